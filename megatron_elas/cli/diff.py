"""``elas diff``: the first step and tensor in which two audited runs part, from their log folders."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from megatron_elas.cli.audit_comparison import Comparison, Difference, Side, compare, describe, describe_distances
from megatron_elas.cli.audit_files import AuditedRun, read_audit
from megatron_elas.cli.text import format_pairs, format_ranges
from megatron_elas.spec.errors import ExitCode
from megatron_elas.spec.tables import as_table

DIFFERENT = 1
"""Exit code."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two folders."""
    for name in "AB":
        parser.add_argument(
            name.lower(), type=Path, metavar=name, help="the folder that elasrun --log-dir named for a run with "
            "--elastic-audit N; with several nodes, one that holds the audit files of all"
        )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of text")


def run(flags: argparse.Namespace) -> int:
    """Read, compare and print. Raises BadUsage."""
    a, b = read_audit(flags.a), read_audit(flags.b)
    found = compare(a, b)
    print(json.dumps(_facts(a, b, found), indent=1, allow_nan=False) if flags.json else describe_all(a, b, found))
    return ExitCode.FINISHED if found.difference is None else DIFFERENT


def describe_all(a: AuditedRun, b: AuditedRun, found: Comparison) -> str:
    """The sentence, and what there is to say of each run."""
    difference = found.difference
    sides = (None, None) if difference is None else (difference.a, difference.b)
    pairs = [(name, _describe_side(run, side)) for name, run, side in zip("AB", (a, b), sides, strict=True)]
    if difference is not None and (apart := describe_distances(difference)):
        pairs.append(("apart", apart))
    missing = [kind for kind in dict.fromkeys((*a.kinds, *b.kinds)) if kind not in found.kinds]
    if missing:
        pairs.append(("left out", f"{', '.join(missing)}: only one of the runs tells them"))
    if a.level != b.level:
        pairs.append(
            ("mind", f"A ran at '{a.level}' and B at '{b.level}': a run is compared with one at its own level")
        )
    return describe(a, b, found) + "\n" + format_pairs(*pairs)


def _describe_side(run: AuditedRun, side: Side | None) -> str:
    text = f"{run.folder}{f' ({run.level})' if run.level else ''}: {run.describe_steps()}"
    if side is not None:
        text += f"; where they part: epoch {side.epoch}, {side.placement}"
        if side.workers:
            text += f"; told by worker{'s' if len(side.workers) > 1 else ''} {format_ranges(side.workers)}"
    return text


def _facts(a: AuditedRun, b: AuditedRun, found: Comparison) -> dict[str, object]:
    return {
        "equal": found.difference is None,
        "kinds": list(found.kinds),
        "equal_steps": list(found.equal),
        "chain": found.chain,
        "difference": None if found.difference is None else _difference_facts(found.difference),
        "runs": [
            {
                "folder": str(run.folder),
                "run": run.run,
                "level": run.level,
                "steps": list(run.steps),
                "unfinished": list(run.unfinished),
            }
            for run in (a, b)
        ],
    }


def _difference_facts(difference: Difference) -> dict[str, object]:
    losses = {
        name: [loss if math.isfinite(loss) else repr(loss) for loss in both]  # which JSON has no numbers for
        for name, both in difference.losses.items()
    }
    return as_table(difference) | {"losses": losses}
