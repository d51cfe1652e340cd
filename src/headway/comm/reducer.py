"""Reducer: sums gradients over the ranks while the backward pass still runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import final

import torch

from headway.comm.buckets import Bucket, GradientBucket, NamedParameter, plan_buckets
from headway.comm.comm_recipe import Algorithm, Wire
from headway.comm.communicator import DIGEST_BITS, Communicator, PendingOperation
from headway.comm.gradient_noise import compute_local_term, compute_squared_norm
from headway.core.errors import CommunicationError
from headway.core.group import Group

LOG = logging.getLogger("headway.comm")

# A hook fires when a gradient is ready. Full buckets are all-reduced in a fixed order, whatever the order in which
# hooks fire. The last bucket waits for `finish` and carries, in its tail, the numbers that ranks have to agree on: live
# ranks, the digest of their operations, the loss, which parameters were used, and running statistics.

# The digest is sent as numbers below 16: their sums and sums of squares are exact in fp32 up to 65,536 ranks.
NIBBLES = DIGEST_BITS // 4

# Without measured links.
DEFAULT_BUCKET_BYTES = 4 << 20

# 16-bit messages that flush a larger share of a step's numbers to zero are given up for fp32.
MAX_FLUSHED_SHARE = 0.01

# Layout of the tail before the flags: four single numbers, then the digest and its squares.
_LIVE_RANKS, _LOSS, _NUM_FLUSHED, _LOCAL_SQ = range(4)
_DIGEST_START = 4
_FIXED_LENGTH = _DIGEST_START + 2 * NIBBLES


@final
@dataclass(frozen=True)
class BucketPlan:
    """How gradients are laid out in buckets, and how these are sent.

    Attributes:
        choose_algorithm: returns the algorithm for a bucket of a given size in bytes.
        bucket_bytes: largest size of a bucket; see `plan_buckets`.
        wire: dtype of messages between hosts; the last bucket is sent as fp32.
        order: names in the order in which gradients become ready, from an earlier Reducer; default: reversed, and
            after the first step the order that rank 0 saw.
    """

    choose_algorithm: Callable[[int], Algorithm] = lambda nbytes: "ring"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    wire: Wire = "fp32"
    order: Sequence[str] | None = None


@final
class StepReduction:
    """The numbers of a step, summed over the ranks. On CUDA the first access to one waits for the device.

    Attributes:
        local_sq: sum of `compute_local_term`, a scalar on the device; 0 if noise is not measured.
        reduced_sq: squared norm of the summed gradient, a scalar on the device; 0 if noise is not measured.
        is_checked: True once the Reducer has seen that all ranks had issued the same operations.
    """

    def __init__(self, tail: torch.Tensor, reduced_sq: torch.Tensor | None = None) -> None:
        self._tail, self.is_checked = tail, False
        self.local_sq = tail[_LOCAL_SQ]
        self.reduced_sq = tail.new_zeros(()) if reduced_sq is None else reduced_sq

    @cached_property
    def _numbers(self) -> list[float]:
        numbers: list[float] = self._tail.tolist()
        return numbers

    @property
    def live_ranks(self) -> int:
        """Number of ranks that added gradients."""
        return round(self._numbers[_LIVE_RANKS])

    @property
    def loss(self) -> float:
        """Sum of the ranks' losses."""
        return self._numbers[_LOSS]

    @property
    def num_flushed(self) -> float:
        """Count of the numbers that 16-bit messages have flushed to zero, or found not finite, since the start."""
        return self._numbers[_NUM_FLUSHED]

    @property
    def flags(self) -> tuple[float, ...]:
        """Sum of each flag."""
        return tuple(self._numbers[_FIXED_LENGTH:])

    def sum_over(self, group: Group) -> StepReduction:
        """Returns these numbers summed over the ranks of a group, each of which has summed them over other ranks."""
        tail = self._tail.clone()
        group.all_reduce(tail).wait()
        total = StepReduction(tail)
        # Digests of different sums differ.
        total.is_checked = True
        return total

    def has_one_digest(self, num_ranks: int) -> bool:
        """Returns True if all ranks had issued the same operations."""
        # Cauchy and Schwarz: N times the sum of squares is the square of the sum only if all numbers are equal.
        sums = self._numbers[_DIGEST_START : _DIGEST_START + NIBBLES]
        square_sums = self._numbers[_DIGEST_START + NIBBLES : _FIXED_LENGTH]
        return all(num_ranks * squares == value * value for value, squares in zip(sums, square_sums, strict=True))


@final
class Reducer:
    """Sums the gradients of a network over all ranks. All ranks build it, and use it, alike.

    In each step call `prepare_for_backward` before the last backward pass, and `finish` after it. Between the two,
    hooks on the parameters start the all-reduces. After `finish` each `grad` is a view of a bucket.

    Args:
        parameters: (name, parameter); only trained ones count. One that is frozen later has no gradient then. Without
            any, what `finish` gets is summed alone.
        communicator: sums over the ranks.
        plan: layout of the buckets, and algorithms.
        buffers: floating-point tensors that become their mean over the ranks in each step: running statistics.
        num_flags: number of flags that `finish` gets besides the loss.
        average: if True, gradients are divided by the live ranks; else they are sums.
        uneven: if True, ranks may run out of data at different steps; on CUDA the host then waits in each step.
        measures_noise: if True, measures the norms for the gradient noise scale: two passes over the gradients.
        has_reported_unused: True if an earlier Reducer of this process has reported the parameters without a gradient.
        build_bucket: builds buckets that give each rank the sums of some parameters only; default: of all parameters.

    Attributes:
        order: parameter names in the order of the buckets; None until it is known.
        wire, has_reported_unused: present values; both may change in a step.
        bucket_bytes: largest size of a bucket.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        communicator: Communicator,
        *,
        plan: BucketPlan | None = None,
        buffers: Sequence[torch.Tensor] = (),
        num_flags: int = 0,
        average: bool = False,
        uneven: bool = False,
        measures_noise: bool = False,
        has_reported_unused: bool = False,
        build_bucket: Callable[[Sequence[NamedParameter]], Bucket] | None = None,
    ) -> None:
        plan = plan or BucketPlan()
        self._communicator, self._world = communicator, communicator.world
        self._parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self._buffers, self.bucket_bytes = list(buffers), plan.bucket_bytes
        self._choose_algorithm = plan.choose_algorithm
        self.wire: Wire = plan.wire
        self._num_flags, self._average = num_flags, average
        self._build_bucket = build_bucket
        # On CPU the sums are on the host anyway. On CUDA only uneven ranks force a host-device sync per step.
        self._host_waits = uneven or self._world.device.type != "cuda"
        self.order: tuple[str, ...] | None = None if plan.order is None else tuple(plan.order)
        self._build_buckets(plan.order or list(reversed(self._parameters)))
        self.has_reported_unused = has_reported_unused
        self._measures_noise = measures_noise
        self._sample_share = 1.0
        self._local_sq = torch.zeros(())
        self._is_prepared = False
        self._step = 0
        self._used_counts_in_first_step: list[float] | None = None
        self._num_flushed = 0.0
        self._ready_names: list[str] = []
        self._hook_handles = [
            parameter.register_post_accumulate_grad_hook(self._build_hook(name))
            for name, parameter in self._parameters.items()
        ]

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets in the order in which they are summed."""
        return self._buckets

    @property
    def algorithms(self) -> list[Algorithm]:
        """The algorithm of each bucket."""
        return [self._choose_algorithm(bucket.nbytes) for bucket in self._buckets]

    def prepare_for_backward(self, sample_share: float = 1.0) -> None:
        """Arms the hooks for the last backward pass of a step: buckets are all-reduced as their gradients become ready.

        Call it before that pass. Earlier, accumulating passes send nothing.

        Args:
            sample_share: this rank's share of the step's samples; used if noise is measured.
        """
        self._is_prepared = True
        self._next_bucket = 0
        self._used_names = set[str]()
        self._sample_share = sample_share
        self._local_sq = torch.zeros((), device=self._world.device)
        self._ready_names.clear()
        self._pending: list[PendingOperation] = []
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.parameters)

    def finish(
        self, loss: torch.Tensor | float = 0.0, flags: Sequence[torch.Tensor | float] = (), *, contributes: bool = True
    ) -> StepReduction:
        """Sends the remaining buckets, waits for all, and puts the sums into the gradients and the buffers.

        A parameter that no rank used gets no gradient. After the first step the buckets are rebuilt, in the order in
        which gradients became ready on rank 0.

        Args:
            loss, flags: numbers of this rank; summed over the ranks.
            contributes: False on a rank that has run out of data: it adds zeros.

        Returns:
            the summed numbers of the step.

        Raises:
            GenerationEndedError: the generation ended while a sum was under way.
            CommunicationError: a sum failed, or ranks issued different operations.
        """
        # A rank without data, or without a backward pass, still sends every bucket.
        if not self._is_prepared or not contributes:
            self.prepare_for_backward()
        self._is_prepared = False
        for bucket in self._buckets[self._next_bucket :]:
            self._fill(bucket) if contributes else bucket.clear()
            if bucket is self._buckets[-1]:
                self._fill_tail(loss, flags, contributes)
            self._send(bucket)
        if contributes:
            self._report_unused()
        for pending in self._pending:
            pending.wait()
        self._step += 1
        sums = [one for bucket in self._buckets for one in bucket.take_sums()]
        reduced_sq = self._measure_reduced([total for _, _, total in sums]) if self._measures_noise else None
        # A copy of the tail: its bucket is filled again in the next step.
        reduction = StepReduction(self._fixed_tail.clone(), reduced_sq)
        if not self._host_waits:
            # Only the first step reads which parameters are used: later ones avoid the host-device sync.
            if self._used_counts_in_first_step is None:
                self._used_counts_in_first_step = self._used_counts.tolist()
            self._assign_gradients(sums, self._used_counts_in_first_step)
            return reduction
        self.check(reduction)
        if reduction.live_ranks:
            self._assign_gradients(sums, self._used_counts.tolist())
        if self.order is None:
            self._reorder_buckets()
        return reduction

    def check(self, reduction: StepReduction) -> None:
        """Checks that the ranks issued the same operations. On CPU `finish` does so itself.

        On CUDA call it when the host waits anyway. Repeated calls cost nothing. If 16-bit messages flushed too
        many numbers to zero, the next steps use fp32.

        Raises:
            CommunicationError: ranks issued different operations.
        """
        if reduction.is_checked:
            return
        if not reduction.has_one_digest(self._world.size):
            raise self._build_digest_error()
        reduction.is_checked = True
        self._check_num_flushed(reduction.num_flushed)

    def close(self) -> None:
        """Removes its hooks from the parameters."""
        for handle in self._hook_handles:
            handle.remove()

    def _build_buckets(self, order: Sequence[str]) -> None:
        named = [(name, self._parameters[name]) for name in order]
        self._names = [name for name, _ in named]
        sizes_bytes = [parameter.numel() * parameter.element_size() for _, parameter in named]
        kinds = [(parameter.dtype, parameter.device) for _, parameter in named]
        groups = [[named[i] for i in indices] for indices in plan_buckets(sizes_bytes, kinds, self.bucket_bytes)]
        # The tail needs full precision: a last bucket of half-precision gradients cannot carry it.
        tail_dtype = torch.float64 if any(buffer.dtype == torch.float64 for buffer in self._buffers) else torch.float32
        # A bucket of another kind does not give all ranks all numbers.
        has_room = self._build_bucket is None and groups and groups[-1][0][1].dtype in (tail_dtype, torch.float64)
        last_group = groups.pop() if has_room else []
        buffer_sizes = [buffer.numel() for buffer in self._buffers]
        tail_sizes = [_FIXED_LENGTH + self._num_flags, len(named), sum(buffer_sizes)]
        ranks = self._world.local_size
        build = self._build_bucket or partial(GradientBucket, ranks=ranks)
        like = torch.empty(0, dtype=tail_dtype, device=self._world.device)
        last = GradientBucket(last_group, ranks=ranks, tail=sum(tail_sizes), like=like)
        self._buckets: list[Bucket] = [*map(build, groups), last]
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._next_bucket, self._pending = 0, []
        self._tail = last.tail
        self._fixed_tail, self._used_counts, means = self._tail.split(tail_sizes)
        parts = zip(means.split(buffer_sizes), self._buffers, strict=True)
        self._buffer_means = [mean.view(buffer.shape) for mean, buffer in parts]

    def _build_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def on_gradient(parameter: torch.Tensor) -> None:
            if not self._is_prepared:
                return
            self._ready_names.append(name)
            self._bucket_of[name].num_missing -= 1
            # In order: a full bucket waits for those before it, so that all ranks issue the same sequence.
            last = len(self._buckets) - 1
            while self._next_bucket < last and not self._buckets[self._next_bucket].num_missing:
                bucket = self._buckets[self._next_bucket]
                self._fill(bucket)
                self._send(bucket)

        return on_gradient

    def _fill(self, bucket: Bucket) -> None:
        # A bucket may keep the gradients that it takes.
        named = zip(bucket.names, bucket.parameters, strict=True)
        self._used_names.update(name for name, parameter in named if parameter.grad is not None)
        gradients = bucket.fill()
        if self._measures_noise and gradients:
            self._local_sq = self._local_sq + compute_local_term(gradients, self._sample_share)

    def _measure_reduced(self, sums: list[torch.Tensor]) -> torch.Tensor:
        """Returns the squared norm of the summed gradient, of which this rank may have a part."""
        total = compute_squared_norm(sums)
        if self._build_bucket is not None:
            total = total.to(self._world.device, torch.float32).reshape(1)
            self._communicator.all_reduce(total, tag=f"step {self._step}, norm of the gradient").wait()
        return total.reshape(())

    def _send(self, bucket: Bucket) -> None:
        tag = f"step {self._step + 1}, bucket {self._next_bucket}: {bucket.describe()}"
        wire: Wire = "fp32" if bucket is self._buckets[-1] else self.wire
        algorithm = self._choose_algorithm(bucket.nbytes)
        self._pending.append(bucket.start_sum(self._communicator, algorithm=algorithm, wire=wire, tag=tag))
        self._next_bucket += 1

    def _fill_tail(self, loss: torch.Tensor | float, flags: Sequence[torch.Tensor | float], contributes: bool) -> None:
        if len(flags) != self._num_flags:
            raise ValueError(f"{len(flags)} flags for a Reducer of {self._num_flags}")
        digest = self._communicator.digest
        nibbles = [digest >> 4 * index & 15 for index in range(NIBBLES)]
        local_sq = self._local_sq if self._measures_noise else 0.0
        # In the order of `_LIVE_RANKS` and the others; the number of flushed values is set below.
        fixed = [contributes, loss, 0.0, local_sq, *nibbles, *(nibble * nibble for nibble in nibbles), *flags]
        # A parameter that any rank has used gets a gradient on all ranks; the others keep none.
        is_used = [name in self._used_names for name in self._names]
        tail = self._tail
        numbers = [0.0 if isinstance(value, torch.Tensor) else float(value) for value in fixed] + is_used
        # Pinned on CUDA: a copy from pageable memory would wait for the device.
        on_cuda = tail.device.type == "cuda"
        host_numbers = torch.tensor(numbers, dtype=tail.dtype, pin_memory=on_cuda)
        tail[: len(numbers)].copy_(host_numbers, non_blocking=on_cuda)
        # Numbers on the device go there directly: reading them on the host would be a host-device sync.
        for index, value in enumerate(fixed):
            if isinstance(value, torch.Tensor):
                tail[index] = value.detach()
        if self.wire != "fp32":
            tail[_NUM_FLUSHED] = self._communicator.count_flushed()
        if self._buffers and contributes:
            torch._foreach_copy_(self._buffer_means, self._buffers)

    def _assign_gradients(
        self, sums: Sequence[tuple[str, torch.nn.Parameter, torch.Tensor]], used_counts: Sequence[float]
    ) -> None:
        """Makes the sums the gradients, without a copy; `used_counts`: ranks that used each parameter."""
        live_ranks = self._fixed_tail[_LIVE_RANKS].clone()
        if self._buffers:
            torch._foreach_div_(self._buffer_means, live_ranks)
            torch._foreach_copy_(self._buffers, self._buffer_means)
        used_count_by_name = dict(zip(self._names, used_counts, strict=True))
        if self._average:
            torch._foreach_div_([total for _, _, total in sums], live_ranks)
        for name, parameter, total in sums:
            parameter.grad = total if used_count_by_name[name] and parameter.requires_grad else None

    def _report_unused(self) -> None:
        if self.has_reported_unused:
            return
        self.has_reported_unused = True
        trained = (name for name, value in self._parameters.items() if value.requires_grad)
        unused = [name for name in trained if name not in self._used_names]
        if unused:
            more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
            LOG.warning(f"Without a gradient in the first step, counted as zero: {', '.join(unused[:5])}{more}.")

    def _reorder_buckets(self) -> None:
        # Rank 0's order on all ranks: buckets fill in the order in which gradients come; those without one are last.
        ready = dict.fromkeys(self._ready_names)
        own_order = [*ready, *(name for name in reversed(self._parameters) if name not in ready)]
        lead_order = self._world.control.broadcast_bytes(json.dumps(own_order).encode())
        self.order = tuple(json.loads(lead_order))
        # This step's gradients stay in the old buckets.
        if list(self.order) != self._names:
            self._build_buckets(self.order)

    def _check_num_flushed(self, total: float) -> None:
        # `total` is summed over ranks and steps, so that all ranks decide alike.
        flushed_in_step = total - self._num_flushed
        self._num_flushed = total
        # Twice: each number is sent, and so is its sum.
        sent_in_step = sum(bucket.numel for bucket in self._buckets) * 2
        if self.wire != "fp32" and flushed_in_step > MAX_FLUSHED_SHARE * sent_in_step:
            lost = f"{self.wire} between hosts lost {flushed_in_step / sent_in_step:.1%} of a step's numbers"
            LOG.warning(f"{lost}: gradients are sent as fp32 from now on.")
            self.wire = "fp32"

    def _build_digest_error(self) -> CommunicationError:
        # Every rank comes here in the same step, so they can still exchange their logs.
        # Texts that ranks exchange differ in length, and are no part of the digest.
        sizes = [0 if entry.algorithm == "bytes" else entry.bytes for entry in self._communicator.log]
        log = zip(self._communicator.log, sizes, strict=True)
        own_log = json.dumps([(entry.seq, entry.tag, entry.algorithm, size) for entry, size in log])
        logs = [json.loads(log) for log in self._world.control.gather_bytes(own_log.encode())]
        ranks = self._world.control.ranks
        for entries in zip(*logs, strict=False):
            if len({tuple(entry) for entry in entries}) > 1:
                tags = "; ".join(f"rank {rank}: {entry[1]}" for rank, entry in zip(ranks, entries, strict=True))
                what = f"ranks issued different operations, and sums mixed them up. Number {entries[0][0]} was {tags}"
                break
        else:
            what = "ranks issued different operations, earlier than their logs reach back"
        return CommunicationError(what, fix="Issue the same operations in the same order on every rank.")
