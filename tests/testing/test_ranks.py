"""Forked ranks: results, errors, deaths and time limits."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

import pytest

from megatron_elas.testing.ranks import RankFailed, run_mortal_ranks, run_ranks

pytestmark = pytest.mark.process


class StubbornError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} {two}")


def test_results_come_back_by_rank() -> None:
    assert run_ranks(3, lambda rank, n, factor: (rank * factor, n), args=(10,)) == [(0, 3), (10, 3), (20, 3)]


def test_large_results_come_back_whole() -> None:
    assert run_ranks(2, lambda rank, n: bytes([rank]) * 3_000_000) == [bytes([rank]) * 3_000_000 for rank in range(2)]


def test_ranks_do_not_change_the_test_process() -> None:
    values: list[int] = []
    run_ranks(2, lambda rank, n: values.append(rank))
    assert not values


def test_an_exception_is_raised_again_with_the_traceback_of_its_rank() -> None:
    def fail(rank: int, n: int) -> None:
        if rank == 1:
            raise KeyError("missing")

    with pytest.raises(KeyError, match="missing") as raised:
        run_ranks(2, fail)
    assert "in fail" in raised.value.__notes__[0]


def test_an_exception_that_cannot_travel_becomes_a_failure_with_its_traceback() -> None:
    def fail(rank: int, n: int) -> None:
        raise StubbornError(1, 2)

    with pytest.raises(RankFailed, match=r"StubbornError: 1 2"):
        run_ranks(1, fail)


def test_the_first_failure_in_time_is_the_one_that_is_raised() -> None:
    ours, theirs = os.pipe()

    def fail(rank: int, n: int) -> None:
        if rank == 1:
            os.write(theirs, str(os.getpid()).encode())
            raise ValueError("cause")
        cause = int(os.read(ours, 100))
        with contextlib.suppress(ProcessLookupError):
            while True:  # until it was reaped
                os.kill(cause, 0)
                time.sleep(0.001)
        raise RuntimeError("consequence")

    try:
        with pytest.raises(ValueError, match="cause"):
            run_ranks(2, fail)
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.timeout(90)
def test_ranks_that_wait_for_a_failed_one_are_ended_early() -> None:
    def fail(rank: int, n: int) -> None:
        if rank == 0:
            raise ValueError("cause")
        threading.Event().wait()

    with pytest.raises(ValueError, match="cause"):
        run_ranks(2, fail, timeout_s=100)


def test_a_rank_that_takes_too_long_is_killed_and_named() -> None:
    def hang(rank: int, n: int) -> int:
        if rank == 1:
            threading.Event().wait()
        return os.getpid()

    with pytest.raises(RankFailed, match=r"rank 1 was still running after 1\.5 s"):
        run_ranks(2, hang, timeout_s=1.5)  # rank 0 is done by then, on a busy machine too


def test_a_stopped_rank_is_killed_too() -> None:
    [end] = run_mortal_ranks(1, lambda rank, n: os.kill(os.getpid(), signal.SIGSTOP), timeout_s=0.3)
    assert end.out_of_time and end.status == -signal.SIGKILL


def test_a_rank_that_dies_is_a_failure_or_an_end_as_the_test_wants() -> None:
    def die(rank: int, n: int) -> int:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            os._exit(5)
        if rank == 2:
            sys.exit(3)
        return rank

    ends = run_mortal_ranks(4, die)
    assert [end.status for end in ends] == [-9, 5, 1, 0]
    assert ends[3].result == 3
    assert isinstance(ends[2].error, SystemExit)
    with pytest.raises(RankFailed, match="rank 0 ended with signal SIGKILL"):
        run_ranks(1, die)
