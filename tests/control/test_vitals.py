"""Stopped and frozen processes: the judgement with plain numbers, and what it is made from with real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time

import pytest

from megatron_elas.control.vitals import LONGEST_LOOK_S, LOOK_S, Sign, StateFile, Vitals

RUNS, STOPPED = False, True


class Looks:
    """Looks at one worker, one every ``LOOK_S`` unless said otherwise."""

    def __init__(self, hang_timeout_s: float = 0.25, heartbeat_timeout_s: float = 10.0) -> None:
        self.vitals = Vitals(hang_timeout_s=hang_timeout_s, heartbeat_timeout_s=heartbeat_timeout_s)
        self.now, self.pulse = 1000.0, 0

    def look(self, stopped: bool, *, beats: bool = False, times: int = 1, after_s: float = LOOK_S) -> list[str]:
        found = []
        for _ in range(times):
            self.now += after_s
            self.pulse += beats
            sign = Sign(stopped=stopped, pulse=self.pulse)
            found += [words for _, words in self.vitals.look({3: sign}, self.now)]
        return found


def test_a_process_that_stays_stopped_is_told_once() -> None:
    looks = Looks()
    assert not looks.look(RUNS, times=20)
    assert not looks.look(STOPPED, times=4)
    [words] = looks.look(STOPPED, times=20)
    assert re.fullmatch(r"its process is stopped, for 0\.(25|30) s", words), "the first look after the limit"


def test_a_short_stop_is_nothing_and_a_second_one_counts_afresh() -> None:
    looks = Looks()
    for _ in range(5):
        assert not looks.look(STOPPED, times=4)
        assert not looks.look(RUNS)
    assert not looks.look(STOPPED, times=4), "nor are many of them"


def test_a_process_that_has_beaten_since_the_last_look_was_not_stopped_all_the_time() -> None:
    assert not Looks().look(STOPPED, beats=True, times=100)


def test_a_stop_after_a_stop_that_was_told_is_told_again() -> None:
    looks = Looks()
    assert len(looks.look(STOPPED, times=20)) == 1
    assert not looks.look(RUNS)
    assert len(looks.look(STOPPED, times=20)) == 1


def test_a_pulse_that_ends_is_told_after_the_heartbeat_limit() -> None:
    looks = Looks(heartbeat_timeout_s=2.0)
    assert not looks.look(RUNS, beats=True, times=100)
    assert not looks.look(RUNS, times=39)
    assert looks.look(RUNS, times=20) == ["its process is frozen, no pulse for 2.0 s"], "and once"


def test_a_worker_without_a_pulse_is_not_judged_by_it() -> None:
    assert not Looks(heartbeat_timeout_s=2.0).look(RUNS, times=1000)


def test_time_in_which_the_agent_itself_was_held_up_counts_as_one_look() -> None:
    looks = Looks(heartbeat_timeout_s=2.0)
    looks.look(RUNS, beats=True)
    assert not looks.look(STOPPED, after_s=3600.0)
    assert not looks.look(STOPPED, after_s=3600.0), f"two looks count {2 * LONGEST_LOOK_S} s at most"


def test_only_workers_that_have_beaten_since_the_last_question_are_vouched_for() -> None:
    looks = Looks()
    looks.look(RUNS, beats=True)
    assert looks.vitals.take_beating() == (3,)
    looks.look(RUNS, times=5)
    assert looks.vitals.take_beating() == ()


@pytest.mark.process
def test_the_state_file_tells_a_stop_and_stays_with_its_process() -> None:
    sleeper = subprocess.Popen(["sleep", "1000"])
    state = StateFile(sleeper.pid)
    try:
        assert not state.is_stopped()
        os.kill(sleeper.pid, signal.SIGSTOP)
        wait_until(state.is_stopped)
        os.kill(sleeper.pid, signal.SIGCONT)
        wait_until(lambda: not state.is_stopped())
        os.kill(sleeper.pid, signal.SIGSTOP)
        wait_until(state.is_stopped)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert not state.is_stopped(), "it is gone"
    state.close()


def wait_until(condition) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
