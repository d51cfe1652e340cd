"""What an NVIDIA GPU does, by NVML, the driver's own library; through the package nvidia-ml-py, where that is there.

Its driver keeps the last seconds of utilisation and power in buffers of its own, several samples a second: these are
taken over, so that rare readings miss no dip. Clocks, memory and temperature are those of the moment.
"""

from __future__ import annotations

import importlib
import math
import time
import warnings
from contextlib import suppress
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.observe.load_sampler import LoadRow, LoadSource

KIND = "gpu"
COLUMNS = (
    "seconds", "busy", "memory_busy", "power_w", "power_limit_w", "sm_clock_hz", "throttle", "memory_bytes",
    "temperature_c",
)  # fmt: skip
"""busy: share of the time in which a kernel ran, be it on one multiprocessor. memory_busy: in which memory was read or
written. throttle: bits of THROTTLED, why the clock is lower than it could be. memory_bytes: of all processes."""

THROTTLE_REASONS = {
    0x4: "the power limit",
    0x8: "hardware: power or heat",
    0x20: "heat",
    0x40: "heat, by hardware",
    0x80: "the power supply",
}
"""Reasons that cost speed, by NVML's nvmlClocksEventReason; an idle GPU and chosen clocks are none."""

MAX_ROWS = 5
"""Rows of one reading; of more samples, neighbours are put together."""
SAMPLE_FIELDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Member of a sample's union, by nvmlValueType_t."""

GpuSamples = tuple[NDArray[np.float64], NDArray[np.float64]]
"""(seconds since the epoch, values)."""


def open_gpu(uuid: str) -> GpuSource | None:
    """The GPU of a UUID as NVML writes it, `GPU-...`; None where the package, the library or that GPU is not there."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an older package of the same name
            nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    with suppress(nvml.NVMLError):
        nvml.nvmlInit()
        try:
            return GpuSource(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
        except nvml.NVMLError:
            nvml.nvmlShutdown()
    return None


@final
class GpuSource(LoadSource):
    """Reads it. What a GPU or a driver does not tell is NaN.

    Args:
        nvml: the module pynvml, after nvmlInit. handle: nvmlDevice_t.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._seen: dict[int, int] = {}
        self._last_s = -math.inf
        self._buffers = (
            nvml.NVML_GPU_UTILIZATION_SAMPLES,
            nvml.NVML_MEMORY_UTILIZATION_SAMPLES,
            nvml.NVML_TOTAL_POWER_SAMPLES,
        )
        for kind in self._buffers:
            self._drain(kind)  # what was before

    @property
    def kind(self) -> str:
        return KIND

    @property
    def columns(self) -> tuple[str, ...]:
        return COLUMNS

    def read(self, now_s: float) -> list[LoadRow]:
        nvml, epoch_s = self._nvml, time.time()
        busy, memory, power = map(self._drain, self._buffers)
        rates = self._query("nvmlDeviceGetUtilizationRates")
        if not len(busy[0]):  # no buffer, or nothing new in it
            busy = np.array([epoch_s]), np.array([math.nan if rates is None else float(rates.gpu)])
        groups = np.array_split(busy[0], min(MAX_ROWS, len(busy[0])))
        ends = np.array([group[-1] for group in groups])
        seconds = np.clip(now_s - (epoch_s - ends), self._last_s, now_s)
        self._last_s = now_s
        now = (
            self._read_number("nvmlDeviceGetEnforcedPowerLimit", scale=1e-3),
            self._read_number("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM, scale=1e6),
            self._read_throttle(),
            self._read_memory_bytes(),
            self._read_number("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        )
        columns = zip(
            seconds,
            _average_until(busy, ends) / 100,
            _average_until(memory, ends, math.nan if rates is None else float(rates.memory)) / 100,
            _average_until(power, ends, self._read_number("nvmlDeviceGetPowerUsage")) / 1000,
            strict=True,
        )
        return [(*map(float, of_its_time), *now) for of_its_time in columns]

    def close(self) -> None:
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _drain(self, kind: int) -> GpuSamples:
        """What the driver has kept since the last time."""
        seen = self._seen.get(kind, 0)
        try:
            value_type, found = self._nvml.nvmlDeviceGetSamples(self._handle, kind, seen)
        except self._nvml.NVMLError:  # not supported, or nothing new
            found, value_type = [], 0
        new = [sample for sample in found if sample.timeStamp > seen]
        if new:
            self._seen[kind] = new[-1].timeStamp
        values = [float(getattr(sample.sampleValue, SAMPLE_FIELDS[value_type])) for sample in new]
        return np.array([sample.timeStamp for sample in new]) / 1e6, np.array(values)

    def _query(self, name: str, *arguments: Any) -> Any:
        """What a function of NVML says; None where this driver or this GPU has it not."""
        try:
            return getattr(self._nvml, name)(self._handle, *arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def _read_number(self, name: str, *arguments: Any, scale: float = 1.0) -> float:
        found = self._query(name, *arguments)
        return math.nan if found is None else float(found) * scale

    def _read_throttle(self) -> float:
        """Older drivers call the events throttling."""
        found = self._query("nvmlDeviceGetCurrentClocksEventReasons")
        if found is None:
            found = self._query("nvmlDeviceGetCurrentClocksThrottleReasons")
        return math.nan if found is None else float(found & sum(THROTTLE_REASONS))

    def _read_memory_bytes(self) -> float:
        found = self._query("nvmlDeviceGetMemoryInfo")
        return math.nan if found is None else float(found.used)


def _average_until(samples: GpuSamples, ends: NDArray[np.float64], otherwise: float = math.nan) -> NDArray[np.float64]:
    """The mean of the samples up to each of these times, since the one before; the last also has what came later."""
    times, values = samples
    places = np.minimum(np.searchsorted(ends, times), len(ends) - 1)
    counts = np.bincount(places, minlength=len(ends))
    sums = np.bincount(places, values, minlength=len(ends))
    return np.where(counts > 0, sums / np.maximum(counts, 1), otherwise)
