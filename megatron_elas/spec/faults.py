"""Faults that a script asks for: which worker is struck, how, and where in a step.

One grammar serves the launch flag, ``elas inject``, process tests and the simulator::

    KIND:worker=W@step=S,phase=P[,microbatch=M]

for example ``kill:worker=3@step=5,phase=forward,microbatch=2``. ``str(fault)`` gives the text back.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_elas.spec.errors import BadUsage


class FaultKind(enum.StrEnum):
    """How the worker is struck."""

    KILL = "kill"
    """SIGKILL, as when a node loses power or the kernel runs out of memory."""
    EXIT = "exit"
    """The process ends with status 1 and no farewell."""
    STOP = "stop"
    """SIGSTOP: it stays, holds its links open and answers nothing."""
    HANG = "hang"
    """Its main thread waits for ever, in nothing that another worker could end; the process lives and beats."""
    EXCEPTION = "exception"
    """A Python exception out of the training step."""


class FaultPhase(enum.StrEnum):
    """Where in a step, beside it, or in a recovery the fault strikes. In the order of a step."""

    FORWARD = "forward"
    """Before the forward pass of a micro-batch."""
    BACKWARD = "backward"
    """Before the backward pass of a micro-batch."""
    REDUCE = "reduce"
    """Before the gradients are reduced over the replicas."""
    SNAPSHOT = "snapshot"
    """Before what the step keeps of the own shard goes to its backups."""
    NORM = "norm"
    """Before the all-reduce of the gradient norm."""
    OPTIMIZER = "optimizer"
    """After the gradient norm, before parameters and optimizer state change."""
    GATHER = "gather"
    """After the optimizer, before updated parameters are gathered."""
    COMMIT = "commit"
    """At the end of the step's body."""
    BETWEEN = "between"
    """After the step, before the next one."""
    EVALUATE = "evaluate"
    """At the start of an evaluation after that step, or before the forward pass of a micro-batch of it."""
    SAVE = "save"
    """At the start of a save after that step."""
    RECOVERY = "recovery"
    """In the recovery from another fault: under the new plan, with groups edited, before anything else."""
    RECOVERY_QUIESCE = "recovery-quiesce"
    """In it: unwound, before the controller is told."""
    RECOVERY_RESTORE = "recovery-restore"
    """In it: before the state moves to its new owners."""
    RECOVERY_REBUILD = "recovery-rebuild"
    """In it: before model and optimizer are fitted to the state."""
    RECOVERY_VERIFY = "recovery-verify"
    """In it: before the state is compared."""
    RECOVERY_RESUME = "recovery-resume"
    """In it: verified, before the first step under the new plan."""
    MIGRATE_STREAM = "migrate-stream"
    """In a migration, at the begin of a step in which state goes to new owners: before anything of it is sent."""
    MIGRATE_HAND_OVER = "migrate-hand-over"
    """In such a step: before gradients of moving pieces go to new owners."""
    MIGRATE_SWITCH = "migrate-switch"
    """Between the last step under the old plan and the first one under the new: before anything is done."""
    MIGRATE_ENTER = "migrate-enter"
    """There: the new shard is put together; before groups are edited."""
    MIGRATE_REBUILD = "migrate-rebuild"
    """There: before model and optimizer are fitted to the plan."""
    MIGRATE_RESUME = "migrate-resume"
    """There: all is done, before the first step under the new plan."""
    MIGRATE_VERIFY = "migrate-verify"
    """In that step: its gradients are reduced, before the state is compared."""


PHASES_WITH_MICROBATCH = frozenset({FaultPhase.FORWARD, FaultPhase.BACKWARD, FaultPhase.EVALUATE, FaultPhase.SAVE})
RECOVERY_PHASES = tuple(phase for phase in FaultPhase if phase.startswith("recovery"))
"""Of a second fault, which strikes in the recovery from a first."""
MIGRATION_PHASES = tuple(phase for phase in FaultPhase if phase.startswith("migrate"))
"""Of a migration, which begins when the controller has a better plan."""

GRAMMAR = (
    f"write KIND:worker=W@step=S,phase=P[,microbatch=M] with KIND {'|'.join(FaultKind)}, "
    f"P {'|'.join(FaultPhase)}; microbatch goes with forward, backward, evaluate and save (0: about to write) only"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One strike. It happens once, the first time the worker is there."""

    kind: FaultKind
    worker: int
    step: int
    """Counted from 0 over the whole training. In a recovery, the step of the first fault: the worker struck
    second may be one ahead or behind. In a migration, the first step that may be struck."""
    phase: FaultPhase
    microbatch: int | None = None
    """Counted over what the worker runs in one step or evaluation, from 0; None means its first."""

    def __post_init__(self) -> None:
        if self.microbatch is not None and self.phase not in PHASES_WITH_MICROBATCH:
            raise BadUsage(f"fault '{self}': phase {self.phase} has no micro-batches: {GRAMMAR}")

    def __str__(self) -> str:
        text = f"{self.kind}:worker={self.worker}@step={self.step},phase={self.phase}"
        return text if self.microbatch is None else f"{text},microbatch={self.microbatch}"

    def strikes_at(self, step: int, phase: FaultPhase, microbatch: int | None = None) -> bool:
        """Whether the place is the fault's own. ``step``: of the worker's training loop."""
        if self.phase in MIGRATION_PHASES:
            return step >= self.step and self.phase == phase
        apart = 1 if self.phase in RECOVERY_PHASES else 0
        return abs(step - self.step) <= apart and self.phase == phase and self.microbatch in (None, microbatch)


def parse_fault(text: str) -> Fault:
    """Read one fault.

    Raises:
        BadUsage: The text does not follow the grammar; the sentence shows it.
    """
    kind, colon, rest = text.strip().partition(":")
    who, at, where = rest.partition("@")
    if not (colon and at):
        raise BadUsage(f"fault {text!r} cannot be read: {GRAMMAR}")
    fields = _read_fields(text, [who, *where.split(",")])
    unknown = sorted(fields.keys() - {"worker", "step", "phase", "microbatch"})
    missing = [name for name in ("worker", "step", "phase") if name not in fields]
    if unknown or missing:
        problem = f"unknown field {unknown[0]}" if unknown else f"{missing[0]} is missing"
        raise BadUsage(f"fault {text!r}: {problem}: {GRAMMAR}")
    return Fault(
        kind=_read_choice(text, "kind", FaultKind, kind),
        worker=_read_count(text, "worker", fields["worker"]),
        step=_read_count(text, "step", fields["step"]),
        phase=_read_choice(text, "phase", FaultPhase, fields["phase"]),
        microbatch=_read_count(text, "microbatch", fields["microbatch"]) if "microbatch" in fields else None,
    )


def check_faults(faults: Iterable[Fault], world_size: int) -> None:
    """Refuse faults of workers that the job does not have.

    Raises:
        BadUsage: A worker id is not in ``[0, world_size)``.
    """
    for fault in faults:
        if fault.worker >= world_size:
            raise BadUsage(
                f"fault '{fault}': there is no worker {fault.worker}, the job has workers 0 to {world_size - 1}"
            )


def explain_unreachable(faults: Iterable[Fault], steps: int | None, passes: int) -> list[str]:
    """Sentences about faults that can strike nowhere, however the job goes.

    Args:
        faults: Of the job.
        steps: Of the whole training, or None where it has no such end.
        passes: The most forward passes that a worker may make in one step.
    """
    sentences = []
    for fault in faults:
        # A recovery strikes one step beside the fault's own too, also after the last one, a migration after it.
        beyond = 2 if fault.phase in RECOVERY_PHASES else 1 if fault.phase in MIGRATION_PHASES else 0
        if steps is not None and fault.step >= steps + beyond:
            sentences.append(f"fault '{fault}' will never strike: the last step of training is {steps - 1}")
        elif (
            fault.phase in (FaultPhase.FORWARD, FaultPhase.BACKWARD)
            and fault.microbatch is not None
            and fault.microbatch >= passes
        ):
            sentences.append(
                f"fault '{fault}' will never strike: the last micro-batch that a worker may run in a step is "
                f"{passes - 1}"
            )
    return sentences


def _read_fields(text: str, pairs: Iterable[str]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not (name and equals and value):
            raise BadUsage(f"fault {text!r}: {pair!r} is not name=value: {GRAMMAR}")
        if name in fields:
            raise BadUsage(f"fault {text!r}: {name} is given twice: {GRAMMAR}")
        fields[name] = value
    return fields


def _read_count(text: str, name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise BadUsage(f"fault {text!r}: {name} must be a number from 0 up, got {value!r}: {GRAMMAR}")
    return int(value)


def _read_choice[C: enum.StrEnum](text: str, name: str, choices: type[C], value: str) -> C:
    try:
        return choices(value.strip())
    except ValueError:
        raise BadUsage(f"fault {text!r}: unknown {name} {value!r}: {GRAMMAR}") from None
