"""Signals that ask a launcher to end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Passed on to the workers; the launcher then ends with 128 plus the number."""


@contextlib.contextmanager
def handling_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Have ``handle`` called with the signal's number, on the running event loop."""
    loop = asyncio.get_running_loop()
    for signum in SIGNALS:
        loop.add_signal_handler(signum, handle, signum)
    try:
        yield
    finally:
        for signum in SIGNALS:
            loop.remove_signal_handler(signum)
