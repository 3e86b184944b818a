"""What has to be there before the rest of this project can be imported: a Python that can read it, and its packages.

Python 3.8 must be able to read this module, and every module that is imported before it is asked.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from megatron_elas.spec.errors import WrongVersion

PYTHON_AT_LEAST = (3, 12)
PIP_NAMES = {"megatron": "megatron-core"}
"""Of packages that are imported under another name."""
REMEDY = "run 'make venv' in the checkout and then '. .venv/bin/activate', or 'pip install -e .'"


def check_prerequisites(packages: Sequence[str], version: Sequence[int] = sys.version_info[:3]) -> None:
    """Look for what is needed, without importing it.

    Args:
        packages: Top-level modules.
        version: Of this Python.

    Raises:
        WrongVersion: Python is too old, or a package is missing.
    """
    found = "Python {} at {}".format(".".join(map(str, version)), sys.executable)
    if tuple(version[:2]) < PYTHON_AT_LEAST:
        needed = ".".join(map(str, PYTHON_AT_LEAST))
        raise WrongVersion(f"this needs Python {needed} or newer, but runs in {found}: {REMEDY} with a newer Python")
    missing = [PIP_NAMES.get(name, name) for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise WrongVersion(f"{found} does not have {', '.join(missing)}: {REMEDY}")


def exit_without_prerequisites(*packages: str) -> None:
    """End the process with one sentence and ExitCode.WRONG_VERSION unless all is there."""
    try:
        check_prerequisites(packages)
    except WrongVersion as error:
        print(f"megatron_elas: {error}", file=sys.stderr, flush=True)
        sys.exit(int(error.exit_code))
