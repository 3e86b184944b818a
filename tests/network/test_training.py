"""A small training between three hosts: what the network does to it changes no loss and no sample."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_elas.host.sample_log import read_samples
from tests.fault.runs import ITERATION, MODEL, RECORDER
from tests.network.hosts import Host, Node, hosts_on_a_switch, job_on
from tests.network.switch import Switch

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 8
LIMIT_S = 8.0
"""A host that is silent for so long is lost: three launchers, and workers that train, share the machine."""
LIMITS = ("--heartbeat-interval-s=0.5", f"--heartbeat-timeout-s={LIMIT_S}", "--settle-timeout-s=30", "--grace-s=2")
ON_TIME_S = 5.0
"""For processes of a busy machine to do what is due."""
TRAINING_S = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a job has left."""

    codes: list[int]
    """Of the launchers."""
    outputs: list[str]
    losses: dict[int, float]
    """By iteration, from whichever host logged it."""
    samples: dict[int, dict[int, list[int]]]
    """Ids by step and stage."""


class Training:
    """A worker on each of three hosts, under way."""

    def __init__(self, folder: Path, network: Switch, hosts: list[Host], nodes: list[Node]) -> None:
        self.folder = folder
        self.network = network
        self.hosts = hosts
        self.nodes = nodes

    def finish(self) -> Outcome:
        """Wait for the end."""
        codes = [node.finish(TRAINING_S) for node in self.nodes]
        lines = [line for node in self.nodes for line in ITERATION.findall(node.output)]
        losses = {int(number): float(loss) for number, _, loss in lines}
        assert len(losses) == len(lines), f"a line was repeated: {lines}"
        return Outcome(
            codes=codes,
            outputs=[node.output[-4000:] for node in self.nodes],
            losses=losses,
            samples=read_samples(str(self.folder / "samples")),
        )


@contextlib.contextmanager
def training(folder: Path, prepare: Callable[[Switch], None] = lambda network: None) -> Iterator[Training]:
    """Start the job, on a network that was prepared."""
    flags = (
        "--nproc-per-node=1", *LIMITS, "--preload=megatron_elas.pretrain_gpt:preload", str(RECORDER), *MODEL,
        f"--train-iters={STEPS}", "--global-batch-size=6", "--elastic",
        "--elastic-migration=off", f"--elastic-sample-log={folder / 'samples'}",
    )  # fmt: skip
    with hosts_on_a_switch(3) as (network, hosts):
        prepare(network)
        with job_on(hosts, folder, flags, {"ELAS_TEST_OUT": str(folder)}) as nodes:
            yield Training(folder, network, hosts, nodes)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The undisturbed run."""
    with training(tmp_path_factory.mktemp("calm")) as job:
        outcome = job.finish()
    assert outcome.codes == [0, 0, 0], outcome.outputs
    assert list(outcome.losses) == list(range(1, STEPS + 1))
    return outcome


@pytest.mark.parametrize("host", [1, 2])
def test_training_goes_on_without_a_host_whose_link_is_down(calm: Outcome, tmp_path: Path, host: int) -> None:
    with training(tmp_path) as job:
        job.nodes[2].wait_for(r"iteration +3/")  # the last rank logs
        job.hosts[host].pull_cable()
        outcome = job.finish()
    assert_it_went_on_without(host, outcome, calm)


def test_training_goes_on_without_a_host_that_a_partition_cuts_off(calm: Outcome, tmp_path: Path) -> None:
    with training(tmp_path) as job:
        job.nodes[2].wait_for(r"iteration +3/")
        job.network.cut(1)
        outcome = job.finish()
        assert job.network.counts["cut"] > 0
    assert_it_went_on_without(1, outcome, calm)


def assert_it_went_on_without(host: int, outcome: Outcome, calm: Outcome) -> None:
    """One loss, told in time; the training of the undisturbed run; and the host's launcher says what it did."""
    outputs = outcome.outputs
    assert outcome.codes == [8 if rank == host else 0 for rank in range(3)], outputs
    [silence_s] = re.findall(
        rf"^lost +worker {host} .*: silent, node {host} did not answer for ([\d.]+) s", outputs[0], re.M
    )
    assert LIMIT_S <= float(silence_s) < LIMIT_S + ON_TIME_S
    assert outputs[0].count("---- recovered: epoch") == 1, outputs[0]
    assert "the workers of this node were killed" in outputs[host]
    # A step that the logging worker had committed, and not logged, lacks its line.
    assert len(calm.losses.keys() - outcome.losses.keys()) <= (host == 2)
    for number, loss in outcome.losses.items():
        # Sums over micro-batches are associated differently once a cell has left.
        assert abs(loss - calm.losses[number]) <= 1e-5 * calm.losses[number], f"iteration {number}"
    assert outcome.samples == calm.samples


def slow_down(network: Switch) -> None:
    network.delay_s = 0.1


def lose_frames(network: Switch) -> None:
    network.loss = 0.01


@pytest.mark.parametrize(("disturb", "count"), [(slow_down, "delayed"), (lose_frames, "lost")])
def test_a_bad_network_changes_nothing(
    calm: Outcome, tmp_path: Path, disturb: Callable[[Switch], None], count: str
) -> None:
    """100 ms each way, or every hundredth frame lost, from before the launch to the end."""
    with training(tmp_path, disturb) as job:
        outcome = job.finish()
        assert job.network.counts[count] > 10, job.network.counts
    assert outcome.codes == [0, 0, 0], outcome.outputs
    assert not any("is lost" in output for output in outcome.outputs), outcome.outputs
    assert (outcome.losses, outcome.samples) == (calm.losses, calm.samples)
