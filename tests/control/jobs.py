"""Small jobs and worker messages for the tests of the control plane."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from megatron_elas.config import ControlTimeouts
from megatron_elas.control.commands import Command, EndJob, ImprovePlan, MakePlan, Tell
from megatron_elas.control.controller import initial_state, step
from megatron_elas.control.events import Event, PlanImproved, PlanKept
from megatron_elas.control.launch import Launch
from megatron_elas.control.messages import AgentHello, Hello, Migrated, Recovered, Settled, ToWorker
from megatron_elas.control.service import make_plan
from megatron_elas.control.states import State
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.migration import MigrationMode, MigrationReport
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.report import Holding, RecoveryReport, SettleReport

TIMEOUTS = ControlTimeouts(
    heartbeat_interval_s=0.05,
    heartbeat_timeout_s=0.5,
    settle_timeout_s=2.0,
    resume_timeout_s=5.0,
    join_timeout_s=10.0,
    grace_s=1.0,
)


def make_job(
    pipeline: int = 2, data: int = 2, tensor: int = 1, layers: tuple[int, ...] = (), migration: MigrationMode = "off"
) -> JobSpec:
    """A grid with eight micro-batches."""
    return JobSpec(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        data_parallel=data,
        micro_batch_size=1,
        num_microbatches=8 * data,
        stage_layers=layers,
        migration=migration,
    )


def make_hello(worker: int, job: JobSpec) -> Hello:
    """As a worker says it."""
    return Hello(
        worker=worker, pid=1000 + worker, host="here", domain=f"worker{worker}", address=f"unix:{worker}", job=job
    )


def make_report(worker: int, epoch: int, plan: ElasticPlan, step_number: int = 5) -> SettleReport:
    """A survivor that holds everything ``plan`` asks of it, in the state before ``step_number``."""
    wards = {ward: (step_number,) for ward in plan.wards_of(worker)}
    holding = Holding(epoch=plan.epoch, live=step_number, kept=(step_number,), wards=wards)
    return SettleReport(worker=worker, epoch=epoch, step=step_number, activity=step_number, holdings=(holding,))


def shift_layer(plan: ElasticPlan, epoch: int, drained: Collection[int] = ()) -> ElasticPlan:
    """A plan in which the first stage has one layer more, the second one less, and some workers have no seat."""
    (first, second), *rest = plan.layers[0], *plan.layers[1:]
    placement = plan.placement.without(drained)
    return replace(
        plan,
        epoch=epoch,
        placement=replace(placement, spares=plan.placement.spares),
        layers=((first, second + 1), (second + 1, rest[0][1]), *rest[1:]),
        backups=tuple(pair for pair in plan.backups if not set(drained) & set(pair)),
    )


def shifted(command: ImprovePlan) -> PlanImproved | PlanKept:
    """The answer of a planner that finds that better."""
    search = command.search
    return PlanImproved(search=search, plan=shift_layer(command.plan, search.epoch, search.drained), seconds=0.25)


class Director:
    """Applies events one by one, keeps what was commanded, answers for the planner at once."""

    improver: Callable[[ImprovePlan], PlanImproved | PlanKept] | None = None
    """Answers for the planner while nobody is lost; None: nobody does."""

    def __init__(self, job: JobSpec, *, nnodes: int = 1, planner: bool = True) -> None:
        self.job = job
        launch = Launch(nnodes=nnodes, workers_per_node=job.world_size // nnodes, timeouts=TIMEOUTS)
        self.state: State = initial_state(launch)
        self.commands: list[Command] = []
        self.now = 100.0
        self.planner = planner

    def send(self, *events: Event) -> list[Command]:
        """Apply events; gives the commands of these."""
        first = len(self.commands)
        for event in events:
            self.now += 0.001
            self.state, commands = step(self.state, event, self.now)
            self.commands.extend(commands)
            if self.planner:
                for command in commands:
                    if isinstance(command, MakePlan):
                        self.send(make_plan(command))
                    if isinstance(command, ImprovePlan) and self.improver is not None:
                        self.send(self.improver(command))
        return self.commands[first:]

    def start(self) -> Director:
        """All agents and workers join."""
        launch = self.state.roster.launch
        for node in range(launch.nnodes):
            self.send(AgentHello(node=node, host="here", workers=launch.workers_of(node)))
        for worker in range(launch.world_size):
            self.send(make_hello(worker, self.job))
        return self

    def settle(self, epoch: int, workers: Iterable[int], plan: ElasticPlan, step_number: int = 5) -> list[Command]:
        """These workers settle."""
        return self.send(*(Settled(report=make_report(worker, epoch, plan, step_number)) for worker in workers))

    def migrate(self, epoch: int, workers: Iterable[int], **phases_s: float) -> list[Command]:
        """These workers end their first step under another plan."""
        blocked_s = sum(phases_s.values())
        reports = [
            MigrationReport(worker=worker, epoch=epoch, step=9, blocked_s=blocked_s, phases_s=phases_s)
            for worker in workers
        ]
        return self.send(*(Migrated(report=report) for report in reports))

    def recover(self, epoch: int, workers: Iterable[int], **marks_s: float) -> list[Command]:
        """These workers end their first step."""
        return self.send(
            *(
                Recovered(report=RecoveryReport(worker=worker, epoch=epoch, resume_step=5, marks_s=marks_s))
                for worker in workers
            )
        )


def told(commands: Iterable[Command], kind: type[ToWorker]) -> list[tuple[tuple[int, ...], ToWorker]]:
    """Messages of one kind, each with the workers it went to."""
    return [
        (command.workers, command.message)
        for command in commands
        if isinstance(command, Tell) and isinstance(command.message, kind)
    ]


def end_of(commands: Iterable[Command]) -> EndJob | None:
    """The end of the job, if it is among the commands."""
    return next((command for command in commands if isinstance(command, EndJob)), None)
