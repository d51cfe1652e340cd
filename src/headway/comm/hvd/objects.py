"""Sends Python objects between ranks, pickled and signed.

A pickle runs whatever code its writer likes. So a rank only reads pickles that a process of the job has signed with the
run's secret, and none if that secret is public.
"""

from __future__ import annotations

import hmac
import pickle
import struct
from typing import Any

import torch

from headway.comm.hvd import context, differentiable
from headway.comm.hvd.errors import HorovodInternalError
from headway.comm.hvd.process_sets import ProcessSet, global_process_set
from headway.core.errors import UsageError
from headway.core.rendezvous import is_public_secret

try:
    # cloudpickle can pickle lambdas, too.
    from cloudpickle import dumps  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    from pickle import dumps

# Before each pickle: its signature and its length.
HEADER = struct.Struct("!32sQ")


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the object of one rank on all; on that rank the object itself.

    Raises as allgather_async does, and ValueError if the root is not in the process set.

    Args:
        obj: object to send; other ranks' objects are ignored.
        root_rank: a rank of the job, not of the process set.

    Raises:
        UsageError: the job runs on several hosts without HEADWAY_SECRET.
    """
    _check_secret()
    if root_rank not in (process_set.ranks or ()):
        raise ValueError(f"broadcast_object: root rank {root_rank} is not in {process_set}")
    is_root = context.rank() == root_rank
    # A gather in which only the root has bytes: the others need not know the length before.
    data = _pack(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    gathered = differentiable.allgather(data, name, process_set)
    return obj if is_root else _unpack(gathered)[0]


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Returns the objects of all ranks, in their order. Raises as `broadcast_object` does."""
    _check_secret()
    return _unpack(differentiable.allgather(_pack(obj), name))


def _check_secret() -> None:
    # On all ranks alike, before any of them waits for another: all have the same secret.
    if is_public_secret(context.get_engine().world.secret):
        what = "Python objects are not sent between several hosts without a secret: a pickle can run any code"
        fix = "Set HEADWAY_SECRET to the same text on every host, for example the output of `openssl rand -hex 32`."
        raise UsageError(what, fix=fix)


def _pack(obj: Any) -> torch.Tensor:
    pickled = dumps(obj)
    # A bytearray, since a tensor needs memory that it may write to.
    return torch.frombuffer(bytearray(HEADER.pack(_sign(pickled), len(pickled)) + pickled), dtype=torch.uint8)


def _unpack(gathered: torch.Tensor) -> list[Any]:
    data = memoryview(gathered.numpy().tobytes())
    pickles = []
    # All signatures first: nothing is unpickled before all of them are right.
    while data:
        signature, length = HEADER.unpack_from(data) if len(data) >= HEADER.size else (b"", 0)
        pickled = data[HEADER.size : HEADER.size + length]
        if not hmac.compare_digest(signature, _sign(pickled)):
            raise HorovodInternalError("an object came that no process of this job has signed; it was not read")
        pickles.append(pickled)
        data = data[HEADER.size + length :]
    return [pickle.loads(pickled) for pickled in pickles]


def _sign(pickled: bytes | memoryview) -> bytes:
    return hmac.digest(context.get_engine().world.secret, b"an object\0" + pickled, "sha256")
