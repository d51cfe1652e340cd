"""The parts that the ranks of a run build in each of its generations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch

from headway.comm.algorithm_choice import AlgorithmChooser, AlgorithmTrial, list_candidates
from headway.comm.batch_norm import SyncBatchNorm
from headway.comm.buckets import Bucket, NamedParameter
from headway.comm.comm_recipe import Algorithm, CommRecipe
from headway.comm.communicator import Communicator
from headway.comm.links import LINKS_BUDGET_S, MeasuredLinks, measure_links
from headway.comm.reducer import Reducer
from headway.comm.stall_watch import StallWatch
from headway.core.collectives import Network
from headway.core.world import World
from headway.launch.handover import LOG
from headway.model.batch_norm import list_running_statistics
from headway.observe.rank_timings import RankTimings
from headway.parallel.experts import SharedExperts, connect_mixtures
from headway.parallel.owners import Owners
from headway.parallel.pairs import ServerPairs
from headway.parallel.parallel_recipe import SpatialRecipe
from headway.parallel.parts import DividedNetwork
from headway.parallel.place import Place
from headway.parallel.towers import Towers

# On one host there is little to choose, so measuring links may take less time.
SINGLE_HOST_BUDGET_S = 0.2

# For a choice that lasts for the whole run. A machine that stays busy is measured no better later.
TRUSTED_SCATTER = 0.2
MAX_LINK_MEASUREMENTS = 3


class AveragedWeights(NamedTuple):
    """Weights that the ranks average after rounds of steps that each makes alone.

    Attributes:
        parameters: the trained parameters by name: the network's, or with 16-bit weights their fp32 masters.
        has_masters: they are not all the network's own.
        max_steps: steps of the longest round.
    """

    parameters: Sequence[tuple[str, torch.nn.Parameter]]
    has_masters: bool
    max_steps: int


@final
@dataclass(frozen=True)
class JoinedGeneration:
    """Objects of one generation.

    One rank has no `watch`; servers have `pairs` alone; `summing` sums gradients; `round_reducer` may be the reducer.
    """

    world: World
    rank_timings: RankTimings
    communicator: Communicator | None = None
    summing: Communicator | None = None
    reducer: Reducer | None = None
    round_reducer: Reducer | None = None
    watch: StallWatch | None = None
    place: Place | None = None
    pairs: ServerPairs | None = None

    def close(self) -> None:
        """Closes everything."""
        for reducer in dict.fromkeys((self.reducer, self.round_reducer)):
            if reducer is not None:
                reducer.close()
        # Aborted before it is closed: no thread must wait in a collective for ranks that are gone.
        self.world.abort("this process has left")
        for part in (self.communicator, self.summing, self.watch):
            if part is not None:
                part.close()
        self.world.close()


def get_links_budget_s(world: World) -> float:
    """Returns the seconds for measuring the links of a world."""
    return LINKS_BUDGET_S if len(world.hosts) > 1 else SINGLE_HOST_BUDGET_S


def measure_world_links(world: World, options: CommRecipe) -> MeasuredLinks:
    """Measures the links of a world, as the recipe asks for it. Every rank calls it."""
    return measure_links(world, rails=options.rails, budget_s=get_links_budget_s(world))


def measure_reliable_links(world: World, options: CommRecipe) -> MeasuredLinks:
    """Measures the links of a world, and again while the times scatter. Returns what scatters least."""
    # All ranks have the numbers of rank 0, so that all measure again.
    found = [measure_world_links(world, options)]
    while found[-1].scatter > TRUSTED_SCATTER and len(found) < MAX_LINK_MEASUREMENTS:
        found.append(measure_world_links(world, options))
    return min(found, key=lambda links: links.scatter)


def build_chooser(
    options: CommRecipe,
    communicator: Communicator,
    network: Network,
    trials: Mapping[Algorithm, AlgorithmTrial],
    shared: Sequence[NamedParameter],
    *,
    owned: bool = False,
) -> AlgorithmChooser:
    """Builds the chooser of all-reduce algorithms from the trials of those that this world can run.

    Args:
        owned: gradients go to owners, so that only running statistics and flags are all-reduced.
    """
    trained = [parameter for _, parameter in shared if parameter.requires_grad]
    gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    # These take little time by any algorithm: always by the same one, a resumed run has the same bits.
    algorithm = "tree" if owned else options.algorithm
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


def connect_network(model: torch.nn.Module, divided: DividedNetwork | None, world: World) -> World:
    """Connects what ranks share of a network. Every rank calls it. Returns the ranks that sum gradients."""
    # Towers sum their gradients over the places alone.
    part = world if divided is None else divided.connect(world)
    if not isinstance(divided, SharedExperts):
        # Ranks that share no experts still sum the load of each over all samples.
        connect_mixtures(model, part)
    return part


def describe_strategy(
    owners: Owners | None, divided: DividedNetwork | None, spatial: SpatialRecipe | None
) -> list[str]:
    """Describes what the processes of a run share besides the batch, a sentence each."""
    sentences = [holder.describe() for holder in (owners, divided) if holder is not None]
    if spatial is not None:
        until = f", until {spatial.until}" if spatial.until else ""
        sentences.append(f"{spatial.ranks} processes share each image{until}.")
    return sentences


def list_shared(model: torch.nn.Module, divided: DividedNetwork | None) -> list[NamedParameter]:
    """Lists the parameters whose gradients are summed, by name."""
    others = frozenset[str]() if divided is None else divided.unsummed
    return [(name, parameter) for name, parameter in model.named_parameters() if name not in others]


def list_buffers(model: torch.nn.Module, divided: DividedNetwork | None) -> list[torch.Tensor]:
    """Lists the running statistics of batch norm: they have no gradients, so the reducer averages them as buffers."""
    statistics = list_running_statistics(model)
    return divided.select_own(statistics) if isinstance(divided, Towers) else statistics


def build_reducers(
    shared: Sequence[NamedParameter],
    averaged: AveragedWeights | None,
    *,
    measures_noise: bool,
    has_reported_unused: bool,
    build_bucket: Callable[[Sequence[NamedParameter]], Bucket] | None,
    **common: Any,
) -> tuple[Reducer, Reducer]:
    """Builds the reducer of a step, and that of a round of steps that each rank makes alone, which may be the same.

    Args:
        common: what both are given.
    """
    reducer = Reducer(
        shared,
        measures_noise=measures_noise,
        has_reported_unused=has_reported_unused,
        build_bucket=build_bucket,
        **common,
    )
    # 16-bit weights are averaged by their fp32 masters. All others need no buckets of their own.
    if averaged is None or not averaged.has_masters:
        return reducer, reducer
    return reducer, Reducer(averaged.parameters, has_reported_unused=True, **common)


def connect_batch_norms(model: torch.nn.Module, world: World) -> None:
    """Connects synchronised batch norm, which communicates inside forward and backward, by a group of its own.

    So its messages are kept apart from those of the reducer.
    """
    group = world.create_group(name="batch norm")
    for module in model.modules():
        if isinstance(module, SyncBatchNorm):
            module.group = group
