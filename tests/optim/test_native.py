"""The native core's steps: the same bits from every instruction set, refused arguments, and doing without it."""

from __future__ import annotations

import ctypes
import json
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.conftest import absent
from tests.optim._cases import CASES, parameters, walk

import headway
from headway.core.errors import UsageError
from headway.core.native import LIBRARY, find_gomp
from headway.optim import native

NATIVE = [name for name in sorted(CASES) if not name.startswith("muon")]


@pytest.fixture(autouse=True)
def _built() -> None:
    if not native.is_available():
        absent("the native core is not built")


@pytest.mark.thin(13)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", NATIVE)
def test_every_instruction_set_gives_the_same_bits(
    name: str, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks = []
    for isa in ("portable", "avx2", "avx512"):  # one that is not here is the best that is
        monkeypatch.setenv("HEADWAY_ISA", isa)
        params = parameters(kind)
        make, _, lr, options = CASES[name]
        optimizer = make(params, lr, **options)
        if kind == torch.bfloat16:
            optimizer.use_bf16()
        walk(optimizer, params, lr, steps=4)
        walks.append(params)
    for left, middle, right in zip(*walks, strict=True):
        assert torch.equal(left, middle)
        assert torch.equal(left, right)


def test_threads_are_those_of_torch() -> None:
    """GOMP_parallel where torch has it, as its wheels for Linux do."""
    assert find_gomp()


def test_what_is_out_of_range_is_refused_and_changes_nothing() -> None:
    library = ctypes.CDLL(str(LIBRARY))
    assert library.hw_optimize(None) == -1
    assert library.hw_optimize((ctypes.c_uint8 * 200)()) == -1
    weight = torch.ones(3)
    with pytest.raises(
        UsageError, match=r"the native core cannot do this step \(LAMB, 1 parameters\). Set fused=False"
    ):
        native.step_native(
            native.NativeRule.LAMB, native.NativeTensors(weights=[weight], grads=[weight]),
            options=(0.9, 0.9, 1e-8, 0.0), lr=0.1, grad_scale=None, found_inf=None,
        )  # fmt: skip
    with pytest.raises(UsageError, match="LARS is given 7 options and 1 parameters"):
        native.step_native(
            native.NativeRule.LARS, native.NativeTensors(weights=[weight], grads=[weight], adapt=[False], keys=[1, 2]),
            options=(0.0,) * 7, lr=0.1, grad_scale=None, found_inf=None,
        )  # fmt: skip
    # In bfloat16 there is no step without keys, and none with them without counts.
    for narrow, keys in ((weight.bfloat16(), None), (weight, [1])):
        with pytest.raises(UsageError, match="the native core cannot do this step"):
            native.step_native(
                native.NativeRule.LARS,
                native.NativeTensors(weights=[narrow], grads=[narrow], adapt=[False], keys=keys),
                options=(0.0,) * 7, lr=0.1, grad_scale=None, found_inf=None,
            )  # fmt: skip
    assert torch.equal(weight, torch.ones(3))


WITHOUT = """
import sys
sys.path[:0], sys.path[len(sys.path):] = [sys.argv[1]], sys.argv[2:]
import torch
from headway import optim
for _ in range(2):
    weight = torch.nn.Parameter(torch.ones(3, 2))
    weight.grad = torch.full_like(weight, 0.5)
    optim.LARS([weight], 1.0, trust=0.1).step()
print(weight.flatten().tolist())
"""


@pytest.mark.check
def test_without_the_library_torch_does_it_and_one_sentence_says_what_is_lost(tmp_path: Path) -> None:
    source = Path(headway.__file__).parent
    shutil.copytree(source, tmp_path / "headway", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    # -S: an editable install would put the source tree before every path
    command = [sys.executable, "-S", "-c", WITHOUT, str(tmp_path), *site.getsitepackages()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [round(value, 6) for value in json.loads(done.stdout)] == [0.9] * 6
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("The native core is not built: LARS, LAMB and their like take several times as long")
    assert "g++ cmake libjpeg62-turbo-dev" in sentence
