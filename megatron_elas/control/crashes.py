"""Errors that end workers: told apart into accidents of one worker and errors that every worker runs into.

A worker that is lost is recovered from. But the others run the same step on the same samples again, so
an error of the model, the data or the code would end them one by one, with a recovery between each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron_elas.control.messages import Crashed

LONGEST_ERROR = 300
"""Characters of an error that are shown."""


def describe_crash(crash: Crashed) -> str:
    """For people: ``failed with: ValueError: bad sample``."""
    return f"failed with: {shorten(crash.error)}"


def shorten(error: str) -> str:
    """The first line, or the beginning of it."""
    line = next(iter(error.strip().splitlines()), "an error without text")
    return line if len(line) <= LONGEST_ERROR else line[: LONGEST_ERROR - 1] + "…"


def find_twin(crashes: Mapping[int, Crashed], crash: Crashed) -> Crashed | None:
    """The crash of another worker in the same step with the same error; None when there is none.

    Numbers in the texts do not count: Megatron names the rank, which differs by worker and by epoch.
    """
    for other in crashes.values():
        if other.worker != crash.worker and other.step == crash.step and _mask(other.error) == _mask(crash.error):
            return other
    return None


def _mask(error: str) -> str:
    return re.sub(r"\d+", "#", error)
