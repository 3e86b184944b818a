"""Controller and links over real sockets, in one process."""

from __future__ import annotations

import contextlib
import math
import queue
import re
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from megatron_elas.control.commands import EndJob
from megatron_elas.control.link import MOST_TRACES, ControlLink
from megatron_elas.control.messages import (
    AgentHeartbeat,
    AgentHello,
    Answer,
    FaultFired,
    Finished,
    Heard,
    Heartbeat,
    InjectRequest,
    KillWorker,
    Message,
    PeerUnreachable,
    Recovered,
    Settled,
    StatusRequest,
    Stop,
    StopAll,
    Terminate,
    WorkerExited,
    WorkerHung,
    decode_answer,
    decode_to_agent,
    decode_to_worker,
    encode,
)
from megatron_elas.control.port import LinkPort
from megatron_elas.control.states import Gathering, Running
from megatron_elas.control.wire import KEEPALIVE_S, OPTIONS, dial
from megatron_elas.proof import NotAMember
from megatron_elas.spec.errors import BadUsage, ElasticError, EpochChanged, ExitCode
from megatron_elas.spec.events import WorkerLost
from megatron_elas.spec.report import RecoveryReport
from megatron_elas.spec.step_report import StepReport
from tests.control.jobs import TIMEOUTS, make_hello, make_job, make_report
from tests.control.served import ROOMY, TOKEN, WAIT_S, WELCOME, Member, Served, joined, serving
from tests.control.test_trace_log import make_trace

JOB = make_job(pipeline=2, data=2)
PATIENT = replace(TIMEOUTS, heartbeat_timeout_s=20.0, settle_timeout_s=20.0, resume_timeout_s=20.0, join_timeout_s=20.0)
"""For agents that send no heartbeats."""
UNREAD = 10
"""More answers than a connection that is made to hold one holds."""


@contextlib.contextmanager
def dialled(served: Served) -> Iterator[ClientConnection]:
    with dial(served.address, TOKEN) as connection:
        yield connection


def ask(served: Served, request: Message) -> Answer:
    with dialled(served) as connection:
        connection.send(encode(request))
        return decode_answer(connection.recv(timeout=WAIT_S))


@pytest.fixture(autouse=True)
def told_to_end(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[tuple[int, int]]:
    """Workers that were told to end, each with its exit code; they stay, being threads of this process."""
    told: queue.Queue[tuple[int, int]] = queue.Queue()
    monkeypatch.setattr(
        "megatron_elas.control.link._end_process", lambda worker, end: told.put((worker, end.exit_code))
    )
    return told


def wait_closed(connection: ClientConnection) -> int | None:
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            connection.recv(timeout=WAIT_S)
    return closed.value.rcvd.code if closed.value.rcvd is not None else None


def exited(worker: int, status: int = -9) -> WorkerExited:
    return WorkerExited(worker=worker, status=status, at_s=time.time())


def test_a_lost_worker_is_recovered_from_over_sockets() -> None:
    with serving(4) as served, joined(served, JOB) as members:
        plan = members[0].plan
        served.apply(exited(3))
        survivors = members[:3]
        for member in survivors:
            quiesce = member.link.wait_quiesce(0, WAIT_S)
            assert quiesce.epoch == member.link.latest_epoch == 1
            assert member.quiesced.get(timeout=WAIT_S) == quiesce
            member.link.send(Settled(report=make_report(member.worker, 1, plan)))
        for member in survivors:
            recover = member.link.wait_recover(1, WAIT_S)
            assert recover.plan.placement.workers == (0, 1, 2)
            report = RecoveryReport(worker=member.worker, epoch=1, resume_step=5, marks_s={"first_step": time.time()})
            member.link.send(Recovered(report=report))
        assert "worker 3" in served.shown.get(timeout=WAIT_S).text
        for member in survivors:
            member.link.send(Finished(worker=member.worker))
            member.link.close()
            served.apply(exited(member.worker, 0))
        assert served.wait_ended() == EndJob(exit_code=0, sentence="", lost=1)


def test_survivors_hear_of_a_loss_at_once() -> None:
    job = make_job(pipeline=2, data=8)
    with serving(16, timeouts=PATIENT) as served, joined(served, job, heartbeat_s=10.0) as members:
        heard: list[float] = []
        all_heard = threading.Barrier(len(members))

        def listen(member: Member) -> None:
            member.link.wait_quiesce(0, WAIT_S)
            heard.append(time.perf_counter())
            all_heard.wait(WAIT_S)

        threads = [threading.Thread(target=listen, args=(member,)) for member in members[:15]]
        for thread in threads:
            thread.start()
        began = time.perf_counter()
        served.apply(exited(15))
        all_heard.wait(WAIT_S)
        for thread in threads:
            thread.join()
        # 15 listeners share this process's interpreter lock; on separate processes it is a fraction of this. With the
        # next heartbeat, or after a limit, it would be several times as much.
        assert statistics.median(heard) - began < 2


def test_a_worker_without_heartbeats_is_lost_and_killed() -> None:
    with serving(4, timeouts=replace(TIMEOUTS, heartbeat_timeout_s=1.0)) as served, joined(served, JOB) as members:
        # The link stays open and its process alive, as with SIGSTOP; only the heartbeats end.
        members[2].link._closing.set()
        assert members[0].link.wait_quiesce(0, WAIT_S).lost[0].worker == 2
        assert served.orders.get(timeout=WAIT_S) == KillWorker(worker=2)


def test_a_worker_whose_link_ends_is_lost_soon() -> None:
    with serving(4) as served, joined(served, JOB) as members:
        members[1].link.close()
        assert members[0].link.wait_quiesce(0, WAIT_S).lost[0].worker == 1


def test_a_newer_epoch_interrupts_the_wait_for_a_plan() -> None:
    job = make_job(pipeline=1, data=4)
    with serving(4) as served, joined(served, job) as members:
        served.apply(exited(3))
        members[0].link.wait_quiesce(0, WAIT_S)
        threading.Timer(0.05, served.apply, [exited(2)]).start()
        with pytest.raises(EpochChanged, match="epoch 2"):
            members[0].link.wait_recover(1, WAIT_S)
        assert members[0].link.wait_quiesce(1, WAIT_S).epoch == 2


def test_waits_say_what_was_waited_for() -> None:
    with (
        serving(4) as served,
        joined(served, JOB) as members,
        pytest.raises(ElasticError, match=r"worker 0 did not hear an epoch after 0 within 0\.05 s"),
    ):
        members[0].link.wait_quiesce(0, 0.05)


def test_a_wait_may_have_no_limit() -> None:
    with serving(4) as served, joined(served, JOB) as members:
        threading.Timer(0.05, served.apply, [exited(3)]).start()
        assert members[0].link.wait_quiesce(0, math.inf).epoch == 1


@pytest.mark.parametrize("culprit", ["quiesce", "inject"])
def test_a_reader_that_fails_says_so_and_ends_waits(culprit: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail(what: object) -> None:
        raise KeyError(f"a bug in {culprit}")

    with serving(4) as served, joined(served, JOB) as members:
        setattr(members[0].link, f"_on_{culprit}", fail)
        if culprit == "quiesce":
            served.apply(exited(3))
        else:
            assert ask(served, InjectRequest(fault="kill:worker=0@step=7,phase=forward")).ok
        with pytest.raises(ElasticError, match=f"acting on its message failed with KeyError: 'a bug in {culprit}'"):
            members[0].link.wait_recover(1, WAIT_S)
    assert "Traceback" in caplog.text and "worker 0: acting on a message of the controller failed" in caplog.text


def test_a_crash_is_said_before_the_worker_ends() -> None:
    with serving(4) as served, joined(served, JOB) as members:
        LinkPort(3, members[3].link, WAIT_S).crashed(7, "ValueError: bad sample")
        served.apply(exited(3, 1))
        members[3].link.close()
        [loss] = members[0].link.wait_quiesce(0, WAIT_S).lost
        assert loss.detail == "exited with status 1, failed with: ValueError: bad sample"


def test_training_goes_on_without_the_controller_until_it_is_needed() -> None:
    with contextlib.ExitStack() as stack:
        with serving(2) as served:
            job = make_job(pipeline=1, data=2)
            members = [Member(served, worker, job, patience_s=0.2) for worker in range(2)]
            for member in members:
                stack.callback(member.link.close)
                member.link.wait_start(WAIT_S)
        members[0].link.send(PeerUnreachable(worker=0, epoch=0, peer=1, detail="reset"))
        with pytest.raises(ElasticError, match="controller is gone"):
            members[0].link.wait_quiesce(0, WAIT_S)


def test_injection_reaches_the_worker_it_names() -> None:
    with serving(4) as served, joined(served, JOB) as members:
        answer = ask(served, InjectRequest(fault="kill:worker=2@step=7,phase=forward,microbatch=1"))
        assert answer.ok, answer.text
        assert members[2].injected.get(timeout=WAIT_S) == "kill:worker=2@step=7,phase=forward,microbatch=1"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill:worker=9@step=7,phase=forward", "no worker 9"),
        ("kill:worker=1@step=2,phase=forward", "in step 4 already"),
        ("nonsense", "cannot be read"),
    ],
)
def test_an_injection_that_cannot_strike_is_refused_with_a_sentence(fault: str, words: str) -> None:
    with serving(4) as served, joined(served, JOB) as members:
        members[1].link.progress(0, 4)
        deadline = time.monotonic() + WAIT_S
        while "worker 1: step 4" not in ask(served, StatusRequest()).text:
            assert time.monotonic() < deadline
        answer = ask(served, InjectRequest(fault=fault))
        assert not answer.ok and words in answer.text


def test_status_names_every_worker() -> None:
    with serving(4) as served, joined(served, JOB) as members:
        served.apply(exited(3))
        members[0].link.wait_quiesce(0, WAIT_S)
        lines = ask(served, StatusRequest()).text.splitlines()
        assert lines[0].startswith("settling, epoch 1")
        assert lines[1] == "consistency: numerical, events change losses by rounding"
        assert lines[5] == "worker 3: lost (exited, killed by SIGKILL)"
        assert len(lines) == 6


# ---------------------------------------------------------------- measured steps


def make_step(worker: int, step: int, step_s: float = 0.5, epoch: int = 0) -> StepReport:
    stage = worker // 2
    return StepReport(
        worker=worker, epoch=epoch, step=step, first_layer=stage, last_layer=stage + 1, cells=2, step_s=step_s
    )


def test_what_workers_measure_is_logged_and_told_by_status() -> None:
    with serving(4) as served, joined(served, JOB) as members:
        for member, step_s in zip(members, (0.4, 0.5, 0.5, 0.8), strict=True):
            member.link.measured(make_step(member.worker, 3, step_s))
        logged = [served.steps.get(timeout=WAIT_S) for _ in members]
        assert sorted(report.worker for report in logged) == [0, 1, 2, 3]
        assert {report.predicted_s for report in logged} == {served.call(lambda: served.service.state.plan.predicted_s)}
        headline, _, times, *workers = ask(served, StatusRequest()).text.splitlines()
        assert headline.startswith("running, epoch 0") and len(workers) == 4
        assert times.startswith("step time: 500.0 ms measured")


def test_only_the_newest_step_is_told_and_once() -> None:
    with serving(4) as served, joined(served, JOB, heartbeat_s=0.3) as members:
        link = members[1].link
        for step in range(20):
            link.measured(make_step(1, step))
        told = [served.steps.get(timeout=WAIT_S).step]
        while told[-1] != 19:  # heartbeats that came in between told what was the newest then
            told.append(served.steps.get(timeout=WAIT_S).step)
        assert told == sorted(set(told)) and len(told) < 20
        link.measured(make_step(1, 30))
        link.tell_measured()
        link.tell_measured()
        assert served.steps.get(timeout=WAIT_S).step == 30
        beats = served.record("_hear")
        while not isinstance(beats.get(timeout=WAIT_S)[1], Heartbeat):
            pass
        assert served.steps.empty()


def test_measured_steps_are_not_kept_for_another_controller_and_not_counted() -> None:
    with serving(4) as served, joined(served, JOB) as members:
        link = members[2].link
        link.measured(make_step(2, 0))
        link.tell_measured()
        served.steps.get(timeout=WAIT_S)
        assert link._outbox.empty
        link.send(FaultFired(worker=2, fault="x", at_s=1.0))
        with link._all_noted:
            assert link._all_noted.wait_for(lambda: link._outbox.empty, WAIT_S)


def test_traces_are_logged_once_each_and_not_kept_for_another_controller() -> None:
    with serving(4) as served, joined(served, JOB) as members:
        traces = [make_trace(2, step) for step in range(MOST_TRACES)]
        for trace in traces:
            members[2].link.traced(trace)
        assert [served.traces.get(timeout=WAIT_S) for _ in traces] == traces, "they go with the heartbeats"
        assert members[2].link._outbox.empty
        members[1].link.traced(make_trace(1))
        members[1].link.tell_measured()
        assert served.traces.get(timeout=WAIT_S).worker == 1
        beats = served.record("_hear")
        while not isinstance(beats.get(timeout=WAIT_S)[1], Heartbeat):
            pass
        assert served.traces.empty()


def test_a_recovery_block_tells_the_forecast_before_and_after() -> None:
    with serving(4) as served, joined(served, JOB) as members:
        plan = members[0].plan
        members[0].link.measured(make_step(0, 3))
        served.steps.get(timeout=WAIT_S)
        served.call(served.service._outlook.meter.set_forecast, 0, 0.25)
        served.apply(exited(3))
        for member in members[:3]:
            member.link.wait_quiesce(0, WAIT_S)
            member.link.send(Settled(report=make_report(member.worker, 1, plan)))
        for member in members[:3]:
            member.link.wait_recover(1, WAIT_S)
        served.call(served.service._outlook.meter.set_forecast, 1, 0.4)
        for member in members[:3]:
            member.link.send(Recovered(report=RecoveryReport(worker=member.worker, epoch=1, resume_step=5)))
        shown = served.shown.get(timeout=WAIT_S)
        line = "step     400.0 ms predicted, before 500.0 ms measured, 250.0 ms predicted, ratio 2.00"
        assert shown.text.splitlines()[-2] == line
        assert shown.facts["step_s"] == {"predicted": 0.4, "predicted_before": 0.25, "measured_before": 0.5}


# ---------------------------------------------------------------- strangers


def test_a_wrong_token_is_refused_before_a_word_is_said() -> None:
    with serving(4) as served:
        heard = served.record("_converse_with_worker")
        for token in ("", "secrets", "ß"):
            with pytest.raises(NotAMember, match="does not know the token"):
                dial(served.address, token)
        assert heard.empty()
        with pytest.raises(BadUsage, match="ELAS_TOKEN"):
            ControlLink(served.address, "wrong", make_hello(0, JOB), 1.0, print, print)


def test_nobody_at_the_address_is_said_in_a_sentence() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"ws://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(ElasticError, match="is elasrun still running"):
        ControlLink(address, TOKEN, make_hello(0, JOB), 1.0, print, print)
    with pytest.raises(BadUsage, match="not of the form"):
        ControlLink("here:80", TOKEN, make_hello(0, JOB), 1.0, print, print)


@pytest.mark.parametrize(
    "words",
    [
        "not json",
        "{}",
        '{"type":"Nothing"}',
        '{"type":"Heartbeat","worker":"zero","epoch":0,"step":0}',
        encode(Finished(worker=0)),
        '{"type":"Hello"}',
    ],
)
def test_a_client_that_breaks_the_protocol_loses_its_own_connection_only(words: str) -> None:
    with serving(4) as served, joined(served, JOB) as members:
        with dialled(served) as connection:
            connection.send(words)
            assert wait_closed(connection) == 1008
        served.apply(exited(3))
        assert members[0].link.wait_quiesce(0, WAIT_S).epoch == 1
        assert set(served.state.roster.lost) == {3}


def test_a_worker_cannot_speak_for_another() -> None:
    with serving(4) as served, joined(served, JOB) as members:
        members[1].link.send(Finished(worker=2))
        members[0].link.wait_quiesce(0, WAIT_S)
        assert served.state.roster.finished == frozenset()
        assert set(served.state.roster.lost) == {1}, "it lost its link, and so its place"


def test_a_second_worker_with_the_same_id_is_sent_away() -> None:
    with serving(4) as served, joined(served, JOB):
        with dialled(served) as connection:
            connection.send(encode(make_hello(1, JOB)))
            answer = decode_to_worker(connection.recv(timeout=WAIT_S))
        assert isinstance(answer, Stop) and answer.exit_code == ExitCode.NOT_STARTED
        assert isinstance(served.state, Running)


def test_noise_on_the_port_disturbs_nobody() -> None:
    with serving(4) as served, joined(served, JOB) as members:
        host, port = served.address.removeprefix("ws://").split(":")
        for noise in (b"", b"\x00" * 100, b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection((host, int(port)), timeout=WAIT_S) as stranger:
                stranger.sendall(noise)
        served.apply(exited(3))
        assert members[0].link.wait_quiesce(0, WAIT_S).epoch == 1


# ---------------------------------------------------------------- other nodes


def test_an_agent_is_welcomed_reports_and_is_told_to_stop() -> None:
    with serving(4, nnodes=2, timeouts=PATIENT) as served, dialled(served) as agent:
        agent.send(encode(AgentHello(node=1, host="there", workers=(2, 3))))
        assert decode_to_agent(agent.recv(timeout=WAIT_S)) == WELCOME, "it completes the nodes"
        agent.send(encode(exited(2, 7)))
        order = decode_to_agent(agent.recv(timeout=WAIT_S))
        assert isinstance(order, StopAll) and order.exit_code == 7
        assert served.orders.get(timeout=WAIT_S) == order


def test_an_agent_that_is_gone_takes_its_workers_with_it(told_to_end: queue.Queue[tuple[int, int]]) -> None:
    with serving(4, nnodes=2, timeouts=PATIENT) as served, contextlib.ExitStack() as stack:
        agent = stack.enter_context(dialled(served))
        agent.send(encode(AgentHello(node=1, host="there", workers=(2, 3))))
        members = stack.enter_context(joined(served, make_job(pipeline=1, data=4)))
        agent.close()
        assert [loss.worker for loss in members[0].link.wait_quiesce(0, WAIT_S).lost] == [2, 3]
        ended = sorted(told_to_end.get(timeout=WAIT_S) for _ in range(2))
        assert ended == [(2, ExitCode.CUT_OFF), (3, ExitCode.CUT_OFF)]


def test_a_node_that_falls_silent_is_lost_as_a_whole_and_told_so(told_to_end: queue.Queue[tuple[int, int]]) -> None:
    """Its connections stay, as when the way to it is gone."""
    with serving(4, nnodes=2, timeouts=PATIENT) as served, contextlib.ExitStack() as stack:
        agent = stack.enter_context(dialled(served))
        agent.send(encode(AgentHello(node=1, host="there", workers=(2, 3))))
        members = stack.enter_context(joined(served, make_job(pipeline=1, data=4)))
        assert decode_to_agent(agent.recv(timeout=WAIT_S)) == WELCOME
        agent.send(encode(AgentHeartbeat(node=1, number=0, beating=())))
        assert decode_to_agent(agent.recv(timeout=WAIT_S)) == Heard(number=0)
        for member in members[2:]:
            member.link._closing.set()
        served.set_silence(1, [2, 3], 2 * PATIENT.heartbeat_timeout_s)
        quiesce = members[0].link.wait_quiesce(0, WAIT_S)
        assert quiesce.epoch == 1 and [loss.worker for loss in quiesce.lost] == [2, 3]
        assert re.fullmatch(r"node 1 did not answer for [\d.]+ s", quiesce.lost[0].detail)
        order = decode_to_agent(agent.recv(timeout=WAIT_S))
        assert isinstance(order, StopAll)
        assert (order.exit_code, order.signum) == (ExitCode.CUT_OFF, signal.SIGKILL), "its workers are not asked first"
        assert wait_closed(agent) is not None


def test_a_message_of_a_lost_node_is_not_answered_and_silence_is_noticed_after_it(
    told_to_end: queue.Queue[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's answers lie unread, so it does not know yet that its connection is being closed."""
    monkeypatch.setitem(OPTIONS, "max_queue", 1)
    with serving(4, nnodes=2, timeouts=PATIENT) as served, contextlib.ExitStack() as stack:
        agent = stack.enter_context(dialled(served))
        agent.send(encode(AgentHello(node=1, host="there", workers=(2, 3))))
        members = stack.enter_context(joined(served, make_job(pipeline=1, data=4)))
        for number in range(UNREAD):
            agent.send(encode(AgentHeartbeat(node=1, number=number, beating=())))
        served.service._agents[1].close_timeout = WAIT_S
        served.set_agent_timeout(0.5)
        assert [loss.worker for loss in members[0].link.wait_quiesce(0, WAIT_S).lost] == [2, 3]
        heard = served.record("_hear_agent")
        agent.send(encode(AgentHeartbeat(node=1, number=UNREAD, beating=())))
        heard.get(timeout=WAIT_S)
        texts = [decode_to_agent(agent.recv(timeout=WAIT_S)) for _ in range(UNREAD + 2)]
        assert texts[:-1] == [WELCOME, *(Heard(number=number) for number in range(UNREAD))]
        assert isinstance(texts[-1], StopAll)
        with pytest.raises(ConnectionClosed):
            agent.recv(timeout=WAIT_S)
        time.sleep(1.0)  # twice the limit: it must not be lost again
        assert not served.call(served.service.ended.done)
        members[1].link.close()
        assert 1 in [loss.worker for loss in members[0].link.wait_quiesce(1, WAIT_S).lost]


def test_a_bug_in_the_watch_over_time_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(now: float) -> None:
        raise KeyError("a bug")

    with serving(4) as served:
        monkeypatch.setattr(served.service._health, "find_silent", fail)
        with pytest.raises(KeyError, match="a bug"):
            served.wait_ended()


def test_both_ends_of_a_link_are_probed_by_the_kernel() -> None:
    with serving(4) as served, joined(served, JOB) as members:
        ends = [members[1].link._connection.socket]
        ends.append(served.call(lambda: served.service._workers[1].transport.get_extra_info("socket")))
        for end in ends:
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == KEEPALIVE_S


def test_a_worker_that_is_vouched_for_needs_no_heartbeats() -> None:
    with serving(4, timeouts=ROOMY) as served, joined(served, JOB) as members:
        for member in members[2:]:
            member.link._closing.set()
        lost: list[int] = []
        while not lost:  # worker 3 is lost after the limit, for lack of a voucher
            served.call(served.service.vouch, [2])
            lost = [loss.worker for loss in find_losses(members[0])]
            time.sleep(0.02)
        assert lost == [3]


def find_losses(member: Member) -> tuple[WorkerLost, ...]:
    with contextlib.suppress(ElasticError):
        return member.link.wait_quiesce(0, 0.0).lost
    return ()


@pytest.mark.parametrize("message", [
    AgentHeartbeat(node=0, number=0, beating=()), WorkerHung(worker=1, detail="x"), exited(1),
    PeerUnreachable(worker=2, epoch=0, peer=3, detail="x"),
])  # fmt: skip
def test_an_agent_cannot_speak_for_others(message: Message) -> None:
    with serving(4, nnodes=2, timeouts=PATIENT) as served, dialled(served) as agent:
        agent.send(encode(AgentHello(node=1, host="there", workers=(2, 3))))
        agent.send(encode(message))
        assert wait_closed(agent) == 1008


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (AgentHello(node=1, host="there", workers=(2, 3, 4)), "--nproc-per-node"),
        (AgentHello(node=5, host="there", workers=(10, 11)), "--node-rank 5"),
        (AgentHello(node=0, host="there", workers=(0, 1)), "taken"),
        (AgentHello(node=1, host="there", workers=(2, 3), version=99), "protocol 99"),
    ],
)
def test_an_agent_that_does_not_fit_is_told_why(hello: AgentHello, words: str) -> None:
    with serving(4, nnodes=2) as served, dialled(served) as agent:
        agent.send(encode(hello))
        answer = decode_to_agent(agent.recv(timeout=WAIT_S))
        assert isinstance(answer, StopAll) and words in answer.sentence
        assert isinstance(served.state, Gathering)


def test_a_job_that_is_told_to_end_says_so_once() -> None:
    with serving(4) as served, joined(served, JOB):
        served.apply(Terminate(signum=15))
        assert isinstance(served.orders.get(timeout=WAIT_S), StopAll)
        for worker in range(4):
            served.apply(exited(worker, -15))
        assert served.wait_ended().exit_code == 143
