"""Strips are exact: every rule against the whole map, forward and backward, on real ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.comm._ranks import Rank, run_ranks
from tests.parallel._memory import expect_two_to_fit, limit_more_memory, read_status
from tests.parallel.test_until import Tail
from torch import Tensor, nn
from torch.nn import functional as F

from headway import model
from headway.comm.batch_norm import SyncBatchNorm
from headway.core.errors import UsageError
from headway.core.group import Group
from headway.core.rows import Range, Window, divide
from headway.core.world import World
from headway.parallel.maps import Part, SplitMap, cut, to_parts, to_samples
from headway.parallel.place import Place
from headway.parallel.strips import Strip, make_strip, run_in_strips
from headway.plan.workloads import find_workload

FORWARD, BACKWARD = 1e-13, 1e-11

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def compare(place: Place, layer: Layer, x: Tensor, weight: Tensor, bias: Tensor) -> dict[str, float]:
    """Largest differences of outputs and gradients between strips and the whole, on this rank."""
    whole = [one.clone().requires_grad_() for one in (x, weight, bias)]
    out = layer(*whole)
    noise = torch.Generator().manual_seed(7)
    chosen = torch.randn(out.shape, generator=noise, dtype=out.dtype)
    (out * chosen).sum().backward()

    leaf = cut(x, place).own.clone().requires_grad_()
    parameters = [one.clone().requires_grad_() for one in (weight, bias)]
    strip = layer(make_strip(SplitMap(leaf, cut(x, place).part)), *parameters)
    if isinstance(strip, Strip):
        assert tuple(strip.shape) == tuple(out.shape)
        expected, factor = cut(out.detach(), place).own, cut(chosen, place).own
    else:
        mine = slice(*place.divide_samples(len(out))[place.ranks.rank])
        expected, factor = out.detach()[mine], chosen[mine]
    own = strip.as_subclass(Tensor)
    (own * factor).sum().backward()
    found = {"forward": largest(own.detach() - expected)}
    assert whole[0].grad is not None
    assert leaf.grad is not None
    found["input"] = largest(leaf.grad - cut(whole[0].grad, place).own)
    for name, parameter, reference in zip(("weight", "bias"), parameters, whole[1:], strict=True):
        total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        place.ranks.all_reduce(total.view(-1)).wait()
        found[name] = largest(total - (0 if reference.grad is None else reference.grad))
    return found


def largest(difference: Tensor) -> float:
    return float(difference.abs().max()) if difference.numel() else 0.0


def check(place: Place, what: str, layer: Layer, x: Tensor, *parameters: Tensor) -> list[str]:
    weight, bias = (*parameters, torch.zeros(1, dtype=x.dtype), torch.zeros(1, dtype=x.dtype))[:2]
    found = compare(place, layer, x, weight, bias)
    return [
        f"{what}: {name} is {value:.2g} off"
        for name, value in found.items()
        if not value <= (FORWARD if name == "forward" else BACKWARD)
    ]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run_windows(
    rank: Rank, grid: tuple[int, int], heights: tuple[int, ...], kernels: tuple[int, ...]
) -> tuple[list[str], int]:
    """Convolutions, transposed ones and pools of every kind. Returns what is wrong, and the number of cases."""
    place, wrong, tried = Place.create(rank.world, grid), list[str](), 0
    for height in heights:
        width = height + 3
        x = draw(2, 3, height, width, seed=height)
        for kernel in kernels:
            for stride in (1, 2, 3):
                for dilation in (1, 2):
                    for padding in sorted({0, 1, kernel // 2, dilation * (kernel - 1) // 2}):
                        if height + 2 * padding <= dilation * (kernel - 1):
                            continue
                        name = (
                            f"{height} rows, kernel {kernel}, stride {stride}, dilation {dilation}, padding {padding}"
                        )
                        weight, bias = draw(4, 3, kernel, kernel, seed=1), draw(4, seed=2)
                        settings: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
                        wrong += check(
                            place, f"conv {name}", lambda x, w, b, s=settings: F.conv2d(x, w, b, **s), x, weight, bias
                        )
                        flipped = draw(3, 4, kernel, kernel, seed=1)
                        extra = settings | {"output_padding": min(stride, dilation * 2, 2) - 1}
                        if (height - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1 >= 1:
                            wrong += check(
                                place, f"transposed {name}",
                                lambda x, w, b, s=extra: F.conv_transpose2d(x, w, b, **s), x, flipped, bias,
                            )  # fmt: skip
                            tried += 1
                        tried += 1
                        if padding > kernel // 2:
                            continue
                        for ceil in (False, True):
                            pool = {"stride": stride, "padding": padding, "ceil_mode": ceil}
                            wrong += check(
                                place, f"max pool {name}, ceil {ceil}",
                                lambda x, w, b, s=pool, k=kernel, d=dilation: F.max_pool2d(x, k, dilation=d, **s), x,
                            )  # fmt: skip
                            tried += 1
                            if dilation == 1:
                                for counts in (False, True):
                                    wrong += check(
                                        place, f"average pool {name}, ceil {ceil}, counts {counts}",
                                        lambda x, w, b, s=pool, k=kernel, c=counts: F.avg_pool2d(
                                            x, k, count_include_pad=c, **s
                                        ),
                                        x,
                                    )  # fmt: skip
                                    tried += 1
    return wrong, tried


HEIGHTS = {(2, 1): (7,), (1, 2): (12,), (3, 1): (7, 12), (2, 2): (12,)}
GRIDS = list(HEIGHTS)
KERNELS = (1, 2, 3, 4, 5, 7)


@pytest.mark.parametrize(
    ("grid", "kernels"),
    # An odd window and an even one take every way through the rules.
    [((2, 1), (3, 4)), *(pytest.param(grid, KERNELS, marks=pytest.mark.check) for grid in GRIDS)],
)
def test_windows_are_exact(grid: tuple[int, int], kernels: tuple[int, ...]) -> None:
    found = run_ranks(grid[0] * grid[1], run_windows, grid, HEIGHTS[grid], kernels)
    assert [wrong[:5] for wrong, _ in found] == [[]] * len(found)
    assert min(tried for _, tried in found) > 40 * len(kernels)


OPERATIONS: dict[str, tuple[Layer, list[tuple[int, ...]]]] = {
    "same padding": (lambda x, w, b: F.conv2d(x, w, b, padding="same"), [(4, 6, 3, 5), (4,)]),
    "valid padding": (lambda x, w, b: F.conv2d(x, w, b, padding="valid"), [(4, 6, 3, 2), (4,)]),
    "depthwise": (lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=6), [(12, 1, 3, 3), (12,)]),
    "a window of two sizes": (lambda x, w, b: F.conv2d(x, w, b, (2, 1), (0, 2), (1, 2)), [(4, 6, 2, 3), (4,)]),
    "transposed in groups": (lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1, 3), [(6, 2, 3, 3), (6,)]),
    "average pool with a divisor": (lambda x, w, b: F.avg_pool2d(x, 3, 2, 1, divisor_override=5), []),
    "group norm": (lambda x, w, b: F.group_norm(x, 3, w, b), [(6,), (6,)]),
    "instance norm": (lambda x, w, b: F.instance_norm(x), []),
    "layer norm of all": (lambda x, w, b: F.layer_norm(x, x.shape[1:], w, b), [(6, 11, 9), (6, 11, 9)]),
    "layer norm of the map": (lambda x, w, b: F.layer_norm(x, x.shape[2:]), []),
    "batch norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(6,), (6,)]),
    "batch norm in evaluation": (lambda x, w, b: F.batch_norm(x, w.detach(), w.detach().abs() + 1, w, b), [(6,), (6,)]),
    "response norm": (lambda x, w, b: F.local_response_norm(x, 3, 0.1), []),
    "nearest": (lambda x, w, b: F.interpolate(x, scale_factor=2), []),
    "nearest to a size": (lambda x, w, b: F.interpolate(x, size=(7, 13), mode="nearest-exact"), []),
    "bilinear": (lambda x, w, b: F.interpolate(x, scale_factor=1.7, mode="bilinear"), []),
    "bilinear with corners": (lambda x, w, b: F.interpolate(x, (23, 4), mode="bilinear", align_corners=True), []),
    "bilinear down": (lambda x, w, b: F.interpolate(x, size=5, mode="bilinear"), []),
    "global pooling": (lambda x, w, b: F.adaptive_avg_pool2d(x, 1), []),
    "pooling to a size": (lambda x, w, b: F.adaptive_avg_pool2d(x, (3, 4)), []),
    "mean": (lambda x, w, b: x.mean((2, 3)), []),
    "flatten": (lambda x, w, b: x.flatten(1), []),
    "squeeze and excitation": (
        lambda x, w, b: x * F.conv2d(F.relu(F.conv2d(F.adaptive_avg_pool2d(x, 1), w)), b).sigmoid(),
        [(2, 6, 1, 1), (6, 2, 1, 1)],
    ),
    "gates by a linear layer": (
        lambda x, w, b: F.linear(x.mean((2, 3)), w, b).sigmoid()[:, :, None, None] * x + x, [(6, 6), (6,)],
    ),
    "values": (lambda x, w, b: (F.gelu(x) * w + x.sigmoid() / 2 - x**2).clamp(-3, 3), [(6, 1, 1)]),
    "channels": (lambda x, w, b: torch.cat([part * number for number, part in enumerate(x.chunk(3, 1))], 1), []),
    "some channels": (lambda x, w, b: x[:, 1:4] + x[:, 2:5], []),
    "the size of another map": (
        lambda x, w, b: F.interpolate(F.max_pool2d(x, 2), size=x.shape[-2:]) + x, [],
    ),
}  # fmt: skip


def run_operations(rank: Rank, grid: tuple[int, int]) -> list[str]:
    place, wrong = Place.create(rank.world, grid), list[str]()
    for name, (layer, shapes) in OPERATIONS.items():
        parameters = [draw(*shape, seed=number + 1) for number, shape in enumerate(shapes)]
        wrong += check(place, name, layer, draw(3, 6, 11, 9), *parameters)
    # Fewer samples than ranks: some have no gate of their own.
    layer, shapes = OPERATIONS["squeeze and excitation"]
    wrong += check(place, "one sample", layer, draw(1, 6, 8, 8), *(draw(*shape) for shape in shapes))
    # More ranks than rows: some hold nothing, and take part in every exchange.
    wrong += check(
        place, "one row", lambda x, w, b: F.relu(F.conv2d(x, w, b, padding=1)).mean((2, 3)), draw(2, 3, 1, 2),
        draw(4, 3, 3, 3), draw(4),
    )  # fmt: skip
    maps = draw(5, 2, 7, 6)
    mine = slice(*place.divide_samples(5)[place.ranks.rank])
    if not torch.equal(to_parts(maps[mine], place.divide_samples(5), place).own, cut(maps, place).own):
        wrong.append("samples to parts")
    if not torch.equal(to_samples(cut(maps, place)), maps[mine]):
        wrong.append("parts to samples")
    return wrong


@pytest.mark.parametrize("grid", [pytest.param(grid, marks=[pytest.mark.check] * (grid != (2, 2))) for grid in GRIDS])
def test_operations_are_exact(grid: tuple[int, int]) -> None:
    assert run_ranks(grid[0] * grid[1], run_operations, grid) == [[]] * (grid[0] * grid[1])


def train(
    network: nn.Module, x: Tensor, labels: Tensor, place: Place | None, until: str | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one step, and the buffers after it; of the place's sum over its ranks."""
    if place is None:
        loss = F.cross_entropy(network(x), labels, reduction="sum")
        loss.backward()
    else:
        mine = slice(*place.divide_samples(len(x))[place.ranks.rank])
        out = run_in_strips(network, to_parts(x[mine], place.divide_samples(len(x)), place), until)
        loss = F.cross_entropy(out, labels[mine], reduction="sum")
        loss.backward()
    total = loss.detach().clone().view(1)
    found = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            found[name] = parameter.grad.clone()
    if place is not None:
        for one in (total, *found.values()):
            place.ranks.all_reduce(one.view(-1)).wait()
    return total, found | {name: buffer.clone() for name, buffer in network.named_buffers()}


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int], str | None]] = {
    "resnet18": (lambda: model.resnet18(num_classes=5), (75, 64), None),
    "resnet50": (lambda: model.resnet50(num_classes=5), (64, 45), None),
    "cifar_net": (lambda: model.cifar_net(num_classes=5), (32, 32), None),
    "alexnet": (lambda: without_dropout(model.alexnet(num_classes=5)), (227, 227), None),
    "resnet18 in part": (lambda: model.resnet18(num_classes=5), (75, 64), "layer3"),
    "tail": (Tail, (30, 21), "tail"),
}


def without_dropout(network: nn.Module) -> nn.Module:
    """Its random values are those of a rank's own samples, and no two processes draw the same."""
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return network


def run_network(rank: Rank, name: str, grid: tuple[int, int]) -> list[str]:
    """What differs by more than rounding between one process and the ranks of a place."""
    torch.manual_seed(0)
    make, size, until = NETWORKS[name]
    network = make().double()
    # AlexNet takes six times as long for a sample as the others.
    count = 3 if name == "alexnet" else 5
    x, labels = draw(count, 3, *size), torch.arange(count)
    reference, split = copy.deepcopy(network), copy.deepcopy(network)
    loss, expected = train(reference, x, labels, None)
    place = Place.create(rank.world, grid)
    own_loss, found = train(split, x, labels, place, until)
    wrong = [] if abs(float(own_loss - loss)) <= 1e-12 * float(loss) else [f"loss {own_loss} and {loss}"]
    for key, value in expected.items():
        off = largest((found[key] - value).double()) / max(1.0, float(value.double().abs().max()))
        if off > 1e-10:
            wrong.append(f"{key} is {off:.2g} off")
    return wrong


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        pytest.param("resnet18", (2, 1), marks=pytest.mark.check),
        ("cifar_net", (2, 1)),
        ("tail", (2, 1)),
        *(pytest.param(name, (3, 1), marks=pytest.mark.check) for name in NETWORKS),
        # The others have no operation that these lack, and take a minute.
        *(pytest.param(name, (2, 2), marks=pytest.mark.check) for name in ("resnet18", "cifar_net", "tail")),
    ],
)
def test_our_networks_are_trained_as_by_one_process(name: str, grid: tuple[int, int]) -> None:
    """Without a changed line; odd numbers of samples and uneven heights."""
    ranks = grid[0] * grid[1]
    assert run_ranks(ranks, run_network, name, grid) == [[]] * ranks


def count_saved_bytes(run: Callable[[], object], network: nn.Module) -> int:
    """Bytes that the backward pass needs, without the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            # Held, so that no later storage gets its address.
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = run()
    assert out is not None
    return sum(storage.nbytes() for storage in saved.values())


def share_of_saved_bytes(rank: Rank, name: str) -> float:
    network, x = getattr(model, name)(), torch.zeros(1, 3, 224, 224)
    whole = count_saved_bytes(lambda: network(x), network)
    split = cut(x, Place.create(rank.world, (rank.size, 1)))
    return count_saved_bytes(lambda: run_in_strips(network, split), network) / whole


@pytest.mark.parametrize(
    ("name", "ranks", "most"),
    [
        ("resnet18", 2, 0.59),
        *(
            pytest.param(*one, marks=pytest.mark.check)
            for one in (("resnet50", 2, 0.53), ("resnet18", 4, 0.32), ("resnet50", 4, 0.28))
        ),
    ],
)
def test_a_rank_keeps_its_share_and_the_rows_of_its_neighbours(name: str, ranks: int, most: float) -> None:
    """And no padded copies: with one for each convolution it would be 0.76 and 0.39."""
    assert max(run_ranks(ranks, share_of_saved_bytes, name)) <= most


def count_sent_bytes(rank: Rank, names: list[str], grid: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """Bytes of rows and columns that this rank sends for one image, (forward, backward), network by network."""
    torch.set_num_threads(1)
    place, found, sent = Place.create(rank.world, grid), {}, list[int]()

    def listen(line: Group) -> None:
        send = line.all_to_all

        def count(out: Tensor, into: Tensor, *splits: Any) -> Any:
            sent.append(into.numel() * into.element_size())
            return send(out, into, *splits)

        line.all_to_all = count  # type: ignore[method-assign]

    for line in {id(one): one for one in place.lines}.values():
        listen(line)
    for name in names:
        size = find_workload(name).input.height
        sent.clear()
        # The heads of all samples but the first one are empty.
        loss = run_in_strips(getattr(model, name)().eval(), cut(torch.zeros(1, 3, size, size), place)).sum()
        forward = sum(sent)
        loss.backward()
        found[name] = (forward, sum(sent) - forward)
    return found


@pytest.mark.parametrize(
    ("grid", "names"),
    [((2, 2), ["resnet18", "alexnet"]), ((3, 1), ["resnet50", "alexnet"])],
)
@pytest.mark.check
def test_the_bytes_are_those_that_a_workload_counts(grid: tuple[int, int], names: list[str]) -> None:
    """To the byte, and of each rank, also where it has a row more than others: the last maps have 7 rows."""
    ranks = grid[0] * grid[1]
    found = run_ranks(ranks, count_sent_bytes, names, grid)
    for name in names:
        windows = [window for layer in find_workload(name).layers for window in layer.windows]
        for rank in range(ranks):
            sent = sum(one.counts[rank][0] for window in windows for one in window.list_exchanges(grid))
            # Gradients go back the way that rows came.
            trained = [window for window in windows if window.needs_gradient]
            back = sum(one.counts[rank][1] for window in trained for one in window.list_exchanges(grid))
            assert found[rank][name] == pytest.approx((sent, back)), name


def step_under_limit(rank: Rank, budget_bytes: int | None) -> int:
    """One training step on one large image, with so many bytes more than the process has; None: any number.

    Returns the bytes that it took; -1 if there were too few.
    """
    torch.set_num_threads(1)
    layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(6)]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    place = Place.create(rank.world, (rank.size, 1))
    held = 0
    # The first, small step loads what every step needs.
    for side in (16, 768):
        part = Part(place, (side, side), place.divide_samples(1))
        own = torch.zeros(1, 16, part.get_own(0).length, side)
        if side > 16 and budget_bytes is not None:
            limit_more_memory(budget_bytes)
        held = read_status("VmSize")
        try:
            run_in_strips(network, SplitMap(own, part)).sum().backward()
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            return -1
    return read_status("VmPeak") - held


@pytest.mark.check
def test_an_image_too_large_for_one_process_trains_on_two() -> None:
    expect_two_to_fit(step_under_limit, 0.75)


REFUSED: dict[str, tuple[Layer, str]] = {
    "an unknown function": (lambda x, w, b: torch.cumsum(x, 2), "torch.cumsum has no rule"),
    "a method": (lambda x, w, b: x.view(len(x), -1), "Tensor.view has no rule for images that are split over ranks"),
    "rows": (lambda x, w, b: x[:, :, 1:], "an index of samples, rows or columns has no rule"),
    "some samples": (lambda x, w, b: x[:1], "an index of samples, rows or columns has no rule"),
    "rows joined": (lambda x, w, b: torch.cat([x, x], 2), "joining parts along samples, rows or columns"),
    "samples joined": (lambda x, w, b: torch.cat([x, -x]), "joining parts along samples, rows or columns"),
    "rows divided": (lambda x, w, b: x.chunk(2, 3), "Tensor.chunk of samples, rows or columns"),
    "samples divided": (lambda x, w, b: x.chunk(2), "Tensor.chunk of samples, rows or columns"),
    "random samples": (lambda x, w, b: x * torch.rand(2, 1, 1, 1), "a tensor with samples of its own"),
    "a mean of rows": (lambda x, w, b: x.mean(2), "a mean over other dimensions"),
    "a map of its own": (lambda x, w, b: x + torch.zeros(11, 9), "a tensor with rows and columns of its own"),
    "values of samples": (lambda x, w, b: x + x.flatten(1), "values of samples that are no [samples, channels, 1, 1]"),
    "other maps": (lambda x, w, b: x + F.max_pool2d(x, 2), "joins parts of different maps"),
    "indices": (lambda x, w, b: F.max_pool2d(x, 2, return_indices=True), "max_pool2d_with_indices has no rule"),
    "bicubic": (lambda x, w, b: F.interpolate(x, 5, mode="bicubic"), "interpolation of mode bicubic"),
    "dropout": (lambda x, w, b: F.dropout(x), "whose random values would differ"),
    "even same": (lambda x, w, b: F.conv2d(x, torch.zeros(1, 6, 2, 2), padding="same"), "padding 'same' and an even"),
    "samples": (lambda x, w, b: x.flatten(), "flattening samples into one another"),
    "running statistics": (lambda x, w, b: F.instance_norm(x, torch.zeros(6)), "running statistics"),
    "norm of a row": (lambda x, w, b: F.layer_norm(x, x.shape[3:]), "a layer_norm over other dimensions"),
    "a strip as weights": (lambda x, w, b: F.conv2d(torch.zeros(1, 6, 20, 20), x), "with a split map as weights"),
    "too small": (lambda x, w, b: F.conv2d(x, torch.zeros(1, 6, 12, 1)), "a window of 12 rows does not fit into 11"),
}


class Layers(nn.Module):
    """A network with one bad layer at a place that a message has to name."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.ReLU(), Bad(layer))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


class Bad(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x)


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rule_is_refused_by_function_and_layer(name: str) -> None:
    """Nothing is guessed. One rank is enough: no rule asks another rank before it refuses."""
    place = Place.create(World.create_single(torch.device("cpu")), (1, 1))
    layer, said = REFUSED[name]
    with pytest.raises(UsageError) as seen:
        run_in_strips(Layers(layer), cut(torch.randn(2, 6, 11, 9), place))
    assert said in str(seen.value)
    assert str(seen.value).startswith("body.1: ")


def test_batch_norms_over_ranks_are_refused() -> None:
    world = World.create_single(torch.device("cpu"))
    network = nn.Sequential(SyncBatchNorm(3, group=world.control))
    with pytest.raises(UsageError, match="0 is a batch norm over ranks"):
        run_in_strips(network, cut(torch.randn(2, 3, 4, 4), Place.create(world, (1, 1))))


@given(
    length=st.integers(1, 40), kernel=st.integers(1, 7), stride=st.integers(1, 4), padding=st.integers(0, 4),
    dilation=st.integers(1, 3), ceil_mode=st.booleans(), parts=st.integers(1, 5),
)  # fmt: skip
def test_what_is_needed_is_the_receptive_field(
    length: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool, parts: int
) -> None:
    """Found by brute force: the rows under the windows of the outputs."""
    window = Window(kernel, stride, padding, dilation, ceil_mode)
    try:
        outputs = window.count_outputs(length)
    except UsageError:
        return
    for one in divide(outputs, parts):
        covered = {o * stride - padding + dilation * tap for o in range(*one) for tap in (0, kernel - 1)}
        need = window.find_need(one, length)
        if not covered:
            assert need == (Range(0, 0), 0, 0)
            continue
        assert need.before + need.rows.length + need.after == max(covered) - min(covered) + 1
        inside = [row for row in range(min(covered), max(covered) + 1) if 0 <= row < length]
        assert list(range(*need.rows)) == inside
        assert need.before == sum(row < 0 for row in range(min(covered), max(covered) + 1)) or not inside
