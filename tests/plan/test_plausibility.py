"""What cannot be is refused, in one sentence with the fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench._plan.local import resnet50
from bench._plan.scaling import device_of, rows
from tests._support import refused
from tests.plan._workload import workload

from headway.core.errors import UsageError
from headway.core.workload import Workload
from headway.plan.calibration import MeasuredRun
from headway.plan.cluster import load_devices
from headway.plan.plausibility import check_phases, check_rates, count_least_operations


def in_precision(found: Workload, precision: str) -> Workload:
    return found.model_copy(update={"step": found.step.model_copy(update={"precision": precision})})


@pytest.mark.parametrize(
    ("precision", "images_s", "words"),
    [
        ("fp16", 795, None),
        ("fp16", 11_105 / 8, None),
        ("fp16", 20_000, r"1x64:20000 is \d+ TFLOPS a device, and the peak of V100 SXM2 is 125. Check the devices"),
        ("fp32", 402, None),
        ("fp32", 1_388, r"computes in fp32, and the peak of V100 SXM2 in fp32 is 15.7. .* add precision=fp16 after"),
        ("fp32", 20_000, "the peak of V100 SXM2 is 125"),
    ],
)
def test_no_device_is_faster_than_its_peak(precision: str, images_s: float, words: str | None) -> None:
    asked = in_precision(resnet50(), precision), load_devices()["v100"]
    if words is None:
        check_rates([MeasuredRun(1, 64, images_s)], *asked)
        return
    with pytest.raises(UsageError, match=words):
        check_rates([MeasuredRun(1, 64, images_s)], *asked)


def test_no_published_run_of_resnet_50_is_refused() -> None:
    for row in rows():
        if row.model.startswith("ResNet-50") and row.images_s is not None:
            precision = "fp32" if row.precision == "FP32" else "fp16"
            check_rates([row.run], in_precision(resnet50(), precision), load_devices()[device_of(row)])


def test_winograd_makes_3x3_convolutions_cheaper() -> None:
    found = resnet50()
    assert found.operations / 2.25 < count_least_operations(found) < found.operations
    # The kernels of this one are no squares of three.
    assert count_least_operations(workload()) == workload().operations


def test_layers_do_the_work_of_their_last_phase(tmp_path: Path) -> None:
    check_phases(resnet50(), "it")
    found = workload()
    (phase,) = found.run.phases
    other = phase.model_copy(update={"forward_multiply_adds": phase.forward_multiply_adds // 3})
    torn = found.model_copy(update={"run": found.run.model_copy(update={"phases": (phase, other)})})
    with pytest.raises(UsageError, match=r"its last phase has 1,333,333,333. Write it anew: headway train RECIPE"):
        check_phases(torn, "it")
    torn.write(tmp_path / "torn.json")
    assert "multiply-adds per image" in refused("plan", tmp_path / "torn.json", "--cluster", "dgx-1", status=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--image-kb", "-3"), "--image-kb: an encoded image has more than 0 and up to 1,000,000 kB, not -3."),
        (("--image-kb", "nan"), "not nan."),
        (("--price", "1e308"), "--price: the price of a node is 0 to 1,000,000 an hour, not 1e+308."),
        (("--price", "-1"), "not -1."),
        (("--runs", "8x64:1e3"), "'8x64:1e3' is not a measured run"),
        (("--runs", "1x64:100,1x64:300"), "no device explains all of these runs: 1x64 gave 100 images/s"),
        (("--runs", "8x64:9999999"), "the peak of V100 SXM2 is 125"),
    ],
)
def test_numbers_that_cannot_be_are_refused(options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    workload().write(tmp_path / "photos.json")
    assert words in refused("plan", tmp_path / "photos.json", "--cluster", "dgx-1", *options, status=2)


def test_a_facility_refuses_them_too() -> None:
    assert "--image-kb: an encoded image" in refused("plan", "--facility", "6", "--image-kb", "-3", status=2)
