"""Ranks: the processes that train one run together, through all of its generations.

Where our launcher started them, a lost process ends a generation and not the run: the others meet in the next one,
those that are behind take over the state of the lowest rank that is ahead, and go on.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, final

import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase

from headway.checkpoint.agreement import SaveExchange, SingleRankExchange, StoreExchange
from headway.comm.algorithm_choice import AlgorithmChooser, AlgorithmTrial, list_candidates, run_trials
from headway.comm.batch_norm import SyncBatchNorm
from headway.comm.comm_recipe import CommRecipe
from headway.comm.communicator import Algorithm, Communicator
from headway.comm.coordinator_client import CoordinatorClient
from headway.comm.links import BUDGET_S, MeasuredLinks, measure_links
from headway.comm.reducer import BucketPlan, Reducer, StepReduction
from headway.comm.stall_watch import StallWatch
from headway.comm.wire_codec import Wire
from headway.core.collectives import Network
from headway.core.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    FencedError,
    GenerationEndedError,
    UsageError,
)
from headway.core.launcher_environment import LaunchedProcess, read_launcher_environment
from headway.core.random_keys import GOLDEN, mix_int
from headway.core.world import World
from headway.launch.handover import Met, Traveller, hand_over
from headway.launch.hosts import shared
from headway.observe.rank_timings import RankTimings

FLAGS = ("bad", "stopping", "regroup")
"""What rides with each step's gradients besides the loss: damaged samples, a signal to stop, newcomers that wait."""
CONNECT_S = 3.0
"""For the building of a group: all have said that they are ready, so more means that one of them was lost meanwhile,
or is slow: doubled for each attempt that failed though all members are alive."""

CONNECT_OF_A_RANK_S = 0.05
"""The same for large worlds, whose ranks connect to each other."""

ATTEMPTS = 5
"""At a generation that does not come together though all of its members are alive."""

BUDGET_OF_ONE_HOST_S = 0.2
"""There is little to choose on one host."""

Say = Callable[[str], object]


@final
class Ranks:
    """This process among the others; a context that it leaves at its end.

    Attributes:
        options: of the recipe; others count from the next time the ranks meet.
        world, communicator, reducer: of the generation in use.
        name: of this process, in the names of its files; it stays when ranks change.
        speaks: whether this process says for all what is to be said: rank 0 does.
        lost: names of the processes that were lost since the generation before.
        joins: this process has come to ranks that train already.
        done: whether the run was at its end when this process left in order.
        noise_scale: whether gradients tell the noise scale; to be set before the ranks meet.
    """

    def __init__(
        self, recipe: CommRecipe, launched: LaunchedProcess, member: CoordinatorClient | None, say: Say
    ) -> None:
        self.options, self._launched, self._member, self._loud = recipe, launched, member, say
        self.name = str(launched.rank) if member is None else member.worker
        self.speaks = launched.rank == 0 and (member is None or not member.joining)
        self.lost: tuple[str, ...] = ()
        self._joined: _Joined | None = None
        self._measured: Measured | None = None
        self.joins = member is not None and member.joining
        self._led = False
        self._named = False  # which parameters have no gradient
        self.done, self.noise_scale = True, False

    @staticmethod
    def from_environment(recipe: CommRecipe, say: Say) -> Ranks | None:
        """The ranks that a launcher started; None where this process trains alone.

        Raises:
            UsageError: variables that contradict each other. CommunicationError: the launcher cannot be reached.
        """
        found, member = read_launcher_environment(), CoordinatorClient.from_environment()
        if found is None or (found.size == 1 and member is None):
            return None
        return Ranks(recipe, found, member, say)

    @property
    def world(self) -> World:
        """World of this generation."""
        assert self._joined is not None
        return self._joined.world

    @property
    def communicator(self) -> Communicator:
        """Communicator of this generation."""
        assert self._joined is not None
        return self._joined.communicator

    @property
    def reducer(self) -> Reducer:
        """Reducer of this generation."""
        assert self._joined is not None
        return self._joined.reducer

    @property
    def board(self) -> RankTimings:
        """On which the ranks of this generation write down how long they took."""
        assert self._joined is not None
        return self._joined.board

    @property
    def local_rank(self) -> int:
        """Number of this process on its host: that of its device."""
        return self._launched.local_rank or 0

    @property
    def launched_size(self) -> int:
        """How many processes were started."""
        return self._launched.size

    def share(self, batch: int) -> None:
        """Raises UsageError where a step has fewer samples than there are processes."""
        shared(batch, self._launched.size)

    def say(self, text: str) -> None:
        """Tells the user, once for all ranks."""
        if self.speaks:
            self._loud(text)

    def meet(self, model: torch.nn.Module, device: torch.device, traveller: Traveller) -> Met:
        """Comes together with the others, for the first time or in the next generation, and waits for all of them.
        All have one state then; see `hand_over`.

        Raises:
            FencedError: the others have gone on without this process. CommunicationError: they cannot be reached.
            HeadwayError: nobody holds the state of the run any more, and there is nothing to go on from.
        """
        failures = 0
        while True:
            try:
                self._leave()
                self._meet(model, device, CONNECT_S * 2**failures)
                self._agree(traveller)
                met = hand_over(self.world, self.name, traveller, self.say, led=self._led)
                self._led = self.world.is_lead
                return met
            except CommunicationError as error:
                if self._member is None:
                    raise
                try:
                    self._member.check()
                except GenerationEndedError:
                    continue  # somebody was lost meanwhile: there is a generation after this one
                failures += 1
                if failures == ATTEMPTS:
                    raise error

    def check(self) -> None:
        """Raises GenerationEndedError, FencedError or CommunicationError if the generation is over."""
        if self._member is not None:
            self._member.check()

    def reason(self, error: CommunicationError) -> CommunicationError:
        """Explains a failed collective: GenerationEndedError if this process goes on in the next generation."""
        member = self._member
        if member is None or isinstance(error, FencedError):
            return error
        if isinstance(error, CollectiveTimeoutError) and self._joined is not None and self._joined.watch is not None:
            for rank in self._joined.watch.find_lagging_ranks():
                member.accuse(self.world.generation, rank)
        # A connection breaks a moment before the launcher has told why; silence it notices after its own time-out.
        until = time.monotonic() + 1.5 * self.options.timeout_s + 1
        while not member.has_changed and time.monotonic() < until:
            time.sleep(0.002)
        try:
            member.check()
        except CommunicationError as seen:
            return seen
        return error

    def _agree(self, traveller: Traveller) -> None:
        """Compares what has to be alike, and decides what each has only found out for itself.

        Raises:
            UsageError: it is not. Among newcomers to a run only by the one that is unlike: it leaves, and the others go
                on. CommunicationError: some newcomer leaves.
        """
        control = self.world.control
        said = json.dumps([self.joins, traveller.identity(), traveller.precision.finding()], sort_keys=True).encode()
        found = [json.loads(text) for text in control.gather_bytes(said)]
        first = found[control.ranks.index(0)][1]
        for rank, (new, other, _) in zip(control.ranks, found, strict=True):
            unlike = [key for key in first.keys() | other.keys() if other.get(key) != first.get(key)]
            if not unlike:
                continue
            if new and rank != self.world.rank:
                raise CommunicationError(f"rank {rank} is another run's, and leaves")
            key = min(unlike)
            what = f"{key} is {other.get(key)!r} on rank {rank} and {first.get(key)!r} on rank 0"
            raise UsageError(what, fix="Start all processes with the same recipe, data and version.")
        if decided := traveller.precision.agree([finding for _, _, finding in found]):
            self.say(decided)

    def seed(self, seed: int, position: int) -> None:
        """Sets the generators of torch, numpy and Python for one step: a function of seed, position and rank, so that
        a step that is repeated, resumed or done by other ranks needs no generator's state."""
        word = mix_int(mix_int(mix_int(seed) + position) + (self.world.rank + 1) * GOLDEN)
        # Not torch.manual_seed: without CUDA it notes a traceback at each call, in a list that nobody empties (2.13).
        device, generator = self.world.device, torch.default_generator
        if device.type == "cuda":
            generator = torch.cuda.default_generators[device.index or 0]
        generator.manual_seed(word & ((1 << 63) - 1))
        np.random.seed(word & 0xFFFFFFFF)
        random.seed(word)

    def arm(self, share: float) -> None:
        """Before the last backward pass of a step, of whose samples this rank has a share."""
        self.reducer.arm(share)

    def finish(self, loss: torch.Tensor, *, bad: int, stopping: bool) -> StepReduction:
        """Waits for the sums of a step; see `Reducer.finish`.

        Raises:
            GenerationEndedError: the step did not come about.
        """
        regroup = False
        if self._member is not None:
            self._member.check()
            regroup = self._member.has_newcomers
        return self.reducer.finish(loss, (float(bad), float(stopping), float(regroup)))

    def exchange(self) -> SaveExchange:
        """By which the ranks of this generation agree on a checkpoint."""
        world = self.world
        return (
            SingleRankExchange()
            if world.store is None
            else StoreExchange(world.store, world.rank, world.size, alive=self.check)
        )

    def confirmer(self) -> Callable[[], None]:
        """What is to be called, from any thread, right before something of this generation becomes final: it raises
        GenerationEndedError or FencedError where the others have gone on meanwhile."""
        member, number = self._member, self.world.generation
        return (lambda: None) if member is None else (lambda: member.confirm(number))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Leaves: in order, or where something failed so that the others take this process for lost."""
        self._leave()
        if self._member is not None:
            if kind is None:
                self._member.leave(done=self.done)
            self._member.close()

    def _meet(self, model: torch.nn.Module, device: torch.device, connect_s: float) -> None:
        options, member = self.options, self._member
        again = self._measured is not None
        if member is None:
            world = World.join(self._launched, device, timeout_s=options.stall_s, interface=options.interface)
        else:
            info = member.wait_for_generation()
            self.lost = (*self.lost, *info.lost)
            world = member.build_world(
                info,
                device,
                why="the generation is over",
                timeout_s=options.stall_s,
                interface=options.interface,
                connect_s=max(connect_s, CONNECT_OF_A_RANK_S * info.size),
            )
        self.speaks = world.is_lead
        if again:
            self.say(info.why)
        parameters = [value for value in model.parameters() if value.requires_grad]
        total_bytes = sum(value.numel() * value.element_size() for value in parameters)
        known = self._agreed(world)
        budget_s = BUDGET_S if len(world.hosts) > 1 else BUDGET_OF_ONE_HOST_S
        links = known.links if known else measure_links(world, rails=options.rails, budget_s=budget_s)
        communicator = Communicator(world, rails=links.rails)
        network = links.build_network(world)
        trials = known.trials if known else run_trials(communicator, network, wire=options.wire, budget_s=budget_s)
        order = known.order if known else None
        wire = known.wire if known else options.wire
        self._measured = Measured(links, trials, order, wire)
        chooser = self._chooser(communicator, network, trials, total_bytes)
        watch = StallWatch(communicator) if world.size > 1 else None
        if watch is not None:
            world.explain = watch.explain
        reducer = Reducer(
            model.named_parameters(),
            communicator,
            plan=BucketPlan(choose=chooser, bucket_bytes=chooser.bucket_bytes, wire=wire, order=order),
            buffers=running_statistics(model),
            flags=len(FLAGS),
            noise=self.noise_scale and world.size > 1,
            has_reported_unused=self._named,
            say=self.say,
        )
        self._joined = _Joined(world, communicator, reducer, watch, RankTimings(world.store, world.rank, world.size))
        if not known:
            for text in (*links.describe(world), chooser.describe([one.nbytes for one in reducer.buckets])):
                self.say(text)
        if options.batch_norm == "sync":
            group = world.create_group(name="batch norm")
            for module in model.modules():
                if isinstance(module, SyncBatchNorm):
                    module.group = group

    def _agreed(self, world: World) -> Measured | None:
        """What rank 0 knows from an earlier generation, on every rank; None where it knows nothing."""
        mine = b""
        if world.is_lead and self._measured is not None:
            links, trials, *rest = self._measured
            numbers = {name: asdict(trial) for name, trial in trials.items()}
            mine = json.dumps([links.to_json(), numbers, *rest]).encode()
        if not (found := world.control.broadcast_bytes(mine)):
            return None
        links, trials, *rest = json.loads(found)
        return Measured(
            MeasuredLinks.from_json(links), {name: AlgorithmTrial(**trial) for name, trial in trials.items()}, *rest
        )

    def _chooser(
        self, communicator: Communicator, network: Network, trials: dict[Algorithm, AlgorithmTrial], total_bytes: int
    ) -> AlgorithmChooser:
        options, algorithm = self.options, self.options.algorithm
        if algorithm != "auto" and algorithm not in communicator.algorithms:
            self.say(f"{algorithm} wants as many ranks on each host: leader takes its place.")
            algorithm = "leader"
        return AlgorithmChooser(
            network,
            {name: trial for name, trial in trials.items() if name in list_candidates(communicator)},
            total_bytes,
            algorithm=algorithm,
            wire=options.wire,
            bucket_bytes=None if options.bucket_mb == "auto" else int(options.bucket_mb * 1e6),
            phased=communicator.world.device.type == "cpu",
        )

    def _leave(self) -> None:
        """Lets go of the generation in use."""
        joined, self._joined = self._joined, None
        if joined is None:
            return
        if self._measured is not None:
            self._measured = self._measured._replace(order=joined.reducer.order, wire=joined.reducer.wire)
        self._named = joined.reducer.has_reported_unused
        joined.reducer.close()
        joined.world.abort("this process has left")
        joined.communicator.close()
        if joined.watch is not None:
            joined.watch.close()
        joined.world.close()


class Measured(NamedTuple):
    """What goes over to the next generation, the same on all ranks: what is known of the links, in which order
    gradients become ready, and how they cross between hosts."""

    links: MeasuredLinks
    trials: dict[Algorithm, AlgorithmTrial]
    order: Sequence[str] | None
    wire: Wire


@dataclass(frozen=True)
class _Joined:
    """One generation, as this process has built it."""

    world: World
    communicator: Communicator
    reducer: Reducer
    watch: StallWatch | None
    board: RankTimings


def running_statistics(model: torch.nn.Module) -> list[torch.Tensor]:
    """Mean and variance of every batch norm: what becomes its mean over the ranks in each step. Other buffers are the
    network's own affair."""
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    return [value for norm in norms for value in norm.buffers(recurse=False) if value.is_floating_point()]
