"""Who moves the bytes: the C core where its library is there, Python code of the same meaning elsewhere."""

from __future__ import annotations

import logging
import os

from megatron_elas.runtime.transport.engine import Control, Engine
from megatron_elas.runtime.transport.native_engine import NativeEngine
from megatron_elas.runtime.transport.native_link import library
from megatron_elas.runtime.transport.python_engine import PythonEngine

logger = logging.getLogger(__name__)

_said_in: set[int] = set()


def choose_engine(control: Control) -> Engine:
    """The C core when its library is there and not switched off, else the Python code. Says so once per process."""
    engine: Engine = PythonEngine(control) if library() is None else NativeEngine(control)
    if os.getpid() not in _said_in:
        _said_in.add(os.getpid())
        logger.info("data plane: %s", engine.name)
    return engine
