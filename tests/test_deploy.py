"""What lies in deploy/: the Slurm script and the Kubernetes manifest run with stand-ins for what starts them there; the
container recipes are read as their builders read them."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from tests._support import records

from headway.cli import main
from headway.comm.comm_recipe import CommRecipe

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
TASKS = 2
STEPS = 30

RECIPE: dict[str, Any] = {
    "data": {"train": "synthetic", "synthetic": {"samples": 100, "classes": 2, "size": [8, 8]}},
    "model": {"factory": "net.py:linear"},
    "optimizer": {"name": "sgd", "lr": 0.01},
    "batch": 10,
    "epochs": STEPS / 10,
    "precision": "fp32",
    "device": "cpu",
    "log_every_steps": 1,
    "checkpoint": {"every_steps": 5},
}
NET = """
import os, time
from torch import nn

class Linear(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.linear = nn.Linear(192, num_classes)

    def forward(self, images):
        time.sleep(float(os.environ.get("TEST_STEP_S", "0")))
        return self.linear(images.flatten(1))

def linear(num_classes):
    return Linear(num_classes)
"""

SRUN = """
import json, os, subprocess, sys
options = []
rest = sys.argv[1:]
while rest[0].startswith("--"):
    options.append(rest.pop(0))
with open("srun.jsonl", "a") as log:
    log.write(json.dumps({"options": options, "command": rest, "omp": os.environ["OMP_NUM_THREADS"]}) + "\\n")
step = sum(1 for _ in open("srun.jsonl")) - 1
tasks = int(os.environ["SLURM_NTASKS"])
common = {"SLURM_STEP_ID": str(step), "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_NODELIST": "localhost"}
running = []
for task in range(tasks):
    of_task = {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}
    running.append(subprocess.Popen(rest, env={**os.environ, **common, **of_task}))
with open("tasks.json.new", "w") as file:
    json.dump([one.pid for one in running], file)
os.replace("tasks.json.new", "tasks.json")
statuses = [one.wait() for one in running]
sys.exit(max(status if status >= 0 else 128 - status for status in statuses))
"""
"""As Slurm's own: starts the tasks of a step, tells them who they are, and leaves with the highest status."""

SCONTROL = "import sys\nopen('scontrol', 'w').write(' '.join(sys.argv[1:]))\n"
APPTAINER = "import os, sys\nassert sys.argv[1:4] == ['exec', '--nv', 'h.sif']\nos.execvp(sys.argv[4], sys.argv[4:])\n"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The folder from which a job is submitted."""
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(RECIPE))
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, code in (("srun", SRUN), ("scontrol", SCONTROL), ("apptainer", APPTAINER)):
        (programs / name).write_text(f"#!{sys.executable}\n{code}")
    (programs / "headway").write_text(f'#!/bin/sh\nexec {sys.executable} -m headway "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    return tmp_path


def environment(job: Path, **more: str) -> dict[str, str]:
    """What a job's shell has; nothing of a launcher that the tests may run under."""
    unset = ("SLURM_", "PET_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMP_")
    whole = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    return {**whole, "PATH": f"{job / 'bin'}:{os.environ['PATH']}", **more}


def batch(job: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    """The script as Slurm runs it: a copy elsewhere, in the folder of the submission."""
    script = job / "slurm_script"
    script.write_text((DEPLOY / "slurm.sh").read_text())
    slurm = {"SLURM_JOB_ID": secrets.token_hex(8), "SLURM_NTASKS": str(TASKS), "SLURM_CPUS_PER_TASK": "1", **more}
    return subprocess.Popen(
        ["bash", script, *arguments],
        cwd=job,
        env=environment(job, **slurm),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def steps_of(job: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job / "srun.jsonl").read_text().splitlines()]


def trained(run: Path) -> list[int]:
    """The steps that are in the log of a run that came to its end."""
    assert json.loads((run / "summary.json").read_text())["finished"]
    return [record["step"] for record in records(run, "train")]


# Slurm


@pytest.mark.check
def test_the_slurm_script_trains_over_all_tasks(job: Path) -> None:
    process = batch(job, "small.yaml", "epochs=2", SLURM_JOB_ID="12", HEADWAY_SIF="h.sif")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert trained(job / "runs/small-12") == list(range(1, 21))
    assert out.count("Trained runs/small-12") == 1  # one process speaks for all
    (step,) = steps_of(job)
    assert {"--cpus-per-task=1", "--kill-on-bad-exit=0"} <= {*step["options"]}
    assert step["omp"] == "1"
    assert step["command"][:4] == ["apptainer", "exec", "--nv", "h.sif"]
    provenance = json.loads((job / "runs/small-12/provenance.json").read_text())
    assert provenance["torch_threads"] == 1
    assert not (job / "scontrol").exists(), err


@pytest.mark.check
def test_the_slurm_script_gives_up_at_once_what_cannot_begin(job: Path) -> None:
    process = batch(job, "small.yaml", "epoks=3")
    _, err = process.communicate()
    assert process.returncode == 2
    assert "there is no key 'epoks'" in err
    assert len(steps_of(job)) == 1
    process = batch(job)
    assert "usage: sbatch slurm.sh RECIPE" in process.communicate()[1]
    assert process.returncode != 0


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 200
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.check
def test_the_slurm_script_goes_on_after_a_killed_task(job: Path) -> None:
    process = batch(job, "small.yaml", SLURM_JOB_ID="7", TEST_STEP_S="0.1")
    wait_for(job / "runs/small-7/checkpoints/latest", process)
    os.kill(json.loads((job / "tasks.json").read_text())[1], signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert "slurm.sh: exit status 137; resuming from the last checkpoint" in err
    assert [step["command"][2] for step in steps_of(job)] == ["small.yaml", "--resume"]
    assert trained(job / "runs/small-7") == list(range(1, STEPS + 1))


@pytest.mark.check
def test_the_slurm_script_gives_up_what_fails_again_and_again(job: Path) -> None:
    process = batch(job, "small.yaml", SLURM_JOB_ID="8", TEST_STEP_S="0.5", HEADWAY_RESTARTS="1")
    for _ in range(2):
        wait_for(job / "tasks.json", process)
        wait_for(job / "runs/small-8/recipe.yaml", process)
        tasks = json.loads((job / "tasks.json").read_text())
        (job / "tasks.json").unlink()
        for task in tasks:
            os.kill(task, signal.SIGKILL)
    process.communicate()
    assert process.returncode == 128 + signal.SIGKILL
    assert len(steps_of(job)) == 2


@pytest.mark.check
def test_at_the_time_limit_the_slurm_script_goes_back_to_the_queue(job: Path) -> None:
    """Slurm sends SIGTERM to the tasks and not to the script; when its turn comes again, the job has its old number."""
    process = batch(job, "small.yaml", SLURM_JOB_ID="9", TEST_STEP_S="0.1")
    wait_for(job / "runs/small-9/checkpoints/latest", process)
    for task in json.loads((job / "tasks.json").read_text()):
        os.kill(task, signal.SIGTERM)
    _, err = process.communicate()
    assert (job / "scontrol").read_text() == "requeue 9", err
    (job / "scontrol").unlink()
    process = batch(job, "small.yaml", SLURM_JOB_ID="9")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert trained(job / "runs/small-9") == list(range(1, STEPS + 1))
    assert not (job / "scontrol").exists()
    again = batch(job, "small.yaml", SLURM_JOB_ID="10", HEADWAY_RUN="runs/small-9")
    _, err = again.communicate()
    assert (again.returncode, "nothing is left to do" in err) == (0, True)


# Kubernetes

Fields = Mapping[str, Any]
POD: Fields = {
    "terminationGracePeriodSeconds": int,
    "volumes": [{"name": str, "persistentVolumeClaim": dict, "emptyDir": dict}],
    "containers": [{"name": str, "volumeMounts": list, "securityContext": {"capabilities": {"add": list}}}],
}
TRAINJOB: Fields = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "runtimeRef": {"name": str},
        "trainer": {
            "image": str,
            "command": [str],
            "args": [str],
            "numNodes": int,
            "numProcPerNode": int,
            "resourcesPerNode": {"requests": dict, "limits": dict},
        },
        "runtimePatches": [
            {
                "manager": str,
                "trainingRuntimeSpec": {
                    "template": {
                        "spec": {"replicatedJobs": [{"name": str, "template": {"spec": {"template": {"spec": POD}}}}]}
                    }
                },
            }
        ],
    },
}
"""Of the fields of trainer.kubeflow.org/v1alpha1, those that the manifest may have."""


def unfit(found: Any, fields: Any, at: str = "") -> Iterator[str]:
    """Places of a tree that fields do not allow."""
    if isinstance(fields, type):
        if not isinstance(found, fields):
            yield f"{at} is no {fields.__name__}"
    elif isinstance(fields, list):
        for number, one in enumerate(found):
            yield from unfit(one, fields[0], f"{at}[{number}]")
    else:
        for key, value in found.items():
            yield from unfit(value, fields[key], f"{at}.{key}") if key in fields else [f"{at}.{key} is no field"]


def manifest() -> Any:
    return yaml.safe_load((DEPLOY / "trainjob.yaml").read_text())


def test_the_manifest_has_fields_of_a_trainjob() -> None:
    found = manifest()
    assert list(unfit(found, TRAINJOB)) == []
    assert (found["apiVersion"], found["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer, (patch,) = found["spec"]["trainer"], found["spec"]["runtimePatches"]
    assert re.fullmatch(r"[a-z0-9.-]+\.[a-z]+/\S+", patch["manager"])
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert node["name"] == container["name"] == "node"  # what Trainer's runtime calls them
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    for name, limit in trainer["resourcesPerNode"]["limits"].items():  # Kubernetes wants them alike of devices
        assert trainer["resourcesPerNode"]["requests"][name] == limit
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert list(unfit({"spec": {"trainer": {"numNods": 2}}}, TRAINJOB)) == [".spec.trainer.numNods is no field"]


@pytest.mark.check
def test_the_script_of_the_manifest_trains_in_two_pods_and_goes_on(job: Path) -> None:
    trainer = manifest()["spec"]["trainer"]
    (script,) = trainer["args"]
    script = script.replace("/runs/", f"{job}/runs/").replace("/data/photos.yaml", f"{job}/small.yaml")
    torchrun = f"{sys.executable} -m torch.distributed.run"
    for again in (False, True):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        given = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        pods = [
            subprocess.Popen(
                [*trainer["command"], script.replace("exec torchrun", f"exec {torchrun}")],
                cwd=job,
                env=environment(job, **given, PET_MASTER_PORT=str(port), PET_NODE_RANK=str(rank)),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        said = [pod.communicate()[0] for pod in pods]
        assert [pod.returncode for pod in pods] == [0, 0], "\n".join(said)
        assert ("nothing is left to do" in "".join(said)) == again
    assert trained(job / "runs/photos") == list(range(1, STEPS + 1))


# Containers


def instructions() -> list[tuple[str, str]]:
    """Instruction and arguments of each line of the Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [(word, re.sub(r" +", " ", rest)) for word, _, rest in (line.partition(" ") for line in lines) if word]


def sections() -> dict[str, str]:
    """The sections of the Apptainer recipe; its header is called ``."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "headway.def").read_text(), flags=re.MULTILINE)
    header, *parts = re.split(r"^%", text, flags=re.MULTILINE)
    named = (part.partition("\n") for part in parts)
    return {"": header} | {name.strip(): textwrap.dedent(body) for name, _, body in named}


def sent(path: str) -> bool:
    """Whether a file of the repository is sent to the builder."""
    there = False
    for rule in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines():
        pattern = rule.removeprefix("!")
        if rule and not rule.startswith("#"):
            deep = pattern.startswith("**/") and fnmatch(os.path.basename(path), pattern[3:])
            if deep or fnmatch(path, pattern) or path.startswith(f"{pattern}/"):
                there = rule.startswith("!")
    return there


def packages(command: str) -> set[str]:
    """What one command of apt-get installs."""
    (found,) = re.findall(r"apt-get install((?: [^&;\n]+)+)", re.sub(r"\\\n\s*", " ", command))
    return {word for word in found.split() if not word.startswith("-")}


def test_the_dockerfile_is_whole() -> None:
    found = instructions()
    known = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
    assert {word for word, _ in found} <= known
    (base,) = [rest for word, rest in found if rest.startswith("BASE=")]
    assert re.fullmatch(r"BASE=debian:bookworm-\d{8}-slim@sha256:[0-9a-f]{64}", base)
    stages = [rest for word, rest in found if word == "FROM"]
    assert stages == ["${BASE} AS build", "${BASE}"]
    for word, rest in found:
        if word == "COPY" and not rest.startswith("--from=build "):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                one = source if (ROOT / source).is_file() else f"{source}/any.txt"
                assert sent(one), f"{source} is not sent to the builder"
        if "apt-get install" in rest:
            assert "--no-install-recommends" in rest
            assert rest.endswith("rm -rf /var/lib/apt/lists/*")
        if word in ("ENTRYPOINT", "CMD"):
            assert isinstance(json.loads(rest), list)
    for left_out in (".venv/bin/python", ".git/config", "src/headway/data/libheadway.so", "tests/conftest.py"):
        assert not sent(left_out), left_out


def test_the_apptainer_recipe_installs_what_the_dockerfile_does() -> None:
    found, docker = sections(), [rest for word, rest in instructions() if word == "RUN"]
    assert found.keys() == {"", "files", "arguments", "post", "environment", "test", "runscript", "help"}
    header = dict(re.findall(r"^(\w+): (\S+)$", found[""], re.MULTILINE))
    digest = re.search(r"sha256:[0-9a-f]{64}", (DEPLOY / "Dockerfile").read_text())
    assert digest is not None
    assert header == {"Bootstrap": "docker", "From": f"debian@{digest[0]}"}
    for line in found["files"].split("\n"):
        if line:
            source, target = line.split()
            assert (ROOT / source).exists()
            assert target == f"/src/{source}"
    assert packages(found["post"]) == set().union(*(packages(one) for one in docker if "apt-get install" in one))
    lines = found["post"].replace("{{ TORCH_INDEX }}", "$TORCH_INDEX").splitlines()
    assert [line for line in lines if line.startswith("pip ")] == [one for one in docker if one.startswith("pip ")]
    for name in ("post", "environment", "test", "runscript"):
        subprocess.run(["sh", "-n"], input=found[name], text=True, check=True)


# The page


def test_the_page_names_options_and_files_that_there_are() -> None:
    page = (ROOT / "docs/launch.md").read_text()
    verbs = typer.main.get_command(main.app).commands  # type: ignore[attr-defined]
    known = {name: {option for param in verb.params for option in param.opts} for name, verb in verbs.items()}
    commands = re.findall(r"headway (train|bench-links)((?: [^`\n|\\]+)?)", page)
    assert len(commands) > 10
    for verb, arguments in commands:
        for option in re.findall(r" (--[a-z-]+)", arguments):
            assert option in known[verb], f"headway {verb} {option}"
    assert {"--procs", "--hosts", "--resume", "--run", "--run-folder"} <= set(re.findall(r"--[a-z-]+", page))
    named = set(re.findall(r"deploy/([\w.]+)", page))
    assert named == {"Dockerfile", "headway.def", "slurm.sh", "trainjob.yaml"}
    recipe = {f"comm.{name}" for name in CommRecipe.model_fields}
    assert set(re.findall(r"`(comm\.\w+)", page)) <= recipe


@pytest.mark.parametrize("name", ["Dockerfile", "headway.def", "slurm.sh", "trainjob.yaml"])
def test_each_file_says_how_far_it_was_tried(name: str) -> None:
    head = "".join(re.findall(r"^#.*\n", (DEPLOY / name).read_text(), re.MULTILINE)[:20])
    assert "# Tested: " in head
    assert "# Not tested: " in head
