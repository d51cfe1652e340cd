"""The result of `headway tune` on the tutorial's loop: both recipes side by side, by the clock of this bench."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench._arms import ROOT, Comparison
from bench._common import Claim, table
from bench._ladder.contestants import rows, train, tutorial
from bench._ladder.feeding import Pace
from bench._ladder.rungs import Network, times
from headway.core.recipe import format_value, read_recipe
from headway.setup.recipe import TrainRecipe


class TuneError(Exception):
    """`headway tune` did not come to an end; the reason."""


ALLOWED = "precision,batch"
"""What the ladder changes too, and tune only with leave."""


def tuned(recipe: Path, out: Path, allow: str) -> Path:
    """The recipe that `headway tune` writes. Raises TuneError.

    Args:
        allow: what may change the mathematics; empty: nothing may.
    """
    command = [sys.executable, "-m", "headway", "tune", str(recipe), "--out", str(out), "--allow", allow, "--json"]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # the network is of this package
    done = subprocess.run(
        command, cwd=recipe.parent, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [""]
        raise TuneError(f"it ended with status {done.returncode}: {said[-1]}")
    found: dict[str, Any] = json.loads(done.stdout)
    tried = [(one["override"], "kept" if one["kept"] else "left", f"{one['gain']:.2f}") for one in found["steps"]]
    table([("headway tune tried", "and", "by its own clock"), *tried])
    return recipe.parent / str(found["written"])


def changes(before: Path, after: Path) -> list[tuple[str, str, str]]:
    """(key, before, after) of what two recipes have not in common."""
    one, other = (dict(read_recipe(path, (), TrainRecipe).list_leaves()) for path in (before, after))
    keys = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
    return [(key, format_value(one.get(key)), format_value(other.get(key))) for key in keys]


def measure(recipe: Path, network: Network, images: Path, folder: Path, pace: Pace) -> list[Claim]:
    """The claims, and tables; nothing, and said, where tune fails."""
    made: dict[str, Path] = {}
    try:
        for name, allow in (("tuned", ALLOWED), ("tuned, exact", "")):
            made[name] = tuned(recipe, recipe.with_suffix(f".{name.replace(', ', '-')}.yaml"), allow)
            table([("key", "before", "after"), *changes(recipe, made[name])])
    except TuneError as reason:
        print(f"headway tune: not here ({reason})")
        return []
    rounds, seconds = pace
    claims = []
    with Comparison(folder) as arms:
        arms.add("tutorial", tutorial(images, network.factory))
        arms.add("recipe", train(recipe))
        for name, path in made.items():
            arms.add(name, train(path))
        arms.run(rounds, seconds)
        table(rows(arms))
        for claim, name, allowed in (
            ("tune_gain", "tuned", f"--allow {ALLOWED}"),
            ("tune_gain_exact", "tuned, exact", "nothing allowed that changes the mathematics"),
        ):
            if (ratio := arms.ratio(name, "recipe")) is not None:
                how = (
                    f"{network.name}, median of {rounds} rounds of {seconds:g} s; 95 % [{ratio[1]:.3g}, {ratio[2]:.3g}]"
                )
                beside = times(arms.ratio(name, "tutorial"))
                said = f"{allowed}; over the recipe; {how}; over the tutorial's own loop {beside}"
                claims.append(Claim(claim, ratio[0], "", said))
    return claims
