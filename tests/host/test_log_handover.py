"""Whoever becomes the last rank tells what its predecessor had not, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_elas.host.log_handover import PLACES, Log, Told, read_board


@dataclass
class Writer:
    """Remembers what a TensorBoard writer is asked for."""

    steps: list[int] = field(default_factory=list)
    flushed: list[int] = field(default_factory=list)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.steps.append(step)

    def flush(self) -> None:
        self.flushed[:] = self.steps

    def close(self) -> None:
        self.flush()


class Workers:
    """Two workers of a job, 1 being the last rank; both come by the same places of the training loop."""

    def __init__(self, folder: Path) -> None:
        self.region: list[int | None] = [0, 0]
        self.last = 1
        self.writers = [Writer(), Writer()]
        self.logs = [
            Log(w, folder, lambda w=w: self.region[w], lambda w=w: self.last == w)  # type: ignore[misc]
            for w in (0, 1)
        ]
        self.board = [
            log.take_writer(self.writers[w] if w == 1 else None, lambda w=w: self.writers[w])  # type: ignore[misc]
            for w, log in enumerate(self.logs)
        ]

    def enter(self, worker: int, activity: int) -> None:
        """The worker begins a joint activity."""
        self.region[worker] = None
        self.logs[worker].seal(activity)

    def log_step(self, worker: int, step: int) -> None:
        """The worker has ended activity ``step`` and comes to the log."""
        self.region[worker] = step + 1
        self.board[worker].add_scalar("loss", 1.0, step)
        self.logs[worker].tell(f"step {step}")

    def step(self, worker: int, step: int) -> None:
        """Both of it."""
        self.enter(worker, step)
        self.log_step(worker, step)

    def lose_the_last(self) -> None:
        """Worker 1 is lost."""
        self.last = 0
        self.logs[0].take_over([1], 1)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    both = Workers(tmp_path)
    yield both
    for log in both.logs:
        log.close()


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_only_the_last_rank_tells(workers: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(3):
        for worker in (0, 1):
            workers.step(worker, step)
    assert lines(capsys) == ["step 0", "step 1", "step 2"]
    workers.enter(1, 3)
    assert (workers.writers[0].steps, workers.writers[1].steps) == ([], [0, 1, 2])


def test_scalars_are_in_the_file_before_the_next_activity_begins(workers: Workers) -> None:
    workers.step(1, 0)
    workers.enter(1, 1)
    assert workers.writers[1].flushed == [0]


def test_a_line_that_the_lost_worker_had_not_told_is_told_by_the_next(
    workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.step(0, 0)
    workers.step(1, 0)
    workers.step(0, 1)
    workers.enter(1, 1)  # is lost behind the barrier, before its log
    workers.enter(0, 2)
    assert lines(capsys) == ["step 0"]
    workers.lose_the_last()
    workers.log_step(0, 2)
    assert lines(capsys) == ["step 1", "step 2"]
    workers.enter(0, 3)
    assert workers.writers[0].steps == [1, 2]


def test_a_worker_that_leaves_in_the_middle_of_an_activity_leaves_its_log_to_the_next(
    workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.step(0, 0)
    workers.step(1, 0)
    workers.enter(1, 1)
    workers.enter(0, 1)
    workers.logs[1].close(complete=False)
    workers.lose_the_last()
    workers.log_step(0, 1)
    workers.enter(0, 2)
    assert lines(capsys) == ["step 0", "step 1"]
    assert (workers.writers[1].steps, workers.writers[0].steps) == ([0], [1])


@pytest.mark.parametrize("sealed", [False, True], ids=["told", "told-and-in-the-next-step"])
def test_a_line_that_the_lost_worker_had_told_is_not_told_again(
    sealed: bool, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.step(1, 0)
    workers.step(1, 1)
    if sealed:
        workers.enter(1, 2)
    workers.step(0, 0)
    workers.step(0, 1)
    workers.lose_the_last()
    workers.step(0, 2)
    assert lines(capsys) == ["step 0", "step 1", "step 2"]
    # A region's scalars go to the file together, when it ends: those of a log that was cut short are not there yet.
    assert (workers.writers[1].steps, workers.writers[0].steps) == (([0, 1], []) if sealed else ([0], [1]))
    workers.enter(0, 3)
    assert workers.writers[0].steps == ([2] if sealed else [1, 2])


def test_a_worker_that_is_behind_leaves_out_what_was_told_ahead_of_it(
    workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.step(1, 0)
    workers.enter(1, 1)
    workers.enter(0, 0)  # still in the barrier of step 0
    workers.lose_the_last()
    workers.log_step(0, 0)
    workers.step(0, 1)
    assert lines(capsys) == ["step 0", "step 1"]
    workers.enter(0, 2)
    assert workers.writers[0].steps == [1]


def test_nothing_older_than_two_activities_is_kept(workers: Workers) -> None:
    for step in range(50):
        workers.step(0, step)
    assert [mark // PLACES for mark, _ in workers.logs[0]._lines] == [49, 50]
    assert [region for region, _ in workers.logs[0]._scalars] == [49, 50]


def test_a_worker_of_another_node_is_assumed_to_have_told_everything_so_far(
    workers: Workers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.step(0, 0)
    (tmp_path / "w1.told").unlink()
    workers.lose_the_last()
    assert lines(capsys) == []
    workers.step(0, 1)
    assert lines(capsys) == ["step 1"]
    workers.enter(0, 2)
    assert workers.writers[0].steps == [1]


def test_a_worker_of_another_node_that_did_not_log_says_nothing_about_the_log(
    workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.step(0, 0)
    workers.enter(1, 0)
    workers.last = 0
    workers.logs[0].take_over([1, 7], 1)
    assert lines(capsys) == ["step 0"]


def test_what_was_told_can_be_read_while_and_after_the_worker_lives(workers: Workers, tmp_path: Path) -> None:
    workers.step(1, 4)
    assert read_board(tmp_path / "w1.told") == Told(line=5 * PLACES + 1, regions=5)
