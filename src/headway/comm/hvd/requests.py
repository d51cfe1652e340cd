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

# Bytes of an element, for the dtypes that can be moved; by torch's names.
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

REDUCIBLE_DTYPES = ("float64", "int64", "float32", "int32", "float16", "bfloat16", "int8", "uint8")

# Kinds whose tensors may differ in their first dimension from rank to rank.
ROWWISE_KINDS = ("allgather", "alltoall")


@final
@dataclass(frozen=True)
class Request:
    """One operation as one rank requests it.

    Attributes:
        process_set: id of the process set.
        name: name, unique among the pending requests of the set; the same on all ranks.
        dtypes, shapes: dtype and shape of each tensor.
        device: `cpu` or `cuda`.
        op, prescale, postscale: operation and factors of a reduction.
        root: root of a broadcast, a rank of the world; for remove_set, the id of the set.
        splits: for alltoall, rows for each rank of the set; for add_set, its ranks.
    """

    process_set: int
    name: str
    kind: Kind
    dtypes: tuple[str, ...] = ()
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
        return sum(ITEM_BYTES[dtype] * prod(shape) for dtype, shape in zip(self.dtypes, self.shapes, strict=True))

    @property
    def fusion_key(self) -> tuple[Any, ...]:
        """Key of the buffer: requests with equal keys can share one."""
        return self.kind, self.device, self.op, self.prescale, self.postscale, self.root

    def to_fields(self) -> list[Any]:
        """Returns the fields as a JSON array; `from_fields` reads it."""
        return list(astuple(self))

    @staticmethod
    def from_fields(fields: Any) -> Request:
        """Returns the request of fields from `to_fields`. Raises ValueError for anything else."""
        try:
            set_id, name, kind, dtypes, shapes, device, op, prescale, postscale, root, splits = fields
            dtypes, shapes, splits = tuple(dtypes), tuple(map(tuple, shapes)), tuple(splits)
            request = Request(set_id, name, kind, dtypes, shapes, device, op, prescale, postscale, root, splits)
        except (TypeError, ValueError):
            raise ValueError("a request of another form") from None
        expect_entries(vars(request), _CHECKS, "request.")
        if len(request.shapes) != len(request.dtypes):
            raise ValueError("a request with a wrong number of shapes")
        return request


@final
@dataclass(frozen=True)
class Response:
    """Operations of one kind that the ranks of a process set execute now.

    Attributes:
        process_set: id of the process set.
        names: names of the operations.
        error: the reason why they fail instead; empty if they do not.
        algorithm: algorithm of sums over all ranks on CPU.
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
        """Returns the response of fields from `to_fields`, without checks: they come from rank 0."""
        set_id, kind, names, error, algorithm, rows, like, value = fields
        rows = tuple(tuple(map(tuple, name_rows)) for name_rows in rows)
        like = tuple(map(Request.from_fields, like))
        return Response(set_id, kind, tuple(names), error, algorithm, rows, like, value)


def collect_rows(requests: Mapping[int, Request], members: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the `rows` of one name that all members of a set have requested, in the order of the members."""
    first = requests[members[0]]
    if first.kind == "allgather":
        return tuple(tuple(requests[rank].shapes[i][0] for rank in members) for i in range(len(first.shapes)))
    return tuple(requests[rank].splits for rank in members)


def find_disagreement(requests: Mapping[int, Request], has_joined_ranks: bool) -> str:
    """Returns the reason why the requests of one name cannot be executed together; empty if they can.

    Args:
        requests: the request of each rank.
        has_joined_ranks: True if ranks of the set have joined, so that zeros must do in their place.
    """
    # Sorted by rank, so that the message does not depend on which rank came first.
    (first_rank, first), *others = sorted(requests.items())
    for what, get_value in _COMPARED_FIELDS:
        first_value = get_value(first)
        for rank, request in others:
            if (value := get_value(request)) != first_value:
                return f"{first.name}: mismatched {what}: rank {first_rank} has {first_value}, rank {rank} has {value}"
    if first.kind in (*ROWWISE_KINDS, "reducescatter") and any(not shape for shape in first.shapes):
        return f"{first.name}: {first.kind} splits or joins the first dimension, and a scalar has none"
    # Zeros can stand in for a rank that has joined in a sum only.
    if has_joined_ranks and first.kind in (*ROWWISE_KINDS, "broadcast", "reducescatter"):
        fix = "; sparse gradients can be made dense with sparse_as_dense=True" if first.kind == "allgather" else ""
        return f"{first.name}: {first.kind} is not possible once a rank has joined{fix}"
    return ""


# A request comes over a connection, so that nothing about it can be taken for granted.
_CHECKS: Checks = {
    "process_set": (is_whole_number, "a whole number"),
    "name": (is_text, "a text"),
    "kind": (lambda value: value in get_args(Kind), "a kind of operation"),
    "dtypes": (lambda value: all(is_text(dtype) and dtype in ITEM_BYTES for dtype in value), "types of tensors"),
    "shapes": (lambda value: all(is_whole_number(size) for shape in value for size in shape), "shapes of tensors"),
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
    if request.kind in ROWWISE_KINDS:
        shapes = [["*", *shape[1:]] if shape else [] for shape in shapes]
    return ", ".join(f"[{', '.join(shape)}]" for shape in shapes)


# In the order in which they are compared: the first mismatch is reported.
_COMPARED_FIELDS: tuple[tuple[str, Callable[[Request], Any]], ...] = (
    ("operations", lambda request: request.kind),
    ("reduction operations", lambda request: request.op),
    ("data types", lambda request: ", ".join(request.dtypes)),
    ("tensor shapes", _format_compared_shapes),
    ("prescale and postscale factors", lambda request: (request.prescale, request.postscale)),
    ("root ranks", lambda request: request.root),
    ("devices", lambda request: request.device),
    ("ranks of a process set", lambda request: request.splits if request.kind == "add_set" else None),
)
