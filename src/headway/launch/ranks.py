"""The processes that train one run together, through all of its generations.

Under Headway's launcher a lost process ends a generation, not the run: the others meet in the next generation, ranks
that are behind take the state of the lowest rank that is ahead, and training continues.
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

from headway.checkpoint.agreement import SaveExchange, SingleRankExchange, StoreExchange
from headway.comm.algorithm_choice import AlgorithmChooser, AlgorithmTrial, list_candidates, run_trials
from headway.comm.batch_norm import SyncBatchNorm
from headway.comm.comm_recipe import Algorithm, CommRecipe, Wire
from headway.comm.communicator import Communicator
from headway.comm.coordinator_client import CoordinatorClient
from headway.comm.links import BUDGET_S, MeasuredLinks, measure_links
from headway.comm.reducer import BucketPlan, Reducer, StepReduction
from headway.comm.stall_watch import StallWatch
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
from headway.launch.handover import HandoverResult, StateCarrier, hand_over
from headway.launch.hosts import check_batch_covers_ranks
from headway.model.batch_norm import list_running_statistics
from headway.observe.rank_timings import RankTimings

# Numbers that are summed with each step's gradients, besides the loss: damaged samples, a signal to stop, newcomers.
STEP_FLAGS = ("bad", "stopping", "regroup")
# Time limit for building a group. All ranks have said that they are ready, so more time means that one was lost or is
# slow: doubled for each failed attempt with all ranks alive.
CONNECT_S = 3.0

# In large worlds every rank connects to every other.
CONNECT_PER_RANK_S = 0.05

# Attempts at a generation that fails to connect although all its ranks are alive.
CONNECT_ATTEMPTS = 5

# On one host there is little to choose, so measuring links may take less time.
ONE_HOST_BUDGET_S = 0.2

Say = Callable[[str], object]


@final
class Ranks:
    """This process among the ranks of a run. Use it as a context manager.

    Attributes:
        options: `comm` of the recipe; a change counts from the next generation on.
        world, communicator, reducer: those of the current generation.
        name: name of this process in file names; it stays when ranks change.
        is_lead: True on rank 0, which speaks to the user for all ranks.
        lost: names of the processes that were lost since the last generation.
        joins: True if this process joins ranks that already train.
        done: False if this process leaves before the end of the run.
        noise_scale: set it before the ranks meet to measure the gradient noise scale.
    """

    def __init__(
        self, recipe: CommRecipe, launched: LaunchedProcess, member: CoordinatorClient | None, say: Say
    ) -> None:
        self.options, self._launched, self._member, self._show = recipe, launched, member, say
        self.name = str(launched.rank) if member is None else member.worker
        # A newcomer may carry rank 0 in its environment, from the worker that it replaces, but another rank leads now.
        self.is_lead = launched.rank == 0 and (member is None or not member.joining)
        self.lost: tuple[str, ...] = ()
        self._joined: _JoinedGeneration | None = None
        self._measured: RankMeasurements | None = None
        self.joins = member is not None and member.joining
        self._was_lead = False
        # True once the parameters without a gradient have been named to the user.
        self._named = False
        self.done, self.noise_scale = True, False

    @staticmethod
    def from_environment(recipe: CommRecipe, say: Say) -> Ranks | None:
        """Reads the launcher's environment variables; returns None if this process trains alone.

        Raises:
            UsageError: the variables contradict each other.
            CommunicationError: the launcher cannot be reached.
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
        """Step timings that the ranks of this generation share."""
        assert self._joined is not None
        return self._joined.board

    @property
    def local_rank(self) -> int:
        """Rank on this host, which selects the device."""
        return self._launched.local_rank or 0

    @property
    def launched_size(self) -> int:
        """Number of processes that the launcher started."""
        return self._launched.size

    def share(self, batch: int) -> None:
        """Raises UsageError if a step has fewer samples than ranks."""
        check_batch_covers_ranks(batch, self._launched.size)

    def say(self, text: str) -> None:
        """Shows a message to the user, once for all ranks."""
        if self.is_lead:
            self._show(text)

    def meet(self, model: torch.nn.Module, device: torch.device, carrier: StateCarrier) -> HandoverResult:
        """Meets the other ranks, for the first time or in the next generation, and brings all to one state.

        Raises:
            FencedError: the others have continued without this process.
            CommunicationError: they cannot be reached.
            HeadwayError: no rank has the state of the run, and no checkpoint can be loaded.
        """
        failures = 0
        while True:
            try:
                self._leave()
                self._meet(model, device, CONNECT_S * 2**failures)
                self._agree(carrier)
                result = hand_over(self.world, self.name, carrier, self.say, was_lead=self._was_lead)
                self._was_lead = self.world.is_lead
                return result
            except CommunicationError as error:
                # Without Headway's launcher nobody forms another generation.
                if self._member is None:
                    raise
                try:
                    self._member.check()
                except GenerationEndedError:
                    # Another rank was lost in the meantime: the next generation is already forming.
                    continue
                failures += 1
                if failures == CONNECT_ATTEMPTS:
                    raise error

    def check(self) -> None:
        """Raises GenerationEndedError, FencedError or CommunicationError if the generation is over."""
        if self._member is not None:
            self._member.check()

    def explain_error(self, error: CommunicationError) -> CommunicationError:
        """Explains a failed collective: GenerationEndedError if this process continues in the next generation."""
        member = self._member
        if member is None or isinstance(error, FencedError):
            return error
        if isinstance(error, CollectiveTimeoutError) and self._joined is not None and self._joined.watch is not None:
            for rank in self._joined.watch.find_lagging_ranks():
                member.accuse(self.world.generation, rank)
        # A connection breaks a moment before the launcher tells the reason. It notices silence only after `timeout_s`;
        # the rest is margin.
        until = time.monotonic() + 1.5 * self.options.timeout_s + 1
        while not member.has_changed and time.monotonic() < until:
            time.sleep(0.002)
        try:
            member.check()
        except CommunicationError as seen:
            return seen
        return error

    def _agree(self, carrier: StateCarrier) -> None:
        """Compares the settings that must be equal on all ranks, and makes choices together, such as the precision.

        Raises:
            UsageError: settings differ. A newcomer that differs raises it alone and leaves; the others continue.
            CommunicationError: a newcomer leaves.
        """
        control = self.world.control
        mine = json.dumps(
            [self.joins, carrier.collect_settings(), carrier.precision.get_vote()], sort_keys=True
        ).encode()
        reports = [json.loads(text) for text in control.gather_bytes(mine)]
        first = reports[control.ranks.index(0)][1]
        for rank, (joins, other, _) in zip(control.ranks, reports, strict=True):
            differing = [key for key in first.keys() | other.keys() if other.get(key) != first.get(key)]
            if not differing:
                continue
            # A newcomer with other settings must not end the run: it leaves, and the others meet again without it.
            if joins and rank != self.world.rank:
                raise CommunicationError(f"rank {rank} has other settings than this run and leaves")
            key = min(differing)
            what = f"{key} is {other.get(key)!r} on rank {rank} and {first.get(key)!r} on rank 0"
            raise UsageError(what, fix="Start all processes with the same recipe, data and version.")
        if decided := carrier.precision.agree_on_votes([finding for _, _, finding in reports]):
            self.say(decided)

    def seed(self, seed: int, position: int) -> None:
        """Seeds torch, numpy and Python for one step, from seed, position and rank."""
        # A step that is repeated, resumed or made by other ranks then needs no saved state of the generators.
        word = mix_int(mix_int(mix_int(seed) + position) + (self.world.rank + 1) * GOLDEN)
        # Not torch.manual_seed: without CUDA, torch 2.13 appends a traceback to a list at each call, and leaks.
        device, generator = self.world.device, torch.default_generator
        if device.type == "cuda":
            generator = torch.cuda.default_generators[device.index or 0]
        generator.manual_seed(word & ((1 << 63) - 1))
        np.random.seed(word & 0xFFFFFFFF)
        random.seed(word)

    def arm(self, share: float) -> None:
        """Prepares the reducer for the last backward pass of a step.

        Args:
            share: this rank's share of the step's samples.
        """
        self.reducer.arm(share)

    def finish(self, loss: torch.Tensor, *, bad: int, stopping: bool) -> StepReduction:
        """Waits for the sums of a step, as `Reducer.finish` does.

        Raises:
            GenerationEndedError: a rank was lost, and the step is void.
        """
        # The flags are summed with the gradients, so all ranks learn of newcomers in the same step, without a message.
        regroup = False
        if self._member is not None:
            self._member.check()
            regroup = self._member.has_newcomers
        return self.reducer.finish(loss, (float(bad), float(stopping), float(regroup)))

    def exchange(self) -> SaveExchange:
        """Returns the exchange by which these ranks agree on a checkpoint."""
        world = self.world
        return (
            SingleRankExchange()
            if world.store is None
            else StoreExchange(world.store, world.rank, world.size, alive=self.check)
        )

    def build_confirmer(self) -> Callable[[], None]:
        """Builds a function to call, from any thread, right before a result of this generation becomes final.

        It raises GenerationEndedError or FencedError if the other ranks have continued without this process.
        """
        member, number = self._member, self.world.generation
        return (lambda: None) if member is None else (lambda: member.confirm(number))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Leaves in order; after an error, in such a way that the others count this process as lost."""
        self._leave()
        if self._member is not None:
            if kind is None:
                self._member.leave(done=self.done)
            self._member.close()

    def _meet(self, model: torch.nn.Module, device: torch.device, connect_s: float) -> None:
        """Builds world, communicator and reducer of the next generation."""
        options, member = self.options, self._member
        again = self._measured is not None
        if member is None:
            world = World.join(self._launched, device, timeout_s=options.stall_s, interface=options.interface)
        else:
            info = member.wait_for_generation()
            # Collected over generations: several may fail before one connects.
            self.lost = (*self.lost, *info.lost)
            world = member.build_world(
                info,
                device,
                why="the generation is over",
                timeout_s=options.stall_s,
                interface=options.interface,
                connect_s=max(connect_s, CONNECT_PER_RANK_S * info.size),
            )
        self.is_lead = world.is_lead
        if again:
            self.say(info.why)
        # Measured once: later generations take the links, trials and bucket order from rank 0.
        parameters = [value for value in model.parameters() if value.requires_grad]
        total_bytes = sum(value.numel() * value.element_size() for value in parameters)
        known = self._share_measured(world)
        budget_s = BUDGET_S if len(world.hosts) > 1 else ONE_HOST_BUDGET_S
        links = known.links if known else measure_links(world, rails=options.rails, budget_s=budget_s)
        communicator = Communicator(world, rails=links.rails)
        network = links.build_network(world)
        trials = known.trials if known else run_trials(communicator, network, wire=options.wire, budget_s=budget_s)
        order = known.order if known else None
        wire = known.wire if known else options.wire
        self._measured = RankMeasurements(links, trials, order, wire)
        chooser = self._build_chooser(communicator, network, trials, total_bytes)
        watch = StallWatch(communicator) if world.size > 1 else None
        if watch is not None:
            world.explain = watch.explain
        # Running statistics of batch norm have no gradients, so the reducer averages them as buffers.
        reducer = Reducer(
            model.named_parameters(),
            communicator,
            plan=BucketPlan(choose=chooser, bucket_bytes=chooser.bucket_bytes, wire=wire, order=order),
            buffers=list_running_statistics(model),
            flags=len(STEP_FLAGS),
            noise=self.noise_scale and world.size > 1,
            has_reported_unused=self._named,
            say=self.say,
        )
        self._joined = _JoinedGeneration(
            world, communicator, reducer, watch, RankTimings(world.store, world.rank, world.size)
        )
        if not known:
            for text in (*links.describe(world), chooser.describe([one.nbytes for one in reducer.buckets])):
                self.say(text)
        # Synchronised batch norm communicates inside forward and backward: a group of its own keeps its messages apart
        # from those of the reducer.
        if options.batch_norm == "sync":
            group = world.create_group(name="batch norm")
            for module in model.modules():
                if isinstance(module, SyncBatchNorm):
                    module.group = group

    def _share_measured(self, world: World) -> RankMeasurements | None:
        """Returns rank 0's measurements from an earlier generation on every rank; None if it has none."""
        # Newcomers have no measurements, and measuring again would hold up the run: they take those of rank 0.
        mine = b""
        if world.is_lead and self._measured is not None:
            links, trials, *rest = self._measured
            trial_trees = {name: asdict(trial) for name, trial in trials.items()}
            mine = json.dumps([links.to_json(), trial_trees, *rest]).encode()
        if not (received := world.control.broadcast_bytes(mine)):
            return None
        links, trials, *rest = json.loads(received)
        return RankMeasurements(
            MeasuredLinks.from_json(links), {name: AlgorithmTrial(**trial) for name, trial in trials.items()}, *rest
        )

    def _build_chooser(
        self, communicator: Communicator, network: Network, trials: dict[Algorithm, AlgorithmTrial], total_bytes: int
    ) -> AlgorithmChooser:
        """Builds the chooser of all-reduce algorithms from the trials of those that this world can run."""
        options, algorithm = self.options, self.options.algorithm
        # After a loss the hosts may differ in their numbers of ranks, so a run can lose the algorithm of its recipe.
        if algorithm != "auto" and algorithm not in communicator.algorithms:
            self.say(f"The algorithm {algorithm} needs the same number of ranks on each host; leader is used instead.")
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
        """Closes everything of the current generation."""
        joined, self._joined = self._joined, None
        if joined is None:
            return
        # The first step finds the order in which gradients become ready; the next generation begins with it.
        if self._measured is not None:
            self._measured = self._measured._replace(order=joined.reducer.order, wire=joined.reducer.wire)
        self._named = joined.reducer.has_reported_unused
        joined.reducer.close()
        # Aborted before it is closed: no thread must wait in a collective for ranks that are gone.
        joined.world.abort("this process has left")
        joined.communicator.close()
        if joined.watch is not None:
            joined.watch.close()
        joined.world.close()


class RankMeasurements(NamedTuple):
    """Measurements that the next generation keeps, the same on all ranks.

    Attributes:
        order: names of the parameters, in the order in which their gradients become ready; None before the first step.
        wire: wire format of the gradients.
    """

    links: MeasuredLinks
    trials: dict[Algorithm, AlgorithmTrial]
    order: Sequence[str] | None
    wire: Wire


@dataclass(frozen=True)
class _JoinedGeneration:
    """Objects of one generation."""

    world: World
    communicator: Communicator
    reducer: Reducer
    watch: StallWatch | None
    board: RankTimings
