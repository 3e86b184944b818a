"""How well operations kept to the times they were asked for."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from megatron_elas.platform.emulated.timeline import Ran

KEPT = 4096
"""Newest operations of a kind that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpError:
    """All operations of a kind; medians and the like over the newest ones."""

    kind: str
    count: int
    asked_s: float
    """Median."""
    achieved_s: float
    """Median."""
    mean_error_s: float
    """Of the distances between asked and achieved."""
    median_error_s: float
    p95_error_s: float
    late_s: float
    """Median of the time from planned to real end."""
    p95_late_s: float
    overrun: float
    """Share of the operations whose real work alone took longer than asked."""


class ErrorLog:
    """Of one device."""

    def __init__(self) -> None:
        self._ran: dict[str, deque[Ran]] = {}
        self._counts: dict[str, int] = {}

    def add(self, kind: str, ran: Ran) -> None:
        """One operation has ended."""
        self._ran.setdefault(kind, deque(maxlen=KEPT)).append(ran)
        self._counts[kind] = self._counts.get(kind, 0) + 1

    def clear(self) -> None:
        """Forget the operations so far, such as those of the first step."""
        self._ran.clear()
        self._counts.clear()

    def summarize(self) -> tuple[OpError, ...]:
        """Kinds in the order in which they first ran."""
        return tuple(self._summarize(kind, ran) for kind, ran in self._ran.items())

    def _summarize(self, kind: str, ran: deque[Ran]) -> OpError:
        errors = sorted(abs(each.achieved_s - each.asked_s) for each in ran)
        late = sorted(each.late_s for each in ran)
        return OpError(
            kind=kind,
            count=self._counts[kind],
            asked_s=statistics.median(each.asked_s for each in ran),
            achieved_s=statistics.median(each.achieved_s for each in ran),
            mean_error_s=sum(errors) / len(errors),
            median_error_s=statistics.median(errors),
            p95_error_s=_percentile(errors, 0.95),
            late_s=statistics.median(late),
            p95_late_s=_percentile(late, 0.95),
            overrun=sum(each.worked_s > each.asked_s for each in ran) / len(ran),
        )


def describe_errors(errors: tuple[OpError, ...]) -> str:
    """For people, in milliseconds."""
    parts = [
        f"{each.kind} x{each.count}: asked {each.asked_s * 1e3:.2f}, achieved {each.achieved_s * 1e3:.2f}, "
        f"off by {each.median_error_s * 1e3:.2f} (95%: {each.p95_error_s * 1e3:.2f})"
        for each in errors
    ]
    return "ms per emulated operation: " + "; ".join(parts)


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
