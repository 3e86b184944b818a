"""Files that grow by whole lines, and whose writers may be killed at any time."""

from __future__ import annotations

import os
from pathlib import Path


def open_for_lines(path: Path) -> int:
    """A descriptor to append to; a line that an earlier writer could not finish is taken away."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o666)
    stop = end = os.fstat(descriptor).st_size
    while stop:
        start = max(0, stop - (1 << 16))
        at = os.pread(descriptor, stop - start, start).rfind(b"\n")
        if at >= 0:
            stop = start + at + 1
            break
        stop = start
    if stop < end:
        os.ftruncate(descriptor, stop)
    return descriptor


def append_line(descriptor: int, line: bytes) -> None:
    """Add a line, given without its end, with one write: it is whole when the writer is killed after it.

    Raises:
        OSError: It cannot be written, or not all of it.
    """
    data = line + b"\n"
    if os.write(descriptor, data) < len(data):
        raise OSError("the disk is full")
