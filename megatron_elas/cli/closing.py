"""What the terminal is told when a job has ended."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_elas.cli.text import format_count
from megatron_elas.control.commands import EndJob
from megatron_elas.control.launch_options import LaunchOptions
from megatron_elas.spec.errors import ExitCode


def describe_end(end: EndJob, options: LaunchOptions) -> list[str]:
    """Lines for this node's terminal.

    A job that ended well has none where its workers' output was on the terminal, unless its script of faults was not
    carried out.
    """
    if end.sentence:
        return [f"{end.sentence} (exit code {end.exit_code}{_name_log(end, options)})"]
    if end.exit_code != ExitCode.FINISHED:
        return []
    lines = []
    if options.log_dir is not None:
        lines.append(f"{sum_up(end, options.launch.world_size)}; output is in {options.log_dir}")
    if end.unstruck:
        lines.append(describe_unstruck(end.unstruck))
    return lines


def describe_unstruck(faults: Sequence[str]) -> str:
    """Of the scripted faults that did not strike in a job that ended well."""
    count = format_count(len(faults), "scripted fault")
    return f"{count} never struck, as the place was not reached: {', '.join(faults)}"


def sum_up(end: EndJob, workers: int | None) -> str:
    """Of a job that ended well. ``workers`` is how many it had; None where that is not known."""
    facts = [f"{format_count(end.steps, 'step')} done"] if end.steps else []
    facts += [f"{_count_of(end.lost, workers)} lost"] if end.lost else []
    facts += [f"{_count_of(end.drained, workers)} drained"] if end.drained else []
    facts += ["no worker lost"] if end.steps and not end.lost else []
    return f"finished: {', '.join(facts)}" if facts else "finished"


def _count_of(count: int, workers: int | None) -> str:
    return format_count(count, "worker") if workers is None else f"{count} of {format_count(workers, 'worker')}"


def _name_log(end: EndJob, options: LaunchOptions) -> str:
    if options.log_dir is None:
        return ""
    if end.worker is None:
        return f", output is in {options.log_dir}"
    if end.worker in options.workers:
        return f", also in {options.log_dir / f'worker{end.worker}.log'}"
    return f", also in worker{end.worker}.log on node {options.launch.node_of(end.worker)}"
