"""Lengths of time for people."""

from __future__ import annotations


def format_duration(seconds: float) -> str:
    """Such as ``0.35 s``, ``48 s``, ``12.5 min``, ``7.2 h`` or ``28 days``."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        # A day and a half of hours, an hour and a half of minutes: more digits that way.
        if seconds >= 1.5 * length or (seconds == length and unit != "days"):
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"
