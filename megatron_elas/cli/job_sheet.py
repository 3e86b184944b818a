"""The text of a dry run: workers, grid, memory, environment."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_elas.cli.text import format_count, format_pairs, format_ranges, format_table
from megatron_elas.control.environment import TOKEN_VARIABLE
from megatron_elas.control.launch_options import LaunchOptions
from megatron_elas.planner.memory import WorkerMemory, plan_memory, sum_memories, total_parameters
from megatron_elas.planner.plan import initial_plan
from megatron_elas.platform.host_memory import AvailableMemory
from megatron_elas.spec.consistency import PROMISES, STREAMS
from megatron_elas.spec.errors import ExitCode
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.shape import ModelShape, RunFacts, TrainingShape

LATER = "(at start)"
"""In place of what the launcher of node 0, or a node's own, chooses when it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWorker:
    """A worker that would be started."""

    worker: int
    node: int
    environ: dict[str, str]
    """Only what its launcher sets."""

    @property
    def domain(self) -> str:
        """Failure domain."""
        return self.environ["ELAS_DOMAIN"]


class JobSheet:
    """Everything about one launch line that is known before it runs."""

    def __init__(
        self,
        options: LaunchOptions,
        workers: Sequence[NodeWorker],
        facts: RunFacts | None,
        available: AvailableMemory,
    ) -> None:
        """``facts`` are None for a script that cannot be asked; ``available`` is what this machine has."""
        self._options = options
        self._workers = workers
        self._facts = facts
        self._available = available
        self._plan: ElasticPlan | None = None
        if facts is not None and facts.job is not None:
            self._plan = initial_plan(facts.job, {worker.worker: worker.domain for worker in workers})

    def describe(self) -> str:
        """The whole text."""
        parts = [self._describe_launch()]
        facts = self._facts
        if facts is None:
            parts.append(
                "Grid and memory are told for -m megatron_elas.pretrain_gpt only; this script was not looked into."
            )
        else:
            parts.append(self._describe_run(facts))
            if self._plan is None or facts.job is None or facts.shape is None or facts.training is None:
                parts.append(f"Grid and memory cannot be told with {', '.join(facts.uncovered)}.")
            else:
                parts.append(self._describe_grid(self._plan, facts.shape, facts.elastic))
                parts.append(self._describe_memory(self._plan, facts.job, facts.shape, facts.training, facts))
        parts.append(self._describe_environment())
        return "\n\n".join(parts)

    # ------------------------------------------------------------ launch

    def _describe_launch(self) -> str:
        options = self._options
        target = options.target
        python = ["python", *(["-m"] if target.is_module else []), target.name, *target.arguments]
        start = "new Pythons" if options.fresh else "forks" + (f" after {options.preload}" if options.preload else "")
        where = "this node" if options.nnodes == 1 else f"{options.controller_host}:{options.controller_port}, node 0"
        return format_pairs(
            ("dry run", "nothing is started; ports, other nodes and files of checkpoints are not looked at"),
            ("workers", f"{options.launch.world_size} on {format_count(options.nnodes, 'node')}, {start}"),
            ("controller", where),
            ("command", shlex.join(python)),
        )

    # ------------------------------------------------------------ run

    def _describe_run(self, facts: RunFacts) -> str:
        pairs = [("platform", facts.platform + (f", so {' '.join(facts.added_flags)}" if facts.added_flags else ""))]
        given = "given" if facts.elastic else "not given"
        allowed = "allowed here" if facts.elastic_refusal is None else f"refused here: {facts.elastic_refusal}"
        beyond = "; where there is an accelerator this release refuses it" if facts.platform == "cpu" else ""
        pairs.append(("--elastic", f"{given}, {allowed}{beyond}"))
        if facts.elastic and facts.job is not None:
            pairs.append(
                ("consistency", f"{facts.job.consistency}: {PROMISES[facts.job.consistency]}; {STREAMS[facts.streams]}")
            )
        if facts.shape is not None and facts.job is not None:
            shape, job = facts.shape, facts.job
            pairs.append(
                (
                    "model",
                    f"{_format_parameters(total_parameters(shape))} parameters, {sum(shape.layers)} layers, "
                    f"vocabulary padded to {shape.vocab}",
                )
            )
            pairs.append(
                (
                    "batch",
                    f"{job.num_microbatches * job.micro_batch_size} samples of {shape.sequence} tokens = "
                    f"{job.num_microbatches} micro-batches of {job.micro_batch_size}, "
                    f"{job.num_microbatches // job.data_parallel} per cell and step",
                )
            )
        pairs += [("faults", sentence) for sentence in facts.unreachable_faults]
        return format_pairs(*pairs)

    # ------------------------------------------------------------ grid

    def _describe_grid(self, plan: ElasticPlan, shape: ModelShape, elastic: bool) -> str:
        stages = plan.placement.stages
        lines = [
            f"grid: tensor {plan.placement.tensor_parallel} x pipeline {len(stages)} x data {len(stages[0])}; "
            f"the workers of a cell are listed by lane"
        ]
        node_of = {worker.worker: worker.node for worker in self._workers}
        rows = []
        first = 0
        for number, (stage, layers) in enumerate(zip(stages, shape.layers, strict=True)):
            holds = format_ranges(range(first, first + layers)) if layers else "none"
            first += layers
            for index, cell in enumerate(stage):
                row = [str(number), holds, str(index), format_ranges(cell.workers)]
                row += [format_ranges(node_of[worker] for worker in cell.workers), self._domains(cell.workers)]
                if elastic:
                    row.append(format_ranges((plan.backup_of(worker) for worker in cell.workers), ordered=True))
                rows.append(row)
        head = ["stage", "layers", "cell", "workers", "node", "failure domain"]
        lines.append(format_table([*head, "copies kept by"] if elastic else head, rows))
        if elastic:
            lines += self._describe_losses(plan)
        return "\n".join(lines)

    def _domains(self, workers: Iterable[int]) -> str:
        domain_of = {worker.worker: worker.domain for worker in self._workers}
        names = list(dict.fromkeys(domain_of[worker] for worker in workers))
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"

    def _describe_losses(self, plan: ElasticPlan) -> list[str]:
        """What the loss of each failure domain would mean."""
        members: dict[str, set[int]] = {}
        for worker in self._workers:
            members.setdefault(worker.domain, set()).add(worker.worker)
        ends = {domain: end for domain, lost in members.items() if (end := _find_end(plan, lost)) is not None}
        if self._options.nnodes > 1:
            ends["node0"] = "the controller runs there"
        kind = "node" if self._options.nnodes > 1 else "worker"
        spared = [domain for domain in members if domain not in ends]
        alike: dict[str, list[str]] = {}
        for domain in members:
            if domain in ends:
                alike.setdefault(ends[domain], []).append(domain)
        lines = [f"If {' or '.join(domains)} is lost, the job ends: {end}." for end, domains in alike.items()]
        if spared:
            lines.append(f"Any one {kind} {'of the others ' if ends else ''}may be lost.")
        return lines

    # ------------------------------------------------------------ memory

    def _describe_memory(
        self, plan: ElasticPlan, job: JobSpec, shape: ModelShape, training: TrainingShape, facts: RunFacts
    ) -> str:
        groups: dict[tuple[int, WorkerMemory], list[int]] = {}
        for worker, memory in plan_memory(plan, job, shape, training, facts.snapshot).items():
            groups.setdefault((plan.placement.seat(worker).stage, memory), []).append(worker)
        copied = facts.snapshot != "off"
        summed = training.sum_bytes > 0
        sums = ["fixed-point sums"] if summed else []
        head = ["stage", "workers", "parameters", "weights", "gradients", *sums, "optimizer", "activations", "sum"]
        host = ["own staging" if facts.snapshot == "replay" else "own copies", "backups", "sum", "in a recovery"]
        unit = _choose_unit(max(memory.device for _, memory in groups))
        rows = [
            [str(stage), format_ranges(workers), f"{memory.parameters / 1e6:.1f} M"]
            + [unit.number(value) for value in (memory.weights, memory.gradients)]
            + ([unit.number(memory.sums)] if summed else [])
            + [unit.number(value) for value in (memory.optimizer, memory.activations)]
            + [unit.number(memory.device)]
            + ([unit.number(value) for value in _host_columns(memory)] if copied else [])
            for (stage, memory), workers in groups.items()
        ]
        which = "device memory, and host memory for the copies that elasticity keeps" if copied else "device memory"
        lines = [f"memory per worker in {unit.name}: {which}", format_table([*head, *host] if copied else head, rows)]
        if copied:
            lines.append(
                f"Copies (--elastic-snapshot {facts.snapshot}) take up to {_size(self._largest_node(groups, 'host'))} "
                f"of a node's host memory, and {_size(self._largest_node(groups, 'host_peak'))} while a recovery "
                f"goes on."
            )
        lines.append(
            "Activations are an estimate, with attention fused unless --transformer-impl local is given. Not counted: "
            "the processes, libraries, communication, fragmentation."
        )
        if facts.platform == "cpu":
            unfused = replace(training, keeps_scores=True)
            here = plan_memory(plan, job, shape, unfused, facts.snapshot)
            more = {stage: here[workers[0]].device - memory.device for (stage, memory), workers in groups.items()}
            sentence = "On the CPU all of it is host memory."
            if any(more.values()):
                by_stage = ", ".join(f"{_size(size)} on stage {stage}" for stage, size in more.items())
                sentence += f" Attention is not fused there: per worker activations take {by_stage} more."
            lines.append(sentence)
            if facts.elastic:
                lines += self._describe_refusal(here)
        return "\n".join(lines)

    def _describe_refusal(self, memories: Mapping[int, WorkerMemory]) -> list[str]:
        """Whether this machine has too little for the workers of a node, as the run would find."""
        nodes: dict[int, list[int]] = {}
        for worker in self._workers:
            nodes.setdefault(worker.node, []).append(worker.worker)
        needs = {number: sum_memories(memories[worker] for worker in workers) for number, workers in nodes.items()}
        number = max(needs, key=lambda number: needs[number].needed)
        node, workers = needs[number], nodes[number]
        if node.needed <= self._available.size:
            return []
        who = f"worker{'s' * (len(workers) > 1)} {format_ranges(workers)}"
        return [
            f"This machine has {_size(self._available.size)} available ({self._available.source}): a run of {who} "
            f"here would be refused, as they need {_size(node.needed)} = {_size(node.training)} for training, "
            f"{_size(node.copies)} for copies and {_size(node.recovery)} more while a recovery goes on."
        ]

    def _largest_node(self, groups: Mapping[tuple[int, WorkerMemory], Sequence[int]], kind: str) -> int:
        """Bytes of that kind on the node that has most."""
        node_of = {worker.worker: worker.node for worker in self._workers}
        nodes: Counter[int] = Counter()
        for (_, memory), workers in groups.items():
            for worker in workers:
                nodes[node_of[worker]] += getattr(memory, kind)
        return max(nodes.values())

    # ------------------------------------------------------------ environment

    def _describe_environment(self) -> str:
        environs = [self._complete(worker.environ) for worker in self._workers]
        common = {name: value for name, value in environs[0].items() if all(e[name] == value for e in environs)}
        own = [name for name in environs[0] if name not in common]
        lines = ["environment: of every worker, beside that of its launcher"]
        lines += [f"  {name}={value}" for name, value in sorted(common.items())]
        if own:
            lines.append("and of each")
            lines.append(format_table(own, [[environ[name] for name in own] for environ in environs]))
        return "\n".join(lines)

    def _complete(self, environ: dict[str, str]) -> dict[str, str]:
        """With words for what is secret or not known yet."""
        changes = {TOKEN_VARIABLE: "(secret)", "ELAS_RUN_DIR": LATER}
        if self._options.master_port is None:
            changes["MASTER_PORT"] = LATER
        if not self._options.run_id:
            changes["TORCHELASTIC_RUN_ID"] = LATER
        if self._options.controller_port == 0:
            changes["ELAS_CONTROLLER"] = environ["ELAS_CONTROLLER"].rpartition(":")[0] + f":{LATER}"
        return {**environ, **changes}


def _find_end(plan: ElasticPlan, lost: set[int]) -> str | None:
    """Why the job would not outlive this loss."""
    left, lanes = len(set(plan.placement.workers) - lost), plan.placement.tensor_parallel
    if left < lanes:
        return f"the workers left are {left}, and a cell takes {lanes} (exit code {ExitCode.GAVE_UP:d})"
    for owner in sorted(lost):
        backups = plan.backups_of(owner)
        if lost.issuperset(backups):
            where = f"worker {owner} and all that keep its copy, {format_ranges(backups)}, are lost together"
            nowhere = f"nobody keeps a copy of worker {owner}"
            return f"{where if backups else nowhere} (exit code {ExitCode.STATE_INVALID:d})"
    return None


@dataclass(frozen=True, slots=True)
class _Unit:
    """Of memory, in which people can read a table."""

    name: str
    bytes: int

    def number(self, size: int) -> str:
        return f"{size / self.bytes:.3g}" if size < self.bytes else f"{size / self.bytes:.1f}"


_UNITS = (_Unit("GiB", 1 << 30), _Unit("MiB", 1 << 20))


def _choose_unit(largest: int) -> _Unit:
    return next((unit for unit in _UNITS if largest >= unit.bytes), _UNITS[-1])


def _size(size: int) -> str:
    """``1.5 GiB``, ``0.4 MiB``."""
    unit = _choose_unit(size)
    return f"{size / unit.bytes:.1f} {unit.name}"


def _format_parameters(number: int) -> str:
    return f"{number / 1e9:.3f} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def _host_columns(memory: WorkerMemory) -> tuple[int, ...]:
    return memory.own_copies, memory.backup_copies, memory.host, memory.host_peak
