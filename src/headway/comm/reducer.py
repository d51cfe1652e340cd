"""Reducer: gradients meet while the backward pass still runs.

A hook fires as each gradient is complete. Full buckets are summed over the ranks in a fixed order, whatever the order
in which hooks fire. The last bucket waits for `finish` and carries, in the same message, what the ranks have to agree
on: that each is whole, the digest of their operations, the loss, which parameters were used, and the running
statistics of batch norm.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import final

import torch

from headway.comm.buckets import Bucket, plan
from headway.comm.communicator import DIGEST_BITS, Algorithm, Communicator, Pending
from headway.comm.noise import local_term, squared_norm
from headway.comm.wire import Wire
from headway.core.errors import CommunicationError, TrainingError

NIBBLES = DIGEST_BITS // 4
"""The digest rides as numbers below 16: their sums and sums of squares are exact in fp32 up to 65,536 ranks."""

DEFAULT_BUCKET_BYTES = 4 << 20
"""Where no link was measured."""

LOST_SHARE = 0.01
"""16-bit messages that flush more of a step's numbers to zero than this are given up for fp32."""

_DIGEST = 4
_FIXED = _DIGEST + 2 * NIBBLES
"""Numbers before the flags: live ranks, loss, lost numbers, local norms, digest and its squares."""


@final
class Verdict:
    """What the ranks agreed on in a step; all of them hold the same. Numbers are sums over the ranks.

    On CUDA the first look at one waits for the device.

    Attributes:
        live: ranks that added gradients. loss: of their losses. flags: of each flag.
        local_sq: of `noise.local_term`, a scalar on the device; 0 where noise is not measured.
        reduced_sq: squared norm of the summed gradient, likewise.
        checked: the Reducer has seen that all ranks had issued the same operations.
    """

    def __init__(self, numbers: torch.Tensor, reduced_sq: torch.Tensor | None = None) -> None:
        self._numbers, self.checked = numbers, False
        self.local_sq, self.reduced_sq = numbers[3], numbers.new_zeros(()) if reduced_sq is None else reduced_sq

    @cached_property
    def _row(self) -> list[float]:
        row: list[float] = self._numbers.tolist()
        return row

    @property
    def live(self) -> int:
        return round(self._row[0])

    @property
    def loss(self) -> float:
        return self._row[1]

    @property
    def lost(self) -> float:
        """Numbers that 16-bit messages have lost since the beginning."""
        return self._row[2]

    @property
    def flags(self) -> tuple[float, ...]:
        return tuple(self._row[_FIXED:])

    def one_digest(self, ranks: int) -> bool:
        """Whether all ranks had issued the same operations: by Cauchy and Schwarz, N times the sum of squares is the
        square of the sum for equal numbers only."""
        sums, squares = self._row[_DIGEST : _DIGEST + NIBBLES], self._row[_DIGEST + NIBBLES : _FIXED]
        return all(ranks * square == value * value for value, square in zip(sums, squares, strict=True))


@final
class Reducer:
    """Sums the gradients of a network over all ranks. All ranks make it, and use it, alike.

    Args:
        parameters: (name, parameter); those that are trained count. One that is frozen later has no gradient then.
        communicator: whose world it is.
        buffers: floating-point tensors that become their mean over the ranks in each step: running statistics.
        choose: bytes of a bucket -> algorithm.
        bucket_bytes: see `plan`.
        wire: form in which buckets cross between hosts; the last one goes as fp32.
        flags: how many numbers `finish` is given besides the loss.
        average: divide by the live ranks; else gradients are sums.
        uneven: ranks may run out of data at different steps; on CUDA the host then waits in each step.
        noise: measure the norms that tell the gradient noise scale: two passes over the gradients.
        order: names in the order in which gradients become ready, of an earlier Reducer; unset: reversed, and after
            the first step as rank 0 saw them.
        named: an earlier Reducer of this process has said which parameters are without a gradient.
        say: told once of parameters without a gradient, and of a wire that was given up.

    Attributes:
        order: as it is now, once it is known.
        wire, named: as they are now.
        bucket_bytes: as given.

    Raises:
        TrainingError: nothing is trained.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        communicator: Communicator,
        *,
        buffers: Sequence[torch.Tensor] = (),
        choose: Callable[[int], Algorithm] = lambda nbytes: "ring",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        wire: Wire = "fp32",
        flags: int = 0,
        average: bool = False,
        uneven: bool = False,
        noise: bool = False,
        order: Sequence[str] | None = None,
        named: bool = False,
        say: Callable[[str], object] = print,
    ) -> None:
        self._communicator, self._world = communicator, communicator.world
        self._parameters = {name: value for name, value in parameters if value.requires_grad}
        if not self._parameters:
            raise TrainingError("there is no parameter to train")
        self._buffers, self._choose, self.bucket_bytes = list(buffers), choose, bucket_bytes
        self.wire: Wire = wire
        self._flags, self._average, self._say = flags, average, say
        self._host_waits = uneven or self._world.device.type != "cuda"
        self.order: tuple[str, ...] | None = None if order is None else tuple(order)
        self._lay(order or list(reversed(self._parameters)))
        self._armed, self.named = False, named
        self._noise, self._share, self._local_sq = noise, 1.0, torch.zeros(())
        self._step = 0
        self._used_first: list[float] | None = None
        self._lost = 0.0
        self._ready: list[str] = []
        self._handles = [
            value.register_post_accumulate_grad_hook(self._hook(name)) for name, value in self._parameters.items()
        ]

    @property
    def buckets(self) -> list[Bucket]:
        """In the order in which they are summed."""
        return self._buckets

    @property
    def algorithms(self) -> list[Algorithm]:
        """By which each bucket is summed."""
        return [self._choose(bucket.nbytes) for bucket in self._buckets]

    def arm(self, share: float = 1.0) -> None:
        """Call it before the last backward pass of a step: its gradients are the ones to sum.

        Args:
            share: of the step's samples that are this rank's; counts where noise is measured.
        """
        self._armed, self._next, self._share = True, 0, share
        self._local_sq = torch.zeros((), device=self._world.device)
        self._ready.clear()
        self._pending: list[Pending] = []
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def finish(
        self, loss: torch.Tensor | float = 0.0, flags: Sequence[torch.Tensor | float] = (), *, contributes: bool = True
    ) -> Verdict:
        """Waits until all gradients are summed; afterwards `parameter.grad` are the sums.

        Args:
            loss: a scalar; flags: as many numbers as the Reducer was made for. Their sums are in the verdict.
            contributes: False on a rank that has no data left: it adds zeros, and need not have run a backward pass.
                Where the verdict has no live rank, all are at their end.

        Raises:
            GenerationEndedError, CommunicationError: a sum failed, or ranks issued different operations.
        """
        if not self._armed or not contributes:
            self.arm()
        self._armed = False
        if contributes:
            self._name_unused()
        for bucket in self._buckets[self._next :]:
            self._fill(bucket) if contributes else bucket.empty()
            if bucket is self._buckets[-1]:
                self._fill_tail(bucket.tail, loss, flags, contributes)
            self._send(bucket)
        for pending in self._pending:
            pending.wait()
        self._step += 1
        views = [view for bucket in self._buckets for view in bucket.views]
        verdict = Verdict(self._fixed.clone(), squared_norm(views) if self._noise else None)
        if not self._host_waits:
            if self._used_first is None:  # the host waits in the first step: what nobody uses has no gradient
                self._used_first = self._used.tolist()
            self._take(self._used_first)
            return verdict
        self.check(verdict)
        if verdict.live:
            self._take(self._used.tolist())
        if self.order is None:
            self._reorder()
        return verdict

    def check(self, verdict: Verdict) -> None:
        """Done by `finish` itself, but on CUDA, where it is to be called when the host waits anyway. Once is enough.

        Raises:
            CommunicationError: ranks issued different operations.
        """
        if verdict.checked:
            return
        if not verdict.one_digest(self._world.size):
            raise self._disagreement()
        verdict.checked = True
        self._watch_lost(verdict.lost)

    def close(self) -> None:
        """Takes its hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def _lay(self, order: Sequence[str]) -> None:
        named = [(name, self._parameters[name]) for name in order]
        sizes = [value.numel() * value.element_size() for _, value in named]
        numbers = plan(sizes, [(value.dtype, value.device) for _, value in named], self.bucket_bytes)
        ranks = self._world.local_size
        rides = _FIXED + self._flags + len(named) + sum(buffer.numel() for buffer in self._buffers)
        groups = [[named[number] for number in group] for group in numbers]
        widest = torch.float64 if any(buffer.dtype == torch.float64 for buffer in self._buffers) else torch.float32
        with_tail = groups.pop() if groups[-1][0][1].dtype in (widest, torch.float64) else []
        self._buckets = [Bucket(group, ranks=ranks) for group in groups]
        like = torch.empty(0, dtype=widest, device=named[0][1].device)
        self._buckets.append(Bucket(with_tail, ranks=ranks, tail=rides, like=like))
        self._of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._names = [name for name, _ in named]
        self._next, self._pending = 0, []
        tail = self._buckets[-1].tail
        self._fixed, self._used, rest = (
            tail[: _FIXED + self._flags],
            tail[_FIXED + self._flags : _FIXED + self._flags + len(named)],
            tail[_FIXED + self._flags + len(named) :],
        )
        self._means = [
            part.view(buffer.shape)
            for part, buffer in zip(rest.split([b.numel() for b in self._buffers]), self._buffers, strict=True)
        ]

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            if not self._armed:
                return
            self._ready.append(name)
            self._of[name].missing -= 1
            last = len(self._buckets) - 1
            while self._next < last and not self._buckets[self._next].missing:
                bucket = self._buckets[self._next]
                self._fill(bucket)
                self._send(bucket)

        return ready

    def _fill(self, bucket: Bucket) -> None:
        bucket.fill()
        if self._noise and bucket.views:
            self._local_sq = self._local_sq + local_term(bucket.views, self._share)

    def _send(self, bucket: Bucket) -> None:
        tag = f"step {self._step + 1}, bucket {self._next}: {bucket.label()}"
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
        fixed = [
            contributes,
            loss,
            0.0,
            self._local_sq if self._noise else 0.0,
            *nibbles,
            *(value * value for value in nibbles),
            *flags,
        ]
        used = [contributes and self._parameters[name].grad is not None for name in self._names]
        numbers = [0.0 if isinstance(value, torch.Tensor) else float(value) for value in fixed] + used
        on_gpu = tail.device.type == "cuda"  # a copy from memory that is not pinned would wait for the device
        host = torch.tensor(numbers, dtype=tail.dtype, pin_memory=on_gpu)
        tail[: len(numbers)].copy_(host, non_blocking=on_gpu)
        for place, value in enumerate(fixed):
            if isinstance(value, torch.Tensor):
                tail[place] = value.detach()
        if self.wire != "fp32":
            tail[2] = self._communicator.lost()
        if self._buffers and contributes:
            torch._foreach_copy_(self._means, self._buffers)

    def _take(self, used: Sequence[float]) -> None:
        """Gradients and running statistics from where they were summed. `used`: whether any rank used a parameter."""
        live = self._fixed[0].clone()
        if self._buffers:
            torch._foreach_div_(self._means, live)
            torch._foreach_copy_(self._buffers, self._means)
        of = dict(zip(self._names, used, strict=True))
        for bucket in self._buckets:
            if self._average:
                torch._foreach_div_(bucket.views, live)
            for name, parameter, view in zip(bucket.names, bucket.parameters, bucket.views, strict=True):
                parameter.grad = view if of[name] and parameter.requires_grad else None

    def _name_unused(self) -> None:
        if self.named:
            return
        self.named = True
        without = [name for name, value in self._parameters.items() if value.grad is None and value.requires_grad]
        if without:
            more = f" and {len(without) - 5} more" if len(without) > 5 else ""
            self._say(f"Without a gradient in the first step, counted as zero: {', '.join(without[:5])}{more}.")

    def _reorder(self) -> None:
        """Lays the buckets as the gradients came on rank 0; those that did not come are last."""
        came = list(dict.fromkeys(self._ready))
        rest = [name for name in reversed(self._parameters) if name not in set(came)]
        agreed = self._world.control.broadcast_bytes(json.dumps(came + rest).encode())
        self.order = tuple(json.loads(agreed))
        if list(self.order) != self._names:
            self._lay(self.order)  # this step's gradients stay where they are

    def _watch_lost(self, total: float) -> None:
        step, self._lost = total - self._lost, total
        numbers = sum(bucket.flat.numel() for bucket in self._buckets) * 2  # each is sent, and its sum is
        if self.wire != "fp32" and step > LOST_SHARE * numbers:
            share = step / numbers
            self._say(
                f"{self.wire} between hosts lost {share:.1%} of a step's numbers: gradients go as fp32 from here."
            )
            self.wire = "fp32"

    def _disagreement(self) -> CommunicationError:
        """Every rank comes here in the same step, so they can still tell each other."""
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
        return CommunicationError(what, fix="Every rank must issue the same operations in the same order.")
