"""Free memory: the machine's, or less in a control group."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from headway.core import free_memory


def test_free_memory_is_the_machines_or_what_a_limit_leaves(tmp_path: Path) -> None:
    free = psutil.virtual_memory().available
    groups, membership = tmp_path / "groups", tmp_path / "membership"
    membership.write_text("")
    assert free_memory.read_free_memory_bytes(groups=groups, membership=membership) == pytest.approx(free, rel=0.3)

    def group(path: Path, limit: str, used: int, cached: int, unified: bool) -> None:
        path.mkdir(parents=True, exist_ok=True)
        names = ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        (path / names[0]).write_text(f"{limit}\n")
        (path / names[1]).write_text(f"{used}\n")
        (path / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")

    membership.write_text("0::/outer/inner\n")
    group(groups / "outer", "9000", 8000, 500, True)
    group(groups / "outer/inner", "max", 10, 0, True)
    assert free_memory.read_free_memory_bytes(groups=groups, membership=membership) == 1500
    group(groups / "outer/inner", "1000", 100, 0, True)
    assert free_memory.read_free_memory_bytes(groups=groups, membership=membership) == 900
    group(groups / "outer/inner", "1000", 2000, 0, True)
    assert free_memory.read_free_memory_bytes(groups=groups, membership=membership) == 0
    membership.write_text("4:memory:/own\n3:cpu:/own\n")
    group(groups / "memory/own", "7000", 3000, 1000, False)
    assert free_memory.read_free_memory_bytes(groups=groups, membership=membership) == 5000
