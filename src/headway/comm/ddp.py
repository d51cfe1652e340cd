"""Headway's all-reduce in DistributedDataParallel models, as a DDP communication hook.

DDP reads the annotations of a hook as objects, so this file does not use postponed annotations.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final, get_args

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from headway.comm.algorithm_choice import AlgorithmChooser
from headway.comm.comm_recipe import Algorithm, Wire
from headway.comm.communicator import Communicator
from headway.comm.links import measure_rates
from headway.core.errors import UsageError
from headway.core.gloo import gather_json
from headway.core.hosts import ANYWHERE, find_own_address, identify_host
from headway.core.key_value_store import StoreClient, StoreServer, build_store
from headway.core.launcher_environment import LOOPBACK
from headway.core.rendezvous import Rendezvous, new_secret, read_secret
from headway.core.world import Membership, World

Future = torch.futures.Future
Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]

# torch's own for Gloo: a rank may evaluate alone for long while the others wait for its gradients.
DDP_TIMEOUT_S = 1800.0

# DDP's default. Its last bucket may be smaller; it is not hidden behind others.
DDP_BUCKET_BYTES = 25 << 20


@final
@dataclass(frozen=True)
class AveragingState:
    """The state of the hook `average_bucket`; see `build_hook`."""

    communicator: Communicator
    choose_algorithm: Callable[[int], Algorithm]
    wire: Wire


def build_communicator(
    process_group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | None = None,
    timeout_s: float = DDP_TIMEOUT_S,
    rails: int = 1,
    interface: str | Sequence[str] | None = None,
) -> Communicator:
    """Builds a Communicator over the ranks of an existing process group, with connections of its own.

    All ranks of the group call it. At the end they call `communicator.close()` and `communicator.world.close()`.

    Args:
        process_group: default: that of torch.distributed.init_process_group.
        device: device of the gradients; default: the current CUDA device if the group uses NCCL, else the CPU.
        timeout_s: time limit of every operation.
        rails: groups on each network interface over which large operations between hosts are striped.
        interface: network interface between hosts; or, on a CPU, several. Their rates are then measured, which takes
            about a second.

    Raises:
        UsageError: there is no process group, this rank is not in it, HEADWAY_SECRET is set on some ranks only, or the
            interfaces cannot be used.
        CommunicationError: a rank did not come.
    """
    if not (dist.is_available() and dist.is_initialized()):
        fix = "Call torch.distributed.init_process_group first, as for DistributedDataParallel."
        raise UsageError("there is no process group to take the ranks from", fix=fix)
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        fix = "Call build_communicator on its members only."
        raise UsageError("this rank is not in the process group", fix=fix)
    if device is None:
        cuda = "nccl" in str(dist.get_backend_config(process_group)) and torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    secret = read_secret()
    identities, has_secret = zip(*gather_json([identify_host(), secret is not None], process_group), strict=True)
    if len(set(has_secret)) > 1:
        fix = "Set it to the same text on every host, or on none."
        raise UsageError("HEADWAY_SECRET is set on some ranks and not on others", fix=fix)
    # Rank 0 serves a store of its own, and the user's group carries its address to the others.
    endpoint: list[Any] = []
    server: StoreServer | None = None
    if rank == 0:
        is_single_host = len(set(identities)) == 1
        address = LOOPBACK if is_single_host else find_own_address(os.environ.get("MASTER_ADDR") or ANYWHERE[0])
        generated_secret = "" if secret else new_secret()
        server = StoreServer(secret or generated_secret.encode(), address)
        endpoint = [address, server.port, generated_secret]
    # Without HEADWAY_SECRET the user's group carries a new one: the connections are as safe as that group's.
    address, port, generated_secret = gather_json(endpoint, process_group)[0]
    client = StoreClient(secret or generated_secret.encode(), address, port)
    world = World.create(
        build_store(client),
        Membership(rank, size, identities=identities),
        device,
        master=address,
        timeout_s=timeout_s,
        secret=client.secret,
        interface=interface,
    )
    world.rendezvous = Rendezvous(server, client, 0)
    return Communicator(world, rails=rails, rates_bytes_s=measure_rates(world))


def build_hook(
    communicator: Communicator,
    *,
    algorithm: Algorithm | Literal["auto"] = "auto",
    wire: Wire = "fp32",
    chooser: Callable[[int], Algorithm] | None = None,
) -> tuple[AveragingState, Hook]:
    """Returns state and hook for `ddp.register_comm_hook(state, hook)`: gradients become their mean over the ranks.

    Buckets that hold only vectors (biases, scales of norms) are sent as fp32 with every wire. If an all-reduce fails,
    DDP raises RuntimeError in the backward pass with the message of our error.

    Inside `ddp.join()` the hook does join's default: the sum over the ranks that still have data, divided by the
    number of all ranks. As with torch's own hooks, `join(divide_by_initial_world_size=False)` has no effect, since DDP
    does not tell a hook which ranks have ended.

    Args:
        communicator: see `build_communicator`.
        algorithm: algorithm of all buckets; `auto`: the chooser's.
        wire: dtype of float32 gradients between hosts.
        chooser: returns the algorithm for a bucket of so many bytes; default: all ranks measure their links now, in
            about 1.5 s.

    Raises:
        UsageError: this world does not support the algorithm, the wire is unknown, or both an algorithm and a chooser
            are given.
        CommunicationError: a rank did not answer while links were measured.
    """
    supported = communicator.algorithms
    if algorithm != "auto" and algorithm not in supported:
        raise UsageError(f"unknown algorithm {algorithm!r}", fix=f"Take {', '.join(supported)} or auto.")
    if wire not in get_args(Wire):
        raise UsageError(f"unknown wire {wire!r}", fix=f"Take {', '.join(get_args(Wire))}.")
    if algorithm != "auto":
        if chooser is not None:
            raise UsageError(f"both a chooser and {algorithm!r} for all buckets", fix="Leave one of them out.")
        return AveragingState(communicator, lambda nbytes: algorithm, wire), average_bucket
    # DDP has planned its buckets already, so their size is given.
    chooser = chooser or AlgorithmChooser.measure(communicator, DDP_BUCKET_BYTES, wire=wire)
    return AveragingState(communicator, chooser, wire), average_bucket


def average_bucket(state: AveragingState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Starts to average a bucket over the ranks, in place. This is the hook.

    Returns:
        a future of the bucket's buffer, flat.
    """
    buffer = bucket.buffer()
    # Buckets of biases and scales of norms alone have few numbers: they stay fp32.
    has_only_vectors = all(parameter.dim() <= 1 for parameter in bucket.parameters())
    # Divided before the sum, as DDP does: the sum of fp16 gradients could overflow.
    buffer.div_(state.communicator.world.size)
    pending = state.communicator.all_reduce(
        buffer,
        algorithm=state.choose_algorithm(buffer.numel() * buffer.element_size()),
        wire="fp32" if has_only_vectors else state.wire,
        tag=f"bucket {bucket.index()}",
    )

    def collect_result(_: Future[None]) -> torch.Tensor:
        # On CUDA the callback's stream waits here, and DDP's stream then waits for that one.
        pending.wait()
        return buffer

    # An exception that is set on a Future does not reach DDP; one that a callback of `then` raises does.
    completed: Future[None] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    averaged = completed.then(collect_result)
    pending.add_done_callback(lambda _: completed.set_result(None))
    return averaged


def build_powersgd_hook(
    process_group: dist.ProcessGroup | None = None, *, rank: int = 1, warmup_steps: int = 1000
) -> tuple[Any, Hook]:
    """Returns state and hook of torch's PowerSGD: gradients are sent as two low-rank factors, with error feedback.

    A matrix n x m is sent as rank (n + m) numbers if these are at most half of n m. It pays off on slow links and costs
    accuracy (Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression"). Its error memory keeps an
    overflow forever: train in bf16 or fp32, not with fp16's loss scaling.

    Args:
        process_group: process group of the DDP model.
        rank: rank of the factors: 1, 2 or 4 are usual.
        warmup_steps: steps with uncompressed gradients at the start; at least the learning rate's warm-up, about a
            tenth of the run.

    Raises:
        UsageError: the rank is below 1, the warm-up steps below 2, or this torch has no PowerSGD.
    """
    if rank < 1:
        raise UsageError(f"factors of rank {rank}", fix="Set 1 or more: 1, 2 and 4 are usual.")
    if warmup_steps < 2:
        fix = "Set 2 or more: DDP rebuilds its buckets after the first step. A tenth of the run is usual."
        raise UsageError(f"{warmup_steps} warm-up steps before PowerSGD", fix=fix)
    try:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    except ImportError as error:
        what = f"this build of torch {torch.__version__} has no PowerSGD ({error})"
        raise UsageError(what, fix="Use another build of torch, or build_hook with wire='fp16'.") from error
    state = powerSGD_hook.PowerSGDState(process_group, matrix_approximation_rank=rank, start_powerSGD_iter=warmup_steps)
    return state, powerSGD_hook.powerSGD_hook
