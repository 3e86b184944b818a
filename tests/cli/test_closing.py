"""What the terminal is told when a job has ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_elas.cli.closing import describe_end
from megatron_elas.cli.launch_flags import read_options
from megatron_elas.control.commands import EndJob
from megatron_elas.control.launch_options import LaunchOptions

KILL = "kill:worker=3@step=90,phase=forward"


def options_of(*flags: str, logs: str | None = None) -> LaunchOptions:
    options = read_options(["--nproc-per-node=4", *flags, "-m", "json.tool"], {"ELAS_TOKEN": "x"})
    return replace(options, log_dir=None if logs is None else Path(logs))


def lines_of(options: LaunchOptions, exit_code: int = 0, sentence: str = "", **facts: Any) -> list[str]:
    return describe_end(EndJob(exit_code=exit_code, sentence=sentence, **facts), options)


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"steps": 50}, "finished: 50 steps done, no worker lost; output is in logs"),
        ({"steps": 50, "lost": 2}, "finished: 50 steps done, 2 of 4 workers lost; output is in logs"),
        (
            {"steps": 1, "lost": 1, "drained": 1},
            "finished: 1 step done, 1 of 4 workers lost, 1 of 4 workers drained; output is in logs",
        ),
        ({}, "finished; output is in logs"),
    ],
)
def test_a_job_that_ended_well_has_one_line_where_its_output_is_elsewhere(facts: dict[str, Any], line: str) -> None:
    assert lines_of(options_of(logs="logs"), **facts) == [line]
    assert lines_of(options_of(), **facts) == []


def test_faults_that_never_struck_are_told_wherever_output_goes() -> None:
    more = "2 scripted faults never struck, as the place was not reached: "
    assert lines_of(options_of(), unstruck=(KILL, "exit:worker=0@step=9,phase=save")) == [
        f"{more}{KILL}, exit:worker=0@step=9,phase=save"
    ]
    closing, faults = lines_of(options_of(logs="logs"), steps=9, unstruck=(KILL,))
    assert closing == "finished: 9 steps done, no worker lost; output is in logs"
    assert faults == f"1 scripted fault never struck, as the place was not reached: {KILL}"
    assert lines_of(options_of(), 3, "too few are left", unstruck=(KILL,)) == ["too few are left (exit code 3)"]


@pytest.mark.parametrize(
    ("worker", "where"),
    [(1, "also in logs/worker1.log"), (6, "also in worker6.log on node 1"), (None, "output is in logs")],
)
def test_why_a_job_failed_comes_with_the_log_that_has_it(worker: int | None, where: str) -> None:
    several = ("--nnodes=2", "--node-rank=0", "--rdzv-endpoint=here:1")
    assert lines_of(options_of(*several, logs="logs"), 2, "no", worker=worker) == [f"no (exit code 2, {where})"]
    assert lines_of(options_of(*several), 2, "no", worker=worker) == ["no (exit code 2)"]
