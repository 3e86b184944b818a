"""How benchmarks tell their figures: tables for people, and lines ``RESULT name=value unit``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence


def print_result(name: str, value: float, unit: str, digits: int = 3) -> None:
    """One RESULT line; a value of 100 and more needs no decimals."""
    print(f"RESULT {name}={value:.{digits if abs(value) < 100 else 0}f} {unit}", flush=True)


def print_small(name: str, value: float, unit: str) -> None:
    """One RESULT line of a value that may be many powers of ten below 1; 0 is exactly that."""
    print(f"RESULT {name}={value:.3e} {unit}" if value else f"RESULT {name}=0 {unit}", flush=True)


def print_ratio(name: str, upper: Sequence[float], lower: Sequence[float]) -> float:
    """The median of the ratios of all turns, as a RESULT line and as the return value."""
    ratio = statistics.median(one / other for one, other in zip(upper, lower, strict=True))
    print_result(name, ratio, "ratio")
    return ratio


def print_table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> None:
    """Cells of text under their column's name, one row per key; a column without a name is prose."""
    first = max(map(len, rows), default=0)
    widths = [max(len(name), *(len(row[at]) for row in rows.values())) for at, name in enumerate(columns)]

    def line(name: str, cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if column else cell for cell, width, column in zip(cells, widths, columns, strict=True)
        ]
        return "  ".join([name.ljust(first), *padded]).rstrip()

    header = [line("", columns)] if any(columns) else []
    print("\n".join(["", title, *header, *(line(name, row) for name, row in rows.items())]))


def format_all(values: Sequence[float], digits: int = 1) -> str:
    """``1.0/2.0/3.0``."""
    return "/".join(f"{value:.{digits}f}" for value in values)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` (0 to 1) of all do not exceed."""
    ordered = sorted(values)
    at = -(-share * len(ordered) // 1)
    return ordered[max(0, min(len(ordered), int(at)) - 1)]
