"""Reads facts about this host from the kernel's files, and builds the findings of the environment checks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import final

from headway.core.cgroups import find_cgroups
from headway.core.cpu_count import count_usable_cores, read_local_ranks
from headway.core.profile import EnvironmentFinding

Findings = Iterator[EnvironmentFinding]


@final
class HostFiles:
    """Reads the kernel's files; facts that they do not give are noted in `unknown`."""

    def __init__(self, root: Path, environ: Mapping[str, str]) -> None:
        self.root, self.environ, self.unknown = root, environ, list[str]()
        self.membership, self.control_groups = root / "proc/self/cgroup", root / "sys/fs/cgroup"
        self.cores = count_usable_cores(groups=self.control_groups, membership=self.membership)
        self.ranks = read_local_ranks() or 1
        # Cores per rank: all ranks of this host share the usable cores.
        self.share = max(1, self.cores // self.ranks)
        words = re.search(r"^(?:flags|Features)\s*:(.*)$", self.read_text("proc/cpuinfo"), re.MULTILINE)
        self.flags = frozenset(words[1].split()) if words else frozenset[str]()

    def read_text(self, path: str | Path) -> str:
        """Reads a file without surrounding blanks; empty if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def read_number(self, path: str | Path) -> float:
        """Reads a number; NaN if there is none."""
        try:
            return float(self.read_text(path))
        except ValueError:
            return math.nan

    def find_groups(self, controller: str) -> Iterator[Path]:
        return find_cgroups(controller, self.control_groups, self.membership)


# A finding without a cure is shown as fine.
def report_fine(what: str) -> EnvironmentFinding:
    return EnvironmentFinding(what=what, cure="")


def report_fault(what: str, cure: str) -> EnvironmentFinding:
    return EnvironmentFinding(what=what, cure=cure)


def parse_cpu_list(text: str) -> set[int]:
    """Parses a list such as `0-3,8`."""
    bounds = [(int(one[1]), int(one[2] or one[1])) for one in re.finditer(r"(\d+)(?:-(\d+))?", text)]
    return {number for low, high in bounds for number in range(low, high + 1)}
