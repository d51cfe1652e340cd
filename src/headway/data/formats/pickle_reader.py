"""Reads plain data from a pickle without unpickling: nothing is imported, created or called.

It supports the opcodes of dictionaries of strings, numbers, lists and numpy arrays, as in CIFAR's Python archives.
Unlike any library, it copies neither strings nor arrays, but returns their offsets in the file.
"""

from __future__ import annotations

import math
import pickletools
from typing import Any, NamedTuple, final

from headway.core.errors import DataError


class PickledText(NamedTuple):
    """A string; `offset` is that of its bytes in the pickle, or -1 if they are written in another form."""

    value: str
    offset: int

    @property
    def utf8(self) -> str:
        """The text decoded as UTF-8 if possible: pickletools decodes bytes as Latin-1."""
        try:
            return self.value.encode("latin-1").decode()
        except UnicodeError:
            return self.value


@final
class PickledCall:
    """A call that unpickling would make.

    Attributes:
        function: (module, name).
        arguments: the arguments of the call.
        state: argument of `__setstate__` on the result; None if there is none.
    """

    def __init__(self, function: Any, arguments: Any) -> None:
        self.function = function
        self.arguments = arguments
        self.state = None


class PickledArray(NamedTuple):
    """A numpy array of unsigned bytes in C order that begins at byte `offset` of the pickle."""

    shape: tuple[int, ...]
    offset: int


def read_pickle(data: bytes, where: str) -> dict[str, Any]:
    """Returns the dictionary in a pickle, with text keys. Raises DataError if the pickle holds anything else."""
    try:
        # A pickle is a program for a stack machine; only harmless opcodes are run.
        content = _interpret(data)
        if not isinstance(content, dict):
            raise TypeError("no dictionary")
        return {key.utf8: value for key, value in content.items()}
    # pickletools raises ValueError; the other errors come from opcodes that find the wrong values on the stack.
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        fix = "Only strings, numbers and arrays of protocol 4 at most can be read without unpickling."
        raise DataError("this is not a pickle of plain data, or it is damaged", where=where, fix=fix) from error


def get_array(value: Any, where: str) -> PickledArray:
    """Returns a value of a pickle as an array. Raises DataError unless it is one of unsigned bytes in C order."""
    try:
        # The state that numpy pickles: version, shape, type, order and bytes.
        _, shape, dtype, fortran, data = value.state
        if (
            value.function[1] == "_reconstruct"
            and dtype.function[1] == "dtype"
            # u1 is an unsigned byte; the bar says that byte order does not apply.
            and dtype.arguments[0].value in ("u1", "|u1")
            and not fortran
            and all(isinstance(side, int) and side >= 0 for side in shape)
            and isinstance(data, PickledText)
            and data.offset >= 0
            and math.prod(shape) == len(data.value)
        ):
            return PickledArray(tuple(shape), data.offset)
    except (AttributeError, TypeError, ValueError, LookupError):
        pass
    raise DataError("its data are not one array of unsigned bytes", where=where)


_MARK = object()
_STRING_OPCODES = {"SHORT_BINSTRING": 2, "BINSTRING": 5, "SHORT_BINBYTES": 2, "BINBYTES": 5, "BINBYTES8": 9}
"""Opcodes whose string lies unchanged in the pickle, and the number of bytes before it."""
_TEXT_OPCODES = frozenset({"STRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE"})
_NUMBER_OPCODES = frozenset({"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"})
_CONSTANT_OPCODES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLE_OPCODES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _interpret(data: bytes) -> Any:
    """Returns the object that the pickle describes. Raises ValueError for an opcode that plain data do not need."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, argument, position in pickletools.genops(data):
        # The position is None only for streams that cannot tell it.
        assert position is not None
        name = opcode.name
        if name == "STOP":
            return stack.pop()
        if name in ("PROTO", "FRAME"):
            continue
        if not (
            _push_value(name, argument, position, stack)
            or _build_container(name, stack)
            or _build_object(name, argument, stack)
            or _use_memo(name, argument, stack, memo)
        ):
            raise ValueError(f"plain data do not need {name}")
    raise ValueError("no end")


def _push_value(name: str, argument: Any, position: int, stack: list[Any]) -> bool:
    """Runs an opcode that pushes a string, a number or a constant; returns False for any other opcode."""
    if name in _STRING_OPCODES:
        # Latin-1 maps each byte to one character, so no byte is lost.
        text = argument.decode("latin-1") if isinstance(argument, bytes) else argument
        # Only these opcodes write the bytes unchanged, so only they have an offset.
        stack.append(PickledText(text, position + _STRING_OPCODES[name]))
    elif name in _TEXT_OPCODES:
        stack.append(PickledText(argument, -1))
    elif name in _NUMBER_OPCODES:
        stack.append(argument)
    elif name in _CONSTANT_OPCODES:
        stack.append(_CONSTANT_OPCODES[name])
    else:
        return False
    return True


def _build_container(name: str, stack: list[Any]) -> bool:
    """Runs an opcode of lists, tuples and dictionaries; returns False for any other opcode."""
    match name:
        case "MARK":
            stack.append(_MARK)
        case "EMPTY_DICT":
            stack.append({})
        case "DICT":
            stack.append(_set_items({}, _pop_marked(stack)))
        case "EMPTY_LIST":
            stack.append([])
        case "LIST":
            stack.append(_pop_marked(stack))
        case "TUPLE":
            stack.append(tuple(_pop_marked(stack)))
        case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
            stack.append(tuple(_pop_items(stack, _TUPLE_OPCODES[name])))
        case "APPEND" | "APPENDS":
            _extend_list(stack, _pop_items(stack, 1) if name == "APPEND" else _pop_marked(stack))
        case "SETITEM" | "SETITEMS":
            items = _pop_items(stack, 2) if name == "SETITEM" else _pop_marked(stack)
            _set_items(stack[-1], items)
        case _:
            return False
    return True


def _build_object(name: str, argument: Any, stack: list[Any]) -> bool:
    """Records a call that unpickling would make, as a `PickledCall`; returns False for any other opcode."""
    match name:
        case "GLOBAL":
            stack.append(tuple(argument.split(" ", 1)))
        case "STACK_GLOBAL":
            stack.append(tuple(text.value for text in _pop_items(stack, 2)))
        case "REDUCE":
            stack.append(PickledCall(*_pop_items(stack, 2)))
        case "BUILD":
            (state,) = _pop_items(stack, 1)
            # `__setstate__` would be called here; the state is only kept.
            stack[-1].state = state
        case _:
            return False
    return True


def _use_memo(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> bool:
    """Runs an opcode that stores a value in the memo or fetches it; returns False for any other opcode."""
    match name:
        case "PUT" | "BINPUT" | "LONG_BINPUT":
            memo[argument] = stack[-1]
        case "MEMOIZE":
            # Protocol 4 numbers memos by their order.
            memo[len(memo)] = stack[-1]
        case "GET" | "BINGET" | "LONG_BINGET":
            stack.append(memo[argument])
        case _:
            return False
    return True


def _pop_items(stack: list[Any], count: int) -> list[Any]:
    # A slice from a negative start would take the wrong items.
    start = len(stack) - count
    if start < 0:
        raise IndexError
    items = stack[start:]
    del stack[start:]
    return items


def _pop_marked(stack: list[Any]) -> list[Any]:
    """Pops everything above the last mark, and the mark."""
    mark_index = len(stack) - 1
    # An IndexError ends the search in a pickle without a mark.
    while stack[mark_index] is not _MARK:
        mark_index -= 1
    items = stack[mark_index + 1 :]
    del stack[mark_index:]
    return items


def _extend_list(stack: list[Any], items: list[Any]) -> None:
    if not isinstance(stack[-1], list):
        raise TypeError("no list")
    stack[-1].extend(items)


def _set_items(target: Any, items: list[Any]) -> Any:
    for key, value in zip(items[::2], items[1::2], strict=True):
        # Only text keys: a tuple or a number would make lookups ambiguous.
        if not isinstance(key, PickledText) or not isinstance(target, dict):
            raise TypeError("no dictionary of strings")
        target[key] = value
    return target
