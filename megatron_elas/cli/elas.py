"""``elas``: looks after jobs. Each command is a module of this folder that is loaded when it is the one asked for.

A command's module has ``add_arguments(parser)`` and ``run(flags)``, which gives the exit code.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_elas.spec.errors import BadUsage, ElasticError

COMMANDS = {
    "status": "where a job is",
    "diff": "the first step and tensor in which two runs with --elastic-audit part",
    "report": "what a job's steps took against what was predicted, and how it recovered",
    "inject": "strike a worker of a running job",
    "drain": "have workers hand over what they hold and leave, while the others go on",
    "rebalance": "have layers move between stages while a job runs",
    "plan": "plan for a job after a loss, and compare policies; nothing is run",
    "simulate": "see what becomes of a job over days of failures, policy by policy",
    "doctor": "check the installed Megatron against what is attached to it",
    "patch": "let a checkout's own pretrain_gpt.py take --elastic",
}
"""What each command does. ``megatron_elas.cli.NAME`` is its module."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong by raising BadUsage."""

    def error(self, message: str) -> NoReturn:
        """For argparse."""
        raise BadUsage(f"{message}; {self.prog} --help says what it takes")


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """All commands, with the arguments of the one that is named."""
    parser = Parser(prog="elas", description="Looks after elastic training jobs.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, text in COMMANDS.items():
        own = commands.add_parser(name, help=text, description=f"{text.capitalize()}.", allow_abbrev=False)
        if name == command:
            module = importlib.import_module(f"megatron_elas.cli.{name}")
            module.add_arguments(own)
            own.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        flags, strange = build_parser(words[0] if words else None).parse_known_args(words)
        if strange:
            raise BadUsage(f"{' '.join(strange)} is not known; elas {flags.command} --help says what it takes")
        code = int(flags.run(flags))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever reads has seen enough. What is still in the buffer would raise again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except ElasticError as error:
        print(f"elas: {error}", file=sys.stderr)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
