"""Workers and agents whose connection ends, and who come back, over real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from megatron_elas.control.health import LINK_GRACE_S
from megatron_elas.control.link import ControlLink
from megatron_elas.control.messages import (
    AgentHello,
    FaultFired,
    Finished,
    HelloAgain,
    InjectRequest,
    KillWorker,
    Settled,
    Stalled,
    StatusRequest,
    Stop,
    StopAll,
    WorkerExited,
    decode_to_agent,
    decode_to_worker,
    encode,
)
from megatron_elas.control.progress import ProgressWatch
from megatron_elas.control.states import Resuming, Running
from megatron_elas.control.wire import dial
from megatron_elas.spec.errors import ExitCode
from tests.control.jobs import make_hello, make_job, make_report
from tests.control.served import TOKEN, WAIT_S, WELCOME, Served, joined, serving
from tests.control.test_service import PATIENT, ask, exited

JOB = make_job(pipeline=2, data=2)


@pytest.fixture(autouse=True)
def nobody_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are told to end stay: they are threads of this process."""
    monkeypatch.setattr("megatron_elas.control.link._end_process", lambda worker, end: None)


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is cleared nobody connects again, and nobody is lost for that."""
    is_open = threading.Event()
    is_open.set()

    def dial_when_open(*words: str) -> Any:
        assert is_open.wait(WAIT_S)
        return dial(*words)

    monkeypatch.setattr("megatron_elas.control.link.dial", dial_when_open)
    monkeypatch.setattr("megatron_elas.control.health.LINK_GRACE_S", 10 * WAIT_S)
    return is_open


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def cut(served: Served, worker: int) -> None:
    """The worker's connection breaks; what is on its way is lost."""
    before = served.call(lambda: served.service._workers[worker])
    served.call(lambda: before.transport.abort())


def test_a_worker_whose_connection_breaks_comes_back_and_keeps_its_place() -> None:
    with serving(4, timeouts=PATIENT) as served, joined(served, JOB) as members:
        before = served.call(lambda: served.service._workers[1])
        cut(served, 1)
        wait_until(lambda: served.call(lambda: served.service._workers[1]) is not before)
        time.sleep(1.2 * LINK_GRACE_S)
        assert isinstance(served.state, Running) and not served.state.roster.lost
        served.apply(exited(3))
        assert members[1].link.wait_quiesce(0, WAIT_S).epoch == 1


def test_what_was_said_while_there_was_no_connection_is_said_again() -> None:
    with serving(4, timeouts=PATIENT) as served, joined(served, JOB) as members:
        plan = members[0].plan
        served.apply(exited(3))
        for member in members[:3]:
            member.link.wait_quiesce(0, WAIT_S)
        cut(served, 1)
        for member in members[:3]:
            member.link.send(Settled(report=make_report(member.worker, 1, plan)))
        for member in members[:3]:
            assert member.link.wait_recover(1, WAIT_S).plan.epoch == 1
        assert isinstance(served.state, Resuming)


def test_what_was_announced_while_there_was_no_connection_is_heard_later(way: threading.Event) -> None:
    with serving(4, timeouts=PATIENT) as served, joined(served, JOB) as members:
        way.clear()
        cut(served, 1)
        served.apply(exited(3))
        members[0].link.wait_quiesce(0, WAIT_S)
        way.set()
        assert members[1].link.wait_quiesce(0, WAIT_S).epoch == 1
        assert members[1].quiesced.get(timeout=WAIT_S).epoch == 1
        assert set(served.state.roster.lost) == {3}


def test_a_fault_for_a_worker_that_cannot_be_told_is_refused(way: threading.Event) -> None:
    fault = InjectRequest(fault="kill:worker=1@step=7,phase=forward")
    with serving(4, timeouts=PATIENT) as served, joined(served, JOB) as members:
        before = served.call(lambda: served.service._workers[1])
        way.clear()
        cut(served, 1)
        wait_until(lambda: served.call(lambda: served.service._hung_up[1].is_set()))
        answer = ask(served, fault)
        assert not answer.ok and "worker 1 is not connected at the moment" in answer.text
        assert served.state.roster.injected == ()
        way.set()
        wait_until(lambda: served.call(lambda: served.service._workers[1]) is not before)
        assert ask(served, fault).ok
        assert members[1].injected.get(timeout=WAIT_S) == fault.fault


def test_a_worker_waits_at_its_end_until_its_last_words_were_noted(way: threading.Event) -> None:
    with serving(4, timeouts=PATIENT) as served, joined(served, JOB) as members:
        way.clear()
        cut(served, 1)
        wait_until(lambda: not members[1].link._connected)
        members[1].link.send(Finished(worker=1))
        threading.Timer(0.2, way.set).start()
        members[1].link.close()
        assert served.state.roster.finished == {1}


def test_messages_that_were_noted_are_not_repeated() -> None:
    with serving(4, timeouts=PATIENT) as served, joined(served, JOB) as members:
        applied = served.record("apply")
        members[1].link.send(FaultFired(worker=1, fault="x", at_s=1.0))
        wait_until(lambda: members[1].link._outbox.empty)
        cut(served, 1)
        wait_until(lambda: members[1].link._connected)
        members[1].link.send(FaultFired(worker=1, fault="y", at_s=2.0))
        wait_until(lambda: members[1].link._outbox.empty)
        fired = []
        while not applied.empty():
            (event,) = applied.get()
            fired += [event.fault] if isinstance(event, FaultFired) else []
        assert fired == ["x", "y"]


def test_a_stall_that_is_over_when_the_connection_is_back_is_not_told(way: threading.Event) -> None:
    with serving(4, timeouts=PATIENT) as served, joined(served, JOB) as members:
        way.clear()
        cut(served, 2)
        wait_until(lambda: not members[2].link._connected)
        members[2].link.send(Stalled(worker=2, detail="its main thread made no progress for 9.0 s"))
        members[2].link.send(FaultFired(worker=2, fault="x", at_s=1.0))
        way.set()
        wait_until(lambda: members[2].link._outbox.empty)
        assert served.state.roster.faults[2].fault == "x"
        assert isinstance(served.state, Running) and not served.state.roster.lost


def test_a_stall_that_goes_on_when_the_connection_is_back_is_told(way: threading.Event) -> None:
    with serving(4, timeouts=PATIENT) as served, joined(served, JOB) as members:
        link = members[2].link
        way.clear()
        cut(served, 2)
        wait_until(lambda: not link._connected)
        link._watch = ProgressWatch(0.02, 0.1)
        link.progress(0, 5)  # and this thread does no more of it
        wait_until(lambda: link._watch._told)
        assert not link._connected, "nobody has heard it"
        way.set()
        wait_until(lambda: set(served.state.roster.lost) == {2})
        assert "in step 5, at " in served.state.roster.lost[2].detail


def test_a_controller_knows_the_step_of_a_worker_that_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlLink, "_beat", lambda link: None)
    with serving(4, timeouts=PATIENT) as served, joined(served, JOB) as members:

        def status() -> str:
            return served.call(lambda: served.service._answer(StatusRequest()).text)

        members[1].link.progress(0, 7)
        served.call(lambda: served.service._health.forget(1))  # as in a controller that was just started
        assert "worker 0: step 0, " in status() and "worker 1: step not heard yet, " in status()
        cut(served, 1)
        wait_until(lambda: "worker 1: step 7, " in status())


def test_a_lost_worker_that_comes_back_is_sent_away() -> None:
    with serving(4, timeouts=PATIENT) as served, joined(served, JOB) as members:
        served.apply(exited(3))
        members[0].link.wait_quiesce(0, WAIT_S)
        with dial(served.address, TOKEN) as connection:
            connection.send(encode(HelloAgain(hello=make_hello(3, JOB), epoch=0, plan_epoch=0, finished=False)))
            answer = decode_to_worker(connection.recv(timeout=WAIT_S))
        assert isinstance(answer, Stop) and answer.exit_code == ExitCode.CUT_OFF


def test_a_worker_that_says_it_makes_no_progress_is_lost_and_killed_and_told() -> None:
    with serving(4, timeouts=PATIENT) as served, joined(served, JOB) as members:
        members[2].link.send(Stalled(worker=2, detail="its main thread made no progress for 9.0 s"))
        [loss] = members[0].link.wait_quiesce(0, WAIT_S).lost
        assert (loss.worker, loss.reason, loss.detail) == (2, "silent", "its main thread made no progress for 9.0 s")
        assert served.orders.get(timeout=WAIT_S) == KillWorker(worker=2)


def test_an_agent_that_was_taken_for_lost_is_told_so_when_it_comes_back() -> None:
    with serving(4, nnodes=2, timeouts=PATIENT) as served:
        with dial(served.address, TOKEN) as agent:
            agent.send(encode(AgentHello(node=1, host="there", workers=(2, 3))))
            assert decode_to_agent(agent.recv(timeout=WAIT_S)) == WELCOME
            with joined(served, JOB):
                agent.close()
                wait_until(lambda: 1 not in served.state.roster.agents)
                with dial(served.address, TOKEN) as back:
                    back.send(encode(AgentHello(node=1, host="there", workers=(2, 3), again=True)))
                    order = decode_to_agent(back.recv(timeout=WAIT_S))
        assert isinstance(order, StopAll) and (order.exit_code, order.signum) == (ExitCode.CUT_OFF, 9)


def test_an_agent_with_two_connections_is_heard_on_the_newer_one() -> None:
    with serving(4, nnodes=2, timeouts=PATIENT) as served, dial(served.address, TOKEN) as old:
        old.send(encode(AgentHello(node=1, host="there", workers=(2, 3))))
        assert decode_to_agent(old.recv(timeout=WAIT_S)) == WELCOME
        with joined(served, JOB) as members, dial(served.address, TOKEN) as new:
            new.send(encode(AgentHello(node=1, host="there", workers=(2, 3), again=True)))
            assert decode_to_agent(new.recv(timeout=WAIT_S)) == WELCOME
            with pytest.raises(ConnectionClosed):
                old.recv(timeout=WAIT_S)
            new.send(encode(WorkerExited(worker=3, status=-9, at_s=time.time())))
            assert [loss.worker for loss in members[0].link.wait_quiesce(0, WAIT_S).lost] == [3]
