"""Faults strike once, where they say, after they were announced."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from megatron_elas.spec.faults import Fault, FaultPhase, parse_fault
from megatron_elas.testing.faults import FaultInjector, InjectedFault
from megatron_elas.testing.ranks import RankEnd, run_mortal_ranks


def make(text: str, worker: int = 0) -> tuple[FaultInjector, list[Fault]]:
    announced: list[Fault] = []
    return FaultInjector([parse_fault(text)], worker, lambda fault, at_s: announced.append(fault)), announced


def strike(text: str, timeout_s: float = 20.0) -> tuple[RankEnd, bytes]:
    """Let the fault strike a fork; gives its end and what was announced before."""
    ours, theirs = os.pipe()

    def run(rank: int, n: int) -> None:
        fault = parse_fault(text)
        injector = FaultInjector([fault], 0, lambda fault, at_s: os.write(theirs, str(fault).encode()))
        injector.at(fault.step, fault.phase, fault.microbatch)

    [end] = run_mortal_ranks(1, run, timeout_s=timeout_s)
    os.close(theirs)
    announced = os.read(ours, 1000)
    os.close(ours)
    return end, announced


@pytest.mark.process
@pytest.mark.parametrize(("kind", "status"), [("kill", -signal.SIGKILL), ("exit", 1)])
def test_a_deadly_fault_is_announced_before_it_strikes(kind: str, status: int) -> None:
    text = f"{kind}:worker=0@step=3,phase=commit"
    end, announced = strike(text)
    assert (end.status, announced.decode()) == (status, text)


@pytest.mark.process
def test_a_stopped_worker_stays_and_does_nothing() -> None:
    end, announced = strike("stop:worker=0@step=3,phase=between", timeout_s=2.0)
    assert end.out_of_time and announced


def test_an_exception_is_raised_out_of_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    injector, announced = make("exception:worker=0@step=3,phase=optimizer")
    with pytest.raises(InjectedFault, match="step=3,phase=optimizer"):
        injector.at(3, FaultPhase.OPTIMIZER)
    assert [str(fault) for fault in announced] == ["exception:worker=0@step=3,phase=optimizer"]
    assert capsys.readouterr().err == "fault strikes: exception:worker=0@step=3,phase=optimizer\n"


def test_a_fault_strikes_at_its_own_place_only_and_once() -> None:
    injector, announced = make("exception:worker=0@step=3,phase=forward,microbatch=2")
    for place in [(2, "forward", 2), (3, "backward", 2), (3, "forward", 0), (3, "forward", 1), (3, "optimizer", None)]:
        injector.at(place[0], FaultPhase(place[1]), place[2])
    with pytest.raises(InjectedFault):
        injector.at(3, FaultPhase.FORWARD, 2)
    injector.at(3, FaultPhase.FORWARD, 2)
    assert len(announced) == 1 and not injector.pending


def test_without_a_micro_batch_the_first_one_is_struck() -> None:
    injector, _ = make("exception:worker=0@step=3,phase=forward")
    with pytest.raises(InjectedFault):
        injector.at(3, FaultPhase.FORWARD, 0)


def test_faults_of_other_workers_are_not_ours() -> None:
    injector, announced = make("exception:worker=1@step=3,phase=between")
    injector.add(parse_fault("exception:worker=1@step=3,phase=between"))
    injector.at(3, FaultPhase.BETWEEN)
    assert not announced


def test_faults_can_be_added_by_other_threads_while_training_runs() -> None:
    injector, announced = make("exception:worker=1@step=0,phase=between")
    faults = [parse_fault(f"exception:worker=0@step={step},phase=between") for step in range(200)]
    threads = [
        threading.Thread(target=lambda part=part: [injector.add(f) for f in faults[part::4]]) for part in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for step in range(200):
        with pytest.raises(InjectedFault):
            injector.at(step, FaultPhase.BETWEEN)
    assert len(announced) == 200
