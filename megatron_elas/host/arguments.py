"""The command line: Megatron's arguments, and a group "elastic" of our own."""

from __future__ import annotations

import argparse
import difflib
import math
from typing import NoReturn

from megatron_elas.spec.consistency import CONSISTENCY_LEVELS, RANDOM_STREAMS
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.step_trace import parse_steps

SNAPSHOT_MODES = ("replay", "copy", "off")
"""What ``--elastic-snapshot`` takes."""


def add_elastic_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "elastic". Has the form of Megatron's ``extra_args_provider``."""
    group = parser.add_argument_group(title="elastic")
    group.add_argument(
        "--elastic",
        action="store_true",
        help="Go on training when workers are lost. Without it the run is stock Megatron.",
    )
    group.add_argument(
        "--elastic-inject",
        action="append",
        metavar="SPEC",
        help="Fault to inject, for tests and demonstrations; may be given several times.",
    )
    group.add_argument(
        "--elastic-sample-log",
        metavar="PREFIX",
        help="Write the sample ids of every step to PREFIX.WORKER, one JSON line per step.",
    )
    group.add_argument(
        "--elastic-trace-steps",
        type=_read_steps,
        metavar="STEPS",
        help="Steps to trace pass by pass besides those around losses and migrations, such as 5,20-22; they are "
        "written to traces.jsonl in the folder of elasrun --log-dir.",
    )
    group.add_argument(
        "--elastic-snapshot",
        choices=SNAPSHOT_MODES,
        default="replay",
        help="How other workers keep each worker's optimizer state: replay sends them its reduced gradients and has "
        "them apply the same update, copy sends them the state itself, off keeps none; default: replay.",
    )
    group.add_argument(
        "--elastic-snapshot-replicas",
        type=_read_replicas,
        default=1,
        metavar="N",
        help="Other workers that keep each worker's optimizer state; default: 1.",
    )
    group.add_argument(
        "--elastic-snapshot-verify-interval",
        type=_read_interval,
        default=100,
        metavar="STEPS",
        help="Compare the copies of optimizer states with their owners, by checksums, before every so many steps, and "
        "send those anew that differ; 0: never; default: 100.",
    )
    group.add_argument(
        "--elastic-migration",
        choices=("async", "blocking", "off"),
        default="async",
        help="How layers move to other stages when that makes steps shorter, after a loss or a drain: async lets their "
        "state move while steps run, blocking stops for it, off leaves layers where they are. After a loss, optimizer "
        "state that changes its owner moves beside the next step with async and off; default: async.",
    )
    group.add_argument(
        "--elastic-consistency",
        choices=CONSISTENCY_LEVELS,
        default="numerical",
        help="How closely the run follows one in which nothing happens. statistical: the same samples, weights and "
        "masks; numerical: and fp32 sums, so that losses differ by rounding; bitwise: every loss, norm, parameter and "
        "optimizer state is equal to the last bit; default: numerical.",
    )
    group.add_argument(
        "--elastic-rng",
        choices=RANDOM_STREAMS,
        default="resharded",
        help="What dropout draws. resharded: by seed, step, sample, layer and site, wherever the sample runs; "
        "megatron: from upstream's streams, which change when samples or layers move; default: resharded.",
    )
    group.add_argument(
        "--elastic-audit",
        type=_read_interval,
        default=0,
        metavar="STEPS",
        help="Write hashes of sample ids, masks, gradients and parameters of every so many steps to the folder of "
        "elasrun --log-dir, for elas diff; 0: never; default: 0.",
    )
    group.add_argument(
        "--elastic-emulate",
        metavar="PROFILE",
        help="Take the time of accelerators that are not there, by waiting: a profile of configs/clusters or "
        "configs/devices, or a .toml file of either. Works without --elastic too.",
    )
    group.add_argument(
        "--elastic-emulate-model",
        metavar="JOB",
        help="Whose layers' time is taken: a profile of configs/jobs, or a .toml file; default: the run's own model.",
    )
    group.add_argument(
        "--elastic-emulate-speed",
        type=_read_speed,
        metavar="FACTOR",
        help="Emulate accelerators and links that are so many times as fast; default: 1.",
    )
    group.add_argument(
        "--elastic-emulate-log",
        metavar="PREFIX",
        help="Write how well each kind of operation kept to its time to PREFIX.WORKER, one JSON line per kind.",
    )
    return parser


def add_entry_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """``add_elastic_arguments`` for a training script: a wrong flag raises BadUsage and prints no page of usage."""

    def refuse(message: str) -> NoReturn:
        raise BadUsage(message + _suggest_flag(parser, message))

    parser.error = refuse  # type: ignore[method-assign]
    add_elastic_arguments(parser)
    _mend_help(parser)
    return parser


def add_dry_run_argument(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """``add_entry_arguments`` and what elasrun --dry-run gives our entry.

    With it the entry checks everything, writes spec.shape.RunFacts as JSON into the file, and ends.
    """
    parser.add_argument("--elastic-dry-run", metavar="FILE", help=argparse.SUPPRESS)
    return add_entry_arguments(parser)


def _read_replicas(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(
            f"must be a whole number from 1 up, got '{text}' (none: --elastic-snapshot off)"
        )
    return int(text)


def _read_interval(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be a whole number of steps from 0 up, got '{text}'")
    return int(text)


def _read_steps(text: str) -> frozenset[int]:
    try:
        return parse_steps(text)
    except BadUsage as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _read_speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not 0 < speed < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got '{text}'")
    return speed


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Escape percent signs that argparse cannot format: with those of Megatron 0.19.2 --help ends in a ValueError."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help:
            try:
                formatter._expand_help(action)
            except (ValueError, TypeError, KeyError):
                action.help = action.help.replace("%", "%%")


LAUNCHER_FLAGS = frozenset(("--dry-run", "--log-dir", "--nnodes", "--nproc-per-node", "--policy", "--rebalance"))
"""Flags of elasrun that may be looked for behind the script."""


def _suggest_flag(parser: argparse.ArgumentParser, message: str) -> str:
    """The flag that was probably meant, as the end of the sentence; empty when there is none near."""
    unknown = message.removeprefix("unrecognized arguments: ")
    if unknown == message:
        return "; see --help"
    name = unknown.split()[0].partition("=")[0]
    if name in LAUNCHER_FLAGS:
        return f"; {name} is a flag of elasrun: write it before the script or -m"
    actions = parser._option_string_actions
    flags = [flag for flag, action in actions.items() if action.help != argparse.SUPPRESS]
    nearest = difflib.get_close_matches(name, flags, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else "; see --help"
