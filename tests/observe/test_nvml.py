"""What is read of a GPU, against a driver's library that is none: NVML's own names, types and errors."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any, final

import pytest

from headway.observe.nvml import COLUMNS, MAX_ROWS, GpuSource, open_gpu


class NVMLError(Exception):
    pass


@final
class Driver:
    """Buffers of samples (microseconds since the epoch, value) by type, and what is asked for at the moment."""

    NVML_TOTAL_POWER_SAMPLES, NVML_GPU_UTILIZATION_SAMPLES, NVML_MEMORY_UTILIZATION_SAMPLES = 0, 1, 2
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
    NVMLError = NVMLError

    def __init__(self, *lacks: str) -> None:
        self.lacks = lacks
        self.buffers: dict[int, list[tuple[int, float]]] = {0: [], 1: [], 2: []}
        self.value_type = 1
        self.shut = 0

    def nvmlDeviceGetSamples(self, handle: str, kind: int, seen: int) -> tuple[int, list[Any]]:  # noqa: N802
        found = [one for one in self.buffers[kind] if one[0] > seen]
        if not found:
            raise NVMLError("not found")
        return self.value_type, [SimpleNamespace(timeStamp=at, sampleValue=self.union(value)) for at, value in found]

    def union(self, value: float) -> SimpleNamespace:
        """As C's: only the member of the type holds the value."""
        members = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal")
        return SimpleNamespace(**dict.fromkeys(members, -1) | {members[self.value_type]: value})

    def __getattr__(self, name: str) -> Any:
        values = {
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=37, memory=11),
            "nvmlDeviceGetPowerUsage": 250_000,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x1 | 0x4 | 0x20,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x40,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=5 << 30),
            "nvmlDeviceGetTemperature": 61,
        }
        if name == "nvmlShutdown":
            self.shut += 1
            return lambda: None
        if name not in values:
            raise AttributeError(name)

        def ask(handle: str, *arguments: Any) -> Any:
            assert handle == "handle"
            if name in self.lacks:
                raise NVMLError("not supported")
            return values[name]

        return ask


def read(gpu: GpuSource, now_s: float = 100.0) -> list[dict[str, float]]:
    return [dict(zip(COLUMNS, row, strict=True)) for row in gpu.read(now_s)]


def fill(driver: Driver, kind: int, *samples: tuple[float, float]) -> None:
    """(seconds before now, value)."""
    now = time.time_ns() // 1000
    driver.buffers[kind] += [(now - round(ago * 1e6), value) for ago, value in samples]


def test_the_buffers_are_taken_over_once_each_sample_at_its_time() -> None:
    driver = Driver()
    fill(driver, 1, (5.0, 99))  # before
    gpu = GpuSource(driver, "handle")
    fill(driver, 1, (0.4, 100), (0.25, 50), (0.1, 0))
    fill(driver, 2, (0.45, 30), (0.15, 10))
    fill(driver, 0, (0.45, 100_000), (0.42, 300_000), (0.3, 500_000), (0.05, 600_000))
    rows = read(gpu)
    assert [row["busy"] for row in rows] == [1.0, 0.5, 0.0]
    assert [row["memory_busy"] for row in rows] == [0.3, 0.11, 0.1]  # what has no sample is that of the moment
    assert [row["power_w"] for row in rows] == [200, 500, 600]
    for row, ago in zip(rows, (0.4, 0.25, 0.1), strict=True):
        assert row["seconds"] == pytest.approx(100 - ago, abs=0.05)
        assert row["power_limit_w"] == 700
        assert row["sm_clock_hz"] == 1980e6
        assert int(row["throttle"]) == 0x4 | 0x20  # an idle GPU is not slowed
        assert row["memory_bytes"] == 5 << 30
        assert row["temperature_c"] == 61
    (again,) = read(gpu, 100.5)
    assert (again["busy"], again["memory_busy"], again["power_w"]) == (0.37, 0.11, 250)
    assert again["seconds"] == 100.5


def test_of_many_samples_neighbours_are_put_together() -> None:
    driver = Driver()
    gpu = GpuSource(driver, "handle")
    fill(driver, 1, *((1 - place / 100, place) for place in range(100)))
    rows = read(gpu)
    assert [row["busy"] for row in rows] == pytest.approx([(9.5 + 20 * place) / 100 for place in range(MAX_ROWS)])


def test_times_of_another_clock_do_not_leave_the_reading() -> None:
    driver = Driver()
    gpu = GpuSource(driver, "handle")
    read(gpu, 100.0)
    fill(driver, 1, (3600, 10), (1800, 20), (-50, 30))
    rows = read(gpu, 100.5)
    assert [row["seconds"] for row in rows] == [100.0, 100.0, 100.5]
    assert [row["busy"] for row in rows] == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize("value_type", range(5))
def test_samples_of_any_type(value_type: int) -> None:
    driver = Driver()
    driver.value_type = value_type
    gpu = GpuSource(driver, "handle")
    fill(driver, 1, (0.1, 42))
    assert [row["busy"] for row in read(gpu)] == [0.42]


@pytest.mark.parametrize(
    ("lacks", "column", "value"),
    [
        ("nvmlDeviceGetUtilizationRates", "busy", math.nan),
        ("nvmlDeviceGetUtilizationRates", "memory_busy", math.nan),
        ("nvmlDeviceGetPowerUsage", "power_w", math.nan),
        ("nvmlDeviceGetEnforcedPowerLimit", "power_limit_w", math.nan),
        ("nvmlDeviceGetClockInfo", "sm_clock_hz", math.nan),
        ("nvmlDeviceGetCurrentClocksEventReasons", "throttle", 0x40),  # as older drivers call them
        ("nvmlDeviceGetMemoryInfo", "memory_bytes", math.nan),
        ("nvmlDeviceGetTemperature", "temperature_c", math.nan),
    ],
)
def test_what_a_gpu_does_not_tell_is_no_number(lacks: str, column: str, value: float) -> None:
    (row,) = read(GpuSource(Driver(lacks), "handle"))
    assert row[column] == pytest.approx(value, nan_ok=True)
    assert sum(map(math.isnan, row.values())) == (0 if column == "throttle" else 1 + (lacks.endswith("Rates")))


def test_it_is_let_go() -> None:
    driver = Driver()
    GpuSource(driver, "handle").close()
    assert driver.shut == 1


def test_a_gpu_that_is_not_there() -> None:
    assert open_gpu("GPU-00000000-0000-0000-0000-000000000000") is None


def test_the_package_has_the_names_that_are_used() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    names = {name for name in vars(Driver) if name.startswith(("NVML", "nvml"))}
    asked = ("UtilizationRates", "PowerUsage", "EnforcedPowerLimit", "ClockInfo", "MemoryInfo", "Temperature")
    names |= {f"nvmlDeviceGet{name}" for name in (*asked, "CurrentClocksEventReasons", "HandleByUUID")}
    assert {name for name in (*names, "nvmlInit", "nvmlShutdown") if not hasattr(pynvml, name)} == set()
    for name in ("NVML_TOTAL_POWER_SAMPLES", "NVML_GPU_UTILIZATION_SAMPLES", "NVML_MEMORY_UTILIZATION_SAMPLES"):
        assert getattr(pynvml, name) == getattr(Driver, name)


@pytest.mark.gpu
def test_a_real_gpu() -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    import torch

    gpu = open_gpu(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    assert gpu is not None
    time.sleep(0.5)
    rows = read(gpu)
    gpu.close()
    assert rows
    for row in rows:
        assert 0 <= row["busy"] <= 1
        assert 0 < row["power_w"] < 2 * row["power_limit_w"]
        assert row["memory_bytes"] > 0
