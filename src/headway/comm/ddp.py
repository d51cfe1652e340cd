"""For users' own DistributedDataParallel models: our sums in the place of DDP's, as its communication hook.

DDP reads the annotations of a hook as objects, so this file does without postponed annotations.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final, get_args

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from headway.comm.choice import Chooser, try_out
from headway.comm.communicator import Algorithm, Communicator
from headway.comm.links import measure
from headway.comm.wire import Wire
from headway.core.errors import UsageError
from headway.core.gloo import gather_json
from headway.core.hosts import ANYWHERE, find_own_address, identify_host
from headway.core.key_value_store import StoreClient, StoreServer, build_store
from headway.core.launcher_environment import LOOPBACK
from headway.core.rendezvous import Rendezvous, new_secret, read_secret
from headway.core.world import Membership, World

Future = torch.futures.Future
Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]

TIMEOUT_S = 1800.0
"""torch's own for Gloo: a rank may evaluate alone for long while the others wait for its gradients."""

DDP_BUCKET_BYTES = 25 << 20
"""DDP's default: smaller buckets, such as its last one, are not hidden behind others."""


@final
@dataclass(frozen=True)
class Averaging:
    """What `average` has to know: the state of the hook.

    Attributes:
        choose: bytes of a bucket -> algorithm.
        wire: form in which float32 crosses between hosts.
    """

    communicator: Communicator
    choose: Callable[[int], Algorithm]
    wire: Wire


def communicator_of(
    process_group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | None = None,
    timeout_s: float = TIMEOUT_S,
    rails: int = 1,
) -> Communicator:
    """A Communicator beside a process group of the user's: the same ranks, connections of its own.

    All ranks of the group call it, and at the end `communicator.close()` and `communicator.world.close()`.

    Args:
        process_group: default: that of torch.distributed.init_process_group.
        device: of the gradients; default: the current CUDA device where the group speaks NCCL, else the CPU.
        timeout_s: of every operation.
        rails: groups over which large operations between hosts are striped.

    Raises:
        UsageError: there is no process group, this rank is not in it, or HEADWAY_SECRET is set on some ranks alone.
        CommunicationError: a rank did not come.
    """
    if not (dist.is_available() and dist.is_initialized()):
        fix = "Call torch.distributed.init_process_group first, as for DistributedDataParallel."
        raise UsageError("there is no process group whose ranks could meet", fix=fix)
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise UsageError("this rank is not in the process group", fix="Only its members call this.")
    if device is None:
        cuda = "nccl" in str(dist.get_backend_config(process_group)) and torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    secret = read_secret()
    told = gather_json([identify_host(), secret is not None], process_group)
    identities, have_secret = [one[0] for one in told], {bool(one[1]) for one in told}
    if len(have_secret) > 1:
        fix = "Set it to the same text on every host, or on none."
        raise UsageError("HEADWAY_SECRET is set on some ranks and not on others", fix=fix)
    meeting: list[Any] = []
    server: StoreServer | None = None
    if rank == 0:
        alone = len(set(identities)) == 1
        address = LOOPBACK if alone else find_own_address(os.environ.get("MASTER_ADDR") or ANYWHERE[0])
        made = "" if secret else new_secret()
        server = StoreServer(secret or made.encode(), address)
        meeting = [address, server.port, made]
    # Where no secret is given the user's own group tells one: the new connections are as safe as those that it has.
    address, port, made = gather_json(meeting, process_group)[0]
    client = StoreClient(secret or made.encode(), address, port)
    store = build_store(client)
    world = World.create(
        store,
        Membership(rank, size, identities=identities),
        device,
        master=address,
        timeout_s=timeout_s,
        secret=client.secret,
    )
    world.rendezvous = Rendezvous(server, client, 0)
    return Communicator(world, rails=rails)


def hook_of(
    communicator: Communicator,
    *,
    algorithm: Algorithm | Literal["auto"] = "auto",
    wire: Wire = "fp32",
    chooser: Callable[[int], Algorithm] | None = None,
) -> tuple[Averaging, Hook]:
    """State and hook for `ddp.register_comm_hook(state, hook)`: gradients become their mean over the ranks.

    Buckets of vectors alone (biases, scales of norms) cross as fp32 whatever the wire is. Where a sum fails, DDP raises
    RuntimeError in the backward pass, with our error's words; its class is lost on the way.

    Inside `ddp.join()` the hook does what join does by default: the sum over the ranks that still have data, divided by
    the number of all ranks. DDP does not tell a hook who has ended, so that
    `join(divide_by_initial_world_size=False)` has no effect with it, as with torch's own hooks.

    Args:
        communicator: see `communicator_of`.
        algorithm: for all buckets; `auto`: the chooser's.
        wire: form in which float32 crosses between hosts.
        chooser: bytes of a bucket -> algorithm; unset: all ranks measure their links now, in about a second and a half.

    Raises:
        UsageError: an algorithm that this world cannot do, an unknown wire, or a chooser that would not be asked.
        CommunicationError: a rank did not answer while links were measured.
    """
    known = communicator.algorithms
    if algorithm != "auto" and algorithm not in known:
        raise UsageError(f"{algorithm!r} is no algorithm here", fix=f"Take {', '.join(known)} or auto.")
    if wire not in get_args(Wire):
        raise UsageError(f"{wire!r} is no form of messages", fix=f"Take {', '.join(get_args(Wire))}.")
    if algorithm != "auto":
        if chooser is not None:
            raise UsageError(f"both a chooser and {algorithm!r} for all buckets", fix="Leave one of them out.")
        return Averaging(communicator, lambda nbytes: algorithm, wire), average
    return Averaging(communicator, chooser or _measured(communicator, wire), wire), average


def average(state: Averaging, bucket: GradBucket) -> Future[torch.Tensor]:
    """The hook: a bucket becomes the mean over the ranks, in place."""
    buffer = bucket.buffer()
    vectors = all(parameter.dim() <= 1 for parameter in bucket.parameters())
    buffer.div_(state.communicator.world.size)  # before the sum, as DDP does: the sum of fp16 gradients could overflow
    pending = state.communicator.all_reduce(
        buffer,
        algorithm=state.choose(buffer.numel() * buffer.element_size()),
        wire="fp32" if vectors else state.wire,
        tag=f"bucket {bucket.index()}",
    )

    def result(_: Future[None]) -> torch.Tensor:
        pending.wait()  # on CUDA the callback's stream does, and DDP's then waits for that one
        return buffer

    # An exception set on a Future does not reach DDP; one that is raised by a callback of `then` does.
    ended: Future[None] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    averaged = ended.then(result)
    pending.add_done_callback(lambda _: ended.set_result(None))
    return averaged


def powersgd(
    process_group: dist.ProcessGroup | None = None, *, rank: int = 1, warmup_steps: int = 1000
) -> tuple[Any, Hook]:
    """State and hook of torch's PowerSGD: gradients cross as two factors of low rank, with error feedback.

    For matrices n x m it sends rank (n + m) numbers in the place of n m, where that is at most half as many; it pays on
    slow links and costs accuracy (Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression"). Its error
    memory keeps an overflow for good: train in bf16 or fp32, not with fp16's loss scaling.

    Args:
        process_group: that of the DDP model.
        rank: of the factors: 1, 2 or 4 are usual.
        warmup_steps: exchanged in full before; at least the learning rate's warm-up, about a tenth of the run.

    Raises:
        UsageError: a rank below 1, fewer than two warm-up steps, or a torch without it.
    """
    if rank < 1:
        raise UsageError(f"factors of rank {rank}", fix="Set 1 or more: 1, 2 and 4 are usual.")
    if warmup_steps < 2:
        fix = "Set 2 or more: DDP lays its buckets anew after the first step. A tenth of the run is usual."
        raise UsageError(f"{warmup_steps} warm-up steps before PowerSGD", fix=fix)
    try:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    except ImportError as error:
        raise UsageError(f"this build of torch {torch.__version__} has no PowerSGD ({error})") from error
    state = powerSGD_hook.PowerSGDState(process_group, matrix_approximation_rank=rank, start_powerSGD_iter=warmup_steps)
    return state, powerSGD_hook.powerSGD_hook


def _measured(communicator: Communicator, wire: Wire) -> Chooser:
    world = communicator.world
    network = measure(world, rails=1).network(world)
    trials = try_out(communicator, network, wire=wire)
    on_cpu = world.device.type != "cuda"
    return Chooser(network, trials, 0, wire=wire, bucket_bytes=DDP_BUCKET_BYTES, phased=on_cpu)
