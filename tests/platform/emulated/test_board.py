"""Workers see each other's times and clocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_elas.platform.emulated.board import TAGS, Board, set_clock
from megatron_elas.spec.device import ClockRange
from megatron_elas.spec.errors import BadUsage

CLOCKS = ClockRange(nominal_mhz=1800, lowest=0.6, highest=1.2, step=0.1, latency_s=0.5)


def test_what_one_writes_the_other_reads(tmp_path: Path) -> None:
    mine, theirs = Board(tmp_path / "board", 3), Board(tmp_path / "board", 3)
    mine.sent(1, 0, 5.0)
    mine.sent(1, TAGS - 1, 6.0)
    mine.sent(2, 0, 7.0)
    mine.computed(0, 8.0)
    assert [theirs.sent_s(1, 0), theirs.sent_s(1, TAGS - 1), theirs.sent_s(2, 0)] == [5.0, 6.0, 7.0]
    assert [theirs.computed_s(worker) for worker in range(3)] == [8.0, 0.0, 0.0]
    mine.close()
    assert theirs.sent_s(1, 0) == 5.0
    theirs.close()


def test_the_file_takes_only_the_space_of_what_is_written(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 64)
    board.sent(63, 1, 1.0)
    board.close()
    assert (tmp_path / "board").stat().st_blocks * 512 < 1 << 20


def test_a_clock_is_nominal_until_one_is_asked_for(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 2)
    assert board.clock(1, 10.0) == 1.0
    assert set_clock(board, 1, 0.72, CLOCKS, now_s=10.0) == 0.8
    assert [board.clock(1, at) for at in (10.0, 10.4, 10.5, 20.0)] == [1.0, 1.0, 0.8, 0.8]
    assert set_clock(board, 1, 5.0, CLOCKS, now_s=30.0, speed=5) == 1.2
    assert [board.clock(1, at) for at in (30.0, 30.2)] == [0.8, 1.2]
    assert board.clock(0, 30.0) == 1.0
    board.close()


def test_a_clock_that_stands_still_is_refused(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 1)
    with pytest.raises(BadUsage, match=r"clock is 0: give a number above 0"):
        board.ask_clock(0, 0, 1.0)
    board.close()
