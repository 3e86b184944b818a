"""Hosts for tests: network namespaces with one cable each to a switch, and the launchers that run there."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fault.runs import REPO
from tests.followed import Followed
from tests.network.switch import Switch, mac_of

CABLE = "cable"
PORT = 29441
EXIT_S = 100
"""For a launcher to end when all that it waits for has happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A network namespace."""

    namespace: str
    address: str

    def pull_cable(self) -> None:
        """The link goes down, as the host itself sees."""
        ip("-n", self.namespace, "link", "set", CABLE, "down")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def hosts_on_a_switch(count: int) -> Iterator[tuple[Switch, list[Host]]]:
    """So many hosts that reach each other through the switch, and nothing else. Skips where they may not be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2 (apt-get install iproute2)")
    with contextlib.ExitStack() as stack:
        switch = Switch()
        stack.callback(switch.close)
        hosts = []
        try:
            for number in range(count):
                hosts.append(_make_host(switch, number, stack))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode().strip()}")
        except OSError as error:
            pytest.skip(f"TUN/TAP interfaces are not allowed here: {error}")
        switch.start()
        yield switch, hosts


def _make_host(switch: Switch, number: int, stack: contextlib.ExitStack) -> Host:
    name = f"elas{os.getpid()}h{number}"
    host = Host(namespace=name, address=f"10.77.43.{number + 1}")
    ip("netns", "add", name)
    stack.callback(ip, "netns", "del", name)
    port = switch.add_port(name)
    ip("link", "set", name, "netns", name, "name", CABLE, "address", mac_of(port).hex(":"))
    ip("-n", name, "addr", "add", f"{host.address}/24", "dev", CABLE)
    ip("-n", name, "link", "set", "lo", "up")
    ip("-n", name, "link", "set", CABLE, "up")
    return host


class Node(Followed):
    """One host's ``elasrun``, its output read as it comes."""

    def __init__(self, hosts: Sequence[Host], rank: int, token: Path, flags: Sequence[str], environ: Mapping[str, str]):
        # One that gets SIGKILL cannot remove its folder of the run; so let that lie where pytest cleans up.
        folder = token.parent / f"host{rank}"
        folder.mkdir()
        command = [
            "ip", "netns", "exec", hosts[rank].namespace, sys.executable, "-m", "megatron_elas.cli.elasrun",
            f"--nnodes={len(hosts)}", f"--node-rank={rank}", f"--rdzv-endpoint={hosts[0].address}:{PORT}",
            f"--token-file={token}", *flags,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONWARNINGS": "ignore", "TMPDIR": str(folder)}
        super().__init__(command, {**environment, **environ}, REPO, patience_s=100)

    def finish(self, timeout_s: float = EXIT_S) -> int:
        """Its exit code, when all output is read."""
        try:
            return self.process.wait(timeout_s)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self._reader.join()


@contextlib.contextmanager
def job_on(
    hosts: Sequence[Host], folder: Path, flags: Sequence[str], environ: Mapping[str, str]
) -> Iterator[list[Node]]:
    """The same job started on all hosts; whatever is left of it at the end is killed."""
    token = folder / "token"
    token.write_text("a secret of this test\n")
    token.chmod(0o600)
    nodes: list[Node] = []
    try:
        for rank in range(len(hosts)):
            nodes.append(Node(hosts, rank, token, flags, environ))
        yield nodes
    finally:
        for node in nodes:
            if node.process.poll() is None:
                node.process.kill()
            node.finish()
