"""Load of an NVIDIA GPU, from NVML, the driver's library, through the package nvidia-ml-py if it is installed.

The driver buffers the last seconds of utilisation and power, with several samples per second. Reading these buffers
misses no dip, even at long intervals. Clocks, memory and temperature are those of the moment.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core.nvml import load_nvml
from headway.observe.load_sampler import LoadRow, LoadSource

SOURCE_KIND = "gpu"
# busy: share of the time in which a kernel ran, on one multiprocessor or more. memory_busy: share of the time in which
# memory was read or written. throttle: bits of THROTTLE_REASONS. memory_bytes: memory of all processes.
COLUMNS = (
    "seconds", "busy", "memory_busy", "power_w", "power_limit_w", "sm_clock_hz", "throttle", "memory_bytes",
    "temperature_c",
)  # fmt: skip

# NVML's nvmlClocksEventReason, without the reasons that cost no speed (an idle GPU, clocks set by the user).
THROTTLE_REASONS = {
    0x4: "the power limit",
    0x8: "hardware: power or heat",
    0x20: "heat",
    0x40: "heat, by hardware",
    0x80: "the power supply",
}

# Rows per reading; if there are more samples, neighbours are averaged.
MAX_ROWS = 5
# Member of a sample's union, by nvmlValueType_t.
SAMPLE_FIELDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

GpuSamples = tuple[NDArray[np.float64], NDArray[np.float64]]
"""(seconds since the epoch, values)"""


def open_gpu(uuid: str) -> GpuSource | None:
    """Opens the GPU with a UUID (`GPU-...`, as NVML writes it); None without the package, the library or the GPU."""
    if (nvml := load_nvml()) is None:
        return None
    try:
        return GpuSource(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError:
        nvml.nvmlShutdown()
        return None


@final
class GpuSource(LoadSource):
    """Reads the load of one GPU. Values that the GPU or the driver does not report are NaN.

    Args:
        nvml: Module pynvml, after nvmlInit.
        handle: nvmlDevice_t of the GPU.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._last_sample_us: dict[int, int] = {}
        self._last_s = -math.inf
        self._buffers = (
            nvml.NVML_GPU_UTILIZATION_SAMPLES,
            nvml.NVML_MEMORY_UTILIZATION_SAMPLES,
            nvml.NVML_TOTAL_POWER_SAMPLES,
        )
        # Samples from before the run do not count.
        for buffer in self._buffers:
            self._drain(buffer)

    @property
    def kind(self) -> str:
        return SOURCE_KIND

    @property
    def columns(self) -> tuple[str, ...]:
        return COLUMNS

    def read(self, now_s: float) -> list[LoadRow]:
        nvml = self._nvml
        epoch_s = time.time()
        busy, memory_busy, power = map(self._drain, self._buffers)
        rates = self._query("nvmlDeviceGetUtilizationRates")
        # Without new samples in the buffer, the present rate has to do.
        if not len(busy[0]):
            busy = np.array([epoch_s]), np.array([math.nan if rates is None else float(rates.gpu)])
        sample_groups = np.array_split(busy[0], min(MAX_ROWS, len(busy[0])))
        ends = np.array([group[-1] for group in sample_groups])
        # NVML has the time of day, rows have the run's clock; clipping keeps them in order if the clocks drift.
        seconds = np.clip(now_s - (epoch_s - ends), self._last_s, now_s)
        self._last_s = now_s
        current = (
            self._read_number("nvmlDeviceGetEnforcedPowerLimit", scale=1e-3),
            self._read_number("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM, scale=1e6),
            self._read_throttle(),
            self._read_memory_bytes(),
            self._read_number("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        )
        columns = zip(
            seconds,
            _average_until(busy, ends) / 100,
            _average_until(memory_busy, ends, math.nan if rates is None else float(rates.memory)) / 100,
            _average_until(power, ends, self._read_number("nvmlDeviceGetPowerUsage")) / 1000,
            strict=True,
        )
        return [(*map(float, averages), *current) for averages in columns]

    def close(self) -> None:
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _drain(self, buffer: int) -> GpuSamples:
        """Returns the samples that the driver added to a buffer since the last call."""
        last_us = self._last_sample_us.get(buffer, 0)
        try:
            value_type, samples = self._nvml.nvmlDeviceGetSamples(self._handle, buffer, last_us)
        # NVML reports an error if the GPU does not support samples, and also if there is no new one.
        except self._nvml.NVMLError:
            samples, value_type = [], 0
        new_samples = [sample for sample in samples if sample.timeStamp > last_us]
        if new_samples:
            self._last_sample_us[buffer] = new_samples[-1].timeStamp
        values = [float(getattr(sample.sampleValue, SAMPLE_FIELDS[value_type])) for sample in new_samples]
        return np.array([sample.timeStamp for sample in new_samples]) / 1e6, np.array(values)

    def _query(self, name: str, *arguments: Any) -> Any:
        """Returns the result of a function of NVML; None if this driver or GPU does not support it."""
        try:
            return getattr(self._nvml, name)(self._handle, *arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def _read_number(self, name: str, *arguments: Any, scale: float = 1.0) -> float:
        value = self._query(name, *arguments)
        return math.nan if value is None else float(value) * scale

    def _read_throttle(self) -> float:
        """Returns the bits of THROTTLE_REASONS; older drivers have them under another name."""
        reasons = self._query("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = self._query("nvmlDeviceGetCurrentClocksThrottleReasons")
        return math.nan if reasons is None else float(reasons & sum(THROTTLE_REASONS))

    def _read_memory_bytes(self) -> float:
        memory = self._query("nvmlDeviceGetMemoryInfo")
        return math.nan if memory is None else float(memory.used)


def _average_until(samples: GpuSamples, ends: NDArray[np.float64], default: float = math.nan) -> NDArray[np.float64]:
    """Returns the averages of the samples between successive times; the last one includes the samples after it.

    Args:
        ends: [n] times in seconds.
        default: Average of an interval without samples.
    """
    times, values = samples
    indices = np.minimum(np.searchsorted(ends, times), len(ends) - 1)
    counts = np.bincount(indices, minlength=len(ends))
    sums = np.bincount(indices, values, minlength=len(ends))
    return np.where(counts > 0, sums / np.maximum(counts, 1), default)
