"""Three hosts, one of which is cut off: the others notice and go on, and its worker ends before they do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.launcher import TOY
from tests.network.hosts import Host, hosts_on_a_switch, job_on
from tests.network.switch import Switch

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

INTERVAL_S = 2.0
"""So far ahead of the controller a host that is cut off ends its worker; a busy machine may hold it up for as long."""
LIMIT_S = 8.0
LIMITS = (
    f"--heartbeat-interval-s={INTERVAL_S}", f"--heartbeat-timeout-s={LIMIT_S}", "--settle-timeout-s=20", "--grace-s=2"
)  # fmt: skip
ON_TIME_S = 20.0
"""For the controller, on a busy machine, to notice."""


def read_diary(folder: Path, worker: int) -> list[tuple[int, float]]:
    """Epoch and time of each step of a worker."""
    lines = [line.split() for line in (folder / str(worker)).read_text().splitlines()]
    return [(int(epoch), float(time_s)) for epoch, _, time_s in lines]


def pull_cable(switch: Switch, hosts: list[Host]) -> None:
    hosts[2].pull_cable()


def part(switch: Switch, hosts: list[Host]) -> None:
    switch.cut(2)


@pytest.mark.parametrize("cut_off", [pull_cable, pytest.param(part, marks=pytest.mark.slow)])
def test_the_others_go_on_and_the_host_that_is_cut_off_ends_its_worker(
    tmp_path: Path, cut_off: Callable[[Switch, list[Host]], None]
) -> None:
    flags = ("--nproc-per-node=1", *LIMITS, TOY, "1", "3", "1")
    with (
        hosts_on_a_switch(3) as (switch, hosts),
        job_on(hosts, tmp_path, flags, {"TOY_DIARY": str(tmp_path)}) as nodes,
    ):
        for number, node in enumerate(nodes):
            node.wait_for(f"worker {number} starts")
        cut_off(switch, hosts)
        codes = [node.finish() for node in nodes]
    outputs = [node.output for node in nodes]
    assert codes == [0, 0, 8], outputs
    [silence_s] = re.findall(r"lost     worker 2 .*: silent, node 2 did not answer for ([\d.]+) s", outputs[0])
    assert LIMIT_S <= float(silence_s) < LIMIT_S + ON_TIME_S
    assert "now      stage 0: [0] [1]" in outputs[0]
    words = r"node 0 did not answer for 6 s \(--heartbeat-timeout-s less .*\): the workers of this node were killed"
    assert re.search(words, outputs[2]), outputs[2]
    goes_on_s = min(time_s for worker in (0, 1) for epoch, time_s in read_diary(tmp_path, worker) if epoch == 1)
    last_s = max(time_s for _, time_s in read_diary(tmp_path, 2))
    assert last_s < goes_on_s, "the worker that was cut off went on beside the others"
