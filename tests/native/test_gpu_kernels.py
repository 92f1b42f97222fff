"""The GPU kernels, compiled by NVIDIA's compiler, which needs no GPU."""

from __future__ import annotations

import locale
import re

import pytest

from tests.harness.tiers import some
from tfdist._src.native import gpu_kernels
from tfdist.errors import NativeUnavailableError

TYPES = ["uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
REDUCTIONS = [f"{name}_{op}" for name in TYPES for op in ("sum", "min", "max", "product")]
REDUCTIONS += [f"{name}_mean" for name in TYPES if "float" in name]
KERNELS = {f"tfdist_{how}_{name}" for how in ("one_shot", "reduce") for name in REDUCTIONS}
KERNELS |= {"tfdist_pack", "tfdist_barrier", "tfdist_signal", "tfdist_unpack"}
FORMS = ["half", "bfloat16", "float8", "levels2", "levels4", "levels8", "powers", "means", "signs"]
KERNELS |= {f"tfdist_{what}_{form}" for what in ("encode", "decode", "sum") for form in FORMS}
KERNELS |= {"tfdist_sum_votes"}
SELECTION = ["digits", "narrow", "count", "place", "sum", "take", "forget"]
KERNELS |= {f"tfdist_select_{step}" for step in SELECTION}
KERNELS |= {f"tfdist_scatter_{step}" for step in ("find", "order", "sum")}
ARCHITECTURES = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90"]


@pytest.mark.parametrize("architecture", some(ARCHITECTURES, always=[]))
def test_every_kernel_keeps_its_values_in_registers(architecture):
    binary, log = gpu_kernels.compile_for(
        architecture, gpu_kernels.find_nvrtc(), ["--ptxas-options=-v"]
    )
    assert binary.startswith(b"\x7fELF")
    assert "warning" not in log
    assert set(re.findall(r"Compiling entry function '(\w+)'", log)) == KERNELS
    taken = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
    assert taken == [("0", "0")] * len(KERNELS)
    # All of a multiprocessor's threads can run at once with at most 32; half of them are enough.
    assert max(map(int, re.findall(r"Used (\d+) registers", log))) <= 64


def test_they_are_compiled_once_and_what_cannot_be_is_one_line(options, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_kernels, "_UNIT", "device/kernels/scatter.cu")  # The quickest ones.
    said = []
    encoding = locale.getpreferredencoding(False)
    (first,) = gpu_kernels.ensure(["sm_80"], options, announce=said.append)
    assert gpu_kernels.find("sm_80", options) == first.path
    assert gpu_kernels.find("sm_90", options) is None
    (again,) = gpu_kernels.ensure(["sm_80"], options, announce=said.append)
    assert again.path == first.path and first.seconds > 0 == again.seconds
    assert locale.getpreferredencoding(False) == encoding  # NVRTC changes its thread's.
    assert said == ["compiling the GPU kernels for sm_80 ..."]
    folder = first.path.parent
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "sm_80.cubin"]
    old = folder.with_name("gpu-0123456789abcdef-12.5")
    old.mkdir()
    assert gpu_kernels.clean(folder.parent) == [old] and not old.exists() and folder.exists()

    def refusal(*architectures):
        with pytest.raises(NativeUnavailableError) as raised:
            gpu_kernels.ensure(architectures, options, announce=said.append)
        return str(raised.value)

    for wrong in ("sm_60", "sm_1000", "hopper", ""):
        assert refusal("sm_80", wrong).endswith(f"sm_90. Received: {wrong!r}.")

    monkeypatch.setattr(gpu_kernels, "FLAGS", ("-std=c++17",))  # a function may be the host's
    assert "could not be compiled by NVRTC 1" in refusal("sm_80")
    broken = tmp_path / "libnvrtc.so.12"
    broken.write_text("nothing")
    for folders, problem in (([], "was not found"), ([tmp_path], "cannot be used")):
        monkeypatch.setattr(gpu_kernels.nvidia, "folders", lambda _, folders=folders: folders)
        monkeypatch.setattr(gpu_kernels.ctypes.util, "find_library", lambda name: None)
        assert f"NVRTC, which compiles GPU kernels, {problem}" in refusal("sm_80")
