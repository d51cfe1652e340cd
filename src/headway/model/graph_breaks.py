"""Finds the lines at which torch.compile breaks the graph of a network, without generating code for it."""

from __future__ import annotations

import copy
import logging
import re
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary
from typing import Any, final

import torch
from torch import Tensor, nn

from headway.core.modules import preserve_training_state

TRACED_SAMPLES = 2
"""Samples that go through the network; batch norm needs two."""

MAX_LISTED_MODULES = 3
"""Most names of modules in a message."""

TORCH_FOLDER = str(Path(torch.__file__).parent)
DYNAMO_FOLDER = str(Path(TORCH_FOLDER, "_dynamo"))


@final
@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A line at which torch.compile ends a graph, lets Python run something, and begins another graph.

    Attributes:
        modules: names of all modules whose class has the line or called it; the network itself has an empty name. Empty
            if torch does not name the line.
        kind: name of that class.
        where: FILE:LINE, in the user's code if possible. Empty if torch does not name the line.
        code: text of the line.
        reason: the reason in torch's words.
    """

    modules: tuple[str, ...]
    kind: str
    where: str
    code: str
    reason: str

    def describe(self) -> str:
        """Returns a sentence: `net.py:13 'print(x.shape)' in Noisy (blocks.0 and blocks.1): Dynamo does not ...`."""
        names = [name or "the network" for name in self.modules]
        if len(names) > MAX_LISTED_MODULES:
            names[MAX_LISTED_MODULES:] = [f"{len(names) - MAX_LISTED_MODULES} more"]
        place = " ".join(
            part
            for part in (
                self.where,
                self.code and repr(self.code),
                f"in {self.kind} ({' and '.join(', '.join(names).rsplit(', ', 1))})" if names else "",
            )
            if part
        )
        return f"{place}: {self.reason}" if place else self.reason


@final
@dataclass(frozen=True, slots=True)
class CompileReport:
    """The graphs that torch.compile would make of a network.

    Attributes:
        graphs: number of graphs; a part of the network may run in Python instead.
        breaks: one for each line, in the order in which the network reaches them.
    """

    graphs: int
    breaks: tuple[GraphBreak, ...]

    @property
    def is_whole(self) -> bool:
        """True if the whole network is one graph."""
        return self.graphs == 1 and not self.breaks


def try_compiling(
    model: nn.Module, images: Tensor, autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> CompileReport:
    """Traces a network with torch.compile over two images. It takes a few seconds, and calls no C++ compiler or Triton.

    The network does one forward pass in its present mode. Afterwards parameters, gradients, buffers and random state
    are as before, and so is torch: no warning is shown or used up, and code that was compiled before stays compiled.

    Args:
        model: a network that accepts these images.
        images: float [2, C, H, W] or more, on the network's device, with values.
        autocast: returns the context of the forward pass.

    Returns:
        The number of graphs, and the breaks between them. A failure of torch.compile is listed as a break without a
        line.
    """
    graphs = 0

    def count_graph(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        forward: Callable[..., Any] = graph.forward
        return forward

    def run_model(images: Tensor) -> Any:
        return model(images)

    # Torch attaches compiled code to a function's code object. A fresh one keeps nothing of an unbroken network behind;
    # of a broken one, the functions in which it breaks and those that continue it remain.
    fresh_function = types.FunctionType(
        run_model.__code__.replace(), run_model.__globals__, closure=run_model.__closure__
    )
    failure = ""
    with preserve_training_state(model), _preserve_dynamo_state(), collect_break_notes() as notes:
        try:
            with autocast():
                torch.compile(fresh_function, backend=count_graph)(images[:TRACED_SAMPLES])
        # Torch's own tracing fails, or this torch cannot compile here.
        except Exception as error:
            failure = f"torch.compile fails: {type(error).__name__}: {_get_first_line(str(error))}"
    breaks = list_graph_breaks(model, notes)
    if failure:
        breaks = (*breaks, GraphBreak((), "", "", "", failure))
    return CompileReport(graphs, breaks)


@final
@dataclass(frozen=True, slots=True)
class BreakNote:
    """Torch's reason for a graph break, and the stack that led there, innermost line last."""

    reason: str
    stack: Sequence[FrameSummary]


@contextmanager
def collect_break_notes() -> Iterator[list[BreakNote]]:
    """Collects torch's notes on graph breaks in the block. The list that it yields is complete after the block."""
    # Torch has two places for them. If it resumes the function behind the line, the reason goes to a list. If it leaves
    # the whole function to Python, as when the line is in a loop, it only logs the reason, at a level that is not
    # shown.
    from torch._dynamo.utils import graph_break_reasons

    notes: list[BreakNote] = []
    num_known = len(graph_break_reasons)
    log = logging.getLogger("torch._dynamo.convert_frame")
    logger_level, effective_level = log.level, log.getEffectiveLevel()

    def record_break(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and hasattr(error, "real_stack"):
            notes.append(BreakNote(getattr(error, "msg", str(error)), error.real_stack))
        return record.levelno >= effective_level

    log.addFilter(record_break)
    # The filter sees records that the level would drop, and lets only the others through.
    log.setLevel(min(effective_level, logging.INFO))
    try:
        yield notes
    finally:
        log.setLevel(logger_level)
        log.removeFilter(record_break)
        notes += [
            BreakNote(break_reason.reason, break_reason.user_stack) for break_reason in graph_break_reasons[num_known:]
        ]


def list_graph_breaks(model: nn.Module, notes: Sequence[BreakNote]) -> tuple[GraphBreak, ...]:
    """Returns a break for each line in the notes of `collect_break_notes`, in the order of the notes.

    Args:
        model: the network that was compiled; its modules are searched for the lines.
    """
    # Torch notes one line several times: for the network, and again for functions called from there, with a shorter
    # stack. The first note that names modules counts.
    module_code = _ModuleCode(model)
    break_by_line: dict[tuple[str, int | None], GraphBreak] = {}
    for note in notes:
        stack = [
            frame for frame in note.stack if not frame.filename.startswith(DYNAMO_FOLDER) and frame.filename != __file__
        ]
        # A line of the user helps more than one of torch.
        user_frames = [frame for frame in stack if not frame.filename.startswith(TORCH_FOLDER)]
        innermost = next(reversed(user_frames or stack), None)
        modules, kind = module_code.find_owners(stack)
        key = ("", None) if innermost is None else (innermost.filename, innermost.lineno)
        if key not in break_by_line or (modules and not break_by_line[key].modules):
            where = "" if innermost is None else f"{_shorten_path(innermost.filename)}:{innermost.lineno}"
            line = "" if innermost is None else (innermost.line or "").strip()
            break_by_line[key] = GraphBreak(modules, kind, where, line, _extract_explanation(note.reason))
    return tuple(break_by_line.values())


@final
class _ModuleCode:
    """Maps lines of code to the modules whose class has them."""

    def __init__(self, model: nn.Module) -> None:
        self._spans: dict[str, list[tuple[int, int, str, str]]] = {}
        for name, module in model.named_modules():
            for code in _list_code(module):
                span = (code.co_firstlineno, _find_last_line(code), name, type(module).__name__)
                self._spans.setdefault(code.co_filename, []).append(span)

    def find_owners(self, stack: Sequence[FrameSummary]) -> tuple[tuple[str, ...], str]:
        """Returns (names, class) of the modules that own the innermost line in the stack; both empty if none does."""
        for frame in reversed(stack):
            spans = self._spans.get(frame.filename, ())
            matching_spans = [span for span in spans if span[0] <= (frame.lineno or 0) <= span[1]]
            if matching_spans:
                kinds = dict.fromkeys(kind for *_, kind in matching_spans)
                return tuple(dict.fromkeys(name for _, _, name, _ in matching_spans)), " and ".join(kinds)
        return (), ""


def _list_code(module: nn.Module) -> Iterator[types.CodeType]:
    """Lists the code of a module's methods, except those that all modules have."""
    base_classes = set(nn.Module.__mro__)
    methods = [
        value for class_ in type(module).__mro__ if class_ not in base_classes for value in vars(class_).values()
    ]
    # A module may have a forward of its own, as with activation checkpointing.
    for method in (*methods, vars(module).get("forward")):
        code = getattr(getattr(method, "__func__", method), "__code__", None)
        if isinstance(code, types.CodeType):
            yield code


def _find_last_line(code: types.CodeType) -> int:
    """Returns the number of the last line of a function, including the functions inside it."""
    inner_ends = [_find_last_line(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return max([code.co_firstlineno, *inner_ends, *(line for _, _, line in code.co_lines() if line is not None)])


def _extract_explanation(reason: str) -> str:
    """Returns torch's explanations of a break without hints, links and object addresses, or else the first line."""
    explanations = re.findall(r"^\s*Explanation: (.*?)(?=\n\s*\n|\n\s*Hint:|\Z)", reason, re.DOTALL | re.MULTILINE)
    text = ". ".join(
        " ".join(explanation.split()).rstrip(".") for explanation in explanations or [_get_first_line(reason)]
    )
    return re.sub(r" at 0x[0-9a-f]+>", ">", text)


def _get_first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _shorten_path(file: str) -> str:
    """Shortens a path relative to the working folder, or for torch's files relative to torch."""
    for base in (Path(TORCH_FOLDER).parent, Path.cwd()):
        if Path(file).is_relative_to(base):
            return str(Path(file).relative_to(base))
    return file


@contextmanager
def _preserve_dynamo_state() -> Iterator[None]:
    """Silences torch.compile within the block, and restores the state of Dynamo after it.

    Code that was compiled for the first time within the block is forgotten.
    """
    # torch._dynamo.reset() would also forget the code that others have compiled, who would compile it again. Without
    # this, a later batch of another size would be the second size of the same code, and torch would compile it with
    # free sizes. The names are private to torch 2.11 to 2.13; those that another version lacks are skipped.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch._dynamo import convert_frame, pgo, utils

        logger = logging.getLogger("torch._dynamo")
        level = logger.level
        known_code = convert_frame.input_codes
        known_ids = set(known_code.seen_ids)
        known_sizes = copy.deepcopy(getattr(pgo, "_CODE_STATE", None))
        known_counters = {name: Counter(counts) for name, counts in utils.counters.items()}
        known_warnings = set(getattr(utils, "warn_once_cache", ()))
        num_reasons = len(utils.graph_break_reasons)
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
            for reference in list(known_code.seen):
                # Code that was known before stays compiled.
                if (code := reference()) is not None and id(code) not in known_ids:
                    known_code.seen.remove(reference)
                    known_code.seen_ids.discard(id(code))
                    torch._C._dynamo.eval_frame.reset_code(code)
            if hasattr(pgo, "_CODE_STATE"):
                pgo._CODE_STATE = known_sizes
            utils.counters.clear()
            utils.counters.update(known_counters)
            if hasattr(utils, "warn_once_cache"):
                utils.warn_once_cache.intersection_update(known_warnings)
            del utils.graph_break_reasons[num_reasons:]
