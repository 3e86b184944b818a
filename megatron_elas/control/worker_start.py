"""From a forked child to a worker: environment, output, then the user's script as ``__main__``."""

from __future__ import annotations

import atexit
import io
import os
import runpy
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import NoReturn

from megatron_elas.control import death_watch
from megatron_elas.control.parent_death import die_with_parent
from megatron_elas.control.starter_messages import StartWorker, Target


def become_worker(request: StartWorker, starter_pid: int, watch_fd: int) -> NoReturn:
    """Turn this forked child into the worker. Never returns.

    The worker leads a process group of its own: a signal from the terminal reaches it once, through
    the launcher, and what it leaves behind can be found.
    """
    die_with_parent(starter_pid)
    os.setpgid(0, 0)
    _redirect(request.log_path)
    os.environ.clear()
    os.environ.update(request.environ)
    if request.fresh:
        _exec_python(request.target, watch_fd, request.watch_slot)
    if request.watch_slot is not None:
        death_watch.hold(watch_fd, request.watch_slot)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A line is one write: whole among those of other workers, and out when the worker dies.
            stream.reconfigure(line_buffering=True, write_through=False)
    end(run_target(request.target))


def _redirect(log_path: str | None) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if log_path is not None:
        log = os.open(log_path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)


def _exec_python(target: Target, watch_fd: int, watch_slot: int | None) -> NoReturn:
    kind = "module" if target.is_module else "script"
    what = ["-m", "megatron_elas.control.fresh_worker", str(watch_fd), str(watch_slot), kind, target.name]
    if watch_slot is None:
        what = ["-m", target.name] if target.is_module else [target.name]
    os.execv(sys.executable, [sys.executable, "-u", *what, *target.arguments])


def run_target(target: Target) -> int:
    """Run the target as Python would; gives the exit status."""
    sys.argv = [target.name, *target.arguments]
    try:
        if target.is_module:
            # It may have been preloaded, and is run again as __main__: that is meant.
            warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning, module="runpy")
            sys.path[0] = str(Path.cwd())
            runpy.run_module(target.name, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(target.name).resolve().parent)
            runpy.run_path(target.name, run_name="__main__")
    except SystemExit as end:
        return _status_of(end.code)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # the process's outermost frame: Python itself would do the same
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _status_of(code: object) -> int:
    """What ``sys.exit(code)`` means."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def end(status: int) -> NoReturn:
    """End as Python does, short of tearing down modules, which a fork shares with its siblings.

    The death watch goes on until the script's last words: its threads and exit handlers may die, too.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's non-daemon threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None when elasrun was started with it closed
            stream.flush()
    death_watch.release()
    os._exit(status)
