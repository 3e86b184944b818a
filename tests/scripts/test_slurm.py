"""The Slurm script really trains, on two nodes that are this machine: srun and scontrol are small stand-ins."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fault.runs import ITERATION, QUICK_TIMEOUTS
from tests.followed import Followed

pytestmark = pytest.mark.process

REPO = Path(__file__).resolve().parents[2]
STAND_INS = Path(__file__).parent / "data"
JOB = "4711"
STEPS = 8
FLAGS = ("--log-interval", "1")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Batch(Followed):
    """The batch script of a Slurm job of two nodes with two workers each, its output read as it comes."""

    def __init__(self, folder: Path, *arguments: str, **environ: str) -> None:
        self.folder = folder
        # Slurm runs a copy of the script.
        copy = folder / "slurm_script"
        copy.write_text((REPO / "scripts/launch_slurm.sh").read_text())
        environment = {
            "PATH": f"{STAND_INS}:{os.environ['PATH']}",
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1",
            "FAKE_SLURM": str(folder),
            "SLURM_JOB_ID": JOB,
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_SUBMIT_DIR": str(REPO),
            "PYTHON": sys.executable,
            "PORT": str(free_port()),
            "WORKERS": "2",
            "TRAIN_ITERS": str(STEPS),
            "ELASRUN_FLAGS": " ".join(QUICK_TIMEOUTS),
            **environ,
        }
        super().__init__(["bash", str(copy), *arguments], environment, folder, patience_s=200)

    def task(self, node: int) -> int:
        """Process id of a node's elasrun."""
        return int((self.folder / f"task{node}").read_text())

    @property
    def steps(self) -> list[int]:
        """Numbers of Megatron's lines."""
        return [int(number) for number, _, _ in ITERATION.findall(self.output)]

    @property
    def losses(self) -> list[float]:
        """Of Megatron's lines."""
        return [float(loss) for _, _, loss in ITERATION.findall(self.output)]

    @property
    def secrets(self) -> list[Path]:
        """What is in the folder for secrets."""
        return list((self.folder / ".megatron_elas").rglob("*"))

    def finish(self) -> int:
        """Its exit code."""
        code = self.process.wait(250)
        self._reader.join()
        return code

    def end(self) -> None:
        """Whatever is left."""
        if self.process.poll() is None:
            for node in range(2):
                if (self.folder / f"task{node}").exists():
                    os.kill(self.task(node), signal.SIGKILL)
            self.process.terminate()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


Submit = Callable[..., Batch]


@pytest.fixture
def sbatch(tmp_path: Path) -> Iterator[Submit]:
    batches: list[Batch] = []

    def submit(*arguments: str, **environ: str) -> Batch:
        batches.append(Batch(tmp_path, *arguments, **environ))
        return batches[-1]

    yield submit
    for batch in batches:
        batch.end()


FAULT = "kill:worker=3@step=4,phase=forward,microbatch=1"


def test_two_nodes_train_and_go_on_without_a_lost_worker(sbatch: Submit) -> None:
    calm = sbatch("tiny", *FLAGS)
    assert calm.finish() == 0, calm.output[-4000:]
    batch = sbatch("tiny", *FLAGS, "--elastic-inject", FAULT)
    batch.wait_for(f"job {JOB}, run 1: ")  # said when the secret is there; what follows takes seconds
    token, *others = [path for path in batch.secrets if path.is_file()]
    assert token.name == "token" and not others
    assert len(token.read_text()) == 64
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in token.parents[:2]} == {0o700}
    assert batch.finish() == 0, batch.output[-4000:]
    assert re.findall(r"fault strikes: (\S+)", batch.output) == [FAULT]
    assert "now      stage 0: [0] [1] | stage 1: [2]" in batch.output
    assert batch.steps == calm.steps == list(range(1, STEPS + 1))
    assert batch.losses == pytest.approx(calm.losses, rel=1e-5)
    assert f"job {JOB}, run 1: tiny on 2 nodes, controller at localhost:" in batch.output
    flags = (batch.folder / "srun").read_text().split("\n")
    assert {"--nodes=2", "--ntasks=2", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(flags)
    assert batch.secrets == []


@pytest.mark.slow
def test_the_code_is_the_jobs_and_not_that_of_a_node_that_was_lost(sbatch: Submit) -> None:
    batch = sbatch("tiny", *FLAGS, PP="1", TRAIN_ITERS="30")
    batch.wait_for("iteration +4/")
    os.kill(batch.task(1), signal.SIGKILL)
    assert batch.finish() == 0, batch.output[-4000:]
    assert "now      stage 0: [0] [1]" in batch.output


@pytest.mark.slow
def test_a_job_that_gives_up_ends_with_that_code(sbatch: Submit) -> None:
    fault = FAULT.replace("worker=3", "worker=1")
    batch = sbatch("tiny", *FLAGS, "--elastic-inject", fault, TP="2", PP="1", WORKERS="1")
    assert batch.finish() == 3, batch.output[-4000:]
    assert "too few workers are left (1), a cell takes 2" in batch.output


@pytest.mark.slow
def test_wrong_arguments_end_the_job_with_their_code(sbatch: Submit) -> None:
    batch = sbatch("tiny", "--exit-signal-handler")
    assert batch.finish() == 2
    assert "--elastic does not cover --exit-signal-handler yet" in batch.output
    assert batch.secrets == []


@pytest.mark.slow
def test_a_signal_to_the_batch_script_ends_all_nodes(sbatch: Submit) -> None:
    batch = sbatch("tiny", *FLAGS, TRAIN_ITERS="100000")
    batch.wait_for("iteration +2/")
    batch.process.send_signal(signal.SIGTERM)
    assert batch.finish() == 128 + signal.SIGTERM, batch.output[-4000:]
    assert batch.secrets == []
    for node in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(batch.task(node), 0)


@pytest.mark.slow
def test_a_requeued_job_goes_on_from_its_newest_checkpoint_with_a_new_secret(sbatch: Submit, tmp_path: Path) -> None:
    calm = sbatch("tiny", *FLAGS)
    assert calm.finish() == 0, calm.output[-4000:]
    checkpoints = {"CHECKPOINTS": str(tmp_path / "checkpoints"), "SAVE_INTERVAL": "3"}
    batch = sbatch("tiny", *FLAGS, **checkpoints)
    batch.wait_for("iteration +1/")
    (first,) = [path.read_text() for path in batch.secrets if path.name == "token"]
    # As if its first node went away: nothing is tidied up.
    batch.wait_for("iteration +4/")
    batch.process.kill()
    for node in range(2):
        os.kill(batch.task(node), signal.SIGKILL)
    batch.finish()
    assert [path.name for path in batch.secrets if path.is_file()] == ["token"]
    again = sbatch("tiny", *FLAGS, SLURM_RESTART_COUNT="1", **checkpoints)
    again.wait_for("iteration +[0-9]+/")
    (second,) = [path.read_text() for path in again.secrets if path.name == "token"]
    assert second != first
    assert again.finish() == 0, again.output[-4000:]
    assert "run 2: tiny on 2 nodes" in again.output
    assert again.steps == list(range(4, STEPS + 1))
    expected = calm.losses[3:]
    expected[1] = sum(expected[:2]) / 2  # Megatron logs the mean of a run's first two losses as its second
    assert again.losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "environ", "sentence"),
    [
        (["tiny"], {"SLURM_JOB_ID": ""}, "this is no Slurm job: start it with sbatch --nodes N"),
        (
            ["tiny"],
            {"SLURM_SUBMIT_DIR": "/proc"},
            "there is no checkout in '/proc': submit in the checkout, or set REPO",
        ),
        (["8b"], {}, "there is no model '8b': give one of 7b 13b 34b 70b tiny"),
        (["tiny"], {"SLURM_JOB_NODELIST": "node[2-3]"}, "scontrol cannot list the nodes 'node[2-3]'"),
    ],
)
def test_bad_input_gets_one_sentence(
    sbatch: Submit, arguments: list[str], environ: dict[str, str], sentence: str
) -> None:
    batch = sbatch(*arguments, **environ)
    assert batch.finish() == 2
    assert f"megatron_elas: {sentence}" in batch.output
