"""Which platform a machine offers is found without importing torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_elas.platform import detect as module
from megatron_elas.platform.detect import detect
from megatron_elas.spec.errors import BadUsage


@pytest.fixture
def machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_count_nvidia_devices", lambda: 8)
    monkeypatch.setattr(module, "_torch_is_cpu_build", lambda: False)
    monkeypatch.setattr(module.glob, "glob", lambda pattern: [])


@pytest.mark.usefixtures("machine_with_gpus")
@pytest.mark.parametrize(
    ("environ", "platform"),
    [
        ({}, "cuda"),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, "cuda"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "cpu"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "cpu"),
        ({"MEGATRON_ELAS_PLATFORM": "cpu"}, "cpu"),
        ({"MEGATRON_ELAS_PLATFORM": "npu"}, "npu"),
    ],
)
def test_gpus_are_used_unless_the_environment_hides_them(environ: dict[str, str], platform: str) -> None:
    assert detect(environ) == platform


@pytest.mark.usefixtures("machine_with_gpus")
def test_a_torch_without_cuda_means_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_torch_is_cpu_build", lambda: True)
    assert detect({}) == "cpu"


def test_no_driver_means_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_count_nvidia_devices", lambda: 0)
    monkeypatch.setattr(module.glob, "glob", lambda pattern: [])
    assert detect({}) == "cpu"


def test_ascend_devices_count_only_with_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.glob, "glob", lambda pattern: ["/dev/davinci0"])
    monkeypatch.setattr(module, "_count_nvidia_devices", lambda: 0)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert detect({}) == "cpu"
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    assert detect({}) == "npu"


def test_a_strange_name_is_refused() -> None:
    with pytest.raises(BadUsage, match="MEGATRON_ELAS_PLATFORM is 'gpu': set it to cuda, npu or cpu"):
        detect({"MEGATRON_ELAS_PLATFORM": "gpu"})


@pytest.mark.process
def test_detecting_does_not_import_torch() -> None:
    program = "import sys; from megatron_elas.platform.detect import detect; detect(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
