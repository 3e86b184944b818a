"""Who is found to make no progress, and when."""

from __future__ import annotations

import sys
import threading
import weakref
from pathlib import Path

import pytest

from megatron_elas.control.progress import (
    FACTOR,
    PATIENCE,
    ProgressWatch,
    describe_place,
    is_waiting,
    look_at_main_thread,
)

LIMIT_S = 5.0
LOOK_S = 1.0


class Worker:
    """A watch, a clock, and looks at every second."""

    def __init__(self) -> None:
        self.now = 100.0
        self.watch = ProgressWatch(LIMIT_S, 2 * LOOK_S)

    def look(self, seconds: int, *, waiting: bool = False, marks: bool = False) -> list[float]:
        """What the looks of so many seconds found."""
        found = []
        for _ in range(seconds):
            self.now += LOOK_S
            if marks:
                self.watch.mark()
            found.append(self.watch.look(self.now, waiting))
        return [stalled_s for stalled_s in found if stalled_s is not None]

    def step(self, number: int, seconds: int = 1) -> None:
        """A whole step."""
        self.watch.enter_step(number, self.now)
        assert self.look(seconds, marks=True) == []
        self.watch.leave_step(self.now)

    def trained(self) -> Worker:
        """In its third step, two short ones behind it."""
        self.step(0)
        self.step(1)
        self.watch.enter_step(2, self.now)
        self.look(1)
        return self


def test_a_main_thread_that_hangs_in_a_step_is_found_once() -> None:
    [stalled_s] = Worker().trained().look(10 * FACTOR)
    assert stalled_s == pytest.approx(FACTOR * LOOK_S), "ten times the longest step is more than the least limit"


def test_the_least_limit_holds_where_steps_are_short() -> None:
    worker = Worker()
    for number in range(3):
        worker.watch.enter_step(number, worker.now)
    worker.look(1)
    assert worker.look(int(LIMIT_S)) == [LIMIT_S]


def test_the_limit_grows_with_the_longest_step() -> None:
    worker = Worker()
    worker.step(0)
    worker.step(1, 7)
    worker.watch.enter_step(2, worker.now)
    worker.look(1)
    assert worker.look(7 * FACTOR - 1) == []
    assert worker.look(1) == [7 * FACTOR * LOOK_S]


def test_marks_and_waiting_for_others_are_progress() -> None:
    worker = Worker().trained()
    assert worker.look(1000, waiting=True) == []
    assert worker.look(1000, marks=True) == []
    assert worker.look(FACTOR) == [FACTOR * LOOK_S], "what was waited for does not count"


def test_before_the_first_step_nothing_is_watched() -> None:
    assert Worker().look(100_000) == []


def test_the_first_step_may_compile() -> None:
    worker = Worker()
    worker.watch.enter_step(0, worker.now)
    worker.look(1)
    assert worker.look(int(PATIENCE * LIMIT_S) - 1) == []
    assert worker.look(1) == [PATIENCE * LIMIT_S]


def test_evaluation_and_saving_may_take_long() -> None:
    worker = Worker().trained()
    worker.watch.leave_step(worker.now)
    worker.look(1)
    assert worker.look(int(PATIENCE * FACTOR * LOOK_S) - 1) == []
    assert worker.look(1) == [PATIENCE * FACTOR * LOOK_S]


def test_the_step_that_a_recovery_cuts_and_the_next_one_are_no_measure_and_may_take_long() -> None:
    worker = Worker().trained()
    worker.look(5, waiting=True)
    worker.watch.disturb()
    worker.look(1)
    assert worker.look(int(PATIENCE * FACTOR * LOOK_S) - 1) == []
    worker.watch.enter_step(1, worker.now)
    worker.look(1)
    assert worker.look(int(PATIENCE * FACTOR * LOOK_S) - 1) == []
    worker.watch.enter_step(2, worker.now)
    worker.look(1)
    assert worker.look(FACTOR) == [FACTOR * LOOK_S]


def test_time_in_which_this_process_was_held_up_does_not_count() -> None:
    worker = Worker().trained()
    for _ in range(3):
        worker.now += 1000.0
        assert worker.watch.look(worker.now, False) is None
    assert worker.look(FACTOR) != []


def test_a_hang_that_ends_and_comes_again_is_found_again() -> None:
    worker = Worker().trained()
    assert len(worker.look(100)) == 1
    worker.watch.mark()
    assert len(worker.look(100)) == 1


def test_a_hang_that_a_new_controller_has_not_heard_of_is_told_again_and_one_that_is_over_is_not() -> None:
    worker = Worker().trained()
    assert len(worker.look(100)) == 1
    worker.watch.tell_again()
    assert len(worker.look(1)) == 1 and worker.look(100) == []
    worker.watch.mark()
    worker.watch.tell_again()
    assert worker.look(1) == []


def test_what_is_said_names_step_place_and_limit() -> None:
    words = Worker().trained().watch.describe(12.3, "read (data.py:7)")
    assert "no progress for 12.3 s in step 2, at read (data.py:7) (limit 10.0 s, see --progress-timeout-s)" in words


# ---------------------------------------------------------------- where the main thread is


def frame_inside(module: str) -> tuple[bool, str]:
    """(waiting, place) of a thread that waits for a lock in a module of this name."""
    done, inside = threading.Event(), threading.Event()
    scope = {"__name__": module, "done": done, "inside": inside}
    exec(compile("def call():\n    inside.set()\n    done.wait()\n", f"/x/{module}.py", "exec"), scope)
    thread = threading.Thread(target=scope["call"])
    thread.start()
    inside.wait()
    try:
        frame = sys._current_frames()[thread.ident or 0]
        return is_waiting(frame), describe_place(frame)
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize(
    ("module", "waiting"),
    [
        ("megatron_elas.runtime.communicator.work", True),
        ("megatron_elas.runtime.transport.native_engine", True),
        ("megatron_elas.runtime.replicator", True),
        ("megatron_elas.control.link", True),
        ("megatron_elas.runtime.session", False),
        ("megatron_elas.runtime.executor", False),
        ("megatron_elas.host.training_step", False),
        ("megatron_elas.testing.faults", False),
        ("megatron.core.pipeline_parallel.schedules", False),
        ("__main__", False),
    ],
)
def test_a_worker_waits_when_the_innermost_code_of_ours_is_there_to_wait(module: str, waiting: bool) -> None:
    assert frame_inside(module)[0] is waiting


def test_modules_that_wait_exist() -> None:
    import megatron_elas

    root = Path(megatron_elas.__file__).parent
    for module in ("runtime/session.py", "runtime/executor.py", "runtime/communicator/work.py", "control/link.py"):
        assert (root / module).is_file(), f"{module} has moved: is control/progress.py still right?"


def test_looking_at_the_main_thread_keeps_nothing_of_it_alive() -> None:
    class Held:
        """Something in a frame."""

    looked: list[tuple[bool, str]] = []
    go_on, done = threading.Event(), threading.Event()

    def look() -> None:
        looked.append(look_at_main_thread())
        done.set()
        go_on.wait()

    def call() -> weakref.ref[Held]:
        held = Held()
        thread.start()
        done.wait()
        return weakref.ref(held)

    thread = threading.Thread(target=look)
    try:
        assert call()() is None
    finally:
        go_on.set()
        thread.join()
    assert not looked[0][0] and "threading.py" in looked[0][1]
