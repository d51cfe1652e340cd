"""The menu of strategies: recipe keys that spread a job over devices, each with its rate, bytes and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

from headway.core import collectives
from headway.core.collectives import Network
from headway.core.epochs import count_longest_round
from headway.core.layer_division import Scheme, count_divided_bytes, predict_divided_s
from headway.core.row_shards import count_sent_bytes, count_working_bytes
from headway.core.text_format import format_bytes
from headway.core.workload import Workload
from headway.plan.cluster import Cluster
from headway.plan.dense_layers import (
    choose_dense_layers,
    count_gathered_bytes,
    find_dense_layers,
    format_patterns,
    replace_layers,
    shard_layers,
)
from headway.plan.device_memory import DeviceMemory, estimate_memory
from headway.plan.job import TrainingJob
from headway.plan.owners import compute_owner_loads
from headway.plan.prediction import Prediction, get_algorithms, predict
from headway.plan.step import list_gradients
from headway.plan.strips import Grid, choose_grid, choose_parts, count_split_bytes, estimate_split_s
from headway.plan.tower_layers import compute_tower_share, find_towers

# Devices that share an image.
STRIPS = (2, 4, 8, 16)
# Steps of a round, as by default; fewer where they would take more than `train` allows.
LOCAL_STEPS = 16


@final
@dataclass(frozen=True)
class Strategy:
    """One way to spread a job over devices."""

    name: str
    # Keys of a recipe that choose it.
    recipe: str
    images_s: float
    # Time to the target; `gain`: how many times as soon as with data parallelism.
    hours: float
    gain: float
    # Bytes that a device sends in a step.
    sent_bytes: float
    memory: DeviceMemory
    # Price of the strategy, in words.
    note: str


def compare_strategies(workload: Workload, job: TrainingJob, cluster: Cluster, nodes: int) -> list[Strategy]:
    """Compares the strategies for a job, the fastest first; plain data parallelism is one of them.

    If its step does not fit in memory, strategies that need less of it are included.
    """
    menu = _Menu(workload, job, cluster, nodes)
    menu.add_plain()
    menu.add_less_memory()
    if menu.plain.devices > 1:
        # Images that are in strips already have a strategy.
        if menu.plain.strips == 1:
            adders = {
                "spatial": menu.add_spatial, "hybrid": menu.add_hybrid, "towers": menu.add_towers,
                "sharded": menu.add_sharded, "sharded all": menu.add_full_shards, "local": menu.add_local,
                "async": menu.add_async,
            }  # fmt: skip
            for strategy, add in adders.items():
                if strategy not in menu.refused:
                    add()
        menu.add_narrow_messages()
        menu.add_rarer_exchange()
    return sorted(menu.strategies, key=lambda one: one.hours)


@final
class _Menu:
    """Collects the strategies for a job on a number of nodes."""

    def __init__(self, workload: Workload, job: TrainingJob, cluster: Cluster, nodes: int) -> None:
        self.workload, self.job, self.cluster, self.nodes = workload, job, cluster, nodes
        self.plain = predict(job, cluster, nodes)
        devices = self.plain.devices
        self.each, self.parts = job.split_batch(devices), job.count_micro_batches(devices)
        self.memory = self.estimate(self.each)
        step = workload.step
        self.refused = step.refused_with_micro_batches if self.parts > 1 else step.refused_strategies
        self.strategies = list[Strategy]()

    @property
    def network(self) -> Network:
        """The network between the devices."""
        return self.cluster.build_network(self.nodes, spread=self.job.spread)

    def estimate(self, samples: float, workload: Workload | None = None) -> DeviceMemory:
        """Estimates the memory of a device."""
        capacity = self.cluster.device_spec.memory_bytes
        return estimate_memory(workload or self.workload, samples, capacity, self.plain.devices)

    def count_gradient_bytes(self, job: TrainingJob) -> float:
        """Counts the bytes that a device sends to sum its gradients: 2 (N - 1)/N of them (Patarasuk and Yuan 2009)."""
        devices = self.plain.devices
        ratio = job.wire_ratio if self.nodes > 1 else 1.0
        return 2 * (devices - 1) / devices * ratio * sum(one.nbytes for one in job.gradients)

    def format_spatial(self, grid: Grid) -> tuple[str, str]:
        """Formats the name and the recipe key of images that the devices of a grid share."""
        rows, columns = grid
        across = ", across_hosts: true" if self.spans_nodes(rows * columns) else ""
        shape = f", grid: [{rows}, {columns}]" if columns > 1 else ""
        parts = f"{rows} x {columns} parts" if columns > 1 else f"{rows} strips"
        recipe = f"parallel: {{strategy: spatial, ranks: {rows * columns}{shape}{across}}}"
        return f"each image in {parts}", recipe

    def spans_nodes(self, devices: int) -> bool:
        """Returns True if so many devices that share a sample lie on several nodes, at least some of them."""
        return self.nodes > 1 and self.cluster.devices % devices > 0

    def add(
        self, name: str, recipe: str, found: Prediction, sent_bytes: float, memory: DeviceMemory, note: str = ""
    ) -> None:
        """Adds a strategy."""
        gain = self.plain.hours / found.hours
        self.strategies.append(Strategy(name, recipe, found.images_s, found.hours, gain, sent_bytes, memory, note))

    def add_plain(self) -> None:
        """Adds what the plan itself has: data parallelism, or strips where there are more devices than samples."""
        strips, sent = self.plain.strips, self.count_gradient_bytes(self.job)
        if strips == 1:
            self.add("data parallel", "parallel: {strategy: data}", self.plain, sent, self.memory)
            return
        grid = choose_parts(self.job.split, strips)
        sent += self.parts * count_split_bytes(self.job.split, self.each * strips, grid)
        self.add(*self.format_spatial(grid), self.plain, sent, self.memory)

    def add_less_memory(self) -> None:
        """Adds micro-batches if a step does not fit in memory, or strips if a single sample does not."""
        if self.memory.fits:
            return
        if self.memory.most_samples and self.each > 1:
            times = math.ceil(self.each / self.memory.most_samples)
            less = self.each / times
            finer = replace(self.job, per_device=less, batch=None, accumulate=times * self.parts)
            many = f"{less:,.0f}" if less >= 10 else f"{less:.3g}"
            found, sent = predict(finer, self.cluster, self.nodes), self.count_gradient_bytes(self.job)
            name, recipe = f"{times} micro-batches of {many} samples", f"micro_batch: {math.ceil(less)}"
            self.add(name, recipe, found, sent, self.estimate(less), "the same batch")
        elif not self.memory.most_samples and "spatial" not in self.refused:
            for strips in STRIPS:
                if self.plain.strips < strips and self.cluster.devices % strips == 0:
                    grid = choose_parts(self.job.split, strips)
                    shared = predict(replace(self.job, per_device=1 / strips, batch=None), self.cluster, self.nodes)
                    sent = self.count_gradient_bytes(self.job) + count_split_bytes(self.job.split, 1, grid)
                    memory, note = self.estimate(1 / strips), f"a batch of {shared.batch:,.0f}"
                    self.add(*self.format_spatial(grid), shared, sent, memory, note)

    def add_spatial(self) -> None:
        """Adds strips or grids of the same batch: as much work and memory as before, and exchanges in every layer."""
        split = self.job.split
        if not split.windows or not self.memory.most_samples:
            return
        for strips in STRIPS:
            # Images are shared inside of a node, whose link is much faster.
            grid = None if self.cluster.devices % strips else choose_grid(split, strips)
            if grid is None:
                continue
            images = self.each * strips
            split_s = estimate_split_s(split, self.cluster.build_network(1), images, grid, self.job.compute)
            found = predict(replace(self.job, exchange_s=split_s), self.cluster, self.nodes)
            sent = self.count_gradient_bytes(self.job) + count_split_bytes(split, images, grid)
            note = "the same batch and memory; for images that do not fit"
            self.add(*self.format_spatial(grid), found, sent, self.memory, note)

    def add_hybrid(self) -> None:
        """Adds fully connected layers in parts: activations cross the network instead of their gradients."""
        workload, devices, width = self.workload, self.plain.devices, self.workload.step.value_bytes
        batch = self.each * devices
        dense = choose_dense_layers(find_dense_layers(workload), batch, devices, width)
        if not dense:
            return
        names = {layer.name for layer in dense}
        rest = workload.model_copy(update={"layers": tuple(one for one in workload.layers if one.name not in names)})
        layers = "a fully connected layer" if len(dense) == 1 else f"{len(dense)} fully connected layers"
        needs = self.estimate(self.each, shard_layers(workload, names, devices))
        schemes: tuple[Scheme, ...] = ("all", "turns")
        for scheme in schemes:
            seconds = [predict_divided_s(one, batch, self.network, value_bytes=width, scheme=scheme) for one in dense]
            nbytes = [count_divided_bytes(one, batch, devices, value_bytes=width, scheme=scheme) for one in dense]
            job = replace(self.job, gradients=tuple(list_gradients(rest)), exchange_s=sum(seconds))
            gathered = count_gathered_bytes(dense, batch, devices, width, scheme)
            self.add(
                f"{layers} in {devices:,} parts" + ", in turns" * (scheme == "turns"),
                f"parallel: {{strategy: hybrid, layers: {format_patterns(dense)}, scheme: {scheme}}}",
                predict(job, self.cluster, self.nodes),
                self.count_gradient_bytes(job) + sum(nbytes),
                replace(needs, activations=needs.activations + round(gathered)),
                f"{format_bytes(sum(nbytes))} of activations per step and device instead of their gradients",
            )

    def add_towers(self) -> None:
        """Adds a tower on each device of a place: values of the towers cross a link, and nothing hides them."""
        towers, devices = find_towers(self.workload), self.plain.devices
        if towers is None or devices % towers.count:
            return
        count, others = towers.count, towers.count - 1
        samples = self.each * count
        # A device computes its tower for the samples of all devices of its place, and all that is not in a tower.
        share = compute_tower_share(self.workload, towers)
        sample_s = self.job.compute.sample_s * (share + count * (1 - share))
        crosses, width = self.spans_nodes(count), self.workload.step.value_bytes
        link = self.network.between if crosses else self.cluster.build_network(1).inside
        values = [samples * width * one for one in towers.list_exchanged_values()]
        images = self.each * self.workload.input.decoded_bytes
        exchange_s = sum(link.latency_s + others * one / link.bandwidth_bytes_s for one in (*values, images))
        # Gradients are summed over places. As many rings as a place has devices share the link of a node.
        kept = [one for one in self.workload.layers if one.name not in towers.elsewhere]
        places = devices // count
        own = sum(one.gradient_bytes for one in kept)
        factor = own * (places - 1) / places / ((devices - 1) / devices) / sum(one.nbytes for one in self.job.gradients)
        factor *= count if self.nodes > 1 else 1
        gradients = tuple(replace(one, nbytes=factor * one.nbytes) for one in self.job.gradients if places > 1)
        job = replace(
            self.job, gradients=gradients, exchange_s=exchange_s, compute=replace(self.job.compute, sample_s=sample_s)
        )
        self.add(
            f"a tower on each of {count} devices",
            "parallel: {strategy: towers, across_hosts: true}" if crosses else "parallel: {strategy: towers}",
            predict(job, self.cluster, self.nodes), others * (sum(values) + images) + 2 * (places - 1) / places * own,
            self.estimate(samples, replace_layers(self.workload, kept)), "for towers whose maps do not fit",
        )  # fmt: skip

    def add_sharded(self) -> None:
        """Adds optimizer state by owner (ZeRO-1, Rajbhandari et al. 2020, arXiv 1910.02054).

        Gradients go to the owner of a weight, which sends the new weight to all: as many bytes as an all-reduce, if
        shares are equal. Owners have whole tensors, so that a large one makes its owner's link the slowest.
        """
        devices, update = self.plain.devices, self.workload.step.update
        total = sum(one.nbytes for one in self.job.gradients)
        if not total:
            return
        products = [one.update_multiply_adds for one in self.workload.order_by_gradient() if one.gradient_bytes]
        loads = compute_owner_loads([one.nbytes for one in self.job.gradients], devices, products)
        # Each owner makes the products of its own tensors.
        compute = replace(self.job.compute, update_s=loads.products * self.job.compute.update_s)
        gradients = tuple(
            replace(one, nbytes=load * one.nbytes)
            for one, load in zip(self.job.gradients, loads.gradients, strict=True)
        )
        # The backward pass hides the gradients; weights travel after the step.
        # Seconds of a micro-batch.
        gather_s = collectives.predict_cost("ring", self.network).seconds(loads.weights * total) / self.parts
        job = replace(self.job, gradients=gradients, exchange_s=gather_s, compute=compute)
        found = predict(job, self.cluster, self.nodes)
        saved = round(update.state_bytes * (1 - loads.largest))
        memory = replace(self.memory, weights=self.memory.weights - saved)
        sent = total * max(1 - one + (devices - 1) * one for one in (loads.largest, loads.least))
        recipe = "parallel: {strategy: sharded, what: optimizer}"
        note = f"{format_bytes(saved)} of the optimizer's state less on each device"
        self.add("optimizer state by owner", recipe, found, sent, memory, note)

    def add_full_shards(self) -> None:
        """Adds rows of all weights, gradients and optimizer state on each device (ZeRO-3, arXiv 1910.02054).

        Weights are gathered forward and backward, and gradients go to the rows' owners: one and a half times the bytes
        of an all-reduce. Nothing is taken to hide them, as over Gloo. Each micro-batch gathers the weights again, and
        gradients stay whole until the last one.
        """
        devices, update, layers = self.plain.devices, self.workload.step.update, self.workload.layers
        gradients = sum(one.gradient_bytes for one in layers)
        weights = sum(one.weight_bytes for one in layers)
        if not gradients or devices == 1:
            return
        # All-reduces of a micro-batch.
        times = 1 + 0.5 / self.parts
        exchange_s = collectives.predict_cost("ring", self.network).seconds(times * gradients)
        found = predict(replace(self.job, gradients=(), exchange_s=exchange_s), self.cluster, self.nodes)
        # Layers of one module count as a block; those of the network itself stay whole for a step.
        blocks: dict[str, int] = {}
        for one in layers:
            parent = one.name.rpartition(".")[0]
            blocks[parent] = blocks.get(parent, 0) + one.weight_bytes
        working = count_working_bytes(blocks.pop("", 0), max(blocks.values(), default=0))
        held = (weights + gradients + update.state_bytes) / devices + gradients * (self.parts > 1)
        memory = replace(self.memory, weights=round(held + working) + update.beside_bytes)
        less = self.memory.weights - memory.weights
        note = (
            f"{format_bytes(less)} less on each device" if less > 0 else "no less memory, as its blocks are too large"
        )
        sent, recipe = (
            count_sent_bytes(gradients, devices) * self.parts * times / 1.5,
            "parallel: {strategy: sharded, what: all}",
        )
        self.add("rows of all weights", recipe, found, sent, memory, note)

    def add_local(self) -> None:
        """Adds local SGD (Stich 2018, arXiv 1805.09767): one exchange of all weights in so many steps.

        Nothing hides it. Each device keeps the weights of the round's beginning.
        """
        steps = min(LOCAL_STEPS, count_longest_round(self.job.samples, self.plain.batch))
        # One step a round is data parallel.
        if steps < 2:
            return
        nbytes = sum(one.nbytes for one in self.job.gradients)
        ratio = self.job.wire_ratio
        seconds, _ = collectives.choose_algorithm(
            nbytes, self.network, get_algorithms(self.job, self.cluster), wire_ratio=ratio
        )
        free = replace(self.job, gradients=(), exchange_s=seconds / steps / self.parts)
        memory = replace(self.memory, weights=self.memory.weights + round(nbytes))
        self.add(
            f"{steps} steps alone, then a mean",
            f"parallel: {{strategy: local, every_steps: {steps}, from_epoch: 0}}",
            predict(free, self.cluster, self.nodes), self.count_gradient_bytes(self.job) / steps, memory,
            "weights of the devices differ during a round, which costs accuracy",
        )  # fmt: skip

    def add_async(self) -> None:
        """Adds asynchronous training as a bound: nobody waits for another, and nothing but the server's link limits.

        A worker sends its gradients and gets the weights, in turn with its compute (Dean et al. 2012, "Large Scale
        Distributed Deep Networks", section 4.1). The server is a worker too, whose own exchange is in memory.
        """
        devices, network = self.plain.devices, self.network
        link = network.between if self.nodes > 1 else network.inside
        nbytes = sum(one.nbytes for one in self.job.gradients)
        alone_s = self.parts * self.job.compute.seconds(self.each)
        # Gradients come in and weights go out at once, for one worker after the other.
        others = min((devices - 1) / (alone_s + 2 * link.seconds(nbytes)), 1 / link.seconds(nbytes))
        updates_s = 1 / alone_s + others
        # The time of a step in which each device takes one batch, and none waits for the slowest.
        losses = replace(self.job.losses, jitter=0.0)
        free = replace(self.job, gradients=(), exchange_s=(devices / updates_s - alone_s) / self.parts, losses=losses)
        # The server is the busiest: it sends its weights to each other worker, once a step as it is meant here.
        # There are no buckets. In the server's host memory each worker has an inbox, an outbox and the weights that it
        # read; the server has weights, momenta and mean squares.
        memory = replace(self.memory, weights=self.memory.weights - round(nbytes))
        served = format_bytes(3 * (devices + 1) * nbytes)
        self.add(
            "asynchronous, at most", "parallel: {strategy: async, servers: 1}",
            predict(free, self.cluster, self.nodes), (devices - 1) * nbytes, memory,
            f"gradients are {devices - 1} updates old in the mean, which costs accuracy; {served} of host memory for "
            "the server",
        )  # fmt: skip

    def add_narrow_messages(self) -> None:
        """Adds messages of 16 bits between nodes."""
        # Autocast keeps gradients in fp32, so that only the messages can be narrower. Those of 16-bit weights are.
        job = self.job
        if self.nodes == 1 or job.wire_ratio != 1 or sum(one.nbytes for one in job.gradients) <= 3 * job.parameters:
            return
        narrow = replace(job, wire_ratio=0.5)
        name, note = (
            "gradients sent in 16 bits between nodes",
            "comm.wire=bf16; with precision=bf16 alone they stay fp32",
        )
        found, sent = predict(narrow, self.cluster, self.nodes), self.count_gradient_bytes(narrow)
        self.add(name, "comm: {wire: bf16}", found, sent, self.memory, note)

    def add_rarer_exchange(self) -> None:
        """Adds gradients of several steps that are exchanged at once."""
        job, plain = self.job, self.plain
        for times in (2, 4):
            if times * plain.batch > job.samples:
                break
            batch = None if job.batch is None else times * job.batch
            rarer = predict(replace(job, batch=batch, accumulate=times * self.parts), self.cluster, self.nodes)
            name = f"gradients of {times} steps exchanged at once"
            recipe = f"{{batch: {rarer.batch:.0f}, micro_batch: {math.ceil(self.each)}}}"
            self.add(name, recipe, rarer, self.count_gradient_bytes(job), self.memory, f"{times} times the batch")


def count_useful_nodes(most_batch: float, per_device: float, devices: int) -> int:
    """Counts the nodes whose global batch stays within `most_batch` when each device has its own `per_device`."""
    return max(0, math.floor(most_batch / (per_device * devices)))
