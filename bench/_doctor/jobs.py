"""Job: a training run to measure, with its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, final

import yaml

BIG = 10**9


@final
@dataclass(frozen=True)
class Limits:
    """What is less around a job than the machine has; None: nothing is."""

    cores: float | None = None
    """Of processor time, for all of its processes."""
    disk_bytes_s: float | None = None
    """Read from the disk on which the data lie."""
    remote_bits_s: float | None = None
    """Of a web server that the data come from."""
    link_bits_s: float | None = None
    """Of all that its processes tell each other."""


@final
@dataclass(frozen=True)
class Job:
    """Attributes:
    data: name of the training set, see `bench._doctor.data`.
    recipe: by dotted key; where the data are is not in it.
    environ: variables of its processes.
    cold: its files are read from the disk: the first epoch.
    held_out: it has an evaluation set.
    """

    data: str
    recipe: Mapping[str, Any]
    environ: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = Limits()
    procs: int = 1
    cold: bool = False
    held_out: bool = False

    def but(
        self,
        recipe: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        limits: Mapping[str, float | None] | None = None,
        **more: Any,
    ) -> Job:
        """The same with some things otherwise."""
        return replace(
            self,
            recipe={**self.recipe, **(recipe or {})},
            environ={**self.environ, **(environ or {})},
            limits=replace(self.limits, **(limits or {})),
            **more,
        )

    def write(self, path: Path, train: str, held_out: str = "") -> None:
        """Writes its recipe, with where its data are."""
        places = {"data.train": train, **({"data.eval": held_out} if self.held_out else {})}
        tree: dict[str, Any] = {}
        for key, value in {**self.recipe, **places}.items():
            *parents, last = key.split(".")
            part = tree
            for name in parents:
                part = part.setdefault(name, {})
            part[last] = value
        path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def network(factory: str, **args: Any) -> dict[str, Any]:
    """What a recipe says of a network."""
    return {"model.factory": factory, "model.args": args}


def own(name: str) -> str:
    """Import path of something in bench/_doctor/user.py."""
    return f"bench._doctor.user:{name}"


# Mean and standard deviation stand here, since measuring them would read files that are to be cold. Files are read and
# decoded by one thread and the network computes with another, so that on two cores neither takes from the other.
_ANY: dict[str, Any] = {
    "seed": 1,
    "device": "cpu",
    "data.cache": "none",
    "data.threads": 1,
    "augment.flip": True,
    "augment.mean": [125.0, 123.0, 114.0],
    "augment.std": [63.0, 62.0, 66.0],
    **network(own("Lenet")),
    "optimizer.name": "sgd",
    "optimizer.lr": 0.001,
    "optimizer.momentum": 0.9,
    "epochs": BIG,
    "precision": "fp32",
    "checkpoint.every_steps": BIG,
    "log_every_steps": 10,
}
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}

BASES = {
    "cifar": Job("pixels", {**_ANY, "batch": 128}, _ONE_THREAD),
    "photos": Job("photos raw", {**_ANY, "batch": 32, "data.size": 224}, _ONE_THREAD),
}
"""Jobs in which no stage takes much, of 50,000 images of 32 x 32 pixels and of 250 photographs of 224 x 224."""
