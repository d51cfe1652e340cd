"""The processes that train one run together, through all of its generations.

Under Headway's launcher a lost process ends a generation, not the run: the others meet in the next generation, ranks
that are behind take the state of the lowest rank that is ahead, and training continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar, final

import torch

from headway.checkpoint.agreement import SaveExchange, SingleRankExchange, StoreExchange
from headway.comm.algorithm_choice import run_trials
from headway.comm.comm_recipe import CommRecipe
from headway.comm.communicator import Communicator
from headway.comm.coordinator_client import CoordinatorClient
from headway.comm.links import MeasuredLinks, reduce_max
from headway.comm.reducer import BucketPlan, Reducer, StepReduction
from headway.comm.stall_watch import StallWatch
from headway.core.collectives import Network
from headway.core.errors import CollectiveTimeoutError, CommunicationError, FencedError, GenerationEndedError
from headway.core.launcher_environment import LaunchedProcess, read_launcher_environment
from headway.core.messages import mute_messages
from headway.core.world import World
from headway.launch.async_ranks import continue_without_lost
from headway.launch.generations import (
    AveragedWeights,
    JoinedGeneration,
    build_chooser,
    build_reducers,
    connect_batch_norms,
    connect_network,
    describe_strategy,
    get_links_budget_s,
    list_buffers,
    list_shared,
    measure_reliable_links,
    measure_world_links,
)
from headway.launch.handover import LOG, HandoverResult, StateCarrier, hand_over
from headway.launch.rank_measurements import RankMeasurements, broadcast_measurements
from headway.launch.settings_agreement import agree_on_settings
from headway.launch.step_seeds import seed_step
from headway.observe.rank_timings import RankTimings
from headway.parallel.full_shards import FullShards
from headway.parallel.owners import Owners
from headway.parallel.pairs import ServerPairs
from headway.parallel.parallel_recipe import SpatialRecipe
from headway.parallel.parts import DividedNetwork
from headway.parallel.place import Place
from headway.parallel.towers import Towers

R = TypeVar("R")

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
        spatial: how ranks share each image, set before the first `meet`; None: none share one.
        servers: number of ranks with a share of the weights in asynchronous training, set before the first `meet`;
            None: the ranks sum their gradients.
        divided: a network that is divided over the ranks, set before the first `meet`.
        owners: owners of the parameters, set before the first `meet`: only they get the sums of the gradients.
        averaged: weights that the ranks average after rounds of steps of their own, set before the first `meet`.
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
        self.spatial: SpatialRecipe | None = None
        self.servers: int | None = None
        self.divided: DividedNetwork | None = None
        self.owners: Owners | None = None
        self.averaged: AveragedWeights | None = None
        self._generation: JoinedGeneration | None = None
        self._measured: tuple[World, MeasuredLinks | None] | None = None
        self._names: tuple[str, ...] = ()
        self._has_joined = False
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
        return self._joined.world

    @property
    def _joined(self) -> JoinedGeneration:
        assert self._generation is not None
        return self._generation

    @property
    def communicator(self) -> Communicator:
        """Communicator of the current generation."""
        assert self._joined.communicator is not None
        return self._joined.communicator

    @property
    def reducer(self) -> Reducer:
        """Reducer of the current generation."""
        assert self._joined.reducer is not None
        return self._joined.reducer

    @property
    def pairs(self) -> ServerPairs:
        """Connections between servers and workers in the current generation of asynchronous training."""
        assert self._joined.pairs is not None
        return self._joined.pairs

    def get_name(self, rank: int) -> str:
        """Returns the name of another process of this generation."""
        return self._names[self.world.control.ranks.index(rank)]

    @property
    def has_newcomers(self) -> bool:
        """True if new processes wait to join."""
        return self._client is not None and self._client.has_newcomers

    def continue_without_lost(self) -> AbstractContextManager[Callable[[], None]]:
        """Keeps the generation of asynchronous training alive for a block; see `async_ranks`."""
        return continue_without_lost(self._client, self.world, self.pairs, self._names)

    @property
    def rank_timings(self) -> RankTimings:
        """Step timings that the ranks of the current generation share."""
        return self._joined.rank_timings

    @property
    def place(self) -> Place | None:
        """The ranks that share images with this one in the current generation; None: it has images of its own."""
        return self._joined.place

    @property
    def local_rank(self) -> int:
        """Rank on this host, which selects the device."""
        return self._launched.local_rank or 0

    @property
    def launched_place(self) -> tuple[int, int]:
        """Rank of this process and number of ranks, as the launcher started them."""
        return self._launched.rank, self._launched.size

    @property
    def launched_size(self) -> int:
        """Number of processes that the launcher started."""
        return self._launched.size

    def measure_network(self, device: torch.device, numbers: Sequence[float]) -> tuple[Network, list[float]]:
        """Meets the other ranks before a `meet`, which then begins with the same world, and measures the links.

        Args:
            numbers: numbers of this rank.

        Returns:
            the network, the same on every rank, and the maxima of the numbers over the ranks.

        Raises:
            FencedError, CommunicationError: as `meet`.
        """

        def measure(connect_s: float) -> tuple[Network, list[float]]:
            self._close_generation()
            world, _ = self._join_world(device, connect_s)
            self._measured = world, None
            links = measure_reliable_links(world, self.options)
            self._measured = world, links
            return links.build_network(world), reduce_max(world, numbers)

        return self._try_generations(measure)

    def meet(self, model: torch.nn.Module, device: torch.device, carrier: StateCarrier) -> HandoverResult:
        """Meets the other ranks, for the first time or in the next generation, and brings all to one state.

        Replaces world, communicator and reducer. May load another rank's state, or a checkpoint, into `carrier`.

        Raises:
            FencedError: the others have continued without this process.
            CommunicationError: they cannot be reached.
            HeadwayError: no rank has the state of the run, and no checkpoint can be loaded.
        """

        def join(connect_s: float) -> HandoverResult:
            self._close_generation()
            self._join_generation(model, device, connect_s)
            agree_on_settings(self.world, carrier, is_joining=self.is_joining)
            result = hand_over(self.world, self.name, carrier, was_lead=self._was_lead)
            self._was_lead, self._names = self.world.is_lead, result.names
            return result

        return self._try_generations(join)

    def _try_generations(self, join: Callable[[float], R]) -> R:
        """Calls `join` with the seconds that it may take to connect, and again if another generation has begun."""
        failures = 0
        while True:
            try:
                return join(FIRST_CONNECT_TIMEOUT_S * 2**failures)
            except CommunicationError as error:
                self._close_measured()
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

    def seed(self, seed: int, position: int) -> None:
        """Seeds the global generators for one step; see `seed_step`."""
        # Ranks that compute the same samples draw the same numbers.
        number = self.divided.place if isinstance(self.divided, Towers) else self.world.rank
        seed_step(seed, position, number, self.world.device)

    def prepare_for_backward(self, sample_share: float) -> None:
        """Prepares for the last backward pass of a step. Args: sample_share: see `Reducer.prepare_for_backward`."""
        if isinstance(self.divided, FullShards):
            self.divided.prepare_for_backward()
        self.reducer.prepare_for_backward(sample_share)

    def finish(self, loss: torch.Tensor, *, bad: int, stopping: bool, ending: bool = False) -> StepReduction:
        """Waits for the sums of a step and puts them into the gradients, as `Reducer.finish` does.

        Args:
            loss: sum of this rank's losses.
            bad: number of damaged samples.
            stopping, ending: True if this rank has received a signal to stop, or a callback on it ends the run.

        Raises:
            GenerationEndedError: a rank was lost, and the step is void.
        """
        if isinstance(self.divided, FullShards):
            self.divided.take_gradients(self.communicator)
        # The flags are summed with the gradients, so all ranks learn of newcomers in the same step, without a message.
        flags = (float(bad), float(stopping), float(self._check_newcomers()), float(ending))
        reduction = self.reducer.finish(loss, (*flags, *[0.0] * self._num_round_numbers))
        # The sum over a place of towers has no digest, so the check is here and not on a logging step.
        if isinstance(self.divided, Towers):
            self.reducer.check(reduction)
        return reduction if self.divided is None else self.divided.complete_step(reduction)

    def finish_round(
        self,
        losses: Sequence[torch.Tensor],
        share: float,
        change_sq: torch.Tensor,
        *,
        bad: int,
        stopping: bool,
        ending: bool,
    ) -> StepReduction:
        """Sums the gradients of `averaged` after a round of steps that each rank made alone.

        Args:
            losses: sums of this rank's losses, one for each step.
            share: this rank's share of the round's samples.
            change_sq: squared length of this rank's change of the weights, times its share.
            bad, stopping, ending: as for `finish`, of the whole round.

        Returns:
            the sums; behind its flags come those of the shares, of the squared lengths, and of the losses.

        Raises:
            GenerationEndedError: a rank was lost. The weights are as before.
        """
        reducer = self._joined.round_reducer
        assert reducer is not None
        flags = (float(bad), float(stopping), float(self._check_newcomers()), float(ending))
        padding = [0.0] * (self._num_round_numbers - 2 - len(losses))
        reduction = reducer.finish(0.0, (*flags, share, change_sq, *losses, *padding))
        # The host reads the sums at once, so this waits for nothing more.
        reducer.check(reduction)
        return reduction

    def _check_newcomers(self) -> bool:
        """Returns True if processes wait to join. Raises GenerationEndedError if a rank was lost."""
        if self._client is None:
            return False
        self._client.check()
        return self._client.has_newcomers

    @property
    def _num_round_numbers(self) -> int:
        """Numbers that travel with the weights of a round: share and length of a rank's change, and its losses."""
        return 0 if self.averaged is None else 2 + self.averaged.max_steps

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
        self._close_measured()
        self._close_generation()
        if self._client is not None:
            if kind is None:
                self._client.leave(done=self.is_complete)
            self._client.close()

    def _join_generation(self, model: torch.nn.Module, device: torch.device, connect_s: float) -> None:
        """Builds world, communicator and reducer of the next generation; or world and pairs, with servers.

        The first generation measures the links and tries the all-reduce algorithms. Later ones take the results, and
        the bucket order, from rank 0.
        """
        options, is_first = self.options, not self._has_joined
        links = None
        if self._measured is None:
            world, reason = self._join_world(device, connect_s)
        else:
            (world, links), self._measured, reason = self._measured, None, ""
        self.is_lead = world.is_lead
        self._has_joined = True
        if not is_first:
            LOG.warning(reason)
        if self.servers is not None:
            rank_timings = RankTimings(world.store, world.rank, world.size)
            pairs = ServerPairs.connect(world, min(self.servers, world.size))
            self._generation = JoinedGeneration(world, rank_timings, pairs=pairs)
            return
        measured = broadcast_measurements(world, self._measurements)
        must_measure = measured is None
        links = measured.links if measured else links or measure_world_links(world, options)
        communicator = Communicator(world, rails=links.rails, rates_bytes_s=links.rates_bytes_s)
        network = links.build_network(world)
        budget_s = get_links_budget_s(world)
        trials = (
            measured.trials if measured else run_trials(communicator, network, wire=options.wire, budget_s=budget_s)
        )
        self._measurements = measured = measured or RankMeasurements(links, trials, None, options.wire)
        part = connect_network(model, self.divided, world)
        summing = communicator
        if part is not world:
            summing = Communicator(part, rails=links.rails, rates_bytes_s=links.rates_bytes_s)
        shared = list_shared(model, self.divided)
        holder = self.divided if isinstance(self.divided, FullShards) else self.owners
        chooser = build_chooser(options, summing, network, trials, shared, owned=holder is not None)
        if self.owners is not None:
            self.owners.connect(communicator, chooser.bucket_bytes)
        watch = StallWatch(communicator) if world.size > 1 else None
        if watch is not None:
            world.explain = watch.explain
        reducer, round_reducer = build_reducers(
            shared,
            self.averaged,
            communicator=summing,
            plan=BucketPlan(chooser, chooser.bucket_bytes, measured.wire, measured.order),
            buffers=list_buffers(model, self.divided),
            num_flags=len(STEP_FLAGS) + self._num_round_numbers,
            measures_noise=self.measures_noise and world.size > 1,
            has_reported_unused=self._has_reported_unused,
            build_bucket=None if self.owners is None else self.owners.build_bucket,
        )
        rank_timings = RankTimings(world.store, world.rank, world.size)
        place = None
        if (spatial := self.spatial) is not None:
            place = Place.join(world, spatial.shape, across_hosts=spatial.across_hosts)
        self._generation = JoinedGeneration(
            world, rank_timings, communicator, summing, reducer, round_reducer, watch, place
        )
        if must_measure:
            sums = () if holder is not None else (chooser.describe([bucket.nbytes for bucket in reducer.buckets]),)
            for text in (*links.describe(world), *describe_strategy(self.owners, self.divided, self.spatial), *sums):
                LOG.info(text)
        if options.batch_norm == "sync":
            connect_batch_norms(model, world)

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

    def _close_measured(self) -> None:
        """Closes the world that `measure_network` has joined, if `meet` has not taken it over."""
        measured, self._measured = self._measured, None
        if measured is not None:
            measured[0].abort("this process has left")
            measured[0].close()

    def _close_generation(self) -> None:
        """Closes everything of the current generation, and keeps what the next one begins with."""
        generation, self._generation = self._generation, None
        if generation is None:
            return
        reducer = generation.reducer
        if reducer is not None:
            # The first step finds the order in which gradients become ready; the next generation begins with it.
            if self._measurements is not None:
                self._measurements = self._measurements._replace(order=reducer.order, wire=reducer.wire)
            self._has_reported_unused = reducer.has_reported_unused
        generation.close()
