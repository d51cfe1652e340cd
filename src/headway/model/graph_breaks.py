"""Whether torch.compile takes a network as one graph, and where and why it does not; nothing is generated for it."""

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

SAMPLES = 2
"""That go through the network; batch norm may want two at least."""

MOST_NAMES = 3
"""Names of modules that are said."""

TORCH_FOLDER = str(Path(torch.__file__).parent)
DYNAMO_FOLDER = str(Path(TORCH_FOLDER, "_dynamo"))


@final
@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A line at which torch.compile ends a graph, leaves something to Python, and begins another one.

    Attributes:
        modules: names of all modules of the class whose code the line is, or that it was called from; the network
            itself has an empty name. None where torch does not say.
        kind: that class.
        where: FILE:LINE; of the user's code where it has a part in it. Empty where torch does not say.
        code: that line.
        reason: in torch's words.
    """

    modules: tuple[str, ...]
    kind: str
    where: str
    code: str
    reason: str

    def describe(self) -> str:
        """`net.py:13 'print(x.shape)' in Noisy (blocks.0 and blocks.1): Dynamo does not know how to ...`."""
        names = [name or "the network" for name in self.modules]
        if len(names) > MOST_NAMES:
            names[MOST_NAMES:] = [f"{len(names) - MOST_NAMES} more"]
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
    """What torch.compile would make of a network.

    Attributes:
        graphs: how many; what breaks it may leave a part to Python, as it is.
        breaks: by their lines, in the order in which the network comes to them.
    """

    graphs: int
    breaks: tuple[GraphBreak, ...]

    @property
    def is_whole(self) -> bool:
        """All of it is one graph."""
        return self.graphs == 1 and not self.breaks


def try_compiling(
    model: nn.Module, images: Tensor, autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> CompileReport:
    """Lets torch.compile trace a network over two images, with a compiler that leaves graphs as they are: it takes a
    second or a few, and no C++ compiler or Triton is called.

    The network does one forward pass, in the mode in which it is. Parameters, gradients, buffers and random state are
    then as before. So is torch: no warning is given or used up, and what it notes of code that it meets here for the
    first time is forgotten, so that a batch of another size later is no second size, for which torch would compile
    anew with sizes that are free. What was compiled before stays so.

    Args:
        model: that works on these images.
        images: float [2, C, H, W] or more, on the network's device, with values.
        autocast: makes the context of the forward pass.
    """
    graphs = 0

    def count_graph(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        forward: Callable[..., Any] = graph.forward
        return forward

    def run_model(images: Tensor) -> Any:
        return model(images)

    # Torch keeps what it compiles with a function's code. With code of its own, nothing of a whole network stays; of
    # one that breaks, what it stops in and goes on with.
    fresh = types.FunctionType(run_model.__code__.replace(), run_model.__globals__, closure=run_model.__closure__)
    failed = ""
    with preserve_training_state(model), _preserve_dynamo_state(), collect_break_notes() as notes:
        try:
            with autocast():
                torch.compile(fresh, backend=count_graph)(images[:SAMPLES])
        except Exception as error:  # of torch's own tracing, or of a torch that cannot compile here
            failed = f"torch.compile fails: {type(error).__name__}: {_first_line(str(error))}"
    found = list_graph_breaks(model, notes)
    if failed:
        found = (*found, GraphBreak((), "", "", "", failed))
    return CompileReport(graphs, found)


@final
@dataclass(frozen=True, slots=True)
class BreakNote:
    """What torch says of a graph that ended, and the lines that led there, the innermost one last."""

    reason: str
    stack: Sequence[FrameSummary]


@contextmanager
def collect_break_notes() -> Iterator[list[BreakNote]]:
    """Gives what torch notes of breaks while something compiles within it; complete once it has ended.

    Of a function that it takes up again behind the line, torch keeps the reason in a list. One that it leaves to Python
    as a whole, as where the line is in a loop, it tells its log alone, at a level that is not shown.
    """
    from torch._dynamo.utils import graph_break_reasons

    found, before = list[BreakNote](), len(graph_break_reasons)
    log = logging.getLogger("torch._dynamo.convert_frame")
    own, shown = log.level, log.getEffectiveLevel()

    def record_break(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and hasattr(error, "real_stack"):
            found.append(BreakNote(getattr(error, "msg", str(error)), error.real_stack))
        return record.levelno >= shown

    log.addFilter(record_break)
    log.setLevel(min(shown, logging.INFO))
    try:
        yield found
    finally:
        log.setLevel(own)
        log.removeFilter(record_break)
        found += [BreakNote(one.reason, one.user_stack) for one in graph_break_reasons[before:]]


def list_graph_breaks(model: nn.Module, notes: Sequence[BreakNote]) -> tuple[GraphBreak, ...]:
    """The lines of what was `noted` while a network was compiled. Torch notes one line several times: for the network,
    and again for what is called from there, with a shorter stack."""
    code = _ModuleCode(model)
    found: dict[tuple[str, int | None], GraphBreak] = {}
    for note in notes:
        stack = [one for one in note.stack if not one.filename.startswith(DYNAMO_FOLDER) and one.filename != __file__]
        users = [frame for frame in stack if not frame.filename.startswith(TORCH_FOLDER)]
        at = next(reversed(users or stack), None)
        modules, kind = code.find_owners(stack)
        key = ("", None) if at is None else (at.filename, at.lineno)
        if key not in found or (modules and not found[key].modules):
            where = "" if at is None else f"{_shorten_path(at.filename)}:{at.lineno}"
            line = "" if at is None else (at.line or "").strip()
            found[key] = GraphBreak(modules, kind, where, line, _extract_explanation(note.reason))
    return tuple(found.values())


@final
class _ModuleCode:
    """Whose code a line is: that of all modules of a class, whatever they are called."""

    def __init__(self, model: nn.Module) -> None:
        self._spans: dict[str, list[tuple[int, int, str, str]]] = {}
        for name, module in model.named_modules():
            for code in _list_code(module):
                span = (code.co_firstlineno, _last_line(code), name, type(module).__name__)
                self._spans.setdefault(code.co_filename, []).append(span)

    def find_owners(self, stack: Sequence[FrameSummary]) -> tuple[tuple[str, ...], str]:
        """(names, class) of the modules of the innermost line that is of any."""
        for frame in reversed(stack):
            spans = self._spans.get(frame.filename, ())
            own_spans = [span for span in spans if span[0] <= (frame.lineno or 0) <= span[1]]
            if own_spans:
                kinds = dict.fromkeys(kind for *_, kind in own_spans)
                return tuple(dict.fromkeys(name for _, _, name, _ in own_spans)), " and ".join(kinds)
        return (), ""


def _list_code(module: nn.Module) -> Iterator[types.CodeType]:
    """Of a module's methods, but for those that all modules have."""
    known = set(nn.Module.__mro__)
    methods = [value for one in type(module).__mro__ if one not in known for value in vars(one).values()]
    for method in (*methods, vars(module).get("forward")):  # some have a forward of their own
        code = getattr(getattr(method, "__func__", method), "__code__", None)
        if isinstance(code, types.CodeType):
            yield code


def _last_line(code: types.CodeType) -> int:
    """Of a function, and of those that are in it."""
    inner = [_last_line(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return max([code.co_firstlineno, *inner, *(line for _, _, line in code.co_lines() if line is not None)])


def _extract_explanation(reason: str) -> str:
    """Torch's explanations of a break, without its hints and links and where something lies in memory; or the first
    line, where it has none."""
    found = re.findall(r"^\s*Explanation: (.*?)(?=\n\s*\n|\n\s*Hint:|\Z)", reason, re.DOTALL | re.MULTILINE)
    said = ". ".join(" ".join(one.split()).rstrip(".") for one in found or [_first_line(reason)])
    return re.sub(r" at 0x[0-9a-f]+>", ">", said)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _shorten_path(file: str) -> str:
    """A path as one would write it here; of torch's own files, within torch."""
    for base in (Path(TORCH_FOLDER).parent, Path.cwd()):
        if Path(file).is_relative_to(base):
            return str(Path(file).relative_to(base))
    return file


@contextmanager
def _preserve_dynamo_state() -> Iterator[None]:
    """Within it torch.compile warns of nothing; afterwards it knows of nothing that it met there for the first time.

    torch._dynamo.reset() would forget what others have compiled as well, who would compile it again. All that is used
    here is torch's own (2.11 to 2.13); what another version lacks is left out.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch._dynamo import convert_frame, pgo, utils

        logger = logging.getLogger("torch._dynamo")
        level, met = logger.level, convert_frame.input_codes
        before, sizes = set(met.seen_ids), copy.deepcopy(getattr(pgo, "_CODE_STATE", None))
        counters = {name: Counter(found) for name, found in utils.counters.items()}
        warned, reasons = set(getattr(utils, "warn_once_cache", ())), len(utils.graph_break_reasons)
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
            for reference in list(met.seen):
                if (code := reference()) is not None and id(code) not in before:
                    met.seen.remove(reference)
                    met.seen_ids.discard(id(code))
                    torch._C._dynamo.eval_frame.reset_code(code)
            if hasattr(pgo, "_CODE_STATE"):
                pgo._CODE_STATE = sizes
            utils.counters.clear()
            utils.counters.update(counters)
            if hasattr(utils, "warn_once_cache"):
                utils.warn_once_cache.intersection_update(warned)
            del utils.graph_break_reasons[reasons:]
