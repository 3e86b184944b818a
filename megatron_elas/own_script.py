"""Megatron's own pretraining script, run as an elastic worker: what ``megatron_elas.install`` does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# What is imported here is imported before the Python's version is checked, so any Python must be able to read it.
from megatron_elas.prerequisites import check_prerequisites
from megatron_elas.pretrain_gpt import errors_told, load_worker, preload
from megatron_elas.spec.errors import BadUsage, WrongVersion


def attach() -> None:
    """Prepare platform and Megatron, so that the script's calls of Megatron train elastically.

    Raises:
        SystemExit: That cannot work; the reason was told.
    """
    with errors_told():
        check_prerequisites(("torch", "megatron", "numpy"))
        _check_origin(Path(sys.argv[0]).resolve().parent)
        platform = preload()
        _check_dataset_helper()
        from megatron_elas.host import script

        script.attach(script.Script(load_worker=load_worker, errors_told=errors_told), platform)


def _check_origin(checkout: Path) -> None:
    """Script and Megatron must be of one checkout. A preload may have imported the installed Megatron instead.

    Args:
        checkout: The script's folder.
    """
    expected = checkout / "megatron" / "core"
    spec = importlib.util.find_spec("megatron.core")
    if expected.is_dir() and spec is not None and spec.origin is not None:
        found = Path(spec.origin).resolve().parent
        if found != expected:
            raise BadUsage(
                f"this script belongs to the Megatron in {expected}, but the one in {found} would be used: start "
                f"elasrun with PYTHONPATH={checkout}, or without --preload"
            )


def _check_dataset_helper() -> None:
    """A checkout's C++ helper is built when training starts, if that is possible at all."""
    name = "megatron.core.datasets.helpers_cpp"
    if importlib.util.find_spec(name) is None and importlib.util.find_spec("pybind11") is None:
        raise WrongVersion(
            f"this Megatron has no built {name}, and pybind11 to build it is missing: install pybind11, "
            f"or install the checkout with pip install -e, which builds it"
        )
