"""What the tests cost: seconds of the processor, of a test and of every process that it started.

They hardly depend on what else the machine does, as wall-clock time does. A child counts once it has been waited for,
with all that it waited for itself; the fork server counts when it ends, in the total.
"""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from tests import _fork

SLOWEST = int(os.environ.get("HEADWAY_TEST_SLOWEST", "10"))
_spent: defaultdict[str, float] = defaultdict(float)
_workers: list[float] = []
_before = 0.0


def _cpu_s(*who: int) -> float:
    found = [resource.getrusage(one) for one in who or (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in found)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Gives each report of a test (setup, call, teardown) the seconds since the report before it."""
    global _before
    report: Any = yield
    now = _cpu_s()
    report.cpu_s, _before = now - _before, now
    return report


def pytest_runtest_logstart() -> None:
    global _before
    if _before == 0.0:  # what comes before the first test is imports and collection
        _before = _cpu_s()


def pytest_runtest_logreport(report: Any) -> None:
    if hasattr(report, "cpu_s"):
        _spent[report.nodeid] += report.cpu_s


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    _fork.close()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu_s"] = _cpu_s()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _workers.append(getattr(node, "workeroutput", {}).get("cpu_s", 0.0))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    total = sum(_workers) + (_cpu_s(resource.RUSAGE_SELF) if _workers else _cpu_s())
    tests = sum(_spent.values())
    if total < 10 or not _spent or "PYTEST_XDIST_WORKER" in os.environ:
        return
    terminalreporter.section(f"{total:.0f} CPU seconds: {tests:.0f} in {len(_spent)} tests, the slowest of them:")
    for name in sorted(_spent, key=_spent.__getitem__, reverse=True)[:SLOWEST]:
        terminalreporter.line(f"{_spent[name]:7.2f} {name}")
