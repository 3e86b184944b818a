"""Parts of this project that are written in C: plain functions, called through ``ctypes``.

``setup.py`` builds a library beside each ``_NAME.c``. Where that was not possible, for lack of a compiler, the Python
code of the same meaning takes its place.
"""

from __future__ import annotations

import ctypes
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

SWITCH = "ELAS_NATIVE"
"""Environment variable; ``0``: use the Python code even where the library is there."""


def load(folder: Path, name: str) -> ctypes.CDLL | None:
    """Load ``folder/NAME.c``'s library; None where there is none, or ``ELAS_NATIVE=0``.

    Calls release the interpreter lock.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    for suffix in EXTENSION_SUFFIXES:
        library = folder / (name + suffix)
        if library.exists():
            return ctypes.CDLL(str(library))
    return None
