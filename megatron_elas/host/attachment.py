"""What the wrappers around Megatron's functions act on; there is one per process, and none with elastic off."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_elas.host.audit import Audit
from megatron_elas.host.data import SeekableLoader
from megatron_elas.host.emulation import Emulation
from megatron_elas.host.gradient_sums import GradientSums
from megatron_elas.host.log_handover import Log
from megatron_elas.host.optimizer import OptimizerFactory
from megatron_elas.host.pipeline import Route, RoutedPipeline
from megatron_elas.host.restage import ModelFactory
from megatron_elas.host.sample_log import SampleLog
from megatron_elas.host.schedule import PassCounter
from megatron_elas.host.step_timer import StepTimer
from megatron_elas.host.training import MegatronHost
from megatron_elas.runtime.communicator.communicator import Communicator
from megatron_elas.runtime.ports import FaultPoint
from megatron_elas.runtime.random_streams import RandomStreams
from megatron_elas.runtime.session import Session
from megatron_elas.runtime.transport.base import Transport
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.layout import Placement


@dataclass(slots=True, kw_only=True)
class Attachment:
    """Filled by worker.prepare, completed at the first training step."""

    worker: int
    job: JobSpec
    initial: Placement
    session: Session
    communicator: Communicator
    transport: Transport
    route: Route
    pipeline: RoutedPipeline
    counter: PassCounter
    timer: StepTimer
    strike: FaultPoint
    log: Log
    summed_rows: int
    """See ``host.summed_rows``."""
    emulation: Emulation | None = None
    sums: GradientSums | None = None
    """Where gradients are summed in fixed point."""
    sample_log: SampleLog | None = None
    streams: RandomStreams | None = None
    """None with ``--elastic-rng megatron``."""
    audit: Audit | None = None
    samples: list[int] = field(default_factory=list)
    """Sample ids that this worker has read for the step under way."""
    losses: list[dict[str, Any]] = field(default_factory=list)
    """Of the items of the step under way, at ``bitwise`` of all its micro-batches; empty before the last stage."""
    norm: Any = None
    """Gradient norm of the step under way, when it is known."""
    zeros: Any = None
    """Zeros among its gradients, where they are counted."""
    factory: OptimizerFactory | None = None
    models: ModelFactory | None = None
    train_loader: SeekableLoader | None = None
    """None on workers that cannot read data: a script of the user's own gave them no data set."""
    host: MegatronHost | None = None
    unsaved: int | None = None
    """Iteration of the newest checkpoint, if it could not be saved."""


_current: list[Attachment] = []


def attach(attachment: Attachment) -> None:
    """Make it the process's attachment. Raises when there is one already."""
    if _current:
        raise RuntimeError("this process is already attached to a job")
    _current.append(attachment)


def detach() -> None:
    """Forget the attachment."""
    _current.clear()


def attachment() -> Attachment:
    """The process's attachment."""
    return _current[0]


def find_streams() -> RandomStreams | None:
    """The process's random streams; None where Megatron's are in force."""
    return _current[0].streams if _current else None
