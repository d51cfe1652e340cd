"""`precision: auto`: measured with the run's own network, agreed on by all ranks, and nothing of it is left behind."""

from __future__ import annotations

import math
import random
import re
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests._support import collect_messages, free_port, headway, packed_digits, write_recipe
from tests.comm._ranks import Rank, run_ranks
from torch import nn

from headway.core.errors import UsageError
from headway.core.launcher_environment import LaunchedProcess
from headway.core.recipe import read_recipe
from headway.core.run_folder import RunFolder
from headway.launch.ranks import Ranks
from headway.setup import build
from headway.setup.build import build_setup
from headway.setup.precision import MIN_SPEEDUP, Precision, PrecisionName, choose_fastest, list_candidates
from headway.setup.recipe import TrainRecipe
from headway.setup.trial import measure_seconds_per_sample
from headway.training.progress import LogLines
from headway.training.trainer import Trainer

CPU = torch.device("cpu")
times = st.fixed_dictionaries({"fp32": st.floats(1e-6, 1), "bf16": st.floats(1e-6, 1)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auto")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml", precision="auto", model={"factory": "net.py:dropout"})
    return folder


def test_a_run_says_and_keeps_what_it_measured_and_trains_as_if_it_had_been_told(folder: Path, tmp_path: Path) -> None:
    """The same weights, bit for bit: the measurement has touched neither weights nor statistics nor generators."""
    auto, told = tmp_path / "auto", tmp_path / "told"
    said = headway("train", folder / "recipe.yaml", "--run", auto).err
    ((name, reason),) = re.findall(r"^Precision: (fp32|bf16), (.* here(?:, .*)?)\.$", said, re.MULTILINE)
    kept = yaml.safe_load((auto / "recipe.yaml").read_text())["precision"]
    origin = RunFolder.open(auto).read_json("provenance")["origins"]["precision"]
    assert (kept, origin) == (name, f"auto: {reason}")
    assert ("no units" in reason) == (list_candidates(CPU) == ("fp32",))
    headway("train", folder / "recipe.yaml", "--run", told, f"precision={kept}")
    one, two = (load_file(run / "weights.safetensors") for run in (auto, told))
    assert all(torch.equal(two[name], value) for name, value in one.items())
    for verb in (("evaluate", auto), ("predict", auto, next((folder / "digits").rglob("*.png")))):
        assert "Precision:" not in headway(*verb).err


def test_the_measurement_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 36, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images = torch.randn(16, 3, 8, 8)
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index,union-attr]
    found = measure_seconds_per_sample(model, images, {"plain": nullcontext, "other": nullcontext})
    assert found.keys() == {"plain", "other"}
    assert all(0 < seconds < 10 for seconds in found.values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.grad is None for value in model.parameters())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index,union-attr]


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ("strategy: towers", r"matches no module of this network. Its modules are for example: 0, 1"),
        ("strategy: hybrid, layers: [fc9]", "'fc9' matches no fully connected layer of this network. Its fully"),
        ("strategy: experts", "the network has no mixture of experts"),
        ("strategy: spatial, until: layer9", "'layer9' is no layer of the network. Known here: "),
    ],
)
def test_layers_that_a_strategy_does_not_find_are_refused_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, parallel: str, said: str
) -> None:
    monkeypatch.setattr(build, "measure_precisions", lambda *_: pytest.fail("the precision was measured"))
    with pytest.raises(UsageError) as caught:
        build_setup(read_recipe(folder / "recipe.yaml", [f"parallel={{{parallel}}}"], TrainRecipe))
    assert said in str(caught.value)


class Picky(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise NotImplementedError("not in this type")
        return super().forward(x)


def test_a_precision_in_which_the_network_fails_is_none_to_choose() -> None:
    names: tuple[PrecisionName, ...] = ("fp32", "bf16")
    contexts = {name: Precision(name, CPU).autocast for name in names}
    found = measure_seconds_per_sample(Picky(4, 2), torch.randn(3, 4), contexts)
    assert found["fp32"] < found["bf16"] == math.inf
    assert choose_fastest([found]) == ("fp32", "the network fails in bf16")


@given(st.lists(times, min_size=1, max_size=5))
def test_the_fastest_on_the_slowest_rank_is_taken_and_fp32_where_little_is_won(
    found: list[dict[PrecisionName, float]],
) -> None:
    slowest = {name: max(one[name] for one in found) for name in found[0]}
    name, reason = choose_fastest(found)
    assert (name == "bf16") == (slowest["fp32"] / slowest["bf16"] >= MIN_SPEEDUP)
    assert ("on the slowest rank" in reason) == (len(found) > 1)


def test_the_sentences() -> None:
    assert choose_fastest([{"fp32": 1.9, "bf16": 1.0}]) == ("bf16", "1.9 times as fast as fp32 here")
    assert choose_fastest([{"fp32": 1.0, "bf16": 3.0}]) == ("fp32", "3 times as fast as bf16 here")
    little = "bf16 is 1.02 times as fast here, which is not worth its lost digits"
    assert choose_fastest([{"fp32": 1.02, "bf16": 1.0}]) == ("fp32", little)
    assert choose_fastest([]) == ("fp32", "there was nothing to measure it with")
    assert choose_fastest([{"fp32": 0.0}]) == ("fp32", "bf16 has no units here")
    assert choose_fastest([{"fp32": 0.0}, {"fp32": 1.0, "bf16": 0.1}]) == ("fp32", "bf16 has no units on some rank")


def test_who_joins_takes_what_the_others_have_and_nobody_changes_later() -> None:
    fast, slow = {"fp32": 1.0, "bf16": 0.1}, {"fp32": 1.0, "bf16": 9.0}
    one, other = Precision("bf16", CPU, seconds=fast), Precision("fp32", CPU, seconds=slow)  # type: ignore[arg-type]
    votes = [one.get_vote(), other.get_vote()]
    said = [each.agree_on_votes(votes) for each in (one, other)]
    assert said == ["Precision: fp32, 9 times as fast as bf16 on the slowest rank.", ""]
    late = Precision("bf16", CPU, seconds={})
    votes = [late.get_vote(), one.get_vote(), other.get_vote()]
    assert [each.agree_on_votes(votes) for each in (late, one, other)] == [
        "Precision: fp32, as the other ranks had agreed.",
        "",
        "",
    ]
    assert {each.name for each in (late, one, other)} == {"fp32"}
    told = Precision("bf16", CPU)
    assert told.agree_on_votes([told.get_vote()] * 2) == ""
    assert told.name == "bf16"


def test_until_the_ranks_agree_memory_is_that_of_fp32() -> None:
    """A micro-batch that fits in bf16 here would not where they then take fp32."""

    def narrow(precision: Precision) -> bool:
        with precision.autocast_widest():
            return torch.is_autocast_enabled("cpu")

    fast: dict[PrecisionName, float] = {"fp32": 1.0, "bf16": 0.1}
    chosen = Precision("bf16", CPU, seconds=fast)
    assert not narrow(chosen)
    chosen.agree_on_votes([chosen.get_vote()] * 2)
    assert chosen.name == "bf16"
    assert narrow(chosen)
    assert narrow(Precision("bf16", CPU))


def meets(rank: Rank, folder: Path, run: Path, overrides: tuple[str, ...], port: int) -> tuple[str, str, list[str]]:
    """A rank of a run; the measurement of rank 1 finds that bf16 is slow there, and that of rank 0 that it is fast."""
    seat = LaunchedProcess(rank.rank, rank.size, rank.rank, rank.size, "127.0.0.1", port, "torchrun")
    loaded = read_recipe(folder / "recipe.yaml", overrides if rank.rank else (), TrainRecipe)
    with collect_messages() as said, Ranks(loaded.recipe.comm, seat, None) as ranks:
        setup = build_setup(loaded, ranks=ranks)
        if not overrides:
            found: Any = {"fp32": 1.0, "bf16": 4.0 if rank.rank else 0.5}
            name, _ = choose_fastest([found])
            loaded = setup.loaded.resolve("precision", name, "it was measured")
            setup = replace(setup, loaded=loaded, precision=Precision(name, CPU, seconds=found))
        with closing(Trainer(setup, RunFolder.create(run / str(rank.rank)), LogLines(), ranks)) as trainer:
            try:
                trainer.recovery.meet()
            except UsageError as error:
                return "", str(error), said
            trainer.run(2)
            return setup.agreed_recipe.recipe.precision, setup.agreed_recipe.origins["precision"], said


def test_ranks_that_found_otherwise_agree(folder: Path, tmp_path: Path) -> None:
    (one, origin, said), (other, _, _) = run_ranks(2, meets, folder, tmp_path, (), free_port())
    assert one == other == "fp32"
    assert origin == "auto: 4 times as fast as bf16 on the slowest rank"
    assert "Precision: fp32, 4 times as fast as bf16 on the slowest rank." in said


@pytest.mark.check
def test_a_rank_that_was_told_and_one_that_measures_are_no_one_run(folder: Path, tmp_path: Path) -> None:
    found = run_ranks(2, meets, folder, tmp_path, ("precision=bf16",), free_port())
    assert all("precision is 'bf16' on rank 1 and 'auto' on rank 0" in sentence for _, sentence, _ in found)


@pytest.mark.check
def test_a_run_of_two_processes_keeps_what_they_agreed_on(folder: Path, tmp_path: Path) -> None:
    from tests._support import finished

    said = finished("train", folder / "recipe.yaml", "--run", tmp_path / "run", "--procs", "2", cwd=folder)
    assert said.status == 0, said.err
    kept = yaml.safe_load((tmp_path / "run/recipe.yaml").read_text())["precision"]
    assert kept in re.findall(r"Precision: (fp32|bf16),", said.err)[-1]


def test_newcomers_alone_take_what_the_run_has() -> None:
    """They measure nothing; whoever had agreed is gone, and the run folder tells."""
    newcomers = [Precision("fp32", torch.device("cpu"), seconds={}) for _ in range(2)]
    newcomers[1].recorded = "bf16"  # the other one does not see the folder
    votes = [one.get_vote() for one in newcomers]
    for one in newcomers:
        assert one.agree_on_votes(votes) == "Precision: bf16, as the other ranks had agreed."
        assert one.name == "bf16"
