"""Two hosts, each a network namespace with its own loopback: launch, lose a worker, lose a host."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fault.runs import ITERATION, MODEL, QUICK_TIMEOUTS
from tests.network.hosts import CABLE, Host, Node, ip, job_on

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

STEPS = 30
TRAINING_S = 250
Launch = Callable[..., list[Node]]


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two namespaces that reach each other over one cable. Skips where they may not be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2 (apt-get install iproute2)")
    hosts = [Host(namespace=f"elas{os.getpid()}{end}", address=f"10.77.41.{n}") for n, end in ((1, "a"), (2, "b"))]
    names = [host.namespace for host in hosts]
    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ip("link", "add", CABLE, "netns", names[0], "type", "veth", "peer", CABLE, "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode().strip()}")
        for host in hosts:
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", CABLE)
            ip("-n", host.namespace, "link", "set", "lo", "up")
            ip("-n", host.namespace, "link", "set", CABLE, "up")
        yield hosts
    finally:
        for name in made:
            ip("netns", "del", name)


@pytest.fixture
def launch(hosts: list[Host], tmp_path: Path) -> Iterator[Launch]:
    """Starts a job of two nodes with two workers each; ends whatever is left of it."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str) -> list[Node]:
            common = (
                "--nproc-per-node=2", *QUICK_TIMEOUTS, "-m", "megatron_elas.pretrain_gpt", *MODEL,
                f"--train-iters={STEPS}", "--global-batch-size=8", "--elastic", "--elastic-migration=off",
            )  # fmt: skip
            return stack.enter_context(job_on(hosts, tmp_path, (*common, *flags), {}))

        yield start


@pytest.mark.slow
def test_a_worker_of_another_host_is_lost_and_training_goes_on(launch: Launch) -> None:
    fault = "kill:worker=3@step=5,phase=forward,microbatch=1"
    first, second = launch("--pipeline-model-parallel-size=2", "--elastic-inject", fault)
    assert (first.finish(TRAINING_S), second.finish(TRAINING_S)) == (0, 0), first.output[-4000:] + second.output[-4000:]
    assert f"fault strikes: {fault}" in second.output
    assert "now      stage 0: [0] [1] | stage 1: [2]" in first.output
    assert [int(number) for number, _, _ in ITERATION.findall(second.output)] == list(range(1, STEPS + 1))


def test_a_whole_host_is_lost_and_the_copies_on_the_other_one_are_used(launch: Launch) -> None:
    first, second = launch()
    second.wait_for(r"iteration +6/")
    launcher = find_launcher(second.process.pid)
    os.kill(launcher, signal.SIGKILL)
    assert first.finish(TRAINING_S) == 0, first.output[-4000:]
    second.finish(TRAINING_S)
    assert "lost     worker 2 " in first.output and "lost     worker 3 " in first.output
    assert "now      stage 0: [0] [1]" in first.output
    lines = [int(number) for node in (second, first) for number, _, _ in ITERATION.findall(node.output)]
    missing = set(range(1, STEPS + 1)) - set(lines)
    assert len(missing) <= 1, "only a step that the logging worker had committed, and not logged, may lack its line"
    assert lines == sorted(set(lines)), "a line was repeated"


def find_launcher(pid: int) -> int:
    """``ip netns exec`` replaces itself by the command, so its pid is the launcher's."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    assert b"megatron_elas.cli.elasrun" in command, command
    return pid
