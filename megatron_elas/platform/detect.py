"""Which kind of device this machine offers. Asked before torch is imported, so it does not import torch.

Neither does it create a CUDA context: a process that did could not fork workers that use CUDA.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from typing import Literal

from megatron_elas.spec.errors import BadUsage

PlatformName = Literal["cuda", "npu", "cpu"]

PLATFORM_VARIABLE = "MEGATRON_ELAS_PLATFORM"
"""Environment variable that overrides what ``detect`` finds, for example ``cpu`` on a machine with GPUs."""


def detect(environ: Mapping[str, str] | None = None) -> PlatformName:
    """The platform that workers of this machine train on.

    Args:
        environ: In place of ``os.environ``.

    Raises:
        BadUsage: MEGATRON_ELAS_PLATFORM holds something else than a platform's name.
    """
    environ = os.environ if environ is None else environ
    match environ.get(PLATFORM_VARIABLE, ""):
        case "":
            return _find_device(environ)
        case "cuda" | "npu" | "cpu" as name:
            return name
        case other:
            raise BadUsage(
                f"{PLATFORM_VARIABLE} is '{other}': set it to cuda, npu or cpu, or unset it to have it detected"
            )


def _find_device(environ: Mapping[str, str]) -> PlatformName:
    if glob.glob("/dev/davinci[0-9]*") and importlib.util.find_spec("torch_npu") is not None:
        return "npu"
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1") or _torch_is_cpu_build():
        return "cpu"
    return "cuda" if _count_nvidia_devices() > 0 else "cpu"


def _torch_is_cpu_build() -> bool:
    """Whether the installed torch was built without CUDA, as its version says (``2.13.0+cpu``)."""
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def _count_nvidia_devices() -> int:
    """GPUs that the driver's management library (NVML) sees; 0 without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    count = ctypes.c_uint(0)
    status = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return count.value if status == 0 else 0
