"""Two hosts, each a network namespace with its own loopback: launch, lose a worker, lose a host."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.runs import ITERATION, MODEL, QUICK_TIMEOUTS, REPO
from tests.followed import Followed

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

ADDRESSES = ("10.77.41.1", "10.77.41.2")
PORT = 29431
STEPS = 30


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces that reach each other over one cable. Skips where they may not be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2 (apt-get install iproute2)")
    names = (f"elas{os.getpid()}a", f"elas{os.getpid()}b")
    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ip("link", "add", "elasv0", "netns", names[0], "type", "veth", "peer", "elasv1", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode().strip()}")
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"{ADDRESSES[number]}/24", "dev", f"elasv{number}")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", f"elasv{number}", "up")
        yield names
    finally:
        for name in made:
            ip("netns", "del", name)


class Node(Followed):
    """One host's launcher, its output read as it comes."""

    def __init__(self, host: str, rank: int, token: Path, flags: tuple[str, ...]) -> None:
        command = [
            "ip", "netns", "exec", host, sys.executable, "-m", "megatron_elas.cli.elasrun", "--nnodes=2",
            f"--node-rank={rank}", f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}", f"--token-file={token}",
            "--nproc-per-node=2", *QUICK_TIMEOUTS, "-m", "megatron_elas.pretrain_gpt", *MODEL,
            f"--train-iters={STEPS}", "--global-batch-size=8", "--elastic", *flags,
        ]  # fmt: skip
        # A launcher that gets SIGKILL cannot remove its folder of the run; so let it lie where pytest cleans up.
        folder = token.parent / f"host{rank}"
        folder.mkdir()
        environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONWARNINGS": "ignore", "TMPDIR": str(folder)}
        super().__init__(command, environment, REPO, patience_s=60)

    def finish(self, timeout_s: float = 100) -> int:
        """Its exit code, when all output is read."""
        try:
            return self.process.wait(timeout_s)
        finally:
            if self.process.poll() is None:
                self.process.terminate()
                self.process.wait()
            self._reader.join()


@pytest.fixture
def launch(hosts: tuple[str, str], tmp_path: Path) -> Iterator[object]:
    """Starts a job of two nodes with two workers each; ends whatever is left of it."""
    token = tmp_path / "token"
    token.write_text("a secret of this test\n")
    token.chmod(0o600)
    nodes: list[Node] = []

    def start(*flags: str) -> tuple[Node, Node]:
        nodes.extend(Node(host, rank, token, flags) for rank, host in enumerate(hosts))
        return nodes[0], nodes[1]

    yield start
    for node in nodes:
        if node.process.poll() is None:
            node.process.kill()
        node.finish()


def test_a_worker_of_another_host_is_lost_and_training_goes_on(launch) -> None:  # type: ignore[no-untyped-def]
    fault = "kill:worker=3@step=5,phase=forward,microbatch=1"
    first, second = launch("--pipeline-model-parallel-size=2", "--elastic-inject", fault)
    assert (first.finish(), second.finish()) == (0, 0), first.output[-4000:] + second.output[-4000:]
    assert f"fault strikes: {fault}" in second.output
    assert "now      stage 0: [0] [1] | stage 1: [2]" in first.output
    assert [int(number) for number, _, _ in ITERATION.findall(second.output)] == list(range(1, STEPS + 1))


def test_a_whole_host_is_lost_and_the_copies_on_the_other_one_are_used(launch) -> None:  # type: ignore[no-untyped-def]
    first, second = launch()
    second.wait_for(r"iteration +6/")
    launcher = find_launcher(second.process.pid)
    os.kill(launcher, signal.SIGKILL)
    assert first.finish() == 0, first.output[-4000:]
    second.finish()
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
