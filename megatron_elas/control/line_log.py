"""A file in the job's log folder with one line per value.

Written by the controller's process, on a thread of its own, because the folder may be on a disk that hangs. Each line
is one write(2) to a file opened for appending, so a controller that is killed leaves whole lines, and the next one goes
on behind them. What cannot be written is dropped with one warning: training does not need it.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from megatron_elas.spec.line_files import append_line, open_for_lines

logger = logging.getLogger(__name__)

WAITING = 10_000
"""Lines that may wait for the disk; more are dropped."""
CLOSE_TIMEOUT_S = 2.0
"""For the last lines."""


class LineLog[Value]:
    """Of one controller. ``close`` it."""

    def __init__(self, path: Path, name: str, encode: Callable[[Value], bytes]) -> None:
        """Nothing is opened before there is something to write.

        Args:
            path: Of the file; made if it is not there.
            name: Of the values, for people: ``steps``.
            encode: Makes a line, without its end; called on the log's thread.
        """
        self._path = path
        self._name = name
        self._encode = encode
        self._values: queue.Queue[Value | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._run, name=f"elas-{name}", daemon=True)
        self._thread.start()

    def put(self, value: Value) -> bool:
        """Have it written. Returns at once: whether there was room for it."""
        try:
            self._values.put_nowait(value)
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """Write what waits, if the disk takes it."""
        try:
            self._values.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        descriptor: int | None = None
        while (value := self._values.get()) is not None:
            line = self._encode(value)
            try:
                if descriptor is None:
                    descriptor = open_for_lines(self._path)
                append_line(descriptor, line)
            except OSError as error:
                logger.warning("%s are not written down any more: %s (%s)", self._name, self._path, error)
                break
        else:
            if descriptor is not None:
                os.close(descriptor)
            return
        while self._values.get() is not None:
            pass
