"""What the terminal is told when a job has ended."""

from __future__ import annotations

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
        lines.append(f"{_sum_up(end, options)}; output is in {options.log_dir}")
    if end.unstruck:
        faults = format_count(len(end.unstruck), "scripted fault")
        lines.append(
            f"{faults} never struck, as training, or the worker, did not come there: {', '.join(end.unstruck)}"
        )
    return lines


def _name_log(end: EndJob, options: LaunchOptions) -> str:
    if options.log_dir is None:
        return ""
    if end.worker is None:
        return f", output is in {options.log_dir}"
    if end.worker in options.workers:
        return f", more in {options.log_dir / f'worker{end.worker}.log'}"
    return f", more in worker{end.worker}.log on node {options.launch.node_of(end.worker)}"


def _sum_up(end: EndJob, options: LaunchOptions) -> str:
    facts = [f"{format_count(end.steps, 'step')} done"] if end.steps else []
    total = options.launch.world_size
    facts += [f"{end.lost} of {format_count(total, 'worker')} lost"] if end.lost else []
    facts += [f"{end.drained} of {format_count(total, 'worker')} drained"] if end.drained else []
    facts += ["no worker lost"] if end.steps and not end.lost else []
    return f"finished: {', '.join(facts)}" if facts else "finished"
