"""``elas diff``: the first step and tensor in which two audited runs part, from their log folders."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path

from megatron_elas.cli.audit_comparison import Comparison, Difference, Side, compare, describe, describe_distances
from megatron_elas.cli.audit_files import AuditedRun, read_audit
from megatron_elas.cli.text import format_pairs, format_ranges
from megatron_elas.spec.errors import ExitCode
from megatron_elas.spec.tables import as_table

DIFFERENT = 1
"""Exit code."""
EXACT = ("samples", "masks")
"""Kinds that no event may change at ``numerical``."""


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
    if found.last_losses:
        pairs.append(("later", _describe_last(found)))
    if found.difference is not None and _may_be_rounding(a, b, found.difference):
        pairs.append(
            ("level", "both ran at 'numerical', where sums may round otherwise after an event or on another layout: "
             "docs/consistency.md has the bound")
        )  # fmt: skip
    missing = [kind for kind in dict.fromkeys((*a.kinds, *b.kinds)) if kind not in found.kinds]
    if missing:
        pairs.append(("left out", f"{', '.join(missing)}: only one of the runs tells them"))
    if a.level != b.level:
        pairs.append(
            ("mind", f"A ran at '{a.level}' and B at '{b.level}': a run is compared with one at its own level")
        )
    return describe(a, b, found) + "\n" + format_pairs(*pairs)


def _may_be_rounding(a: AuditedRun, b: AuditedRun, difference: Difference) -> bool:
    """Samples and masks are the same at this level, and rounding takes nothing away."""
    kinds = {difference.kind, *difference.others}
    return a.level == b.level == "numerical" and difference.manner == "differs" and kinds.isdisjoint(EXACT)


def _describe_last(found: Comparison) -> str:
    parts = []
    for name, (ours, theirs) in found.last_losses.items():
        parts.append(f"the {name} is {ours!r} in " + ("both" if ours == theirs else f"A and {theirs!r} in B"))
    return f"in step {found.last}, the last that both have, {'; '.join(parts)}"


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
        "kinds": list(found.compared),
        "equal_steps": list(found.equal),
        "final": found.final,
        "chain": found.chain,
        "difference": None if found.difference is None else _difference_facts(found.difference),
        "last": None if found.last is None else {"step": found.last, "losses": _loss_facts(found.last_losses)},
        "runs": [
            {
                "folder": str(run.folder),
                "run": run.run,
                "level": run.level,
                "steps": list(run.steps),
                "final": run.final,
                "unfinished": list(run.unfinished),
            }
            for run in (a, b)
        ],
    }


def _difference_facts(difference: Difference) -> dict[str, object]:
    return as_table(difference) | {"losses": _loss_facts(difference.losses)}


def _loss_facts(losses: Mapping[str, tuple[float, float]]) -> dict[str, object]:
    """What JSON has no numbers for is text."""
    return {name: [loss if math.isfinite(loss) else repr(loss) for loss in both] for name, both in losses.items()}
