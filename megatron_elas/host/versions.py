"""Versions of Python, torch and Megatron that this project supports."""

from __future__ import annotations

import sys

from megatron_elas.prerequisites import PYTHON_AT_LEAST
from megatron_elas.spec.errors import WrongVersion

TORCH_RANGE = ((2, 11), (2, 14))
"""First and last minor release."""
MEGATRON_MINOR = (0, 19)


def check_versions() -> tuple[str, ...]:
    """One sentence per package outside its range. Imports torch and megatron.core."""
    return tuple(
        problem for problem in (_check_python(sys.version_info[:2]), _check_torch(), _check_megatron()) if problem
    )


def require_versions() -> None:
    """Raise WrongVersion, with the first sentence, unless all packages are in range."""
    problems = check_versions()
    if problems:
        raise WrongVersion(problems[0])


def installed_megatron() -> str:
    """Version of the Megatron that ``import megatron`` gives (a checkout may come before the wheel)."""
    try:
        from megatron.core.package_info import __version__
    except ImportError:
        return "(not installed)"
    return str(__version__)


def _check_python(version: tuple[int, int]) -> str | None:
    if version >= PYTHON_AT_LEAST:
        return None
    return f"Python {_dotted(version)} is too old: use Python {_dotted(PYTHON_AT_LEAST)} or later"


def _check_torch() -> str | None:
    first, last = TORCH_RANGE
    wanted = f"install torch {_dotted(first)} to {_dotted(last)}"
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported ({error}): {wanted}"
    if first <= _minor(torch.__version__) <= last:
        return None
    return f"torch {torch.__version__} is outside the supported range {_dotted(first)} to {_dotted(last)}: {wanted}"


def _check_megatron() -> str | None:
    wanted = (
        f"install megatron-core {_dotted(MEGATRON_MINOR)}.* (pip install 'megatron-core=={_dotted(MEGATRON_MINOR)}.*')"
    )
    version = installed_megatron()
    if version == "(not installed)":
        return f"megatron.core cannot be imported: {wanted}"
    if _minor(version) == MEGATRON_MINOR:
        return None
    return f"megatron-core {version} is outside the supported range {_dotted(MEGATRON_MINOR)}.x: {wanted}"


def _minor(version: str) -> tuple[int, int]:
    """``(2, 13)`` of ``2.13.0+cu130``."""
    major, minor, *_ = version.split(".")
    return int(major), int("".join(digit for digit in minor if digit.isdigit()))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
