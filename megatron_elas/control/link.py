"""A worker's connection to the controller. Plain threads, so that it lives beside any training loop.

Two daemon threads: one reads what the controller says and acts on it at once, one sends heartbeats. Beside them is the
pulse, for the agent, which needs no interpreter. When the controller is gone training goes on; the reader connects
again, says what the worker has seen and repeats what was not noted, and what needs an answer waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.sync.client import ClientConnection

from megatron_elas.control import death_watch
from megatron_elas.control.messages import (
    BadMessage,
    Finished,
    Heartbeat,
    Hello,
    HelloAgain,
    Inject,
    Measured,
    Message,
    Migrate,
    Noted,
    Quiesce,
    Recover,
    Stalled,
    Start,
    Stop,
    ToWorker,
    Traced,
    decode_to_worker,
    encode,
)
from megatron_elas.control.outbox import Outbox
from megatron_elas.control.progress import ProgressWatch, look_at_main_thread
from megatron_elas.control.wire import PROTOCOL_VIOLATION, dial
from megatron_elas.proof import NotAMember
from megatron_elas.spec.errors import BadUsage, ElasticError, EpochChanged
from megatron_elas.spec.step_report import StepReport
from megatron_elas.spec.step_trace import StepTrace

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.5
"""Between attempts to connect again; doubled each time."""
FAREWELL_S = 10.0
"""For the controller to note what was said last, before this process ends."""
MOST_TRACES = 16
"""That wait for a heartbeat; of more the oldest are dropped."""
LEAVE_S = 2.0
"""For a thread to end; one that is connecting stays behind, being a daemon."""


class ControlLink:
    """Joins the job on construction; ``close`` leaves it.

    ``send``, ``progress`` and the waits may be called from any thread. The callbacks run on the
    link's own thread and must return quickly.
    """

    def __init__(
        self,
        address: str,
        token: str,
        hello: Hello,
        heartbeat_interval_s: float,
        on_quiesce: Callable[[Quiesce], None],
        on_inject: Callable[[str], None],
        patience_s: float = 60.0,
        progress_timeout_s: float = math.inf,
    ) -> None:
        """Connect and send ``hello``.

        Args:
            address: ``ws://host:port``.
            token: Shared secret of the job.
            hello: This worker.
            heartbeat_interval_s: Between heartbeats.
            on_quiesce: Called at once when an epoch ends. Typically cancels communication.
            on_inject: Called with the text of a fault.
            patience_s: When nobody listens at the address for so long, the controller will not come back. (While one is
                started anew its launcher listens for it.)
            progress_timeout_s: See ``progress.ProgressWatch``.

        Raises:
            BadUsage: The controller refused the token, or the address is none.
            ElasticError: Nobody answers at the address.
        """
        self._address, self._token, self._hello = address, token, hello
        self._worker = hello.worker
        self._patience_s = patience_s
        self._on_quiesce = on_quiesce
        self._on_inject = on_inject
        self._heartbeat_interval_s = heartbeat_interval_s
        self._changed = threading.Condition()
        self._start: Start | None = None
        self._quiesce: Quiesce | None = None
        self._recover: Recover | None = None
        self._migrate: Migrate | None = None
        self._gone: str | None = None
        self._closing = threading.Event()
        self._epoch = 0
        self._step = 0
        self._watch = ProgressWatch(progress_timeout_s, 2 * heartbeat_interval_s)
        self._reports: deque[StepReport] = deque(maxlen=1)
        """The newest one that was not told."""
        self._traces: deque[StepTrace] = deque(maxlen=MOST_TRACES)
        """Those that were not told."""
        self._plan_epoch = -1
        self._finished = False
        self._outbox = Outbox()
        self._sending = threading.Lock()
        """Held while the outbox and what goes out change together."""
        self._all_noted = threading.Condition(self._sending)
        self._connection = _connect(address, token)
        self._connected = True
        self.send(hello)
        self._threads = [
            threading.Thread(target=self._read, name="elas-link", daemon=True),
            threading.Thread(target=self._beat, name="elas-heartbeat", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        death_watch.start_pulse()

    # ------------------------------------------------------------ towards the controller

    def send(self, message: Message) -> None:
        """Send now: when this returns the message has left the process, or the controller is gone.

        A gone controller is no error here: training goes on, and the next one is sent what this one has not noted.
        """
        with self._sending:
            self._outbox.keep(message)
            self._finished |= isinstance(message, Finished)
            if self._connected:
                with contextlib.suppress(ConnectionClosed):  # the reader notices, and connects again
                    self._connection.send(encode(message))

    def progress(self, epoch: int, step: int) -> None:
        """A step begins on the main thread: what the next heartbeats say."""
        self._epoch, self._step = epoch, step
        self._watch.enter_step(step, time.monotonic())

    def measured(self, report: StepReport) -> None:
        """A step has been measured: goes with the next heartbeat, unless a newer one comes before."""
        self._reports.append(report)

    def traced(self, trace: StepTrace) -> None:
        """A step that matters has been traced: goes with the next heartbeat."""
        self._traces.append(trace)

    def tell_measured(self) -> None:
        """What was measured last, and what was traced, if that was not told."""
        with contextlib.suppress(IndexError):
            self.send(Measured(report=self._reports.pop()))
        with contextlib.suppress(IndexError):
            while True:
                self.send(Traced(trace=self._traces.popleft()))

    def mark(self) -> None:
        """The main thread makes progress."""
        self._watch.mark()

    def leave_step(self) -> None:
        """The step has ended; whatever comes next is not part of one."""
        self._watch.leave_step(time.monotonic())

    # ------------------------------------------------------------ from the controller

    @property
    def latest_epoch(self) -> int:
        """The newest epoch that was announced."""
        quiesce = self._quiesce
        return quiesce.epoch if quiesce is not None else 0

    @property
    def migration(self) -> Migrate | None:
        """The newest order to go over to another plan, unless a newer epoch was announced since."""
        order = self._migrate
        return order if order is not None and order.plan.epoch > self.latest_epoch else None

    def wait_start(self, timeout_s: float) -> Start:
        """The plan of epoch 0, when all workers have joined; given once. Raises ElasticError."""
        start = self._wait(lambda: self._start, timeout_s, "that all workers have joined")
        self._start = None  # its plan would outlive its epoch here
        return start

    def wait_quiesce(self, newer_than: int, timeout_s: float) -> Quiesce:
        """The latest announcement of an epoch newer than ``newer_than``. Raises ElasticError."""

        def find() -> Quiesce | None:
            quiesce = self._quiesce
            return quiesce if quiesce is not None and quiesce.epoch > newer_than else None

        return self._wait(find, timeout_s, f"an epoch after {newer_than}")

    def wait_recover(self, epoch: int, timeout_s: float) -> Recover:
        """The plan of ``epoch``, when all survivors have settled.

        Raises:
            EpochChanged: A newer epoch was announced; settle for that one.
            ElasticError: The controller is gone, or silent for ``timeout_s``.
        """

        def find() -> Recover | None:
            if self.latest_epoch > epoch:
                raise EpochChanged(f"epoch {self.latest_epoch} was announced while waiting for the plan of {epoch}")
            recover = self._recover
            if recover is None or recover.plan.epoch != epoch:
                return None
            self._recover = None  # it holds plans of two epochs
            return recover

        return self._wait(find, timeout_s, f"the plan of epoch {epoch}")

    def _wait[M](self, find: Callable[[], M | None], timeout_s: float, what: str) -> M:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if (found := find()) is not None:
                    return found
                if self._gone is not None:
                    raise ElasticError(
                        f"worker {self._worker} needs to hear {what}, but the controller is gone ({self._gone}): "
                        f"restart the job from its newest checkpoint"
                    )
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise ElasticError(
                        f"worker {self._worker} did not hear {what} within {timeout_s:g} s: see elasrun's output for "
                        f"the worker that is waited for"
                    )
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))

    def close(self) -> None:
        """Say goodbye, once everything said was noted, and end the threads. May be called again."""
        with self._all_noted:
            if not self._all_noted.wait_for(lambda: self._outbox.empty or self._gone is not None, FAREWELL_S):
                logger.warning("worker %d: the controller has not noted what this worker said last", self._worker)
        self._closing.set()
        death_watch.stop_pulse()
        self._connection.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(LEAVE_S)

    # ------------------------------------------------------------ threads

    def _read(self) -> None:
        try:
            while True:
                why = self._read_to_the_end()
                if self._closing.is_set():
                    return
                # Its launcher, or this node's, warns; here it would be a line per worker.
                logger.info("worker %d: the controller is gone (%s); training goes on", self._worker, why)
                if not self._connect_again():
                    return
                logger.info("worker %d: the controller is back", self._worker)
        except BadMessage as error:
            self._note_gone(str(error))
        except Exception as error:  # the thread's boundary: if it died silently, waits would never end
            logger.exception("worker %d: acting on a message of the controller failed", self._worker)
            self._note_gone(f"acting on its message failed with {type(error).__name__}: {error}")

    def _read_to_the_end(self) -> str:
        """Act on what the controller says; gives how the connection ended."""
        try:
            for text in self._connection:
                self._act(decode_to_worker(text))
        except ConnectionClosed as error:
            if error.rcvd is not None and error.rcvd.code == PROTOCOL_VIOLATION:
                raise BadMessage(f"it refused what this worker said: {error.rcvd.reason}") from error
            return str(error)
        finally:
            with self._sending:
                self._connected = False
        return "it closed the connection"

    def _connect_again(self) -> bool:
        """Until somebody answers; False when this worker leaves, or nobody will."""
        pause_s, deadline = FIRST_PAUSE_S, time.monotonic() + self._patience_s
        while not self._closing.wait(pause_s):
            try:
                connection = dial(self._address, self._token)
            except NotAMember as error:
                self._note_gone(f"at its address is somebody else: {error}")
                return False
            except (OSError, InvalidHandshake) as error:
                if isinstance(error, ConnectionRefusedError) and time.monotonic() > deadline:
                    self._note_gone(f"nobody has answered at {self._address} for {self._patience_s:g} s: {error}")
                    return False
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            if self._closing.is_set():
                connection.close()
            elif self._speak_again(connection):
                return True
        return False

    def _speak_again(self, connection: ClientConnection) -> bool:
        """The first words on a new connection; False when it broke meanwhile."""
        with self._sending:
            again = HelloAgain(
                hello=self._hello, epoch=self.latest_epoch, plan_epoch=self._plan_epoch, finished=self._finished,
                step=self._step,
            )  # fmt: skip
            try:
                for message in (again, *self._outbox.repeat()):
                    connection.send(encode(message))
            except ConnectionClosed:
                return False
            self._connection, self._connected = connection, True
            self._watch.tell_again()
            return True

    def _act(self, message: ToWorker) -> None:
        match message:
            case Stop():
                _end_process(self._worker, message)
            case Inject(fault=fault):
                self._on_inject(fault)
            case Quiesce():
                if message.epoch > self.latest_epoch:
                    self._watch.disturb()
                    self._keep(quiesce=message)
                    self._on_quiesce(message)
            case Start():
                self._keep(start=message)
            case Recover():
                self._keep(recover=message)
            case Migrate():
                self._keep(migrate=message)
            case Noted(count=count):
                with self._all_noted:
                    self._outbox.note(count)
                    self._all_noted.notify_all()

    def _keep(
        self,
        *,
        start: Start | None = None,
        quiesce: Quiesce | None = None,
        recover: Recover | None = None,
        migrate: Migrate | None = None,
    ) -> None:
        with self._changed:
            self._start = start or self._start
            self._quiesce = quiesce or self._quiesce
            self._recover = recover or self._recover
            self._migrate = migrate or self._migrate
            if self.migration is None:  # its plan would outlive its epoch here
                self._migrate = None
            for order in (start, recover, migrate):
                if order is not None:
                    self._plan_epoch = max(self._plan_epoch, order.plan.epoch)
            self._changed.notify_all()

    def _beat(self) -> None:
        while not self._closing.wait(self._heartbeat_interval_s) and self._gone is None:
            waiting, place = look_at_main_thread()
            self.send(Heartbeat(worker=self._worker, epoch=self._epoch, step=self._step, waiting=waiting))
            self.tell_measured()
            self._look_for_progress(waiting, place)

    def _look_for_progress(self, waiting: bool, place: str) -> None:
        stalled_s = self._watch.look(time.monotonic(), waiting)
        if stalled_s is not None:
            detail = self._watch.describe(stalled_s, place)
            logger.warning("worker %d: %s", self._worker, detail)
            self.send(Stalled(worker=self._worker, detail=detail))

    def _note_gone(self, why: str) -> None:
        with self._changed:
            if self._gone is None:
                self._gone = why
                if not self._closing.is_set():
                    logger.warning(
                        "worker %d: the controller stays away (%s); training goes on, but the next loss ends it",
                        self._worker,
                        why,
                    )
            self._changed.notify_all()
        with self._all_noted:
            self._all_noted.notify_all()


def _connect(address: str, token: str) -> ClientConnection:
    try:
        return dial(address, token)
    except InvalidURI as error:
        raise BadUsage(f"controller address '{address}' is not of the form ws://host:port: {error}") from error
    except NotAMember as error:
        raise BadUsage(
            f"the controller at {address} and this process do not share a secret: ELAS_TOKEN is not that of the job"
        ) from error
    except (OSError, InvalidHandshake) as error:
        raise ElasticError(f"no controller answers at {address} ({error}): is elasrun still running?") from error


def _end_process(worker: int, stop: Stop) -> None:
    """End at once, whatever the other threads do."""
    print(f"worker {worker} ends with status {stop.exit_code}: {stop.sentence}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(stop.exit_code)
