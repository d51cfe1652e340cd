"""Advises changes to a watched loop, each with the exact code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

from headway.core.profile import LimitKind
from headway.doctor.loader_facts import SPARE, advise_loader
from headway.doctor.loop_observation import Advice, LoopFacts, format_share
from headway.doctor.loop_verdict import LIMIT, OFTEN, LoopCosts

# Share of the time from which a change is worth it.
WORTH = 0.05


@final
class LoopAdviser:
    """Collects advice, the most important first.

    Args:
        bursts: the workers keep up, but batches come late now and then.
        period: steps after which stalls repeat, with the name of a known interval of that length; None: they do not.
    """

    def __init__(
        self,
        kind: LimitKind | None,
        costs: LoopCosts,
        facts: LoopFacts,
        *,
        bursts: bool,
        period: tuple[int, str | None] | None,
    ) -> None:
        self._kind, self._costs, self._facts = kind, costs, facts
        self._bursts, self._period = bursts, period
        self._advice: list[Advice] = []

    def advise(self) -> tuple[Advice, ...]:
        """Returns advice for everything that takes 5 % of the time or more, the limit first."""
        parts: dict[str, Callable[[], None]] = {
            "host/IO limited": self._advise_input,
            "stall limited": self._advise_stalls,
            "sync limited": self._advise_syncs,
            "communication limited": self._advise_exchange,
            "launch limited": self._advise_launch,
            "device limited": self._advise_device,
        }
        # The limit comes first; the other parts follow in the order in which they usually matter.
        first = parts.get(self._kind or "", self._advise_input)
        for part in (first, *(other for other in parts.values() if other != first)):
            part()
        return tuple(self._advice)

    def _add(self, why: str, change: str) -> None:
        if all(change != one.change for one in self._advice):
            self._advice.append(Advice(why=why, change=change))

    def _advise_input(self) -> None:
        costs, facts = self._costs, self._facts
        if costs.wait >= WORTH and facts.loader is not None:
            for why, change in advise_loader(
                facts.loader, wait=costs.wait, cores=facts.cores, shares_cores=not facts.is_asynchronous
            ):
                self._add(why, change)
        elif costs.wait >= WORTH and facts.torch_loader:
            self._advise_workers(facts.workers or 0)
        elif costs.wait >= WORTH:
            self._add("the loader is slower than the loop", "let it prefetch batches in its own threads or processes")
        if costs.sum_shares("other") >= LIMIT and facts.is_asynchronous and facts.torch_loader and not facts.pinned:
            why = "copies to the device block because batches are not in pinned memory"
            self._add(why, "DataLoader(..., pin_memory=True), and batch.to(device, non_blocking=True)")

    def _advise_workers(self, workers: int) -> None:
        costs, facts = self._costs, self._facts
        most = max(1, facts.cores - 1)
        if not workers:
            # The wait is the time of a batch; each worker can use the rest of a step for one.
            number = min(most, math.ceil(SPARE * costs.wait / max(1 - costs.wait, 0.01)))
            shared = "" if facts.is_asynchronous else " (they share the cores with the training)"
            why = f"the loop makes its batches itself{shared}"
            self._add(why, f"DataLoader(..., num_workers={number}, persistent_workers=True)")
            return
        if self._bursts:
            # Only the queue is too short, so deeper prefetch helps and more workers do not. torch's default is 2.
            ahead = 2 * (facts.prefetch or 2)
            self._add("most batches come in time, but some come late", f"DataLoader(..., prefetch_factor={ahead})")
            return
        number = math.ceil(SPARE * workers / max(1 - costs.wait, 0.01))
        why = f"{workers} {'worker is' if workers == 1 else 'workers are'} too slow, on {facts.cores} cores"
        if workers < most:
            self._add(why, f"DataLoader(..., num_workers={min(most, number)}, persistent_workers=True)")
        # More workers than cores only help while they wait for storage.
        if number > most:
            more = "add workers only if they wait for storage; otherwise make a batch cheaper"
            pack = "headway pack IMAGES PACKED, and headway.Loader(PACKED, batch=...)"
            self._add(why, f"{more}: {pack}")

    def _advise_stalls(self) -> None:
        costs, facts = self._costs, self._facts
        if costs.first >= WORTH:
            if facts.torch_loader and facts.workers and not facts.persistent:
                change = "DataLoader(..., persistent_workers=True)"
                self._add("every epoch starts new workers", change)
            elif facts.loader is not None and facts.loader.is_own:
                # Its workers live as long as the Loader.
                self._add("every epoch begins slowly", "make the headway.Loader once, before the first epoch")
            elif facts.loader is not None:
                # A Loader without an end keeps its ring full over the ends of epochs.
                change = "one iteration over all epochs: headway.Loader(..., seed=..., stop=math.inf)"
                self._add("every epoch fills the queue of batches again", change)
            else:
                self._add("every epoch begins slowly", "keep open files and indices of the data set between epochs")
        if costs.stall >= WORTH:
            when, name = self._period or (None, None)
            why = f"steps stall in the stage {costs.stalled}"
            if name is not None:
                self._add(f"{why} every {when} steps, as {name}", f"do {name} less often, or in another thread")
            elif costs.stalled in ("other", "loss"):
                often = "now and then" if when is None else f"every {when} steps"
                self._add(why, f"check what your loop does {often}: logging, checkpoints, evaluation")
            else:
                self._add(why, "check for other load on the machine, and for batches of other shapes")

    def _advise_syncs(self) -> None:
        costs, facts = self._costs, self._facts
        if facts.is_asynchronous and costs.syncs >= OFTEN and costs.sync >= WORTH:
            where = f", first {facts.places[0][0]}" if facts.places else ""
            change = f"keep values on the device (total += loss.detach()) and read them every 50 steps{where}"
            self._add("Python waits for values", change)

    def _advise_exchange(self) -> None:
        if self._costs.exchange is not None and self._costs.exchange >= WORTH:
            change = "exchange only every k-th batch (model.no_sync() in the others), or use a larger batch"
            self._add("backward waits for the exchange of gradients", change)

    def _advise_launch(self) -> None:
        facts = self._facts
        if self._kind == "launch limited":
            if not facts.compiled:
                self._add(
                    "the device waits for kernel launches", 'model = torch.compile(model, mode="reduce-overhead")'
                )
            batch = "DataLoader(..., batch_size=...)" if facts.loader is None else "headway.Loader(..., batch=...)"
            self._add("a larger batch gives each kernel more work", f"{batch} as memory allows")
        if facts.fusable and self._costs.sum_shares("optimizer") >= WORTH:
            share = format_share(self._costs.sum_shares("optimizer"))
            self._add(f"the optimizer takes {share} of the time", "give the optimizer fused=True")

    def _advise_device(self) -> None:
        facts = self._facts
        if facts.is_asynchronous and facts.bf16 and facts.autocast is False:
            change = f'with torch.autocast("{facts.device}", dtype=torch.bfloat16): around forward and loss'
            self._add("forward and backward run in float32", change)
        if not facts.is_asynchronous and facts.threads < facts.cores:
            why = f"torch uses {facts.threads} of {facts.cores} cores"
            self._add(why, f"torch.set_num_threads({facts.cores})")
        if self._kind == "device limited" and not facts.compiled:
            self._add("the network runs one operation at a time", "model = torch.compile(model)")
