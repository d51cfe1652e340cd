"""The processes that train one run together, through all of its generations.

Under Headway's launcher a lost process ends a generation, not the run: the others meet in the next generation, ranks
that are behind take the state of the lowest rank that is ahead, and training continues.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, final

import numpy as np
import torch

from headway.checkpoint.agreement import SaveExchange, SingleRankExchange, StoreExchange
from headway.comm.algorithm_choice import AlgorithmChooser, AlgorithmTrial, list_candidates, run_trials
from headway.comm.batch_norm import SyncBatchNorm
from headway.comm.comm_recipe import Algorithm, CommRecipe, Wire
from headway.comm.communicator import Communicator
from headway.comm.coordinator_client import CoordinatorClient
from headway.comm.links import LINKS_BUDGET_S, MeasuredLinks, measure_links
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
from headway.core.messages import mute_messages
from headway.core.random_keys import GOLDEN, mix_int
from headway.core.world import World
from headway.launch.handover import LOG, HandoverResult, StateCarrier, hand_over
from headway.launch.hosts import check_batch_covers_ranks
from headway.model.batch_norm import list_running_statistics
from headway.observe.rank_timings import RankTimings
from headway.parallel.place import Place
from headway.parallel.rows import Range, divide

# Numbers that are summed with each step's gradients, besides the loss: damaged samples, a signal to stop, newcomers, a
# callback that ends the run.
STEP_FLAGS = ("bad", "stopping", "regroup", "ending")

# Time limit for building a group. All ranks have said that they are ready, so more time means that one was lost or is
# slow: doubled for each failed attempt with all ranks alive.
FIRST_CONNECT_TIMEOUT_S = 3.0

# In large worlds every rank connects to every other.
CONNECT_TIMEOUT_PER_RANK_S = 0.05

# Attempts at a generation that fails to connect although all its ranks are alive.
MAX_CONNECT_ATTEMPTS = 5

# On one host there is little to choose, so measuring links may take less time.
SINGLE_HOST_BUDGET_S = 0.2


@final
class Ranks:
    """This process among the ranks of a run. Use it as a context manager.

    Attributes:
        options: `comm` of the recipe; a change counts from the next generation on.
        name: name of this process in file names; it stays when ranks change.
        is_lead: True on rank 0, which writes the run folder and speaks to the user for all ranks.
        lost_workers: names of the processes that were lost since the caller last cleared it.
        is_joining: True if this process was started to join ranks that already train.
        is_complete: set it to False if this process leaves before the end of the run.
        measures_noise: set it to True before the first `meet` to measure the gradient noise scale.
        grid: rows and columns of the ranks that share each image, set before the first `meet`; None: none share one.
    """

    def __init__(self, recipe: CommRecipe, launched: LaunchedProcess, client: CoordinatorClient | None) -> None:
        self.options, self._launched, self._client = recipe, launched, client
        # All ranks have the same messages, and one shows them.
        self._mute = mute_messages(unless=lambda: self.is_lead)
        self.name = str(launched.rank) if client is None else client.worker
        self.is_joining = client is not None and client.joining
        # A newcomer may carry rank 0 in its environment, from the worker that it replaces, but another rank leads now.
        self.is_lead = launched.rank == 0 and not self.is_joining
        self.lost_workers: tuple[str, ...] = ()
        self.is_complete = True
        self.measures_noise = False
        self.grid: tuple[int, int] | None = None
        self._generation: _JoinedGeneration | None = None
        self._measurements: RankMeasurements | None = None
        self._was_lead = False
        self._has_reported_unused = False

    @staticmethod
    def from_environment(recipe: CommRecipe) -> Ranks | None:
        """Reads the launcher's environment variables; returns None if this process trains alone.

        Raises:
            UsageError: the variables contradict each other.
            CommunicationError: the launcher cannot be reached.
        """
        launched = read_launcher_environment()
        client = CoordinatorClient.from_environment()
        if launched is None or (launched.size == 1 and client is None):
            return None
        return Ranks(recipe, launched, client)

    @property
    def world(self) -> World:
        """World of the current generation."""
        assert self._generation is not None
        return self._generation.world

    @property
    def communicator(self) -> Communicator:
        """Communicator of the current generation."""
        assert self._generation is not None
        return self._generation.communicator

    @property
    def reducer(self) -> Reducer:
        """Reducer of the current generation."""
        assert self._generation is not None
        return self._generation.reducer

    @property
    def rank_timings(self) -> RankTimings:
        """Step timings that the ranks of the current generation share."""
        assert self._generation is not None
        return self._generation.rank_timings

    @property
    def place(self) -> Place | None:
        """The ranks that share images with this one in the current generation; None: it has images of its own."""
        assert self._generation is not None
        return self._generation.place

    def divide_place(self, batch: int) -> list[Range]:
        """Divides the samples of this rank's place in a step over its ranks, as the step divides `batch` samples."""
        assert self.place is not None
        sizes = [share.length for share in (divide(batch, self.world.size)[rank] for rank in self.place.ranks.ranks)]
        ends = [0, *accumulate(sizes)]
        return [Range(start, stop) for start, stop in pairwise(ends)]

    @property
    def local_rank(self) -> int:
        """Rank on this host, which selects the device."""
        return self._launched.local_rank or 0

    @property
    def launched_size(self) -> int:
        """Number of processes that the launcher started."""
        return self._launched.size

    def check_batch(self, batch: int, sharing: int = 1) -> None:
        """Raises UsageError if a step has fewer samples than ranks, or than groups of ranks that share a sample."""
        check_batch_covers_ranks(batch, self._launched.size, sharing)

    def meet(self, model: torch.nn.Module, device: torch.device, carrier: StateCarrier) -> HandoverResult:
        """Meets the other ranks, for the first time or in the next generation, and brings all to one state.

        Replaces world, communicator and reducer. May load another rank's state, or a checkpoint, into `carrier`.

        Raises:
            FencedError: the others have continued without this process.
            CommunicationError: they cannot be reached.
            HeadwayError: no rank has the state of the run, and no checkpoint can be loaded.
        """
        failures = 0
        while True:
            try:
                self._close_generation()
                self._join_generation(model, device, FIRST_CONNECT_TIMEOUT_S * 2**failures)
                self._agree_on_settings(carrier)
                result = hand_over(self.world, self.name, carrier, was_lead=self._was_lead)
                self._was_lead = self.world.is_lead
                return result
            except CommunicationError as error:
                # Without Headway's launcher nobody forms another generation.
                if self._client is None:
                    raise
                try:
                    self._client.check()
                except GenerationEndedError:
                    # Another rank was lost in the meantime: the next generation is already forming.
                    continue
                failures += 1
                if failures == MAX_CONNECT_ATTEMPTS:
                    raise error

    def check(self) -> None:
        """Raises GenerationEndedError, FencedError or CommunicationError if the generation is over."""
        if self._client is not None:
            self._client.check()

    def explain_error(self, error: CommunicationError) -> CommunicationError:
        """Returns the reason why a collective failed: the launcher's if it knows one, else `error` itself.

        It is a GenerationEndedError if this process continues in the next generation. Waits for the launcher, and
        reports ranks that are alive and did not come to the collective.
        """
        client, generation = self._client, self._generation
        if client is None or isinstance(error, FencedError):
            return error
        if isinstance(error, CollectiveTimeoutError) and generation is not None and generation.watch is not None:
            for rank in generation.watch.find_lagging_ranks():
                client.accuse(self.world.generation, rank)
        # A connection breaks a moment before the launcher tells the reason. It notices silence only after `timeout_s`;
        # the rest is margin.
        client.wait_for_change(1.5 * self.options.timeout_s + 1)
        try:
            client.check()
        except CommunicationError as reason:
            return reason
        return error

    def _agree_on_settings(self, carrier: StateCarrier) -> None:
        """Compares the settings that must be equal on all ranks, and makes choices together, such as the precision.

        Raises:
            UsageError: settings differ. A newcomer that differs raises it alone and leaves; the others continue.
            CommunicationError: a newcomer leaves.
        """
        control = self.world.control
        report = [self.is_joining, carrier.get_shared_settings(), carrier.precision.get_vote()]
        reports = [json.loads(text) for text in control.gather_bytes(json.dumps(report, sort_keys=True).encode())]
        lead_settings = reports[control.ranks.index(0)][1]
        for rank, (is_joining, settings, _) in zip(control.ranks, reports, strict=True):
            keys = lead_settings.keys() | settings.keys()
            differing = [key for key in keys if settings.get(key) != lead_settings.get(key)]
            if not differing:
                continue
            # A newcomer with other settings must not end the run: it leaves, and the others meet again without it.
            if is_joining and rank != self.world.rank:
                raise CommunicationError(f"rank {rank} has other settings than this run and leaves")
            key = min(differing)
            what = f"{key} is {settings.get(key)!r} on rank {rank} and {lead_settings.get(key)!r} on rank 0"
            raise UsageError(what, fix="Start all processes with the same recipe, data and version.")
        if message := carrier.precision.agree_on_votes([vote for _, _, vote in reports]):
            LOG.info(message)

    def seed(self, seed: int, position: int) -> None:
        """Seeds the global generators of torch, numpy and Python for one step, from seed, position and rank."""
        # A step that is repeated, resumed or made by other ranks then needs no saved state of the generators.
        mixed_seed = mix_int(mix_int(mix_int(seed) + position) + (self.world.rank + 1) * GOLDEN)
        # Not torch.manual_seed: without CUDA, torch 2.13 appends a traceback to a list at each call, and leaks.
        device, generator = self.world.device, torch.default_generator
        if device.type == "cuda":
            generator = torch.cuda.default_generators[device.index or 0]
        generator.manual_seed(mixed_seed & ((1 << 63) - 1))
        np.random.seed(mixed_seed & 0xFFFFFFFF)
        random.seed(mixed_seed)

    def prepare_for_backward(self, sample_share: float) -> None:
        """Prepares the reducer for the last backward pass of a step.

        Args:
            sample_share: this rank's share of the step's samples, from 0 to 1.
        """
        self.reducer.prepare_for_backward(sample_share)

    def finish(self, loss: torch.Tensor, *, bad: int, stopping: bool, ending: bool = False) -> StepReduction:
        """Waits for the sums of a step and puts them into the gradients, as `Reducer.finish` does.

        Args:
            loss: sum of this rank's losses.
            bad: number of damaged samples.
            stopping: True if this rank has received a signal to stop.
            ending: True if a callback on this rank ends the run.

        Raises:
            GenerationEndedError: a rank was lost, and the step is void.
        """
        # The flags are summed with the gradients, so all ranks learn of newcomers in the same step, without a message.
        regroup = False
        if self._client is not None:
            self._client.check()
            regroup = self._client.has_newcomers
        return self.reducer.finish(loss, (float(bad), float(stopping), float(regroup), float(ending)))

    def build_save_exchange(self) -> SaveExchange:
        """Builds the exchange by which the ranks of this generation agree on a checkpoint."""
        world = self.world
        if world.store is None:
            return SingleRankExchange()
        return StoreExchange(world.store, world.rank, world.size, check_alive=self.check)

    def build_confirmer(self) -> Callable[[], None]:
        """Builds a function to call, from any thread, right before a result of this generation becomes final.

        It raises GenerationEndedError or FencedError if the other ranks have continued without this process.
        """
        client, number = self._client, self.world.generation
        return (lambda: None) if client is None else (lambda: client.confirm(number))

    def __enter__(self) -> Ranks:
        self._mute.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Leaves in order; after an error, in such a way that the others count this process as lost."""
        self._mute.__exit__(None, None, None)
        self._close_generation()
        if self._client is not None:
            if kind is None:
                self._client.leave(done=self.is_complete)
            self._client.close()

    def _join_generation(self, model: torch.nn.Module, device: torch.device, connect_s: float) -> None:
        """Builds world, communicator and reducer of the next generation.

        The first generation measures the links and tries the all-reduce algorithms. Later ones take the results, and
        the bucket order, from rank 0.
        """
        options, is_first = self.options, self._measurements is None
        world, reason = self._join_world(device, connect_s)
        self.is_lead = world.is_lead
        if not is_first:
            LOG.warning(reason)
        measured = self._broadcast_measurements(world)
        must_measure = measured is None
        budget_s = LINKS_BUDGET_S if len(world.hosts) > 1 else SINGLE_HOST_BUDGET_S
        links = measured.links if measured else measure_links(world, rails=options.rails, budget_s=budget_s)
        communicator = Communicator(world, rails=links.rails)
        network = links.build_network(world)
        trials = (
            measured.trials if measured else run_trials(communicator, network, wire=options.wire, budget_s=budget_s)
        )
        self._measurements = measured = measured or RankMeasurements(links, trials, None, options.wire)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        chooser = self._build_chooser(communicator, network, trials, gradient_bytes)
        watch = StallWatch(communicator) if world.size > 1 else None
        if watch is not None:
            world.explain = watch.explain
        # Running statistics of batch norm have no gradients, so the reducer averages them as buffers.
        reducer = Reducer(
            model.named_parameters(),
            communicator,
            plan=BucketPlan(chooser, chooser.bucket_bytes, measured.wire, measured.order),
            buffers=list_running_statistics(model),
            num_flags=len(STEP_FLAGS),
            measures_noise=self.measures_noise and world.size > 1,
            has_reported_unused=self._has_reported_unused,
        )
        rank_timings = RankTimings(world.store, world.rank, world.size)
        place = None if self.grid is None else _join_place(world, self.grid)
        self._generation = _JoinedGeneration(world, communicator, reducer, watch, rank_timings, place)
        if must_measure:
            for text in (*links.describe(world), chooser.describe([bucket.nbytes for bucket in reducer.buckets])):
                LOG.info(text)
        # Synchronised batch norm communicates inside forward and backward: a group of its own keeps its messages apart
        # from those of the reducer.
        if options.batch_norm == "sync":
            group = world.create_group(name="batch norm")
            for module in model.modules():
                if isinstance(module, SyncBatchNorm):
                    module.group = group

    def _join_world(self, device: torch.device, connect_s: float) -> tuple[World, str]:
        """Joins the world of the next generation. Returns it, and the reason of the change for the user."""
        options, client = self.options, self._client
        if client is None:
            return World.join(self._launched, device, timeout_s=options.stall_s, interface=options.interface), ""
        generation = client.wait_for_generation()
        # Collected over generations: several may fail before one connects.
        self.lost_workers = (*self.lost_workers, *generation.lost_workers)
        world = client.build_world(
            generation,
            device,
            abort_reason="the generation is over",
            timeout_s=options.stall_s,
            interface=options.interface,
            connect_s=max(connect_s, CONNECT_TIMEOUT_PER_RANK_S * generation.size),
        )
        return world, generation.reason

    def _broadcast_measurements(self, world: World) -> RankMeasurements | None:
        """Returns rank 0's measurements from an earlier generation on every rank; None if it has none."""
        # Newcomers have no measurements, and measuring again would hold up the run: they take those of rank 0.
        data = b""
        if world.is_lead and self._measurements is not None:
            links, trials, *rest = self._measurements
            trial_trees = {name: asdict(trial) for name, trial in trials.items()}
            data = json.dumps([links.to_json(), trial_trees, *rest]).encode()
        if not (received := world.control.broadcast_bytes(data)):
            return None
        links, trials, *rest = json.loads(received)
        return RankMeasurements(
            MeasuredLinks.from_json(links), {name: AlgorithmTrial(**trial) for name, trial in trials.items()}, *rest
        )

    def _build_chooser(
        self, communicator: Communicator, network: Network, trials: dict[Algorithm, AlgorithmTrial], gradient_bytes: int
    ) -> AlgorithmChooser:
        """Builds the chooser of all-reduce algorithms from the trials of those that this world can run."""
        options, algorithm = self.options, self.options.algorithm
        # After a loss the hosts may differ in their numbers of ranks, so a run can lose the algorithm of its recipe.
        if algorithm != "auto" and algorithm not in communicator.algorithms:
            needs = f"The algorithm {algorithm} needs the same number of ranks on each host"
            LOG.warning(f"{needs}; leader is used instead.")
            algorithm = "leader"
        return AlgorithmChooser(
            network,
            {name: trial for name, trial in trials.items() if name in list_candidates(communicator)},
            gradient_bytes,
            algorithm=algorithm,
            wire=options.wire,
            bucket_bytes=None if options.bucket_mb == "auto" else int(options.bucket_mb * 1e6),
            phased=communicator.world.device.type == "cpu",
        )

    def _close_generation(self) -> None:
        """Closes everything of the current generation, and keeps what the next one begins with."""
        generation, self._generation = self._generation, None
        if generation is None:
            return
        reducer = generation.reducer
        # The first step finds the order in which gradients become ready; the next generation begins with it.
        if self._measurements is not None:
            self._measurements = self._measurements._replace(order=reducer.order, wire=reducer.wire)
        self._has_reported_unused = reducer.has_reported_unused
        reducer.close()
        # Aborted before it is closed: no thread must wait in a collective for ranks that are gone.
        generation.world.abort("this process has left")
        generation.communicator.close()
        if generation.watch is not None:
            generation.watch.close()
        generation.world.close()


class RankMeasurements(NamedTuple):
    """Measurements that the next generation keeps, the same on all ranks.

    Attributes:
        links: latency and bandwidth inside and between hosts.
        trials: measured cost of each all-reduce algorithm that differs on this world.
        order: names of the parameters, in the order in which their gradients become ready; None before the first step.
        wire: wire format of the gradients.
    """

    links: MeasuredLinks
    trials: dict[Algorithm, AlgorithmTrial]
    order: Sequence[str] | None
    wire: Wire


@dataclass(frozen=True)
class _JoinedGeneration:
    """Objects of one generation. A world of one rank has no `watch`."""

    world: World
    communicator: Communicator
    reducer: Reducer
    watch: StallWatch | None
    rank_timings: RankTimings
    place: Place | None


def _join_place(world: World, grid: tuple[int, int]) -> Place:
    """Joins the ranks that share images: neighbours in the ring, so that they lie on one host where they fit."""
    ranks = grid[0] * grid[1]
    first = world.ring_order.index(world.rank) // ranks * ranks
    return Place.create(world, grid, world.ring_order[first : first + ranks])
