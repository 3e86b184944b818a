"""A worker that dies is noticed by the mutex it held; one that leaves in order is not."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megatron_elas.control.death_watch import SLOTS, DeathWatch

PATIENCE_S = 20
HOLDER = """
import os, signal, sys, threading, time
from megatron_elas.control import death_watch
fd, slot, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
for _ in range(4):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
death_watch.hold(fd, slot)
print("held", flush=True)
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "exit":
    os._exit(7)
if how == "fork":
    if not os.fork():
        os._exit(9)
    os.wait()
    sys.stdin.read()
if how == "wait":
    sys.stdin.read()
death_watch.release()
os._exit(5)
"""


@pytest.fixture
def watch() -> Iterator[DeathWatch]:
    made = DeathWatch()
    yield made
    made.close()


def start(watch: DeathWatch, slot: int, how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(watch.fd), str(slot), how],
        pass_fds=[watch.fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(holder: subprocess.Popen[str]) -> None:
    holder.communicate(timeout=PATIENCE_S)


@pytest.mark.process
@pytest.mark.parametrize(("how", "status"), [("kill", -signal.SIGKILL), ("exit", 7)])
def test_the_death_of_a_holder_is_told_with_its_status(watch: DeathWatch, how: str, status: int) -> None:
    deaths: queue.Queue[tuple[int, int]] = queue.Queue()
    slot = watch.watch(lambda at, code, when: deaths.put((at, code)))
    assert slot == 0
    holder = start(watch, slot, how)
    told = deaths.get(timeout=PATIENCE_S)  # before it is reaped: then its parent knows anyhow
    end(holder)
    assert told == (0, status)


@pytest.mark.process
def test_one_killed_from_outside_is_told_and_one_that_lets_go_is_not(watch: DeathWatch) -> None:
    deaths: queue.Queue[tuple[int, int]] = queue.Queue()
    slots = [watch.watch(lambda at, code, when: deaths.put((at, code))) for _ in range(2)]
    assert slots == [0, 1]
    leaving, staying = start(watch, 0, "leave"), start(watch, 1, "wait")
    end(leaving)
    assert staying.stdout is not None and staying.stdout.readline() == "held\n"
    os.kill(staying.pid, signal.SIGKILL)
    assert deaths.get(timeout=PATIENCE_S) == (1, -signal.SIGKILL)
    end(staying)
    assert deaths.empty(), "leaving in order is no death"


@pytest.mark.process
def test_the_end_of_a_holders_child_is_no_death(watch: DeathWatch) -> None:
    deaths: queue.Queue[tuple[int, int]] = queue.Queue()
    assert watch.watch(lambda at, code, when: deaths.put((at, code))) == 0
    holder = start(watch, 0, "fork")
    end(holder)
    assert holder.returncode == 5 and deaths.empty()


def test_a_watch_of_a_worker_that_never_held_its_slot_can_be_closed() -> None:
    watch = DeathWatch()
    assert watch.watch(lambda *death: pytest.fail(f"nobody died: {death}")) == 0
    watch.close()


def test_workers_beyond_the_last_slot_are_not_watched(watch: DeathWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_elas.control.death_watch.SLOTS", 1)
    assert SLOTS > 1
    assert [watch.watch(lambda *death: None) for _ in range(2)] == [0, None]
