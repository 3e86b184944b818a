"""How soon the agent knows that a worker was killed or stopped, at several sizes of its memory.

    python benchmarks/detection.py [--sizes 16 256 1024] [--times 20] [--stops 10]

A kill is noticed by the robust mutex that the worker held; beside it, in the same kill, by its pidfd and by the
end-of-file of a socket that it had open, both of which wait until the kernel has freed its memory. A stop is noticed by
an agent as ``elasrun`` runs it, with its default limits. Prints lines ``RESULT name=value unit``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_elas.config import ControlTimeouts
from megatron_elas.control.agent import Agent
from megatron_elas.control.death_watch import DeathWatch
from megatron_elas.control.messages import WorkerExited, WorkerHung
from megatron_elas.control.starter_messages import StartWorker, Target

PATIENCE_S = 60.0
WAYS = ("mutex", "pidfd", "eof")
TOUCH = """
import mmap, sys, threading
pages = mmap.mmap(-1, int(sys.argv[1]) << 20)
for position in range(0, len(pages), 4096):
    pages[position] = 1
"""
HOLDER = (
    TOUCH
    + """
from megatron_elas.control import death_watch
death_watch.hold(int(sys.argv[2]), 0)
print("ready", flush=True)
threading.Event().wait()
"""
)
WORKER = (
    TOUCH
    + """
import os
from megatron_elas.control import death_watch
death_watch.start_pulse()
with open(sys.argv[2], "w") as ready:
    ready.write(f"{os.getpid()}\\n")
threading.Event().wait()
"""
)


def time_kill_ms(size_mib: int) -> dict[str, float]:
    """From SIGKILL to each notice, in one kill; each notice has a thread of its own that waits for it."""
    noticed_s: dict[str, float] = {}
    watch = DeathWatch()
    told = threading.Event()

    def note_death(slot: int, status: int, at_s: float) -> None:
        noticed_s["mutex"] = time.monotonic()
        told.set()

    watch.watch(note_death)
    ours, theirs = socket.socketpair()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(size_mib), str(watch.fd)],
        pass_fds=[watch.fd, theirs.fileno()], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    theirs.close()
    pidfd = os.pidfd_open(holder.pid)

    def wait_pidfd() -> None:
        select.select([pidfd], [], [], PATIENCE_S)
        noticed_s["pidfd"] = time.monotonic()

    def wait_eof() -> None:
        assert ours.recv(1) == b""
        noticed_s["eof"] = time.monotonic()

    threads = [threading.Thread(target=wait) for wait in (wait_pidfd, wait_eof)]
    for thread in threads:
        thread.start()
    assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
    began_s = time.monotonic()
    os.kill(holder.pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    if not told.wait(PATIENCE_S):
        raise SystemExit("the death watch said nothing")
    holder.communicate()
    os.close(pidfd)
    ours.close()
    watch.close()
    return {way: 1e3 * (at_s - began_s) for way, at_s in noticed_s.items()}


async def time_stop_ms(size_mib: int, folder: Path) -> float:
    """From SIGSTOP to the agent's report."""
    script, ready = folder / "worker.py", folder / "pid"
    script.write_text(WORKER)
    ready.unlink(missing_ok=True)
    loop = asyncio.get_running_loop()
    hung_s: asyncio.Future[float] = loop.create_future()

    def report(news: WorkerExited | WorkerHung) -> None:
        if isinstance(news, WorkerHung) and not hung_s.done():
            hung_s.set_result(time.monotonic())

    agent = await Agent.launch(preload=None, environ=os.environ, timeouts=ControlTimeouts(), report=report)
    try:
        target = Target(name=str(script), is_module=False, arguments=(str(size_mib), str(ready)))
        agent.start([StartWorker(worker=0, target=target, environ=dict(os.environ))])
        async with asyncio.timeout(PATIENCE_S):
            while not ready.exists() or not ready.read_text().endswith("\n"):
                await asyncio.sleep(0.01)
            began_s = time.monotonic()
            os.kill(int(ready.read_text()), signal.SIGSTOP)
            return 1e3 * (await hung_s - began_s)
    finally:
        agent.kill_all()
        await agent.close()


def print_result(name: str, size_mib: int, times_ms: Sequence[float]) -> None:
    """Median, 99th percentile (the largest, of fewer than a hundred) and largest."""
    ordered = sorted(times_ms)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    print(f"RESULT {name}@{size_mib}MiB={statistics.median(ordered):.3f} ms")
    print(f"RESULT {name}_p99@{size_mib}MiB={p99:.3f} ms")
    print(f"RESULT {name}_max@{size_mib}MiB={ordered[-1]:.3f} ms", flush=True)


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 256, 1024], help="memory that is touched, MiB")
    parser.add_argument("--times", type=int, default=20, help="kills per size")
    parser.add_argument("--stops", type=int, default=10, help="stops per size")
    options = parser.parse_args()
    for size_mib in options.sizes:
        kills = [time_kill_ms(size_mib) for _ in range(options.times)]
        for way in WAYS:
            name = "detect_kill_ms" if way == "mutex" else f"detect_kill_{way}_ms"
            print_result(name, size_mib, [kill[way] for kill in kills])
        ratio = statistics.median(kill["pidfd"] / kill["mutex"] for kill in kills)
        print(f"RESULT detect_kill_vs_pidfd@{size_mib}MiB={ratio:.1f} pidfd/mutex", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for size_mib in sorted({options.sizes[0], options.sizes[-1]}):
            stops = [asyncio.run(time_stop_ms(size_mib, Path(folder))) for _ in range(options.stops)]
            print_result("detect_stop_ms", size_mib, stops)


if __name__ == "__main__":
    main()
