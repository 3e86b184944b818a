"""From a command line to Megatron's ``pretrain``, stock or elastic."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from megatron.core.enums import ModelType
from megatron.training import inprocess_restart, pretrain, set_startup_timestamps
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args, parse_args

from megatron_elas.host import cpu_fixes, dry_run, gpt_seams, patching, upstream_fixes
from megatron_elas.host.argument_checks import check_arguments, check_save
from megatron_elas.host.argument_files import expand_files
from megatron_elas.host.arguments import add_dry_run_argument
from megatron_elas.host.cpu_defaults import missing_defaults
from megatron_elas.host.emulation import check_flags
from megatron_elas.host.emulation_seams import emulated_stock_run
from megatron_elas.host.gpt_data import provide_datasets
from megatron_elas.host.gpt_step import forward_step, get_embedding_ranks
from megatron_elas.platform.detect import PlatformName
from megatron_elas.spec.errors import BadUsage, ElasticError, ExitCode

TOKENIZER_DEFAULT = {"tokenizer_type": "GPT2BPETokenizer"}
"""As in Megatron's own entry."""
TWO_HANDLERS = "--elastic and --inprocess-restart both want to handle lost workers: leave one of them out"


def attach(platform: PlatformName, *, elastic: bool = False) -> None:
    """Fix what must be fixed in Megatron on this platform, once per process (or once before forking).

    A run that is neither elastic nor on the CPU is left alone, but for the one slip of the wheel that would end it.
    """
    rows: tuple[patching.Seam, ...] = ()
    if platform == "cpu":
        rows = cpu_fixes.ROWS + upstream_fixes.ROWS
    elif elastic:
        rows = upstream_fixes.ROWS
    elif upstream_fixes.wheel_lacks_makefile():
        rows = (upstream_fixes.COMPILE_HELPERS,)
    patching.apply_missing(rows)


class ElasticWorker(Protocol):
    """What this module needs of ``megatron_elas.worker``, which lies above it."""

    def settle_arguments(self, args: argparse.Namespace) -> object:
        """Refuse what cannot work, without joining the job."""

    def prepare(self, args: argparse.Namespace) -> dict[str, Any]:
        """Join the job. Gives keyword arguments for ``pretrain``, such as ``store`` and ``pg_collection``."""

    def finish(self) -> None:
        """Leave the job after a successful end."""

    def stop(self, exit_code: int) -> None:
        """Leave the job after Megatron ended the run with this status."""

    def fail(self, error: Exception) -> ElasticError | None:
        """Leave the job because of an error. Gives what to end with instead, if anything."""


def run(
    argv: Sequence[str],
    platform: PlatformName,
    *,
    load_worker: Callable[[], ElasticWorker],
    started_s: float,
) -> None:
    """Train as the command line says, or say what would be trained.

    Args:
        argv: Without the program's name; may hold ``@file`` words.
        platform: What the workers compute on.
        load_worker: Imports the elastic worker; only called with --elastic.
        started_s: ``time.time()`` when the program began, for Megatron's start-up times.

    Raises:
        BadUsage: The command line cannot work; no process group was made.
        WrongVersion: The installed Megatron is not the expected one.
        SystemExit: Megatron ended the run itself, for example at --exit-interval.
    """
    words = expand_files(argv)
    added = missing_defaults(words) if platform == "cpu" else []
    # Megatron reads sys.argv, also later; our words come first so that the user's win.
    with _command_line([*added, *words]):
        args = read_arguments(add_dry_run_argument)
        attach(platform, elastic=args.elastic)
        patching.require(gpt_seams.ROWS)
        if args.elastic_dry_run is not None:
            _describe(args.elastic_dry_run, platform, added, load_worker)
            return
        say_added(added)
        _set_single_worker()
        set_startup_timestamps(program_start=started_s, main_entry=started_s)
        if args.elastic:
            _train_elastic(load_worker())
        else:
            _train_stock()


def say_added(words: Sequence[str]) -> None:
    """Tell the user of the flags that were added for the CPU, if any, on the first rank."""
    if words and os.environ.get("RANK", "0") == "0":
        print(f"megatron_elas: no accelerator here, so this run has {' '.join(words)}", flush=True)


def read_arguments(provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser]) -> argparse.Namespace:
    """Parse and check the command line, without any effect on Megatron.

    Args:
        provider: Adds the arguments that are not Megatron's own, those of ``add_entry_arguments`` among them.

    Raises:
        BadUsage: They cannot work.
    """
    args: argparse.Namespace = parse_args(provider)
    if args.elastic and "ELAS_CONTROLLER" not in os.environ:
        raise BadUsage("--elastic needs elasrun: start the job with elasrun, not with torchrun or python")
    if args.elastic_inject and not args.elastic:
        raise BadUsage("--elastic-inject needs --elastic: without it nobody strikes faults, and nobody recovers")
    check_flags(args)
    check_arguments(args)
    if getattr(args, "elastic_dry_run", None) is None:  # it may be meant for another machine
        check_save(args)
    if args.elastic and args.inprocess_restart:
        raise BadUsage(TWO_HANDLERS)
    return args


def _complete_arguments() -> tuple[argparse.Namespace, Any]:
    """Let Megatron validate the arguments and describe the run."""
    with refusals_told():
        args = parse_and_validate_args(extra_args_provider=add_dry_run_argument, args_defaults=TOKENIZER_DEFAULT)
        return args, pretrain_cfg_container_from_args(args, gpt_config_from_args(args))


@contextlib.contextmanager
def refusals_told() -> Iterator[None]:
    """Inside, what Megatron says against the arguments becomes BadUsage."""
    try:
        yield
    except ElasticError:
        raise
    except (AssertionError, ValueError, ImportError) as error:
        # An assertion without a text is told by its source line.
        line = traceback.extract_tb(error.__traceback__)[-1].line
        raise BadUsage(f"Megatron refuses these arguments: {str(error).strip() or line}") from error


def _describe(
    path: str, platform: PlatformName, added: Sequence[str], load_worker: Callable[[], ElasticWorker]
) -> None:
    """Refuse what a run would refuse before its first process group; write what it would be into the file."""
    dry_run.keep_writers_closed()
    args, container = _complete_arguments()
    refusal = dry_run.find_elastic_refusal(args, platform)
    if args.elastic and platform == "cpu":
        load_worker().settle_arguments(args)
    dry_run.write_facts(path, args, container.model.transformer, platform, added, refusal)


def _train_stock() -> None:
    """What Megatron's own entry does."""
    # The wrapper hands pretrain back unchanged unless --inprocess-restart is given.
    start, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args, container = _complete_arguments()
    with emulated_stock_run(args):
        _call_pretrain(start, container, store=store)


def _train_elastic(worker: ElasticWorker) -> None:
    """The same with the elastic worker around it."""
    args, container = _complete_arguments()
    run_worker(worker, args, functools.partial(_call_pretrain, pretrain, container))


def run_worker(worker: ElasticWorker, args: argparse.Namespace, train: Callable[..., None]) -> None:
    """Join the job, train, and leave the job in the way that fits the end.

    Args:
        worker: Not used before.
        args: Megatron's, validated.
        train: Takes the keyword arguments that ``prepare`` gives, and trains to the end.

    Raises:
        ElasticError: How the job ended, unless it ended well.
        SystemExit: Megatron ended the run itself.
    """
    try:
        try:
            train(**worker.prepare(args))
        except SystemExit as stop:
            if stop.code in (None, 0):
                worker.finish()
            else:
                worker.stop(stop.code if isinstance(stop.code, int) else int(ExitCode.CRASHED))
            raise
        worker.finish()
    except Exception as error:
        own = worker.fail(error)
        if own is None or own is error:
            raise
        raise own from error


def _call_pretrain(start: Callable[..., None], container: Any, **extra: Any) -> None:
    start(
        container,
        provide_datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=get_embedding_ranks,
        **extra,
    )


def _set_single_worker() -> None:
    """Without a launcher, be the only worker of a job."""
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")


@contextlib.contextmanager
def _command_line(words: list[str]) -> Iterator[None]:
    """``sys.argv`` as if the program had been called with ``words``."""
    before = sys.argv
    sys.argv = [before[0] if before else "pretrain_gpt", *words]
    try:
        yield
    finally:
        sys.argv = before
