"""Reducer: sums gradients over the ranks while the backward pass still runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch

from headway.comm.buckets import GradientBucket, plan_buckets
from headway.comm.comm_recipe import Algorithm, Wire
from headway.comm.communicator import DIGEST_BITS, Communicator, PendingAllReduce
from headway.comm.gradient_noise import compute_local_term, compute_squared_norm
from headway.core.errors import CommunicationError, TrainingError

# A hook fires when a gradient is ready. Full buckets are all-reduced in a fixed order, whatever the order in which
# hooks fire. The last bucket waits for `finish` and carries, in the same message, the numbers that ranks have to agree
# on: live ranks, the digest of their operations, the loss, which parameters were used, and running statistics.

# The digest is sent as numbers below 16: their sums and sums of squares are exact in fp32 up to 65,536 ranks.
NIBBLES = DIGEST_BITS // 4

# Without measured links.
DEFAULT_BUCKET_BYTES = 4 << 20

# 16-bit messages that flush a larger share of a step's numbers to zero are given up for fp32.
MOST_LOST_SHARE = 0.01

# Layout of the tail before the flags: live ranks, loss, lost numbers, local norms, digest, squares of the digest.
_DIGEST = 4
_FIXED = _DIGEST + 2 * NIBBLES


@final
@dataclass(frozen=True)
class BucketPlan:
    """How gradients are laid out in buckets, and how these are sent.

    Attributes:
        choose: bytes of a bucket -> algorithm.
        bucket_bytes: see `plan_buckets`.
        wire: form of buckets between hosts; the last one is sent as fp32.
        order: names in the order in which gradients become ready, from an earlier Reducer; default: reversed, and
            after the first step the order that rank 0 saw.
    """

    choose: Callable[[int], Algorithm] = lambda nbytes: "ring"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    wire: Wire = "fp32"
    order: Sequence[str] | None = None


@final
class StepReduction:
    """The numbers of a step, summed over the ranks. On CUDA the first access to one waits for the device.

    Attributes:
        local_sq: sum of `compute_local_term`, a scalar on the device; 0 if noise is not measured.
        reduced_sq: squared norm of the summed gradient, likewise.
        is_checked: the Reducer has seen that all ranks had issued the same operations.
    """

    def __init__(self, numbers: torch.Tensor, reduced_sq: torch.Tensor | None = None) -> None:
        self._numbers, self.is_checked = numbers, False
        self.local_sq, self.reduced_sq = numbers[3], numbers.new_zeros(()) if reduced_sq is None else reduced_sq

    @cached_property
    def _row(self) -> list[float]:
        row: list[float] = self._numbers.tolist()
        return row

    @property
    def live_ranks(self) -> int:
        """Number of ranks that added gradients."""
        return round(self._row[0])

    @property
    def loss(self) -> float:
        """Sum of the ranks' losses."""
        return self._row[1]

    @property
    def lost_numbers(self) -> float:
        """Numbers that 16-bit messages have lost since the beginning."""
        return self._row[2]

    @property
    def flags(self) -> tuple[float, ...]:
        """Sum of each flag."""
        return tuple(self._row[_FIXED:])

    def has_one_digest(self, ranks: int) -> bool:
        """Returns True if all ranks had issued the same operations."""
        # Cauchy and Schwarz: N times the sum of squares is the square of the sum only if all numbers are equal.
        sums, squares = self._row[_DIGEST : _DIGEST + NIBBLES], self._row[_DIGEST + NIBBLES : _FIXED]
        return all(ranks * square == value * value for value, square in zip(sums, squares, strict=True))


@final
class Reducer:
    """Sums the gradients of a network over all ranks. All ranks build it, and use it, alike.

    Args:
        parameters: (name, parameter); only trained ones count. One that is frozen later has no gradient then.
        communicator: of the ranks.
        plan: layout of the buckets, and algorithms.
        buffers: floating-point tensors that become their mean over the ranks in each step: running statistics.
        flags: number of flags that `finish` gets besides the loss.
        average: divide by the live ranks; else gradients are sums.
        uneven: ranks may run out of data at different steps; on CUDA the host then waits in each step.
        noise: measure the norms for the gradient noise scale: two passes over the gradients.
        has_reported_unused: an earlier Reducer of this process has reported the parameters without a gradient.
        say: called once with the parameters without a gradient, and when a wire is given up.

    Attributes:
        order: as it is now; None until it is known.
        wire, has_reported_unused: as they are now.
        bucket_bytes: as given.

    Raises:
        TrainingError: nothing is trained.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        communicator: Communicator,
        *,
        plan: BucketPlan | None = None,
        buffers: Sequence[torch.Tensor] = (),
        flags: int = 0,
        average: bool = False,
        uneven: bool = False,
        noise: bool = False,
        has_reported_unused: bool = False,
        say: Callable[[str], object] = print,
    ) -> None:
        plan = plan or BucketPlan()
        self._communicator, self._world = communicator, communicator.world
        self._parameters = {name: value for name, value in parameters if value.requires_grad}
        if not self._parameters:
            raise TrainingError("there is no parameter to train", fix="Freeze less.")
        self._buffers, self._choose, self.bucket_bytes = list(buffers), plan.choose, plan.bucket_bytes
        self.wire: Wire = plan.wire
        self._flags, self._average, self._say = flags, average, say
        # On CPU the sums are on the host anyway. On CUDA only uneven ranks force a host-device sync per step.
        self._host_waits = uneven or self._world.device.type != "cuda"
        self.order: tuple[str, ...] | None = None if plan.order is None else tuple(plan.order)
        self._build_buckets(plan.order or list(reversed(self._parameters)))
        self._armed, self.has_reported_unused = False, has_reported_unused
        self._noise, self._share, self._local_sq = noise, 1.0, torch.zeros(())
        self._step = 0
        self._used_in_first_step: list[float] | None = None
        self._lost_numbers = 0.0
        self._ready: list[str] = []
        self._handles = [
            value.register_post_accumulate_grad_hook(self._build_hook(name)) for name, value in self._parameters.items()
        ]

    @property
    def buckets(self) -> list[GradientBucket]:
        """The buckets in the order in which they are summed."""
        return self._buckets

    @property
    def algorithms(self) -> list[Algorithm]:
        """The algorithm of each bucket."""
        return [self._choose(bucket.nbytes) for bucket in self._buckets]

    def arm(self, share: float = 1.0) -> None:
        """Prepares for the last backward pass of a step, whose gradients are summed. Call it before that pass.

        Args:
            share: this rank's share of the step's samples; used if noise is measured.
        """
        self._armed, self._next, self._share = True, 0, share
        self._local_sq = torch.zeros((), device=self._world.device)
        self._ready.clear()
        self._pending: list[PendingAllReduce] = []
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def finish(
        self, loss: torch.Tensor | float = 0.0, flags: Sequence[torch.Tensor | float] = (), *, contributes: bool = True
    ) -> StepReduction:
        """Sends the remaining buckets, waits for all, and puts the sums into the gradients.

        Args:
            loss, flags: this rank's numbers; summed over the ranks.
            contributes: False on a rank that has run out of data: it adds zeros.

        Raises:
            GenerationEndedError, CommunicationError: a sum failed, or ranks issued different operations.
        """
        # A rank without data, or without a backward pass, still sends every bucket.
        if not self._armed or not contributes:
            self.arm()
        self._armed = False
        if contributes:
            self._report_unused()
        for bucket in self._buckets[self._next :]:
            self._fill(bucket) if contributes else bucket.clear()
            if bucket is self._buckets[-1]:
                self._fill_tail(bucket.tail, loss, flags, contributes)
            self._send(bucket)
        for pending in self._pending:
            pending.wait()
        # A copy of the tail: its bucket is filled again in the next step.
        self._step += 1
        views = [view for bucket in self._buckets for view in bucket.views]
        reduction = StepReduction(self._fixed.clone(), compute_squared_norm(views) if self._noise else None)
        if not self._host_waits:
            # Only the first step reads which parameters are used: later ones avoid the host-device sync.
            if self._used_in_first_step is None:
                self._used_in_first_step = self._used.tolist()
            self._assign_gradients(self._used_in_first_step)
            return reduction
        self.check(reduction)
        if reduction.live_ranks:
            self._assign_gradients(self._used.tolist())
        if self.order is None:
            self._reorder_buckets()
        return reduction

    def check(self, reduction: StepReduction) -> None:
        """Checks that the ranks issued the same operations. On CPU `finish` does so itself.

        On CUDA call it when the host waits anyway. Repeated calls cost nothing.

        Raises:
            CommunicationError: ranks issued different operations.
        """
        if reduction.is_checked:
            return
        if not reduction.has_one_digest(self._world.size):
            raise self._build_disagreement_error()
        reduction.is_checked = True
        self._check_lost_numbers(reduction.lost_numbers)

    def close(self) -> None:
        """Removes its hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    def _build_buckets(self, order: Sequence[str]) -> None:
        named = [(name, self._parameters[name]) for name in order]
        sizes = [value.numel() * value.element_size() for _, value in named]
        numbers = plan_buckets(sizes, [(value.dtype, value.device) for _, value in named], self.bucket_bytes)
        ranks = self._world.local_size
        tail_numbers = _FIXED + self._flags + len(named) + sum(buffer.numel() for buffer in self._buffers)
        groups = [[named[number] for number in group] for group in numbers]
        widest = torch.float64 if any(buffer.dtype == torch.float64 for buffer in self._buffers) else torch.float32
        # The tail needs full precision: a last bucket of half-precision gradients cannot carry it.
        with_tail = groups.pop() if groups[-1][0][1].dtype in (widest, torch.float64) else []
        self._buckets = [GradientBucket(group, ranks=ranks) for group in groups]
        like = torch.empty(0, dtype=widest, device=named[0][1].device)
        self._buckets.append(GradientBucket(with_tail, ranks=ranks, tail=tail_numbers, like=like))
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._names = [name for name, _ in named]
        self._next, self._pending = 0, []
        self._fixed, self._used, means = self._buckets[-1].tail.split(
            [_FIXED + self._flags, len(named), sum(buffer.numel() for buffer in self._buffers)]
        )
        self._means = [
            part.view(buffer.shape)
            for part, buffer in zip(means.split([b.numel() for b in self._buffers]), self._buffers, strict=True)
        ]

    def _build_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def on_gradient(parameter: torch.Tensor) -> None:
            if not self._armed:
                return
            self._ready.append(name)
            self._bucket_of[name].missing -= 1
            # In order: a full bucket waits for those before it, so that all ranks issue the same sequence.
            last = len(self._buckets) - 1
            while self._next < last and not self._buckets[self._next].missing:
                bucket = self._buckets[self._next]
                self._fill(bucket)
                self._send(bucket)

        return on_gradient

    def _fill(self, bucket: GradientBucket) -> None:
        bucket.fill()
        if self._noise and bucket.views:
            self._local_sq = self._local_sq + compute_local_term(bucket.views, self._share)

    def _send(self, bucket: GradientBucket) -> None:
        tag = f"step {self._step + 1}, bucket {self._next}: {bucket.describe()}"
        wire: Wire = "fp32" if bucket is self._buckets[-1] else self.wire
        algorithm = self._choose(bucket.nbytes)
        self._pending.append(self._communicator.all_reduce(bucket.flat, algorithm=algorithm, wire=wire, tag=tag))
        self._next += 1

    def _fill_tail(
        self, tail: torch.Tensor, loss: torch.Tensor | float, flags: Sequence[torch.Tensor | float], contributes: bool
    ) -> None:
        if len(flags) != self._flags:
            raise ValueError(f"{len(flags)} flags for a Reducer of {self._flags}")
        digest = self._communicator.digest
        nibbles = [digest >> 4 * place & 15 for place in range(NIBBLES)]
        local_sq = self._local_sq if self._noise else 0.0
        fixed = [contributes, loss, 0.0, local_sq, *nibbles, *(value * value for value in nibbles), *flags]
        # A parameter that any rank has used gets a gradient on all ranks; the others keep none.
        used = [contributes and self._parameters[name].grad is not None for name in self._names]
        numbers = [0.0 if isinstance(value, torch.Tensor) else float(value) for value in fixed] + used
        # Pinned on CUDA: a copy from pageable memory would wait for the device.
        on_gpu = tail.device.type == "cuda"
        host = torch.tensor(numbers, dtype=tail.dtype, pin_memory=on_gpu)
        tail[: len(numbers)].copy_(host, non_blocking=on_gpu)
        # Numbers on the device go there directly: reading them on the host would be a host-device sync.
        for place, value in enumerate(fixed):
            if isinstance(value, torch.Tensor):
                tail[place] = value.detach()
        if self.wire != "fp32":
            tail[2] = self._communicator.count_lost_numbers()
        if self._buffers and contributes:
            torch._foreach_copy_(self._means, self._buffers)

    def _assign_gradients(self, used: Sequence[float]) -> None:
        # Gradients become views of the buckets: no copy back. `used` has the number of ranks that used a parameter.
        live = self._fixed[0].clone()
        if self._buffers:
            torch._foreach_div_(self._means, live)
            torch._foreach_copy_(self._buffers, self._means)
        used_by_name = dict(zip(self._names, used, strict=True))
        for bucket in self._buckets:
            if self._average:
                torch._foreach_div_(bucket.views, live)
            for name, parameter, view in zip(bucket.names, bucket.parameters, bucket.views, strict=True):
                parameter.grad = view if used_by_name[name] and parameter.requires_grad else None

    def _report_unused(self) -> None:
        if self.has_reported_unused:
            return
        self.has_reported_unused = True
        without = [name for name, value in self._parameters.items() if value.grad is None and value.requires_grad]
        if without:
            more = f" and {len(without) - 5} more" if len(without) > 5 else ""
            self._say(f"Without a gradient in the first step, counted as zero: {', '.join(without[:5])}{more}.")

    def _reorder_buckets(self) -> None:
        # Rank 0's order on all ranks: buckets fill in the order in which gradients come; those without one are last.
        came = list(dict.fromkeys(self._ready))
        rest = [name for name in reversed(self._parameters) if name not in set(came)]
        agreed = self._world.control.broadcast_bytes(json.dumps(came + rest).encode())
        self.order = tuple(json.loads(agreed))
        # This step's gradients stay in the old buckets.
        if list(self.order) != self._names:
            self._build_buckets(self.order)

    def _check_lost_numbers(self, total: float) -> None:
        # `total` is summed over ranks and steps, so that all ranks decide alike.
        in_step, self._lost_numbers = total - self._lost_numbers, total
        # Twice: each number is sent, and so is its sum.
        numbers = sum(bucket.flat.numel() for bucket in self._buckets) * 2
        if self.wire != "fp32" and in_step > MOST_LOST_SHARE * numbers:
            share = in_step / numbers
            lost = f"{self.wire} between hosts lost {share:.1%} of a step's numbers"
            self._say(f"{lost}: gradients are sent as fp32 from now on.")
            self.wire = "fp32"

    def _build_disagreement_error(self) -> CommunicationError:
        # Every rank comes here in the same step, so they can still exchange their logs.
        mine = json.dumps([(entry.seq, entry.tag, entry.algorithm, entry.bytes) for entry in self._communicator.log])
        logs = [json.loads(log) for log in self._world.control.gather_bytes(mine.encode())]
        order = self._world.control.ranks
        for entries in zip(*logs, strict=False):
            if len({tuple(entry) for entry in entries}) > 1:
                seen = "; ".join(f"rank {rank}: {entry[1]}" for rank, entry in zip(order, entries, strict=True))
                what = f"ranks issued different operations, and sums mixed them up. Number {entries[0][0]} was {seen}"
                break
        else:
            what = "ranks issued different operations, earlier than their logs reach back"
        return CommunicationError(what, fix="Issue the same operations in the same order on every rank.")
