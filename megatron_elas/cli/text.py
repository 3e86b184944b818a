"""Numbers and tables as text, for what the command lines print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def format_pairs(*pairs: tuple[str, str]) -> str:
    """Names and what there is to say of each, one line each, in two columns."""
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name:{width}}  {text}" for name, text in pairs)


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest cell."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    )


def format_ranges(numbers: Iterable[int | None], *, ordered: bool = False) -> str:
    """``0-3 8``: runs of successive numbers, in the order given or ascending without repeats; "nobody" for none."""
    known = [number for number in numbers if number is not None]
    runs: list[list[int]] = []
    for number in known if ordered else sorted(set(known)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "nobody"


def format_span(least: float, most: float) -> str:
    """``32`` or ``36-37``: the least and the most of something."""
    return f"{least:g}" if least == most else f"{least:g}-{most:g}"


def format_bytes(size: float) -> str:
    """``57.2 GB``, ``0.148 MB``."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def format_count(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
