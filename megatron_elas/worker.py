"""An elastic worker: wires control link, runtime and host together inside the training process."""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from megatron_elas.control.environment import WorkerEnvironment
from megatron_elas.control.link import ControlLink
from megatron_elas.control.messages import FaultFired, Hello, Quiesce
from megatron_elas.control.port import LinkPort
from megatron_elas.host.attachment import detach
from megatron_elas.host.audit import Audit, check_audit
from megatron_elas.host.checkpoints import use_exchangeable_checkpoints
from megatron_elas.host.emulation import make_emulation, settle_emulation
from megatron_elas.host.fault_script import find_unreachable_faults
from megatron_elas.host.join import join_megatron
from megatron_elas.host.log_handover import Log
from megatron_elas.host.memory import check_node_memory
from megatron_elas.host.requirements import check_elastic_arguments, describe_job
from megatron_elas.host.sample_log import SampleLog
from megatron_elas.host.shape import describe_run, launch_layers
from megatron_elas.host.step_tracer import StepTracer
from megatron_elas.platform.detect import detect
from megatron_elas.platform.host_memory import read_available
from megatron_elas.runtime.communicator.communicator import Communicator
from megatron_elas.runtime.session import Session
from megatron_elas.runtime.snapshots import SnapshotMode
from megatron_elas.runtime.transport.sockets import SocketTransport
from megatron_elas.spec.audit import KINDS
from megatron_elas.spec.errors import BadUsage, ElasticError, EpochChanged, ExitCode, NotStarted, comes_of
from megatron_elas.spec.faults import Fault, FaultPhase, check_faults, parse_fault
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.testing.faults import FaultInjector

logger = logging.getLogger(__name__)

WITHOUT_LIMIT_S = math.inf
"""The controller has the limits (config.ControlTimeouts) and ends the job with a reason. When it is gone, waits end."""


class Worker:
    """One per process."""

    def __init__(self, args: Any) -> None:
        """Join the job and wait for the plan.

        Raises:
            BadUsage: A flag cannot work with --elastic, or this process was not started by elasrun.
        """
        self.job, faults = settle_arguments(args)
        self._environment = environment = WorkerEnvironment.from_environ(os.environ)
        audit = _make_audit(args, environment)
        self._emulation = emulation = make_emulation(args, environment.worker, Path(environment.run_dir))
        self._session: Session | None = None
        self._ready = threading.Event()
        """Set when the link's thread may use this object."""
        self._faults = FaultInjector(faults, environment.worker, self._announce)
        self._transport = SocketTransport(environment.worker, self._listen_address(), environment.token)
        shape, training = describe_run(args) or (None, None)
        self._link = ControlLink(
            environment.controller,
            environment.token,
            Hello(
                worker=environment.worker,
                pid=os.getpid(),
                host=socket.gethostname(),
                domain=environment.domain,
                address=self._transport.address,
                job=self.job,
                shape=shape,
                training=training,
                emulated=None if emulation is None else emulation.time,
                faults=tuple(map(str, self._faults.pending)),
            ),
            environment.heartbeat_s,
            self._cancel,
            self._inject,
            progress_timeout_s=environment.progress_s,
        )
        self._port = LinkPort(environment.worker, self._link, WITHOUT_LIMIT_S)
        self._ready.set()
        if environment.worker == 0 and self.job.world_size < 2 * self.job.tensor_parallel:
            print(
                "megatron_elas: the job has a single cell, so the loss of any worker ends it: add workers to survive "
                "losses",
                flush=True,
            )
        if environment.worker == 0:
            for sentence in find_unreachable_faults(args, self.job):
                print(f"megatron_elas: {sentence}", flush=True)
        start = self._link.wait_start(WITHOUT_LIMIT_S)
        self._transport.set_addresses(start.addresses)
        communicator = Communicator(self._transport, range(self.job.world_size))
        mode = SnapshotMode.COPY if args.elastic_snapshot == "copy" else SnapshotMode.REPLAY
        session = Session(
            environment.worker,
            start.plan,
            self._transport if emulation is None else emulation.time_moves(self._transport),
            communicator,
            self._port,
            self._strike,
            mode,
            args.elastic_snapshot_verify_interval,
            moves_beside=args.elastic_migration != "blocking",
            migration=self.job.migration,
        )
        self._session = session
        log = Log(environment.worker, Path(environment.run_dir), lambda: session.coming_activity)
        try:
            self._check_memory(args, start.plan)
            self.attachment, self.pretrain_arguments = join_megatron(
                args, self.job, start.plan, self._transport, communicator, session, self._strike, log,
                self._link.measured, emulation,
                StepTracer(environment.worker, self._link.traced, args.elastic_trace_steps or ()),
            )  # fmt: skip
        except ElasticError as error:
            self._port.failed(int(error.exit_code), str(error))
            raise
        if args.elastic_sample_log is not None:
            self.attachment.sample_log = SampleLog(args.elastic_sample_log, environment.worker)

        self.attachment.audit = audit
        if audit is not None and self.attachment.streams is not None:
            self.attachment.streams.observe = audit.observe_mask

    def _check_memory(self, args: Any, plan: ElasticPlan) -> None:
        """The first worker of a node says what those of the node will take. Raises BadUsage when it is not there."""
        if int(os.environ["LOCAL_RANK"]) == 0:
            first = self._environment.worker
            here = range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))
            print(f"megatron_elas: {check_node_memory(args, self.job, plan, here, read_available())}", flush=True)
            if self._emulation is not None:
                print(f"megatron_elas: {self._emulation}", flush=True)

    def finish(self) -> None:
        """Leave after the end of training."""
        assert self._session is not None
        self._link.tell_measured()
        unsaved = self.attachment.unsaved
        self._session.finish(None if unsaved is None else lambda: self._report_unsaved(unsaved))
        if self.attachment.audit is not None and self.attachment.host is not None:
            self.attachment.host.tell_audit_end(self.attachment.audit, self._session.plan)
        self._close()

    def _report_unsaved(self, iteration: int) -> None:
        self._port.failed(
            int(ExitCode.NOT_SAVED),
            f"training is done, but its last checkpoint, of iteration {iteration}, could not be saved (see above)",
        )

    def fail(self, exit_code: int, sentence: str) -> None:
        """Leave, and have the controller end the job with this code."""
        self._port.failed(exit_code, sentence)
        self._close()

    def crash(self, error: Exception) -> None:
        """Leave because of an error that may be this worker's alone; the others may go on."""
        assert self._session is not None
        self._port.crashed(self._session.next_step, f"{type(error).__name__}: {error}")
        self._close(complete=False)

    def _close(self, *, complete: bool = True) -> None:
        detach()
        if self.attachment.sample_log is not None:
            self.attachment.sample_log.close()
        if self.attachment.audit is not None:
            self.attachment.audit.close()
        if self._emulation is not None:
            self._emulation.close()
        self.attachment.log.close(complete=complete)
        self._link.close()
        self._transport.close()

    def _listen_address(self) -> str:
        """Unix sockets when all workers are on this node, TCP on the address that reaches the controller otherwise."""
        if int(os.environ["LOCAL_WORLD_SIZE"]) == int(os.environ["WORLD_SIZE"]):
            return f"unix:{Path(self._environment.run_dir) / f'w{self._environment.worker}.sock'}"
        return f"tcp:{_own_address(self._environment.controller, os.environ['MASTER_ADDR'])}:0"

    def _cancel(self, quiesce: Quiesce) -> None:
        """An epoch has ended. Runs on the link's thread."""
        self._transport.cancel()
        self._ready.wait()
        if not self.started:
            who = ", ".join(f"worker {loss.worker} ({loss.detail})" for loss in quiesce.lost)
            self._port.failed(ExitCode.NOT_STARTED, _too_early(who))

    @property
    def started(self) -> bool:
        """Whether the first step has begun here, so that losses are recovered from."""
        return self._session is not None and self._session.attached

    def _inject(self, text: str) -> None:
        self._faults.add(parse_fault(text))

    def _announce(self, fault: Fault, at_s: float) -> None:
        self._link.send(FaultFired(worker=self._environment.worker, fault=str(fault), at_s=at_s))

    def _strike(self, step: int, phase: str, microbatch: int | None) -> None:
        """The main thread has come to a place that a fault script can name."""
        if phase in (FaultPhase.BETWEEN, FaultPhase.EVALUATE, FaultPhase.SAVE):
            self._link.leave_step()
        else:
            self._link.mark()
        if self._faults.pending:
            self._faults.at(step, FaultPhase(phase), microbatch)


def _own_address(controller: str, first_node: str) -> str:
    """Where workers of other nodes reach this host.

    Args:
        controller: ``ws://host:port``; a loopback address on the first node, which hosts it.
        first_node: The first node's name for the others.
    """
    host, _, port = controller.removeprefix("ws://").rpartition(":")
    if ipaddress.ip_address(socket.gethostbyname(host)).is_loopback:
        address = socket.gethostbyname(first_node)
        if ipaddress.ip_address(address).is_loopback and first_node not in ("localhost", address):
            raise BadUsage(
                f"the first node is called {first_node}, which is {address} on itself, where no other node reaches it: "
                f"give --rdzv-endpoint an address, or mend /etc/hosts"
            )
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def _make_audit(args: Any, environment: WorkerEnvironment) -> Audit | None:
    """What --elastic-audit asks for. Raises BadUsage when there is no folder for it."""
    every, folder = args.elastic_audit, environment.log_dir
    check_audit(every, folder)
    if not every or folder is None:
        return None
    # Megatron's own streams draw for whole micro-batches: their masks belong to no sample.
    kinds = [kind for kind in KINDS if kind != "masks" or args.elastic_rng == "resharded"]
    run = os.environ["TORCHELASTIC_RUN_ID"]
    return Audit(Path(folder), environment.worker, every, run, kinds, args.elastic_consistency)


_worker: list[Worker] = []


def settle_arguments(args: Any) -> tuple[JobSpec, list[Fault]]:
    """The job and the faults to inject; sets the checkpoint format in ``args``.

    Raises:
        BadUsage: Something cannot work with --elastic. Nothing was joined.
    """
    check_elastic_arguments(args, detect())
    use_exchangeable_checkpoints(args)
    job = describe_job(args, launch_layers(args))
    faults = [parse_fault(text) for text in args.elastic_inject or ()]
    check_faults(faults, job.world_size)
    settle_emulation(args)
    return job, faults


def prepare(args: Any) -> dict[str, Any]:
    """Join the job. Gives the keyword arguments for ``pretrain``. Raises ElasticError."""
    started_s = time.monotonic()
    worker = Worker(args)
    _worker.append(worker)
    logger.info("worker joined in %.2f s", time.monotonic() - started_s)
    return worker.pretrain_arguments


def finish() -> None:
    """Leave the job after the end of training."""
    _worker.pop().finish()


def fail(error: Exception) -> ElasticError | None:
    """Leave the job because of ``error``.

    Returns:
        What to end with: the error itself when it is one of ours, NotStarted when it comes of a loss before the
        first step (Megatron wraps what its collectives raise there), None for any other error.
    """
    if not _worker:
        return error if isinstance(error, ElasticError) else None
    worker = _worker.pop()
    own = error if isinstance(error, ElasticError) and not isinstance(error, EpochChanged) else None
    if own is None and not worker.started and comes_of(error, EpochChanged):
        own = NotStarted(_too_early("a worker"))
    if own is not None:
        worker.fail(int(own.exit_code), str(own))
    elif not worker.started:
        worker.fail(int(ExitCode.CRASHED), f"failed before the first step with {type(error).__name__}: {error}")
    else:
        worker.crash(error)
    return own


def stop(exit_code: int) -> None:
    """Leave the job because Megatron ended the run itself with this status, which becomes the job's."""
    if _worker:
        _worker.pop().fail(exit_code, f"Megatron ended the run with exit code {exit_code}")


def _too_early(who: str) -> str:
    return f"{who} was lost before the first step, where there is nothing to recover yet: start the job again"
