"""How much memory of this host a new process may still take: what the kernel has, within limits of control groups."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_UNLIMITED = 1 << 60
"""Version 1 of control groups writes a limit near 2^63 when there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableMemory:
    """Bytes, and what sets the bound."""

    size: int
    source: str
    """For people: ``MemAvailable``, or the folder of the control group with the tightest limit."""


def read_available(root: Path = Path("/")) -> AvailableMemory:
    """The memory available to this process.

    Args:
        root: Of the file system in which proc and sys lie; another one in tests.
    """
    text = (root / "proc/meminfo").read_text()
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None, "this kernel's /proc/meminfo has no MemAvailable"
    bounds = [AvailableMemory(size=int(found[1]) * 1024, source="MemAvailable")]
    for folder in _groups(root):
        room = _read_room(folder)
        if room is not None:
            bounds.append(AvailableMemory(size=room, source=f"the limit of control group {folder}"))
    return min(bounds, key=lambda bound: bound.size)


def _groups(root: Path) -> Iterator[Path]:
    """Folders of this process's control groups that may limit memory, and of those around them.

    In a container the group's path may be the host's and not be there; then its mount point is the group's folder.
    """
    mounts = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = mounts if (mounts / "cgroup.controllers").exists() else mounts / "unified"
        elif "memory" in controllers.split(","):
            base = mounts / "memory"
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for part in (inside, *inside.parents):
            if (base / part).is_dir():
                yield base / part


def _read_room(folder: Path) -> int | None:
    """Bytes below the group's limit, file cache that can be dropped included; None without a limit."""
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            allowed = (folder / limit).read_text().strip()
            if not allowed.isdigit() or int(allowed) >= _UNLIMITED:
                continue
            used = int((folder / usage).read_text())
            dropped = re.search(rf"^{cache} (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
        except OSError:  # not this version's file, or not ours to read
            continue
        return max(0, int(allowed) - used + (int(dropped[1]) if dropped else 0))
    return None
