"""``elasrun`` as a program, with small workers that need no torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_elas.cli.launch_flags import TIMEOUT_HELP, build_parser
from megatron_elas.cli.report_facts import read_job_log
from megatron_elas.config import ControlTimeouts
from megatron_elas.control import pulse
from megatron_elas.spec.report import PHASES
from tests.cli.launcher import FAST, TOY, WAIT_S, Job, elasrun, launched, wait_gone, write_script

pytestmark = pytest.mark.process

WAIT_SCRIPT = "import signal, sys, threading\nprint('up', flush=True)\nthreading.Event().wait()\n"
STUBBORN_SCRIPT = (
    "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('not now', flush=True))\n" + WAIT_SCRIPT
)


def run_dirs() -> list[str]:
    return [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("elas-")]


# ---------------------------------------------------------------- plain jobs


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_get_torchruns_environment_and_their_arguments(method: str, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import json, os, sys\n"
        # One write: a fresh Python is unbuffered, and print() would write the newline by itself.
        "seen = {**os.environ, 'argv': sys.argv, 'name': __name__, 'path': sys.path[0]}\n"
        "sys.stdout.write(json.dumps(seen) + '\\n')\n",
    )
    outcome = elasrun("--nproc_per_node", "2", "--start-method", method, script, "--flag", "-m", "x")
    assert outcome.code == 0, outcome.err
    zero, one = sorted((json.loads(line) for line in outcome.out.splitlines()), key=lambda seen: seen["RANK"])
    assert [one[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == ["1", "1", "2", "2"]
    assert one["MASTER_ADDR"] == "127.0.0.1" and 0 < int(one["MASTER_PORT"]) == int(zero["MASTER_PORT"])
    assert one["ELAS_WORKER"] == "1" and one["ELAS_DOMAIN"] == "worker1" and one["OMP_NUM_THREADS"] == "1"
    assert one["argv"] == [script, "--flag", "-m", "x"]
    assert (one["name"], one["path"]) == ("__main__", str(tmp_path))
    assert not Path(one["ELAS_RUN_DIR"]).exists()


def test_a_module_is_run_as_with_python_m() -> None:
    outcome = elasrun("--nproc-per-node=1", "-m", "json.tool", "--help")
    assert outcome.code == 0 and "usage" in outcome.out


def test_a_worker_that_fails_ends_the_job_with_its_code(tmp_path: Path) -> None:
    script = write_script(
        tmp_path, "import os, sys, threading\nsys.exit(7) if os.environ['RANK'] == '1' else threading.Event().wait()\n"
    )
    outcome = elasrun("--nproc-per-node", "3", script)
    assert outcome.code == 7
    assert outcome.err.strip() == "elasrun: worker 1 exited with status 7 (exit code 7)"


def test_a_traceback_of_a_worker_is_seen(tmp_path: Path) -> None:
    outcome = elasrun(write_script(tmp_path, "print('before')\nraise ValueError('oops')\n"))
    assert outcome.code == 1
    assert "ValueError: oops" in outcome.err and "before" in outcome.out


def test_a_worker_that_is_killed_ends_a_plain_job(tmp_path: Path) -> None:
    outcome = elasrun(write_script(tmp_path, "import os\nos.kill(os.getpid(), 9)\n"))
    assert outcome.code == 137 and "killed by SIGKILL" in outcome.err


def test_a_worker_of_an_elastic_job_that_is_killed_before_it_joined_ends_the_job_as_not_started(tmp_path: Path) -> None:
    """Also when the flag is in a file."""
    script = write_script(tmp_path, "import os\nos.kill(os.getpid(), 9)\n")
    (tmp_path / "flags").write_text("--lr 1  # a comment\n--elastic\n")
    for flag in ("--elastic", f"@{tmp_path / 'flags'}"):
        outcome = elasrun(script, flag)
        assert outcome.code == 5 and "worker 0 was lost before training began (killed by SIGKILL)" in outcome.err


def test_output_goes_to_one_file_per_worker_when_asked(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import os, sys\nprint('out', os.environ['RANK'])\nprint('err', file=sys.stderr)\n")
    outcome = elasrun("--nproc-per-node", "2", "--log-dir", str(tmp_path / "logs"), script)
    closing = f"elasrun: finished; output is in {tmp_path / 'logs'}\n"
    assert (outcome.code, outcome.out, outcome.err) == (0, "", closing)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["events.jsonl", "worker0.log", "worker1.log"]
    assert (tmp_path / "logs" / "worker1.log").read_text() == "out 1\nerr\n"


def test_an_elastic_job_is_named_where_its_output_is_in_files(tmp_path: Path) -> None:
    logs, script = tmp_path / "logs", write_script(tmp_path, "print('hello')\n")
    flags = ("--nproc-per-node=2", "--rdzv-id=run7")
    outcome = elasrun(*flags, "--log-dir", str(logs), script, "--elastic")
    assert outcome.out == f"elasrun: job run7: 2 workers, output is in {logs}\n", outcome
    assert "job run7" not in elasrun(*flags, script, "--elastic").out


REFUSER = """
import atexit, os, pathlib, sys, threading, time
from megatron_elas.pretrain_gpt import errors_told
from megatron_elas.spec.errors import BadUsage
told = pathlib.Path(os.environ["ELAS_RUN_DIR"], "told")
if os.environ["RANK"] == "1":
    atexit.register(threading.Event().wait)
while os.environ["RANK"] == "0" and not (told.exists() and told.stat().st_size):
    time.sleep(0.01)
with errors_told():
    raise BadUsage(f"worker {os.environ['RANK']} does not like 7")
"""
"""Worker 1 speaks first, and lives on; so worker 0 ends first."""


def test_of_a_refused_job_the_terminal_tells_the_sentence_and_whose_log_has_it(tmp_path: Path) -> None:
    script, logs = write_script(tmp_path, REFUSER), tmp_path / "logs"
    outcome = elasrun("--nproc-per-node=2", "--grace-s=1", "--log-dir", str(logs), script)
    assert outcome.code == 2
    wanted = f"elasrun: worker 1: worker 1 does not like 7 (exit code 2, also in {logs / 'worker1.log'})"
    assert outcome.err.splitlines()[-1] == wanted
    assert read_events(logs)[-1].items() >= {"sentence": "worker 1: worker 1 does not like 7", "worker": 1}.items()
    assert (logs / "worker0.log").read_text() == "", "it has nothing to add"


def test_where_a_refusal_is_on_the_terminal_it_is_not_said_again(tmp_path: Path) -> None:
    outcome = elasrun("--nproc-per-node=2", "--grace-s=1", write_script(tmp_path, REFUSER))
    told = [line for line in outcome.err.splitlines() if "did not end by themselves" not in line]
    assert (outcome.code, told) == (
        2, ["megatron_elas: worker 1 does not like 7", "elasrun: worker 1 exited with status 2 (exit code 2)"]
    )  # fmt: skip


def test_exit_handlers_and_threads_of_a_forked_worker_end_as_in_python(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import atexit, sys, threading\n"
        "atexit.register(print, 'handler')\n"
        "timer = threading.Timer(0.2, print, ['thread'])\n"
        "timer.start()\n"
        "sys.exit('a reason')\n",
    )
    outcome = elasrun("--start-method", "fork", script)
    assert (outcome.code, outcome.out.split()) == (1, ["thread", "handler"])
    assert "a reason" in outcome.err


def test_preloading_is_done_once_and_shared(tmp_path: Path) -> None:
    (tmp_path / "shared_module.py").write_text(
        "import os\ndef preload():\n    os.environ['X'] = '1'\n    print('once')\n"
    )
    script = write_script(tmp_path, "import sys\nprint('shared_module' in sys.modules)\n")
    environ = {"PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"}
    outcome = elasrun("--nproc-per-node", "2", "--preload", "shared_module:preload", script, environ=environ)
    assert (outcome.code, outcome.out.split()) == (0, ["once", "True", "True"]), outcome


def test_a_preload_that_fails_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    script = write_script(tmp_path, WAIT_SCRIPT)
    outcome = elasrun("--preload", "json:nothing", script)
    assert outcome.code == 2
    assert "elasrun: cannot preload json:nothing: AttributeError" in outcome.err
    assert not run_dirs()


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_are_passed_on_and_end_the_job(signum: signal.Signals, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import os, signal, sys, threading\n"
        "def leave(signum, frame):\n    print('got', signum, flush=True)\n    os._exit(0)\n"
        f"signal.signal({int(signum)}, leave)\n" + WAIT_SCRIPT,
    )
    with launched("--nproc-per-node", "2", script) as job:
        job.wait_for("up", 2)
        processes = job.descendants()
        assert len(processes) == 4, "the controller, what workers are started from, and two workers"
        job.process.send_signal(signum)
        outcome = job.finish()
    assert outcome.code == 128 + signum
    assert outcome.out.count(f"got {int(signum)}") == 2
    assert not wait_gone(processes)
    assert not run_dirs()


def test_workers_that_do_not_listen_are_killed_after_the_grace_period(tmp_path: Path) -> None:
    with launched("--nproc-per-node", "2", "--grace-s", "0.3", write_script(tmp_path, STUBBORN_SCRIPT)) as job:
        job.wait_for("up", 2)
        job.process.terminate()
        outcome = job.finish()
    assert outcome.code == 143
    assert "workers [0, 1] did not end by themselves" in outcome.err


@pytest.mark.timeout(200)
def test_a_second_signal_does_not_wait_for_the_grace_period(tmp_path: Path) -> None:
    with launched("--grace-s", "1000", write_script(tmp_path, STUBBORN_SCRIPT)) as job:
        job.wait_for("up")
        job.process.terminate()
        job.wait_for("not now")
        job.process.terminate()
        assert job.finish().code == 143


def test_a_stopped_worker_ends_with_the_others(tmp_path: Path) -> None:
    with launched("--nproc-per-node", "2", write_script(tmp_path, WAIT_SCRIPT)) as job:
        job.wait_for("up", 2)
        workers = job.workers()
        workers[0].suspend()
        job.process.terminate()
        assert job.finish().code == 143
    assert not wait_gone(workers)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_nothing_is_left_when_the_launcher_is_killed(method: str, tmp_path: Path) -> None:
    with launched("--nproc-per-node", "2", "--start-method", method, write_script(tmp_path, STUBBORN_SCRIPT)) as job:
        job.wait_for("up", 2)
        processes = job.descendants()
        job.process.kill()
        job.process.wait(WAIT_S)
        assert not wait_gone(processes)
    assert elasrun(write_script(tmp_path, "")).code == 0, "it also removes what the killed one could not"
    assert not run_dirs()


def test_workers_die_with_the_process_they_were_forked_from(tmp_path: Path) -> None:
    with launched("--nproc-per-node", "2", write_script(tmp_path, STUBBORN_SCRIPT)) as job:
        job.wait_for("up", 2)
        processes = job.descendants()
        [starter] = [child for child in processes if child.children()]
        starter.kill()
        outcome = job.finish()
    assert outcome.code == 137
    assert "with the process that workers are started from, which was killed by SIGKILL" in outcome.err
    assert not wait_gone(processes)


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "import subprocess\nchild = subprocess.Popen(['sleep', '1000'])\nprint('child', child.pid, flush=True)\n",
    )
    with launched(script) as job:
        [match] = job.wait_for(r"child (\d+)")
        assert job.finish().code == 0
    with contextlib.suppress(psutil.NoSuchProcess):
        assert not wait_gone([psutil.Process(int(match[1]))])


def test_a_signal_while_preloading_ends_the_launch(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text(
        "import threading\ndef preload():\n    print('loading', flush=True)\n    threading.Event().wait()\n"
    )
    environ = {"PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"}
    with launched("--preload", "slow_module:preload", write_script(tmp_path, ""), environ=environ) as job:
        job.wait_for("loading")
        processes = job.descendants()
        job.process.terminate()
        assert job.finish().code == 143
    assert not wait_gone(processes)
    assert not run_dirs()


# ---------------------------------------------------------------- bad usage


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.py"], "there is no script nothing.py"),
        (["-m", "no_such_module"], "there is no module no_such_module"),
        (["-m", "megatron_elas.pretrain_gtp"], "there is no module megatron_elas.pretrain_gtp"),
        (["-m", "megatron.training.nothing"], "there is no module megatron.training.nothing"),
        (["-m", "json"], "there is no module json to run"),
        ([], "the following arguments are required: script; elasrun --help"),
        (["--nproc-per-node", "0", TOY], "--nproc-per-node must be a number from 1 up"),
        (["--nproc-per-node", "many", TOY], "got 'many'"),
        (["--nnodes", "1:4", TOY], "a range is not supported"),
        (["--nnodes", "2", TOY], "--nnodes 2 needs --node-rank"),
        (["--nnodes", "2", "--node-rank", "2", TOY], "--node-rank 2 is not one of 0 to 1"),
        (["--nnodes", "2", "--node-rank", "0", TOY], "needs --rdzv-endpoint"),
        (["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "localhost", TOY], "needs a secret"),
        (["--master-port", "70000", TOY], "--master-port must be a port from 0 to 65535"),
        (
            ["--rebalance", "8,7", TOY],
            "--rebalance must be STEP:N,N,... with a number of layers for each stage, got '8,7'",
        ),
        (["--unknown", TOY], "there is no flag --unknown: elasrun --help"),
        (["--nproc-per-nod=2", TOY], "there is no flag --nproc-per-nod, did you mean --nproc-per-node? elasrun --help"),
        (["--log_dirs", "x", TOY], "there is no flag --log_dirs, did you mean --log-dir?"),
        (["--heartbeat-timeout-s", "0.6", TOY], "--heartbeat-timeout-s=0.6 is less than twice --heartbeat-interval-s"),
        (["--settle-timeout-s", "5", TOY], "--heartbeat-timeout-s=10 is more than --settle-timeout-s=5"),
        (["--resume-timeout-s", "59", TOY], "--settle-timeout-s=60 is more than --resume-timeout-s=59"),
        (["--grace-s", "soon", TOY], "--grace-s must be a number of seconds"),
        (["--preload", "nothing", TOY], "module:function"),
        (["--log-dir", "/proc/nothing", TOY], "--log-dir /proc/nothing cannot be made"),
        (["--token-file", "/nothing", TOY], "--token-file /nothing cannot be read"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_2(arguments: list[str], words: str) -> None:
    outcome = elasrun(*arguments, environ={"ELAS_TOKEN": ""})
    assert outcome.code == 2
    assert words in outcome.err
    assert len(outcome.err.splitlines()) == 1 and outcome.err.startswith("elasrun: ")


@pytest.mark.parametrize("flag", ["--controller-port", "--master-port", "--rdzv-endpoint"])
def test_a_port_in_use_is_said_and_leaves_nothing(flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outcome = elasrun(flag, f"127.0.0.1:{port}" if "rdzv" in flag else str(port), TOY)
    assert outcome.code == 2
    assert str(port) in outcome.err and len(outcome.err.splitlines()) == 1
    assert outcome.err.lower().count("address already in use") == 1
    assert not run_dirs()


def test_a_second_node_that_is_started_as_the_first_is_told_so() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        outcome = elasrun(
            "--nnodes=2", "--node-rank=0", f"--rdzv-endpoint={endpoint}", TOY, environ={"ELAS_TOKEN": "the same"}
        )
    assert outcome.code == 2 and len(outcome.err.splitlines()) == 1
    assert "--rdzv-endpoint" in outcome.err and "--node-rank" in outcome.err and "--controller" not in outcome.err


def test_the_help_says_what_every_timeout_limits_and_its_default() -> None:
    assert TIMEOUT_HELP.keys() == {field.name for field in fields(ControlTimeouts)}
    text = " ".join(build_parser().format_help().split())
    assert "--grace_s S between asking a worker to end (SIGTERM) and killing it; default: 10 s" in text
    assert "auto, cpu, gpu or npu; default: 1" in text


def test_an_unknown_rendezvous_backend_is_accepted_with_a_line(tmp_path: Path) -> None:
    outcome = elasrun("--rdzv-backend", "etcd", write_script(tmp_path, ""))
    assert outcome.code == 0 and outcome.err.startswith("elasrun: --rdzv-backend etcd has no effect")
    assert elasrun("--rdzv-backend", "c10d", write_script(tmp_path, "")).err == ""


def test_the_launcher_imports_no_torch() -> None:
    program = (
        "import sys, megatron_elas.cli.elasrun, megatron_elas.control.starter_process\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'megatron', 'numpy')))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=WAIT_S, check=False).returncode == 0


# ---------------------------------------------------------------- elastic jobs


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("kill:worker=3@step=5,phase=between", "exited, killed by SIGKILL"),
        ("stop:worker=3@step=5,phase=between", "silent, its process is stopped, for 0."),
        ("exit:worker=3@step=5,phase=between", "exited, exited with status 1"),
        (
            "exception:worker=3@step=5,phase=between",
            "exited, exited with status 1, failed with: InjectedFault: injected fault exception:worker=3@step=5,",
        ),
        ("kill:worker=0@step=5,phase=between", "exited, killed by SIGKILL"),
    ],
)
def test_a_job_that_loses_a_worker_goes_on_with_the_others(fault: str, reason: str) -> None:
    victim = fault[fault.index("=") + 1]
    outcome = elasrun("--nproc-per-node", "4", *FAST, TOY, "2", "2", "1", fault)
    assert outcome.code == 0, outcome
    assert re.search(rf"lost     worker {victim} \(stage ., cell ., lane 0\): {reason}", outcome.out), outcome.out
    assert outcome.out.count("goes on") == 3
    header, numbers = re.findall(r"^(?:ms  |    ) {5}(.*)$", outcome.out, re.MULTILINE)
    names, values = header.split(), [float(text) for text in numbers.split("(")[0].split()]
    assert names[0] == "detect" and names[-1] == "total"
    assert sum(values[:-1]) == pytest.approx(values[-1], abs=1e-6)


@pytest.mark.skipif(pulse._library is None, reason="no C library (make native)")
@pytest.mark.parametrize(
    ("native", "reason"),
    [("1", "exited, killed by SIGKILL"), pytest.param("0", "silent, no heartbeat", marks=pytest.mark.slow)],
)
def test_a_worker_that_holds_the_interpreter_lock_for_long_is_not_lost(native: str, reason: str) -> None:
    """It is lost right after, by a scripted fault. Without the C library it would have been before."""
    with launched(
        "--nproc-per-node", "2", *FAST, "--heartbeat-timeout-s=2", TOY, "1", "2", "1",
        "kill:worker=1@step=6,phase=between", environ={"TOY_HOLDS_LOCK": "1", "ELAS_NATIVE": native},
    ) as job:  # fmt: skip
        outcome = job.finish(wait_s=80)
    assert outcome.code == 0, outcome
    assert re.search(rf"lost     worker 1 \(stage 0, cell ., lane 0\): {reason}", outcome.out), outcome.out


def run_toy_into(stdout: int | None, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """The toy job with a loss, its output going to this descriptor; None: closed."""
    command = [
        sys.executable, "-m", "megatron_elas.cli.elasrun", "--nproc-per-node=4", f"--log-dir={tmp_path}", *FAST, TOY,
        "2", "2", "1", "kill:worker=3@step=5,phase=between",
    ]  # fmt: skip
    closing = ["sh", "-c", 'exec "$@" >&-', "sh"] if stdout is None else []
    return subprocess.run(
        [*closing, *command], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, check=False
    )


def read_events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_recovery_that_cannot_be_printed_ends_no_job_and_is_logged_all_the_same(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        ran = run_toy_into(full, tmp_path)
    finally:
        os.close(full)
    assert ran.returncode == 0, ran.stderr
    assert "the recovery of epoch 1 could not be written down: [Errno 28]" in ran.stderr
    assert [event["event"] for event in read_events(tmp_path)] == ["loss", "recovery", "end"]


def test_a_job_whose_output_is_closed_runs_and_recovers(tmp_path: Path) -> None:
    ran = run_toy_into(None, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    assert [event["event"] for event in read_events(tmp_path)] == ["loss", "recovery", "end"]


def test_a_recovery_is_logged_with_who_was_lost_and_where_the_others_are_now(tmp_path: Path) -> None:
    outcome = elasrun(
        "--nproc-per-node=4", f"--log-dir={tmp_path}", *FAST, TOY, "2", "2", "1", "kill:worker=3@step=5,phase=between"
    )
    assert outcome.code == 0, outcome
    lost, event, end = read_events(tmp_path)
    [loss] = event["lost"]
    assert lost.items() >= {"event": "loss", "epoch": 0, **loss}.items() and lost["time_s"] > 0
    assert end.items() >= {"event": "end", "exit_code": 0, "sentence": "", "lost": 1, "workers": 4}.items()
    assert loss == {
        "worker": 3, "stage": 1, "cell": 1, "lane": 0, "reason": "exited", "detail": "killed by SIGKILL"
    }  # fmt: skip
    assert event["before"] == "stage 0: [0] [1] | stage 1: [2] [3]"
    assert event["after"] == "stage 0: [0] [1] | stage 1: [2]"
    assert event["survivors"] == [0, 1, 2] and event["resume_step"] >= 5
    assert (event["event"], event["epoch"]) == ("recovery", 1) and event["total"] > 0 and event["time_s"] > 0
    [told] = read_job_log(tmp_path).recoveries
    assert told.lost == ("worker 3 (stage 1, cell 1): killed by SIGKILL",)
    assert list(told.phases_ms) == [*PHASES, "total"]
    assert sum(told.phases_ms[name] for name in PHASES) == pytest.approx(told.phases_ms["total"], abs=0.05)


def test_a_second_loss_during_the_recovery_is_recovered_from_too() -> None:
    outcome = elasrun(
        "--nproc-per-node", "4", *FAST, TOY, "1", "4", "2",
        "kill:worker=3@step=5,phase=between", "kill:worker=1@step=999,phase=recovery",
    )  # fmt: skip
    assert outcome.code == 0, outcome
    assert "now      stage 0: [0] [2]" in outcome.out


def test_fewer_workers_than_a_cell_takes_give_up_with_their_own_code() -> None:
    fault = "kill:worker=1@step=5,phase=between"
    outcome = elasrun("--nproc-per-node", "2", *FAST, TOY, "1", "1", "1", fault, environ={"TOY_LANES": "2"})
    assert outcome.code == 3
    assert "too few workers are left (1), a cell takes 2" in outcome.err


def test_losing_a_whole_stage_is_recovered_from_with_fewer_stages() -> None:
    outcome = elasrun("--nproc-per-node", "2", *FAST, TOY, "2", "1", "1", "kill:worker=1@step=5,phase=between")
    assert outcome.code == 0, outcome
    assert "now      stage 0: [0]" in outcome.out


def test_an_error_that_a_second_worker_runs_into_ends_the_job_instead_of_all_workers_one_by_one() -> None:
    faults = [f"exception:worker={worker}@step=5,phase=between" for worker in range(6)]
    outcome = elasrun("--nproc-per-node", "6", *FAST, TOY, "1", "6", "6", *faults)
    assert outcome.code == 1, outcome
    [sentence] = re.findall(r"^elasrun: (workers .*)$", outcome.err, re.MULTILINE)
    assert re.fullmatch(
        r"workers \d and \d failed in step 5 with the same error, which the others would run into too \(InjectedFault: "
        r".*\): mend its cause, then restart from the newest checkpoint \(exit code 1\)",
        sentence,
    )


def test_survivors_that_hang_after_the_order_to_recover_end_the_job() -> None:
    outcome = elasrun(
        "--nproc-per-node", "4", *FAST, "--heartbeat-timeout-s=2", "--settle-timeout-s=2", "--resume-timeout-s=2",
        TOY, "2", "2", "1", "kill:worker=3@step=5,phase=between", environ={"TOY_NEVER_RECOVERS": "1"},
    )  # fmt: skip
    assert outcome.code == 3, outcome
    assert "did not finish its first step within --resume-timeout-s=2" in outcome.err


def test_a_worker_killed_from_outside_is_recovered_from() -> None:
    with launched("--nproc-per-node", "4", *FAST, TOY, "2", "2", "1") as job:
        job.wait_for("starts", 4)
        job.workers()[2].kill()
        outcome = job.finish()
    assert outcome.code == 0 and outcome.out.count("goes on") == 3, outcome


NODES = ("--heartbeat-timeout-s=4",)
"""An agent and the controller each need a turn within it, on a busy machine too."""


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[Job, Job]]:
    """A toy job on two nodes, all of whose workers have started."""
    common = ("--nnodes=2", "--nproc-per-node=2", f"--rdzv-endpoint={free_endpoint()}", *FAST, *NODES)
    environ = {"ELAS_TOKEN": "a secret of two nodes"}
    with (
        launched(*common, "--node-rank=1", TOY, "1", "4", "2", environ=environ) as second,
        launched(*common, "--node-rank=0", TOY, "1", "4", "2", environ=environ) as first,
    ):
        first.wait_for("starts", 2)
        second.wait_for("starts", 2)
        yield first, second


def test_a_job_of_two_nodes_survives_the_death_of_one(tmp_path: Path) -> None:
    with two_nodes() as (first, second):
        processes = second.descendants()
        second.process.kill()
        outcome = first.finish()
        assert outcome.code == 0, outcome
        assert "now      stage 0: [0] [1]" in outcome.out
        assert not wait_gone(processes)
    elasrun(write_script(tmp_path, ""))  # removes the folder of the killed launcher


def test_workers_end_although_the_launcher_of_their_node_is_stopped() -> None:
    with two_nodes() as (first, second):
        workers = second.workers()
        second.process.send_signal(signal.SIGSTOP)
        outcome = first.finish()
        assert outcome.code == 0 and "silent, node 1 did not answer for" in outcome.out, outcome
        assert len(workers) == 2 and not wait_gone(workers), "their own links told them"
        second.process.send_signal(signal.SIGCONT)
        assert second.finish().code == 8


def test_nodes_whose_first_one_dies_kill_their_workers_and_say_so(tmp_path: Path) -> None:
    with two_nodes() as (first, second):
        processes = second.descendants()
        first.process.kill()
        outcome = second.finish()
        assert outcome.code == 8, outcome
        assert "the controller on node 0 is gone: the workers of this node were killed" in outcome.err
        assert not wait_gone(processes)
    elasrun(write_script(tmp_path, ""))  # removes the folder of the killed launcher


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_a_plain_job_of_two_nodes_ends_everywhere(tmp_path: Path) -> None:
    common = ("--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint={free_endpoint()}", *FAST, *NODES)
    script = write_script(
        tmp_path, "import os, sys, threading\nsys.exit(9) if os.environ['RANK'] == '0' else threading.Event().wait()\n"
    )
    environ = {"ELAS_TOKEN": "the same"}
    with (
        launched(*common, "--node-rank=1", script, environ=environ) as second,
        launched(*common, "--node-rank=0", script, environ=environ) as first,
    ):
        assert (first.finish().code, second.finish().code) == (9, 9)


SOON = ("--heartbeat-timeout-s=0.5", "--settle-timeout-s=0.6", "--join-timeout-s=1", "--grace-s=50")


def test_nodes_that_wait_for_others_in_vain_end_as_not_started_and_at_once() -> None:
    common = ("--nnodes=2", "--nproc-per-node=2", f"--rdzv-endpoint={free_endpoint()}", *FAST, *SOON)
    environ = {"ELAS_TOKEN": "the same"}
    for node, words in ((0, "nodes [1] did not join within --join-timeout-s=1"), (1, "node 0 did not answer")):
        began = time.monotonic()
        outcome = elasrun(*common, f"--node-rank={node}", TOY, "1", "4", "2", environ=environ)
        assert time.monotonic() - began < 40
        assert outcome.code == 5 and words in outcome.err, outcome
        assert len(outcome.err.splitlines()) == 1
    assert not run_dirs()


def test_a_node_with_another_secret_is_refused(tmp_path: Path) -> None:
    common = ("--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint={free_endpoint()}", *FAST, *NODES)
    script = write_script(tmp_path, "print('up', flush=True)")
    with (
        launched(*common, "--node-rank=0", script, environ={"ELAS_TOKEN": "the secret"}) as first,
        launched(*common, "--node-rank=1", script, environ={"ELAS_TOKEN": "another"}) as second,
    ):
        outcome = second.finish()
        assert outcome.code == 2 and "do not share a secret" in outcome.err
        first.process.terminate()
        outcome = first.finish()
    assert outcome.code == 143 and outcome.out == "", "no worker starts before all nodes are there"


def test_a_node_that_is_asked_to_leave_is_recovered_from() -> None:
    with two_nodes() as (first, second):
        second.process.terminate()
        assert second.finish().code == 143
        outcome = first.finish()
    assert outcome.code == 0 and "now      stage 0: [0] [1]" in outcome.out, outcome
