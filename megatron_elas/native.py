"""Parts of this project that are written in C: plain functions, called through ``ctypes``.

``setup.py`` builds a library beside each ``_NAME.c``. Where that was not possible, for lack of a compiler, the Python
code of the same meaning takes its place.
"""

from __future__ import annotations

import ctypes
import logging
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

logger = logging.getLogger(__name__)

SWITCH = "ELAS_NATIVE"
"""Environment variable; ``0``: use the Python code even where the library is there."""


def load(folder: Path, name: str) -> ctypes.CDLL | None:
    """Load ``folder/NAME.c``'s library; None where there is none, or ``ELAS_NATIVE=0``.

    Calls release the interpreter lock. In a checkout, a library that is older than the sources is not loaded: what it
    expects of its callers may be another thing.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    for suffix in EXTENSION_SUFFIXES:
        library = folder / (name + suffix)
        if library.exists():
            built_at = library.stat().st_mtime
            if any(
                source.stat().st_mtime > built_at
                for source in (folder / f"{name}.c", *folder.glob("*.h"), *Path(__file__).parent.glob("*.h"))
                if source.exists()
            ):
                logger.warning("%s is older than its sources and not used: run 'make native'", library)
                return None
            return ctypes.CDLL(str(library))
    return None
