"""Messages survive the wire, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_elas.config import ControlTimeouts
from megatron_elas.control import messages
from megatron_elas.control.launch import Launch
from megatron_elas.control.messages import (
    BadMessage,
    Message,
    decode_from_client,
    decode_from_launcher,
    decode_to_agent,
    decode_to_launcher,
    decode_to_worker,
    encode,
)
from megatron_elas.planner.plan import initial_plan
from megatron_elas.planner.settle import settle
from megatron_elas.spec.events import LossReason, WorkerLost
from megatron_elas.spec.plan import Settlement
from megatron_elas.spec.report import RecoveryReport
from megatron_elas.spec.step_report import PassTotal, StepReport
from megatron_elas.spec.step_trace import Span, StepTrace
from megatron_elas.spec.transaction import Update
from tests.control.jobs import make_hello, make_job, make_report

JOB = make_job(pipeline=2, data=2, tensor=2)
PLAN = initial_plan(JOB, {worker: "d" for worker in range(8)})
PLAN_OF_ONE = initial_plan(make_job(pipeline=1, data=1), {0: "d"})
LOSS = WorkerLost(worker=1, reason=LossReason.SILENT, detail="x", at_s=1.5, fault_s=0.5)

EXAMPLES: list[Message] = [
    make_hello(3, JOB),
    messages.HelloAgain(hello=make_hello(3, JOB), epoch=2, plan_epoch=1, finished=False),
    messages.Heartbeat(worker=1, epoch=2, step=3),
    messages.Declined(worker=1, epoch=2, sentence="no memory for layer 3"),
    messages.Measured(
        report=StepReport(
            worker=1,
            epoch=2,
            step=3,
            first_layer=0,
            last_layer=2,
            cells=2,
            step_s=0.5,
            stage=0,
            passes=(PassTotal(kind="forward", passes=2, samples=4, seconds=0.1),),
            waited_s=0.0,
            first=True,
        )
    ),
    messages.Traced(
        trace=StepTrace(
            worker=1,
            epoch=2,
            step=3,
            stage=0,
            cell=1,
            first_layer=0,
            last_layer=2,
            began_s=5.5,
            step_s=0.5,
            spans=(
                Span(kind="forward", start_s=0.0, end_s=0.25, item=0, samples=2),
                Span(kind="wait", start_s=0.25, end_s=0.5),
            ),
        )
    ),
    messages.Stalled(worker=1, detail="x"),
    messages.PeerUnreachable(worker=1, epoch=2, peer=3, detail="x"),
    messages.Settled(report=make_report(1, 2, PLAN)),
    messages.Recovered(report=RecoveryReport(worker=1, epoch=2, resume_step=3, marks_s={"settle": 1.0})),
    messages.FaultFired(worker=1, fault="x", at_s=1.0),
    messages.Failed(worker=1, exit_code=4, sentence="x"),
    messages.Crashed(worker=1, step=3, error="x"),
    messages.Finished(worker=1),
    messages.Start(plan=PLAN, addresses={0: "a", 7: "b"}),
    messages.Quiesce(epoch=1, lost=(LOSS,)),
    messages.Recover(
        plan=PLAN,
        settlement=Settlement(base_epoch=0, resume_step=1, lead_activity=2),
        base=PLAN,
        addresses={0: "a"},
        plan_s=0.1,
    ),
    messages.Inject(worker=1, fault="x"),
    messages.Noted(count=3),
    messages.Stop(exit_code=3, sentence="x"),
    messages.AgentHello(node=1, host="h", workers=(2, 3)),
    messages.AgentHeartbeat(node=1, number=3, beating=(2,)),
    messages.WorkerExited(worker=1, status=-9, at_s=1.0),
    messages.WorkerHung(worker=1, detail="x"),
    messages.Welcome(master_address="a", master_port=1, run_id="r"),
    messages.Heard(number=3),
    messages.KillWorker(worker=1),
    messages.StopAll(exit_code=1, sentence="x"),
    messages.InjectRequest(fault="x"),
    messages.StatusRequest(),
    messages.Setup(
        launch=Launch(nnodes=1, workers_per_node=8, timeouts=ControlTimeouts(), elastic=True),
        token="t",
        welcome=messages.Welcome(master_address="a", master_port=1, run_id="r"),
        journal="/x",
        down_since_s=1.5,
    ),
    messages.Terminate(signum=15),
    messages.Show(event="loss", epoch=1, worker=2, text="x", facts={"a": [1, None, "b"]}),
    messages.JobEnded(exit_code=3, sentence="x"),
]
READERS = {
    messages.FromClient: decode_from_client,
    messages.FromLauncher: decode_from_launcher,
    messages.ToLauncher: decode_to_launcher,
    messages.ToWorker: decode_to_worker,
    messages.ToAgent: decode_to_agent,
}


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_is_read_back_by_those_it_is_for_and_by_nobody_else(message: Message) -> None:
    for kinds, decode in READERS.items():
        if isinstance(message, kinds):
            assert decode(encode(message)) == message
        else:
            with pytest.raises(BadMessage):
                decode(encode(message))


@given(st.binary(max_size=50) | st.text(max_size=50))
def test_any_bytes_are_refused_with_a_sentence(noise: bytes | str) -> None:
    with pytest.raises(BadMessage, match=f"not a message of protocol version {messages.PROTOCOL_VERSION}:"):
        decode_from_client(noise)


@pytest.mark.parametrize("norm", [1.1, 5e-324, float("inf"), float("nan"), 0.0, None])
def test_any_gradient_norm_comes_back_in_the_settlement_bit_for_bit(norm: float | None) -> None:
    report = make_report(0, 1, PLAN_OF_ONE)
    losses = {"lm loss": 1 / 3} if norm is None else {"lm loss": norm}
    told = replace(report.holdings[0], update=Update.of(4, norm, losses=losses))
    settled = decode_from_client(encode(messages.Settled(report=replace(report, holdings=(told,)))))
    assert isinstance(settled, messages.Settled)
    settlement = settle([settled.report], {0: PLAN_OF_ONE})
    order = messages.Recover(plan=PLAN_OF_ONE, settlement=settlement, base=None, addresses={}, plan_s=0.0)
    heard = decode_to_worker(encode(order))
    assert heard == order and isinstance(heard, messages.Recover)
    assert heard.settlement.commit is not None
    got = heard.settlement.commit.norm
    assert repr(got) == repr(norm) and repr(heard.settlement.commit.losses) == repr(losses)


def test_values_that_make_no_sense_are_refused_with_the_field() -> None:
    text = encode(make_hello(0, JOB)).replace('"micro_batch_size":1', '"micro_batch_size":0')
    with pytest.raises(BadMessage, match=r"micro_batch_size must be at least 1.*job"):
        decode_from_client(text)
