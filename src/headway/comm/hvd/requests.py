"""Requests of ranks, responses of the negotiator, and the check that the ranks of a set agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import prod
from typing import Any, Literal, final, get_args

from headway.core.untrusted_json import Checks, expect_entries, is_any_number, is_text, is_whole_number

# A Request describes one named operation of one rank; it is sent to the negotiator. A Response names operations that
# all ranks of a process set have requested; it is sent back to all of them. Each is one JSON array.

Kind = Literal[
    "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join", "add_set", "remove_set"
]
Op = Literal["average", "sum", "adasum", "min", "max", "product"]

# Element types that can be moved, by torch's names.
ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

# Element types that can be reduced.
SUMMABLE = ("float64", "int64", "float32", "int32", "float16", "bfloat16", "int8", "uint8")

# Kinds whose tensors may differ in their first dimension from rank to rank.
ROWWISE = ("allgather", "alltoall")


@final
@dataclass(frozen=True)
class Request:
    """One operation as one rank requests it.

    Attributes:
        process_set: its id.
        name: unique among the pending ones of the set; the same on all ranks.
        types, shapes: of each tensor.
        device: `cpu` or `cuda`.
        op, prescale, postscale: of reductions.
        root: of broadcasts; a rank of the world.
        splits: for alltoall, rows for each rank of the set; for add_set, its ranks.
    """

    process_set: int
    name: str
    kind: Kind
    types: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    device: str = "cpu"
    op: Op = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(ITEM_BYTES[kind] * prod(shape) for kind, shape in zip(self.types, self.shapes, strict=True))

    @property
    def fusion_key(self) -> tuple[Any, ...]:
        """Requests with equal keys can share a buffer."""
        return self.kind, self.device, self.op, self.prescale, self.postscale, self.root

    def to_fields(self) -> list[Any]:
        """Returns the fields as a JSON array; `from_fields` reads it."""
        return list(astuple(self))

    @staticmethod
    def from_fields(fields: Any) -> Request:
        """Reads the fields of `to_fields`. Raises ValueError for anything else."""
        try:
            number, name, kind, types, shapes, device, op, prescale, postscale, root, splits = fields
            dims = tuple(map(tuple, shapes))
            out = Request(number, name, kind, tuple(types), dims, device, op, prescale, postscale, root, tuple(splits))
        except (TypeError, ValueError):
            raise ValueError("a request of another form") from None
        expect_entries(vars(out), _CHECKS, "request.")
        if len(out.shapes) != len(out.types):
            raise ValueError("a request with a wrong number of shapes")
        return out


@final
@dataclass(frozen=True)
class Response:
    """Operations of one kind that the ranks of a process set execute now.

    Attributes:
        error: the reason why they fail instead; empty if they do not.
        algorithm: of sums over all ranks on CPU.
        rows: for allgather, by name and tensor: rows from each rank. For alltoall, by name and rank: rows that it sends
            to each rank.
        like: a request of each name, if ranks have joined: these take part with zeros of its shapes.
        value: for join the rank that joined last; for add_set the set's id.
    """

    process_set: int
    kind: Kind
    names: tuple[str, ...]
    error: str = ""
    algorithm: str = "ring"
    rows: tuple[tuple[tuple[int, ...], ...], ...] = ()
    like: tuple[Request, ...] = ()
    value: int = 0

    def to_fields(self) -> list[Any]:
        """Returns the fields as a JSON array; `from_fields` reads it."""
        like = [request.to_fields() for request in self.like]
        return [self.process_set, self.kind, self.names, self.error, self.algorithm, self.rows, like, self.value]

    @staticmethod
    def from_fields(fields: Sequence[Any]) -> Response:
        """Reads the fields of `to_fields`, without checks: they come from rank 0."""
        set_id, kind, names, error, algorithm, rows, like, value = fields
        table = tuple(tuple(map(tuple, one)) for one in rows)
        requests = tuple(map(Request.from_fields, like))
        return Response(set_id, kind, tuple(names), error, algorithm, table, requests, value)


def collect_rows(requests: Mapping[int, Request], members: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Collects the `rows` of one name that all members of a set have requested, in the order of the members."""
    first = requests[members[0]]
    if first.kind == "allgather":
        return tuple(tuple(requests[rank].shapes[i][0] for rank in members) for i in range(len(first.shapes)))
    return tuple(requests[rank].splits for rank in members)


def find_disagreement(requests: Mapping[int, Request], someone_joined: bool) -> str:
    """Finds the reason why the requests of one name, by rank, cannot be executed together; empty if they can.

    Args:
        someone_joined: ranks of the set have joined, so that zeros must do in their place.
    """
    (first_rank, first), *others = sorted(requests.items())
    for what, read in _ASPECTS:
        mine = read(first)
        for rank, request in others:
            if (theirs := read(request)) != mine:
                return f"{first.name}: mismatched {what}: rank {first_rank} has {mine}, rank {rank} has {theirs}"
    if first.kind in (*ROWWISE, "reducescatter") and any(not shape for shape in first.shapes):
        return f"{first.name}: {first.kind} splits or joins the first dimension, and a scalar has none"
    if someone_joined and first.kind in (*ROWWISE, "broadcast", "reducescatter"):
        fix = "; sparse gradients can be made dense with sparse_as_dense=True" if first.kind == "allgather" else ""
        return f"{first.name}: {first.kind} is not possible once a rank has joined{fix}"
    return ""


# A request comes over a connection, so that nothing about it can be taken for granted.
_CHECKS: Checks = {
    "process_set": (is_whole_number, "a whole number"),
    "name": (is_text, "a text"),
    "kind": (lambda value: value in get_args(Kind), "a kind of operation"),
    "types": (lambda value: all(is_text(kind) and kind in ITEM_BYTES for kind in value), "types of tensors"),
    "shapes": (lambda value: all(is_whole_number(side) for shape in value for side in shape), "shapes of tensors"),
    "device": (is_text, "a text"),
    "op": (lambda value: value in get_args(Op), "a reduction"),
    "prescale": (is_any_number, "a number"),
    "postscale": (is_any_number, "a number"),
    "root": (is_whole_number, "a rank"),
    "splits": (lambda value: all(map(is_whole_number, value)), "numbers of rows"),
}


def _format_compared_shapes(request: Request) -> str:
    # With `*` for a dimension that may differ: `[*, 3, 224]`.
    shapes = [list(map(str, shape)) for shape in request.shapes]
    if request.kind in ROWWISE:
        shapes = [["*", *shape[1:]] if shape else [] for shape in shapes]
    return ", ".join(f"[{', '.join(shape)}]" for shape in shapes)


# In the order in which they are compared: the first mismatch is reported.
_ASPECTS: tuple[tuple[str, Callable[[Request], Any]], ...] = (
    ("operations", lambda request: request.kind),
    ("reduction operations", lambda request: request.op),
    ("data types", lambda request: ", ".join(request.types)),
    ("tensor shapes", _format_compared_shapes),
    ("prescale and postscale factors", lambda request: (request.prescale, request.postscale)),
    ("root ranks", lambda request: request.root),
    ("devices", lambda request: request.device),
    ("ranks of a process set", lambda request: request.splits if request.kind == "add_set" else None),
)
