"""What the open descriptors of this process are, so that one too many can be named."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
from collections.abc import Mapping

Descriptors = dict[str, str]
"""Number -> what it is. What has no number of its own in the system, such as a file, goes by its path."""
LINK = "link to worker "
"""What links begin with."""
_FOLDER = "/proc/self/fd"


def list_descriptors(links: Mapping[int, str]) -> Descriptors:
    """All that are open. Other threads may open and close some meanwhile.

    Args:
        links: What is known to be a link, and which: ``LINK`` and more.
    """
    found = {}
    for name in os.listdir(_FOLDER):
        with contextlib.suppress(FileNotFoundError):  # it is closed again, as that of the listing is
            found[name] = links.get(int(name)) or _describe(int(name), os.readlink(f"{_FOLDER}/{name}"))
    return found


def others(descriptors: Descriptors) -> Descriptors:
    """Those that are no links."""
    return {number: what for number, what in descriptors.items() if not what.startswith(LINK)}


def find_new(before: Descriptors, now: Descriptors) -> list[str]:
    """Those of ``now`` that are no links and were not there ``before``, as number and what it is."""
    known = before.items()
    return [f"{number} {what}" for number, what in others(now).items() if (number, what) not in known]


def _describe(fd: int, target: str) -> str:
    """``target``: the file's path, or the kind and, of pipes and sockets, their number in the system."""
    try:
        if target == "anon_inode:[eventfd]":
            return f"{target} {_event_number(fd)}"
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return target
        borrowed = socket.socket(fileno=fd)
    except OSError as error:
        return f"{target}, closed meanwhile ({error.strerror})"
    try:
        own, peer = (_address(get) for get in (borrowed.getsockname, borrowed.getpeername))
        return f"{target} {borrowed.family.name} {own} -> {peer}"
    finally:
        borrowed.detach()


def _event_number(fd: int) -> str:
    with open(f"/proc/self/fdinfo/{fd}") as file:
        found = re.search(r"^eventfd-id:\s*(\d+)", file.read(), re.MULTILINE)
    return found.group(1) if found else ""


def _address(get: object) -> str:
    try:
        return repr(get())  # type: ignore[operator]
    except OSError as error:
        return f"({error.strerror})"
