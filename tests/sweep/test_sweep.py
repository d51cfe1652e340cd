"""`headway sweep` from the command line: real processes, their deaths, and what it refuses."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests._support import Said, collect_messages, command, finished, packed_digits, refused, write_recipe

from headway.core.errors import UsageError
from headway.sweep.best import list_best
from headway.sweep.journal import open_journal, read_journal
from headway.sweep.records import Fused
from headway.sweep.sweep import build_plan, resume_sweep
from headway.sweep.sweep_folder import SweepFolder

SPACE = "parameters:\n  optimizer.lr: {log: [0.001, 0.5]}\n"
OPTIONS = ("--budget", "2", "--smallest", "1/3", "--slots", "1", "--seeds", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml", device="cpu", epochs=4)
    (folder / "space.yaml").write_text(SPACE)
    return folder


def sweep(folder: Path, name: str, *more: str, space: str = "space.yaml") -> Said:
    return finished("sweep", "recipe.yaml", "--space", space, *OPTIONS, "--out", name, *more, cwd=folder)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    said = sweep(folder, "whole")
    assert said.status == 0, said.err
    assert "Trained again with a new seed" in said.out
    return folder / "whole"


def decisions(sweep: Path) -> list[str]:
    """The journal without checksums; the order of results is that of their arrival."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in (sweep / "decisions.jsonl").read_text().splitlines()]
    return sorted(json.dumps({key: value for key, value in row.items() if key != "crc32"}) for row in rows)


def weights(sweep: Path) -> dict[str, list[float]]:
    """Sums of the weights of the trials that were trained to their end, and of the winner's."""
    winner = json.loads((sweep / "result.json").read_text())["winner"]["trial"]
    runs = [sweep / "trials" / str(winner), *sorted((sweep / "retrained").iterdir())]
    return {
        str(run.relative_to(sweep)): [
            value.double().sum().item() for value in load_file(run / "weights.safetensors").values()
        ]
        for run in runs
    }


@pytest.mark.check
def test_a_sweep_finds_its_best_trial_and_trains_it_again(whole: Path) -> None:
    state, result = read_journal(whole), json.loads((whole / "result.json").read_text())
    plan = state.plan
    assert len(state.trials) == plan.trials == 4
    ended = [trial for trial in state.trials if len(trial.scores) == 2]
    assert [trial.number for trial in ended] == [result["winner"]["trial"]]
    # The winner of the rung is the best of it.
    assert ended[0].scores[0] == max(trial.scores[0] or 0.0 for trial in state.trials)
    assert result["winner"]["score"] == ended[0].scores[1]
    assert len(result["retrained"]["scores"]) == 1
    for trial in state.trials:
        provenance = json.loads((whole / "trials" / str(trial.number) / "provenance.json").read_text())
        assert provenance["origins"]["optimizer.lr"] == f"sweep: trial {trial.number}"


def test_the_winner_is_a_recipe_that_trains_as_the_trial_did(folder: Path, whole: Path) -> None:
    said = finished("train", whole / "winner/recipe.yaml", "--run", folder / "again", cwd=folder.parent)
    assert said.status == 0, said.err
    winner = json.loads((whole / "result.json").read_text())["winner"]
    summary = json.loads((folder / "again/summary.json").read_text())
    assert summary["accuracy"] == winner["score"]


@pytest.mark.check
def test_an_ended_sweep_gives_its_result_again_and_trains_nothing(whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("weights.safetensors")}
    written = json.loads((whole / "result.json").read_text())
    with collect_messages() as told:
        result = resume_sweep(whole).to_json()
    assert {**result, "sweep": written["sweep"], "winner": {**result["winner"], "recipe": ""}} == {
        **written,
        "winner": {**written["winner"], "recipe": ""},
    }
    assert told[0] == "This sweep is finished: nothing is left to train."
    assert not any("Training" in line for line in told)
    assert before == {path: path.stat().st_mtime_ns for path in whole.rglob("weights.safetensors")}
    # Without its result, it is found again by the runs, which train nothing either.
    (whole / "result.json").unlink()
    said = finished("sweep", "--resume", whole, "--json")
    assert said.status == 0, said.err
    assert json.loads(said.out)["retrained"] == written["retrained"]
    assert before == {path: path.stat().st_mtime_ns for path in whole.rglob("weights.safetensors")}
    (whole / "result.json").write_text(json.dumps(written))


def test_the_same_sweep_is_not_run_twice_at_once(whole: Path) -> None:
    sweep = SweepFolder.open(whole)
    with open_journal(whole, build_plan(sweep.read_settings()[0])), pytest.raises(Exception, match="another process"):
        resume_sweep(whole)


@pytest.mark.check
@pytest.mark.timeout(900)
def test_killed_at_random_moments_it_makes_the_same_decisions(folder: Path, whole: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance, kills = random.Random(seed), 0
    begin = ("sweep", "recipe.yaml", "--space", "space.yaml", *OPTIONS, "--out", "killed")
    arguments: tuple[str, ...] = begin
    while kills < 5:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command(*arguments), cwd=folder, **quiet)
        try:
            process.wait(chance.uniform(1, 10))
            break
        except subprocess.TimeoutExpired:
            pass
        # Workers are its children; they end by themselves once it is gone.
        workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
        children = list(map(int, workers.stdout.split()))
        for victim in chance.choice([[process.pid], children, [process.pid, *children]]):
            os.kill(victim, signal.SIGKILL)
        kills += 1
        process.kill()
        process.wait()
        if (folder / "killed/sweep.yaml").exists():
            arguments = ("sweep", "--resume", "killed")
    if not (folder / "killed/result.json").exists():
        said = finished(*arguments, cwd=folder)
        assert said.status == 0, said.err
    assert decisions(folder / "killed") == decisions(whole)
    assert weights(folder / "killed") == weights(whole)


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ("", "there is nothing to vary"),
        ("parameters: {model.args.width: {choice: [4, 8]}}", "'net.py:linear' has no argument 'width'"),
        ("parameters: {optimizer.learning_rate: {log: [0.1, 1]}}", "Did you mean 'optimizer.lr'?"),
        ("objective: acuracy\n" + SPACE, "no evaluation of this recipe has the metric 'acuracy'. Did you mean"),
        ("method: tpe\n" + SPACE, "Add --method asha"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_there_is_a_folder(folder: Path, space: str, said: str) -> None:
    (folder / "bad.yaml").write_text(space)
    options = ("--space", folder / "bad.yaml", "--budget", "2", "--out", folder / "none")
    assert said in refused("sweep", folder / "recipe.yaml", *options, status=2)
    assert not (folder / "none").exists()


@pytest.mark.check
def test_trials_that_always_crash_end_the_sweep_with_the_traceback(folder: Path) -> None:
    """After three; none has a result, so that they are tried again."""
    (folder / "odd.py").write_text("def loss(outputs, labels):\n    return (outputs / (labels > 99)).sum(dim=3)\n")
    said = sweep(folder, "crashing", "transform=odd.py:missing")
    assert said.status != 0
    (folder / "odd.py").write_text("def odd(images, labels, keys):\n    raise ValueError('an odd batch')\n")
    said = sweep(folder, "crashed", "transform=odd.py:odd")
    assert said.status == 1
    assert "3 trials crashed one after another" in said.err
    assert 'odd.py", line 2, in odd' in said.err
    assert "an odd batch" in said.err
    assert not any(trial.scores for trial in read_journal(folder / "crashed").trials)


@pytest.mark.parametrize("files", [(), ("provenance.json", ".sweep.yaml.x")])
def test_a_sweep_killed_before_it_had_its_settings_begins_again_in_its_folder(
    tmp_path: Path, files: tuple[str, ...]
) -> None:
    SweepFolder.create(tmp_path / "new")
    for name in files:
        (tmp_path / "new" / name).touch()
    SweepFolder.create(tmp_path / "new")
    (tmp_path / "new/trials/mine").touch()
    with pytest.raises(UsageError, match="this folder is not empty"):
        SweepFolder.create(tmp_path / "new")


def test_the_best_trials_of_a_sweep_become_an_ensemble(whole: Path) -> None:
    """One trial of four was trained to its end, so there is no ensemble of two."""
    assert "1 trial of 4 trained to the end, and --best asks for 2" in refused(
        "ensemble", "--of", whole, "--best", "2", status=2
    )
    assert list_best(whole, 1) == [
        whole / "trials" / str(json.loads((whole / "result.json").read_text())["winner"]["trial"])
    ]
    assert "an ensemble needs runs" in refused("ensemble", status=2)


@pytest.mark.check
@pytest.mark.root
def test_a_full_disk_stops_the_sweep_and_loses_nothing(folder: Path, small_disk: Path) -> None:
    out = small_disk / "full"
    # Checkpoints of four networks of 180 kB with momentum do not fit into the megabyte; those of the digits do.
    said = sweep(folder, str(out), "--seeds", "0", "model.factory=net.py:wide")
    assert said.status == 1
    assert "the disk is full. Mend it, and continue" in said.err
    assert f"headway sweep --resume {out}" in said.err
    assert not any(trial.has_failed for trial in read_journal(out).trials)
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    said = finished("sweep", "--resume", out, cwd=folder)
    assert said.status == 0, said.err
    assert not any(trial.has_failed for trial in read_journal(out).trials)


@pytest.mark.check
def test_a_population_forks_its_best_members(folder: Path) -> None:
    options = ("--method", "pbt", "--budget", "5", "--smallest", "1/2", "--seeds", "0")
    said = sweep(folder, "population", *options)
    assert said.status == 0, said.err
    state = read_journal(folder / "population")
    (fork,) = (trial for trial in state.trials if trial.parent is not None)
    assert fork.parent is not None
    assert fork.scores[-1] is not None
    provenance = json.loads((folder / "population/trials" / str(fork.number) / "provenance.json").read_text())
    assert provenance["forked"]["run"] == str((folder / "population/trials" / str(fork.parent)).resolve())
    parent, own = (state.trials[number].values["optimizer.lr"] for number in (fork.parent, fork.number))
    assert own / parent == pytest.approx(0.8, rel=1e-3) or own / parent == pytest.approx(1.2, rel=1e-3)


def test_a_population_varies_what_a_fork_may_change(folder: Path) -> None:
    (folder / "batch.yaml").write_text("parameters: {batch: {choice: [15, 30]}}")
    options = ("--space", folder / "batch.yaml", "--method", "pbt", "--budget", "5", "--out", folder / "no")
    assert "batch cannot change there" in refused("sweep", folder / "recipe.yaml", *options, status=2)


@pytest.mark.check
def test_runs_of_a_sweep_share_no_folder_of_checkpoints(folder: Path) -> None:
    said = sweep(folder, "apart", "--seeds", "2", "checkpoint.folder=saved")
    assert said.status == 0, said.err
    names = {path.name for path in (folder / "saved").iterdir()}
    assert {"0", "1", "2", "3"} < names
    assert len([name for name in names if name.startswith("seed-")]) == 2


@pytest.mark.check
@pytest.mark.timeout(900)
def test_a_killed_sweep_goes_on_with_the_choices_and_bits_of_its_fused_trials(folder: Path, whole: Path) -> None:
    """The journal says that the first four trials are fused, whatever this machine would measure."""
    found = []
    for name, kills in (("fused", False), ("fused-killed", True)):
        sweep = SweepFolder.create(folder / name)
        for path in (whole / "sweep.yaml", whole / "provenance.json", whole / "decisions.jsonl"):
            shutil.copy(path, folder / name)
        settings = (folder / name / "sweep.yaml").read_text()
        (folder / name / "sweep.yaml").write_text(settings.replace("fuse: 'off'", "fuse: auto"))
        lines = (folder / name / "decisions.jsonl").read_text().splitlines(keepends=True)
        created = [line for line in lines if '"kind": "created"' in line]
        (folder / name / "decisions.jsonl").write_text(lines[0] + "".join(created))
        with open_journal(folder / name, build_plan(sweep.read_settings()[0])) as journal:
            journal.append(Fused((0, 1, 2, 3), 4, 1.5, "measured before"))
        if kills:
            process = subprocess.Popen(command("sweep", "--resume", folder / name), stderr=subprocess.DEVNULL)
            while not list((folder / name / "trials").glob("*/checkpoints/step-*")) and process.poll() is None:
                time.sleep(0.01)
            process.kill()
            process.wait()
        said = finished("sweep", "--resume", folder / name)
        assert said.status == 0, said.err
        found.append((decisions(folder / name), weights(folder / name)))
    assert found[0] == found[1]
    assert any('"fused"' in row for row in found[0][0])
    # Fused trials are others in their last bits, so this sweep did fuse them.
    assert found[0][1] != weights(whole)
