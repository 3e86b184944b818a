"""Messages of the control plane: JSON text, one object per message, tagged by type.

Decoding checks every field's type; an unknown type or another ``PROTOCOL_VERSION`` is refused.
The bytes never name code, so a stranger can at worst be told no.
"""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_elas.control.launch import Launch
from megatron_elas.control.plan_text import PlanText, pack_plan, unpack_plan
from megatron_elas.refusal import Refusal
from megatron_elas.spec.emulation import EmulatedTime
from megatron_elas.spec.events import WorkerLost
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.migration import MigrationReport
from megatron_elas.spec.plan import ElasticPlan, Settlement
from megatron_elas.spec.report import RecoveryReport, SettleReport
from megatron_elas.spec.shape import ModelShape, TrainingShape
from megatron_elas.spec.step_report import StepReport
from megatron_elas.spec.step_trace import StepTrace

PROTOCOL_VERSION = 9

MAX_MESSAGE_BYTES = 64 * 2**20
"""Larger messages end the connection. A plan of 100,000 workers is a few MiB, see ``control.plan_text``."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of everything that crosses a link."""


# ---------------------------------------------------------------- worker -> controller


class Hello(Message, kw_only=True):
    """First message of a worker: it is ready to be given a seat."""

    version: int = PROTOCOL_VERSION
    worker: int
    pid: int
    host: str
    domain: str
    """Failure domain: workers with the same text are assumed to die together."""
    address: str
    """Where peers reach its data plane, for example ``unix:/tmp/…/w3.sock`` or ``tcp:10.0.0.4:40123``."""
    job: JobSpec
    shape: ModelShape | None = None
    """Of the model; None: with flags that ``host.shape`` does not cover. Costs of its layers follow from it."""
    training: TrainingShape | None = None
    emulated: EmulatedTime | None = None
    faults: tuple[str, ...] = ()
    """That the script it was launched with has for it."""


class HelloAgain(Message, kw_only=True):
    """First message of a worker that was connected before: the controller was restarted, or the link broke.

    Then come its messages that were not ``Noted``.
    """

    hello: Hello
    """As it was."""
    epoch: int
    """The newest that was announced to it."""
    plan_epoch: int
    """Of the newest plan that it got; -1: none."""
    finished: bool
    """It has sent ``Finished``."""
    step: int = 0
    """As its heartbeats say."""


class Heartbeat(Message, kw_only=True):
    """Sent every ``heartbeat_interval_s`` from a thread of its own."""

    worker: int
    epoch: int
    step: int
    waiting: bool = False
    """Its main thread waits for another worker, or for the controller."""


class Measured(Message, kw_only=True):
    """How long the newest finished step of the worker took; at most one per heartbeat, and never repeated."""

    report: StepReport


class Traced(Message, kw_only=True):
    """What the worker did in a step that matters (``host.step_tracer``), with its times; never repeated."""

    trace: StepTrace


class PeerUnreachable(Message, kw_only=True):
    """The worker's link to ``peer`` broke while in use."""

    worker: int
    epoch: int
    peer: int
    detail: str


class Stalled(Message, kw_only=True):
    """The worker's main thread makes no progress, and waits for no other worker; said by another thread."""

    worker: int
    detail: str
    """For people: since when, the limit, and the place in its code."""


class LeaveOut(Message, kw_only=True):
    """Somebody could not do its part of a joint activity that can be left out: all are to go on without it."""

    worker: int
    """Who says so."""
    epoch: int
    culprit: int
    """The worker that could not."""
    detail: str
    """What it could not do, and why."""


class CopyDiffered(Message, kw_only=True):
    """A copy of another worker's shard was not what that one used; it was replaced."""

    worker: int
    """Who kept it."""
    epoch: int
    owner: int
    step: int
    """Before which the two were compared."""
    slot: str


class Unverified(Message, kw_only=True):
    """A check before resuming failed. All workers say so; one of them is enough."""

    worker: int
    epoch: int
    check: str
    """Its name."""
    step: int
    """The step that was to be run next."""
    sentence: str
    renewable: bool = False
    """Only copies on backups are bad, or lost workers have other backups than those that were used; what is bad was
    dropped, so that it is worth another try with what is left."""


class Settled(Message, kw_only=True):
    """The worker has unwound to the step boundary."""

    report: SettleReport


class Recovered(Message, kw_only=True):
    """The worker has finished its first step after a recovery."""

    report: RecoveryReport


class Migrated(Message, kw_only=True):
    """The first step under the plan of a ``Migrate`` is done, so all have gone over."""

    report: MigrationReport


class Drained(Message, kw_only=True):
    """The worker has no seat in the plan of a ``Migrate`` and has done its part of it.

    It stays until it is told to stop, so that a loss before a step is finished without it finds what it holds.
    """

    worker: int


class Declined(Message, kw_only=True):
    """The worker cannot do its part of a ``Migrate``. It has not said that it is ready, so nobody has gone over."""

    worker: int
    epoch: int
    """Of the plan that was to be gone over to."""
    sentence: str


class FaultFired(Message, kw_only=True):
    """A scripted fault strikes now; sent just before it does."""

    worker: int
    fault: str
    at_s: float


class Failed(Message, kw_only=True):
    """The worker ends because of an error that no other worker can mend."""

    worker: int
    exit_code: int
    sentence: str


class Crashed(Message, kw_only=True):
    """The worker ends because of an exception that is not ours. Sent just before; then it is lost like any other."""

    worker: int
    step: int
    """The step its training loop is in."""
    error: str
    """Type and text."""


class Finished(Message, kw_only=True):
    """The worker reached the end of training and is about to exit with 0.

    Sent after a last barrier of all survivors: once one has sent it, nobody needs anybody any
    more, and a loss after it starts no new epoch.
    """

    worker: int
    steps: int = 0
    """That training has done, from its very beginning."""


# ---------------------------------------------------------------- controller -> worker


class Start(Message, kw_only=True):
    """All workers joined: the plan of epoch 0 and where everybody is."""

    plan: ElasticPlan
    addresses: dict[int, str]


class Quiesce(Message, kw_only=True):
    """The membership ends. Cancel communication, unwind, report ``Settled`` for this epoch."""

    epoch: int
    lost: tuple[WorkerLost, ...]
    """All that were lost since the last plan that every survivor had recovered under, newest last."""


class Recover(Message, kw_only=True):
    """All survivors settled: the new plan and where to go on."""

    plan: ElasticPlan
    settlement: Settlement
    base: ElasticPlan | None
    """The plan of ``settlement.base_epoch``, in whose layout the state is, for spares that never saw it."""
    addresses: dict[int, str]
    plan_s: float
    """Time the planner took."""


class Migrate(Message, kw_only=True):
    """Nobody is lost, and there is a better plan: go over to it between two steps, when all are ready for it.

    No answer is waited for; an epoch that is announced later than its own takes its place.
    """

    plan: ElasticPlan
    addresses: dict[int, str]


class _MigrateText(Message, kw_only=True, tag="Migrate"):
    """``Migrate`` as it is sent."""

    plan: PlanText
    addresses: dict[int, str]


class _StartText(Message, kw_only=True, tag="Start"):
    """``Start`` as it is sent."""

    plan: PlanText
    addresses: dict[int, str]


class _RecoverText(Message, kw_only=True, tag="Recover"):
    """``Recover`` as it is sent."""

    plan: PlanText
    settlement: Settlement
    base: PlanText | None
    addresses: dict[int, str]
    plan_s: float


class Inject(Message, kw_only=True):
    """Add a fault to the worker's script."""

    worker: int
    fault: str


class Noted(Message, kw_only=True):
    """So many messages of this connection, without hellos, heartbeats, measurements and traces, need not be sent again.

    The controller has written them to its journal, or they changed nothing.
    """

    count: int


class Stop(Message, kw_only=True):
    """End now with this exit code."""

    exit_code: int
    sentence: str


# ---------------------------------------------------------------- agent <-> controller


class AgentHello(Message, kw_only=True):
    """First message of an agent. Answered by ``StopAll`` when it does not fit."""

    version: int = PROTOCOL_VERSION
    node: int
    host: str
    workers: tuple[int, ...]
    again: bool = False
    """It was connected before. Then come all that it has ever said of its workers."""


class Welcome(Message, kw_only=True):
    """All agents joined: start your workers, telling them this."""

    master_address: str
    master_port: int
    run_id: str


class WorkerExited(Message, kw_only=True):
    """A worker process ended. ``status`` is its exit code, or minus the signal number."""

    worker: int
    status: int
    at_s: float
    why: str = ""
    """What else is known about it, for people."""
    refusal: Refusal | None = None
    """What the first worker of its node to refuse the job has said, if one has."""


class WorkerHung(Message, kw_only=True):
    """A worker process lives but does not run: it is stopped or frozen."""

    worker: int
    detail: str
    """For people."""


class AgentHeartbeat(Message, kw_only=True):
    """Sent every ``heartbeat_interval_s``, or more often (``Lease.pause_s``). Answered by ``Heard``."""

    node: int
    number: int
    """Of this heartbeat, from 0."""
    beating: tuple[int, ...]
    """Workers whose pulse beats: their processes run, whether or not their Python has time for heartbeats."""


class Heard(Message, kw_only=True):
    """The heartbeat with this number came: its sender's lease (``lease.py``) counts from when it sent it."""

    number: int


class KillWorker(Message, kw_only=True):
    """Fence: end this worker with SIGKILL."""

    worker: int


class StopAll(Message, kw_only=True):
    """End all workers of the node, politely and then firmly, and exit with this code.

    With SIGKILL the node was taken for lost: they are killed at once, because the others go on.
    """

    exit_code: int
    sentence: str
    signum: int = 15
    """The first signal."""


# ---------------------------------------------------------------- launcher of node 0 <-> controller


class Setup(Message, kw_only=True):
    """First line of the launcher: what the controller needs to know."""

    launch: Launch
    token: str
    welcome: Welcome
    journal: str
    """Path; written by earlier controllers of the job, if there were any."""
    steps: str | None = None
    """Path of the file that measured steps are added to, and traces to one beside it; None: nobody wants them."""
    down_since_s: float | None
    """``time.time()`` when the one before ended; None for the first one."""


class Terminate(Message, kw_only=True):
    """The launcher got a signal that asks it to end."""

    signum: int


class Show(Message, kw_only=True):
    """Print the text, unless it is empty, and append the line to ``events.jsonl``; once per event, epoch and worker."""

    event: str
    epoch: int
    worker: int = -1
    text: str
    facts: dict[str, Any]


class JobEnded(Message, kw_only=True):
    """Nothing is left to do, and the controller ends. As ``commands.EndJob``."""

    exit_code: int
    sentence: str
    worker: int | None = None
    steps: int = 0
    lost: int = 0
    drained: int = 0
    unstruck: tuple[str, ...] = ()


# ---------------------------------------------------------------- tools <-> controller


class InjectRequest(Message, kw_only=True):
    """From ``elas inject``. Answered by ``Answer``."""

    version: int = PROTOCOL_VERSION
    fault: str


class DrainRequest(Message, kw_only=True):
    """From ``elas drain``. Answered by ``Answer``, when the workers are let go, or when it is known that they stay."""

    version: int = PROTOCOL_VERSION
    workers: tuple[int, ...]
    wait: bool = True
    """False: the answer comes as soon as there is a plan, or none."""


class RebalanceRequest(Message, kw_only=True):
    """From ``elas rebalance``. Answered by ``Answer``, when there is a plan, or none."""

    version: int = PROTOCOL_VERSION
    layers: tuple[int, ...] | None = None
    """Transformer layers that every stage is to have; None: as the planner likes."""


class StatusRequest(Message, kw_only=True):
    """From ``elas status``. Answered by ``Answer``."""

    version: int = PROTOCOL_VERSION


class Answer(Message, kw_only=True):
    """Reply to a tool."""

    ok: bool
    text: str
    run_id: str = ""
    """Of the job that answers."""


# ---------------------------------------------------------------- on the wire

FromClient = (
    Hello
    | HelloAgain
    | Heartbeat
    | Measured
    | Traced
    | PeerUnreachable
    | Stalled
    | LeaveOut
    | Unverified
    | CopyDiffered
    | Settled
    | Recovered
    | Migrated
    | Drained
    | Declined
    | FaultFired
    | Failed
    | Crashed
    | Finished
    | AgentHello
    | AgentHeartbeat
    | WorkerExited
    | WorkerHung
    | InjectRequest
    | DrainRequest
    | RebalanceRequest
    | StatusRequest
)
"""What the controller reads."""

ToWorker = Start | Quiesce | Recover | Migrate | Inject | Noted | Stop
"""What a worker reads."""

ToAgent = Welcome | Heard | KillWorker | StopAll
"""What an agent reads."""

FromLauncher = Setup | AgentHello | AgentHeartbeat | WorkerExited | WorkerHung | Terminate
"""What the controller reads from the launcher of node 0, which is also that node's agent."""

ToLauncher = ToAgent | Show | JobEnded
"""What that launcher reads."""

_from_client: msgspec.json.Decoder[FromClient] = msgspec.json.Decoder(FromClient)
_ToWorkerText = _StartText | Quiesce | _RecoverText | _MigrateText | Inject | Noted | Stop
_to_worker: msgspec.json.Decoder[_ToWorkerText] = msgspec.json.Decoder(_ToWorkerText)
_to_agent: msgspec.json.Decoder[ToAgent] = msgspec.json.Decoder(ToAgent)
_from_launcher: msgspec.json.Decoder[FromLauncher] = msgspec.json.Decoder(FromLauncher)
_to_launcher: msgspec.json.Decoder[ToLauncher] = msgspec.json.Decoder(ToLauncher)
_answer: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
_encoder = msgspec.json.Encoder()


class BadMessage(ValueError):
    """The text is not a message of this protocol. Says which field of which message."""


def encode(message: Message) -> str:
    """One JSON object, as text."""
    return _encoder.encode(_pack(message)).decode()


def _pack(message: Message) -> Message:
    match message:
        case Start(plan=plan, addresses=addresses):
            return _StartText(plan=pack_plan(plan), addresses=addresses)
        case Migrate(plan=plan, addresses=addresses):
            return _MigrateText(plan=pack_plan(plan), addresses=addresses)
        case Recover(plan=plan, base=base):
            return _RecoverText(
                plan=pack_plan(plan),
                settlement=message.settlement,
                base=None if base is None else pack_plan(base),
                addresses=message.addresses,
                plan_s=message.plan_s,
            )
    return message


def _unpack(message: _ToWorkerText) -> ToWorker:
    match message:
        case _StartText(plan=plan, addresses=addresses):
            return Start(plan=unpack_plan(plan), addresses=addresses)
        case _MigrateText(plan=plan, addresses=addresses):
            return Migrate(plan=unpack_plan(plan), addresses=addresses)
        case _RecoverText(plan=plan, base=base):
            return Recover(
                plan=unpack_plan(plan),
                settlement=message.settlement,
                base=None if base is None else unpack_plan(base),
                addresses=message.addresses,
                plan_s=message.plan_s,
            )
    return message


def decode_from_client(text: str | bytes) -> FromClient:
    """Read what a worker, an agent or a tool sent. Raises BadMessage."""
    return _decode(_from_client, text)


def decode_to_worker(text: str | bytes) -> ToWorker:
    """Read what the controller sent to a worker. Raises BadMessage."""
    message = _decode(_to_worker, text)
    try:
        return _unpack(message)
    except ValueError as error:
        raise BadMessage(f"not a message of protocol version {PROTOCOL_VERSION}: {error}") from error


def decode_to_agent(text: str | bytes) -> ToAgent:
    """Read what the controller sent to an agent. Raises BadMessage."""
    return _decode(_to_agent, text)


def decode_from_launcher(text: str | bytes) -> FromLauncher:
    """Read what the launcher of node 0 said to its controller. Raises BadMessage."""
    return _decode(_from_launcher, text)


def decode_to_launcher(text: str | bytes) -> ToLauncher:
    """Read what the controller said to the launcher of node 0. Raises BadMessage."""
    return _decode(_to_launcher, text)


def decode_answer(text: str | bytes) -> Answer:
    """Read the reply to a tool. Raises BadMessage."""
    return _decode(_answer, text)


def _decode[M](decoder: msgspec.json.Decoder[M], text: str | bytes) -> M:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise BadMessage(f"not a message of protocol version {PROTOCOL_VERSION}: {error}") from error
