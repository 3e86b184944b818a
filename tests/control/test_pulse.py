"""The pulse goes on where Python cannot, and ends with the process, however it ends or stops."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from megatron_elas import native
from megatron_elas.control.death_watch import DeathWatch
from megatron_elas.control.pulse import PERIOD_S, _library

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(_library is None, reason=f"no C library (make native), or {native.SWITCH}=0"),
]

PATIENCE_S = 20
WORKER = """
import ctypes, os, sys, time
from megatron_elas.control import death_watch
death_watch.hold(int(sys.argv[1]), int(sys.argv[2]))
print(death_watch.start_pulse(), flush=True)
for order in sys.stdin:
    if order == "hold the interpreter\\n":
        print("holds", flush=True)
        ctypes.PyDLL(None).sleep(90)  # PyDLL: without giving the interpreter lock away
    if order == "fork\\n":
        child = os.fork()
        if child == 0:
            death_watch.stop_pulse()
            os._exit(0)
        os.waitpid(child, 0)
    if order == "stop\\n":
        death_watch.stop_pulse()
        death_watch.stop_pulse()
    if order == "start again\\n":
        assert death_watch.start_pulse()
    print("done", flush=True)
death_watch.release()
"""


class Beating:
    """A process with a pulse."""

    def __init__(self, environ: dict[str, str] | None = None) -> None:
        self.watch = DeathWatch()
        slot = self.watch.watch(lambda *death: None)
        assert slot is not None
        self.slot = slot
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(self.watch.fd), str(slot)],
            pass_fds=[self.watch.fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            bufsize=0,  # what it said is in the pipe, for select, until it is read
            env={**os.environ, **(environ or {})},
        )  # fmt: skip
        self.has_pulse = self.read() == "True"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    @property
    def has_spoken(self) -> bool:
        """Whether ``read`` would return at once."""
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def order(self, words: str, answer: str = "done") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((words + "\n").encode())
        assert self.read() == answer

    @property
    def pulse_ns(self) -> int:
        return self.watch.pulse_ns(self.slot)

    def wait_beat(self) -> None:
        """Until it beats once more."""
        before = self.pulse_ns
        wait_until(lambda: self.pulse_ns not in (before, 0))

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.watch.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def beating() -> Iterator[Beating]:
    made = Beating()
    try:
        assert made.has_pulse
        yield made
    finally:
        made.end()


def test_it_is_the_time_of_the_monotonic_clock(beating: Beating) -> None:
    before_ns = time.monotonic_ns()
    beating.wait_beat()
    beating.wait_beat()
    assert before_ns <= beating.pulse_ns <= time.monotonic_ns()


def test_it_goes_on_while_the_interpreter_lock_is_held(beating: Beating) -> None:
    beating.order("hold the interpreter", "holds")
    for _ in range(3):
        beating.wait_beat()
    assert not beating.has_spoken, "the call has ended"


def test_it_ends_with_a_stop_of_the_process_and_comes_back_with_it(beating: Beating) -> None:
    beating.wait_beat()
    os.kill(beating.process.pid, signal.SIGSTOP)
    _, status = os.waitpid(beating.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    last = beating.pulse_ns
    time.sleep(4 * PERIOD_S)
    assert beating.pulse_ns == last
    os.kill(beating.process.pid, signal.SIGCONT)
    beating.wait_beat()


def test_a_forked_child_does_not_end_it(beating: Beating) -> None:
    beating.order("fork")
    beating.wait_beat()


def test_it_is_zero_when_it_was_ended_and_can_be_started_again(beating: Beating) -> None:
    beating.order("stop")
    assert beating.pulse_ns == 0
    beating.order("start again")
    beating.wait_beat()


def test_a_second_start_finds_the_pulse_that_there_is(beating: Beating) -> None:
    beating.order("start again")
    beating.wait_beat()


def test_without_the_library_there_is_none() -> None:
    made = Beating({native.SWITCH: "0"})
    try:
        assert not made.has_pulse and made.pulse_ns == 0
    finally:
        made.end()
