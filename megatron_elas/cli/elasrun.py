"""``elasrun``: starts a job on this node and stays until it ends. See docs/exit-codes.md."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence

from megatron_elas.cli.closing import describe_end
from megatron_elas.cli.dry_run import show_dry_run
from megatron_elas.cli.launch_flags import find_ignored, read_options
from megatron_elas.control.first_node import run_first_node
from megatron_elas.control.launch_options import LaunchOptions
from megatron_elas.control.other_node import run_other_node
from megatron_elas.spec.errors import ElasticError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; gives the exit code."""
    logging.basicConfig(level=logging.WARNING, format="elasrun: %(message)s", stream=sys.stderr)
    # A client that hangs up while shaking hands (a port scan) is no news, and no reason for a traceback.
    logging.getLogger("websockets").setLevel(logging.CRITICAL)
    arguments = sys.argv[1:] if argv is None else argv
    try:
        options = read_options(arguments, os.environ)
        if ignored := find_ignored(arguments):
            print(f"elasrun: {ignored}", file=sys.stderr)
    except ElasticError as error:
        print(f"elasrun: {error}", file=sys.stderr)
        return error.exit_code
    if options.dry_run:
        return _run(lambda: show_dry_run(options, os.environ))
    code_file = options.exit_code_file if options.node_rank == 0 else None
    if code_file is not None:
        code_file.unlink(missing_ok=True)  # so that nobody takes the code of an earlier job for this one's
    exit_code = _run(lambda: _train(options))
    if code_file is not None:
        try:
            code_file.write_text(f"{exit_code}\n")
        except OSError as error:
            print(f"elasrun: --exit-code-file could not be written: {error}", file=sys.stderr)
    return exit_code


def _run(work: Callable[[], int]) -> int:
    try:
        return work()
    except ElasticError as error:
        print(f"elasrun: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # before anything was started that could be told
        return 128 + signal.SIGINT


def _train(options: LaunchOptions) -> int:
    end = asyncio.run(run_first_node(options) if options.node_rank == 0 else run_other_node(options))
    for line in describe_end(end, options):
        print(f"elasrun: {line}", file=sys.stderr)
    return end.exit_code


if __name__ == "__main__":
    sys.exit(main())
