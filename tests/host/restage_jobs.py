"""Real training jobs whose workers change places between two steps, by plans made by hand: no controller, no faults.

Everything is Megatron's and the host's own but for the session, whose stand-in brings the state to its new owners
over a plain gather.
"""

from __future__ import annotations

import copy
import gc
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_elas.planner.plan import share_items
from megatron_elas.spec.items import whole_micro_batches
from megatron_elas.spec.layout import Cell, Placement
from megatron_elas.spec.plan import ElasticPlan
from tests.fault.runs import ITERATION, LLAMA, TRAINING
from tests.runtime.workers import introduce, run_workers

SIZES = shlex.split(
    "--num-layers=4 --hidden-size=32 --ffn-hidden-size=64 --num-attention-heads=4 --group-query-attention "
    "--num-query-groups=2 --seq-length=32 --max-position-embeddings=32 --mock-data"
)
UNTIED = "--untie-embeddings-and-output-weights"
STEPS, BATCH = 6, 8
HEAD, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"

Pieces = list[tuple[str, int, int, torch.Tensor]]
"""(parameter, start, stop, (3, n) master and moments)."""


@dataclass(kw_only=True)
class Worker:
    """What one worker tells at the end."""

    output: str
    seats: list[tuple[int, int]] = field(default_factory=list)
    """(stage, lane) in each step."""
    times: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Begin and end of each step, of ``time.monotonic()``."""
    samples: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    """Sample ids read, by step and then by stage."""
    pieces: Pieces = field(default_factory=list)
    lane: int = -1
    found: dict[str, Any] = field(default_factory=dict)
    """What the test's ``look`` gave after the last step."""


def make_plan(epoch: int, stages: Sequence[Sequence[Sequence[int]]], layers: Sequence[tuple[int, int]]) -> ElasticPlan:
    """``stages[stage][cell]`` are workers by lane."""
    placement = Placement(
        stages=tuple(
            tuple(Cell(row=row, workers=tuple(cell)) for row, cell in enumerate(stage)) for stage in stages
        )
    )  # fmt: skip
    return ElasticPlan(
        epoch=epoch,
        placement=placement,
        layers=tuple(layers),
        items=tuple(whole_micro_batches(share_items(BATCH, len(stage)), 1) for stage in stages),
        backups=(),
    )


class SessionStandIn:
    """Runs steps as they come, and changes to the plans given for them before they begin."""

    def __init__(
        self, worker: int, transport: Any, groups: Any, plans: Mapping[int, ElasticPlan], told: Worker
    ) -> None:
        self.worker, self.next_step, self.attached = worker, 0, False
        self.attachment: Any = None
        self._transport, self._groups, self._plans, self._told = transport, groups, plans, told
        self._activity = 0

    @property
    def coming_activity(self) -> int:
        return self._activity

    def attach(self, host: Any, first_step: int) -> None:
        from megatron_elas.spec.catalogue import Catalogue, StageContents

        self.host, self.next_step, self.attached = host, first_step, True
        said: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(said, host.describe_parameters().to_json())
        self.catalogue = Catalogue.gathered([StageContents.from_json(text) for text in said])
        host.take_catalogue(self.catalogue)

    def exchange_gradients(self) -> None:
        pass

    def prepare(self, update: Any) -> None:
        pass

    def applied(self) -> None:
        pass

    def ballot(self) -> tuple[int, int]:
        return 0, 0

    def count_ballots(self, votes: tuple[int, int], voters: int) -> None:
        pass

    def run_step(self, step: int, body: Callable[[int], Any]) -> Any:
        self.host.begin_activity(self._activity)
        self._activity += 1
        if step in self._plans:
            self.change(self._plans[step])
        elif step + 1 in self._plans:
            self.host.prebuild(self._plans[step + 1])
        self.plan = self.attachment.route.plan
        self._captured = self.host.capture()
        begin_s = time.monotonic()
        outcome = body(step)
        self._told.times[step] = begin_s, time.monotonic()
        self.next_step = step + 1
        seat = self.attachment.route.seat
        self._told.seats.append((seat.stage, seat.lane))
        self._told.samples[step] = {seat.stage: list(self.attachment.samples)}
        return outcome

    def captured(self, step: int) -> object:
        return self._captured

    def run_between(self, body: Callable[[], Any], optional: Any = None) -> Any:
        self.host.begin_activity(self._activity)
        self._activity += 1
        return body()

    def change(self, plan: ElasticPlan) -> None:
        """Go over to the plan; workers without a seat end here."""
        from megatron_elas.runtime.communicator.membership import Membership

        host = self.host
        captured = host.capture()
        lane = self.attachment.route.seat.lane
        everybody: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everybody, (lane, *read_pieces(host)))
        self._transport.cancel()
        self._groups.drain()
        if plan.placement.find_seat(self.worker) is None:
            raise SystemExit(0)
        addresses = self._transport._connections._addresses
        living = sorted(plan.placement.workers)
        self._groups.edit(
            Membership(
                epoch=plan.epoch,
                addresses={worker: addresses[worker] for worker in living},
                ranks={worker: rank for rank, worker in enumerate(plan.placement.workers)},
                groups=host.plan_groups(plan),
            )
        )
        host.follow_groups(plan)
        host.clear_step()
        self._groups.open_links()
        self.rebuild(plan)
        layout = host._access.layout()
        assert layout == self.catalogue.layout(plan, self.worker), f"worker {self.worker} under {plan}"
        host.write_shard(fill(layout, plan.placement.seat(self.worker).lane, everybody))
        host.sync_parameters()
        host.rewind(captured)

    def rebuild(self, plan: ElasticPlan) -> None:
        """Have the host do it; on the same lane, what is there before and after keeps its values."""
        host = self.host
        before = values_of(host) if host._part.lane == plan.part_of(self.worker).lane else {}
        host.rebuild(plan)
        after = values_of(host)
        changed = [name for name in before.keys() & after.keys() if not torch.equal(before[name], after[name])]
        assert not changed, f"worker {self.worker} has {changed} before and after, with other values"


def values_of(host: Any) -> dict[str, torch.Tensor]:
    """Copies of the parameters, by global name."""
    from megatron_elas.host.model import named_parameters

    return {name: param.detach().clone() for name, param in named_parameters(host._model)}


def read_pieces(host: Any) -> tuple[Pieces, float]:
    """This worker's optimizer state by name, and its step."""
    layout = host._access.layout()
    flat = torch.empty(layout.flat_numel)
    host.read_shard(flat)
    slots = flat[:-1].view(3, -1)
    pieces = [
        (piece.name, piece.start, piece.stop, slots[:, offset : offset + piece.numel].clone())
        for piece, offset in zip(layout.pieces, layout.offsets(), strict=True)
    ]
    return pieces, float(flat[-1])


def whole(pieces: Pieces) -> dict[str, torch.Tensor]:
    """Every parameter's (3, numel), put together; each element has one owner. For one lane."""
    by_name: dict[str, Pieces] = {}
    for piece in pieces:
        by_name.setdefault(piece[0], []).append(piece)
    found = {}
    for name, parts in by_name.items():
        parts.sort(key=lambda part: part[1])
        assert [part[1] for part in parts] == [0, *(part[2] for part in parts[:-1])], f"{name} is not owned once"
        found[name] = torch.cat([part[3] for part in parts], dim=1)
    return found


def fill(layout: Any, lane: int, everybody: Sequence[tuple[int, Pieces, float]]) -> torch.Tensor:
    """The flat shard of that layout. A tied copy that nobody had is the other one's."""
    state = whole([piece for at, pieces, _ in everybody if at == lane for piece in pieces])
    state.setdefault(HEAD, state[EMBEDDING])
    flat = torch.empty(layout.flat_numel)
    slots = flat[:-1].view(3, -1)
    for piece, offset in zip(layout.pieces, layout.offsets(), strict=True):
        slots[:, offset : offset + piece.numel] = state[piece.name][:, piece.start : piece.stop]
    flat[-1] = max(step for *_, step in everybody)
    return flat


class StandIn:
    """Of ``megatron_elas.worker``."""

    def __init__(self, worker: int, folder: Path, plans: Mapping[int, ElasticPlan], told: Worker) -> None:
        self.worker, self._folder, self._plans, self._told = worker, folder, plans, told

    def settle_arguments(self, args: Any) -> None:
        raise NotImplementedError

    def prepare(self, args: Any) -> dict[str, Any]:
        from megatron_elas.host.checkpoints import use_exchangeable_checkpoints
        from megatron_elas.host.emulation import make_emulation
        from megatron_elas.host.join import join_megatron
        from megatron_elas.host.log_handover import Log
        from megatron_elas.host.requirements import check_elastic_arguments, describe_job
        from megatron_elas.host.shape import launch_layers
        from megatron_elas.planner.plan import initial_plan
        from megatron_elas.runtime.communicator.communicator import Communicator

        check_elastic_arguments(args, "cpu")
        use_exchangeable_checkpoints(args)
        job = describe_job(args, launch_layers(args))
        self.transport = introduce(self.worker, job.world_size, self._folder)
        communicator = Communicator(self.transport, range(job.world_size))
        session: Any = SessionStandIn(self.worker, self.transport, communicator, self._plans, self._told)
        log = Log(self.worker, self._folder, lambda: session.coming_activity)
        session.attachment, arguments = join_megatron(
            args, job, initial_plan(job, {}), self.transport, communicator, session, lambda *place: None, log,
            emulation=make_emulation(args, self.worker, self._folder),
        )  # fmt: skip
        self.session = session
        return arguments

    def finish(self) -> None:
        if not self.transport.cancelled:
            attached = self.session.attachment
            self._told.pieces, _ = read_pieces(attached.host)
            self._told.lane = attached.route.seat.lane
            torch.distributed.barrier()

    def stop(self, exit_code: int) -> None:
        raise AssertionError(f"Megatron ended with {exit_code}")

    def fail(self, error: Exception) -> None:
        return None


def train(
    worker: int,
    count: int,
    folder: Path,
    argv: list[str],
    plans: Mapping[int, ElasticPlan],
    look: Callable[[Any], dict[str, Any]] | None,
    by_script: bool,
) -> Worker:
    """One worker's life."""
    os.environ.update(
        RANK=str(worker), LOCAL_RANK=str(worker), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0", ELAS_CONTROLLER="none", OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    gc.freeze()  # what lives in the test process is nobody's business
    log = os.open(folder / f"log.{worker}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    from megatron_elas import pretrain_gpt
    from megatron_elas.host import gpt_run

    if by_script:
        rebuild_by_script()
    told = Worker(output="")
    stand_in = StandIn(worker, folder, plans, told)
    try:
        gpt_run.run(argv, pretrain_gpt.preload(), load_worker=lambda: stand_in, started_s=time.time())
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    if look is not None and not stand_in.transport.cancelled:
        told.found = look(stand_in.session.attachment)
    sys.stdout.flush()
    told.output = (folder / f"log.{worker}").read_text()
    return told


def rebuild_by_script() -> None:
    """Have models made again as if a script of the user's own had made the first one, by a function of its own."""
    from megatron_elas.host import stage_layers

    original = stage_layers._build_model

    def build(model_type: Any, provider: Any, container: Any, pg_collection: Any, config: Any) -> Any:
        def make_part(pre_process: bool, post_process: bool, config: Any, pg_collection: Any) -> Any:
            model = copy.copy(container.model)
            model.__dict__["transformer"] = copy.copy(config)
            return model.get_builder_cls()(model).build_model(pg_collection, pre_process, post_process)

        return original(model_type, make_part, None, pg_collection, config)

    stage_layers._build_model = build


def run_job(
    folder: Path,
    flags: Sequence[str],
    count: int,
    plans: Mapping[int, ElasticPlan] | None = None,
    *,
    steps: int = STEPS,
    look: Callable[[Any], dict[str, Any]] | None = None,
    by_script: bool = False,
    timeout_s: float = 250,
) -> list[Worker]:
    """Train on ``count`` workers; ``plans`` are carried out before the steps they are given for."""
    folder.mkdir()
    argv = [
        *SIZES, *LLAMA, *TRAINING, f"--train-iters={steps}", f"--global-batch-size={BATCH}", "--elastic",
        "--elastic-migration=off", *flags
    ]  # fmt: skip
    return run_workers(count, train, count, folder, argv, plans or {}, look, by_script, timeout_s=timeout_s)


def losses(workers: Sequence[Worker]) -> dict[int, float]:
    """By iteration, of whoever printed it."""
    found: dict[int, float] = {}
    for worker in workers:
        for iteration, _, loss in ITERATION.findall(worker.output):
            assert int(iteration) not in found, f"iteration {iteration} is printed twice"
            found[int(iteration)] = float(loss)
    return dict(sorted(found.items()))


def validation_losses(workers: Sequence[Worker]) -> list[float]:
    """As printed."""
    text = "\n".join(worker.output for worker in workers)
    return [float(value) for value in re.findall(r"validation loss at .*?lm loss value: ([0-9.E+-]+)", text)]


def read_samples(workers: Sequence[Worker], stages: Callable[[int], int]) -> dict[int, tuple[list[int], list[int]]]:
    """Sample ids that the first and the last stage read, by step; ``stages`` gives how many there are in a step."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for worker in workers:
        for step, by_stage in worker.samples.items():
            ends = found.setdefault(step, ([], []))
            for stage, ids in by_stage.items():
                for end, at in zip(ends, (0, stages(step) - 1), strict=True):
                    end.extend(ids if stage == at and worker.seats[step][1] == 0 else ())
    return {step: (sorted(first), sorted(last)) for step, (first, last) in sorted(found.items())}


def states(workers: Sequence[Worker]) -> dict[tuple[int, str], torch.Tensor]:
    """(lane, global name) -> master and moments at the end."""
    found = {}
    for lane in sorted({worker.lane for worker in workers if worker.lane >= 0}):
        state = whole([piece for worker in workers if worker.lane == lane for piece in worker.pieces])
        found |= {(lane, name): value for name, value in state.items()}
    return found


def assert_same_training(changed: Sequence[Worker], calm: Sequence[Worker], plans: Mapping[int, ElasticPlan]) -> None:
    """Everybody came to its seats; losses, samples and state by global name are those of the undisturbed job."""
    first_stages = 1 + max(stage for worker in calm for stage, _ in worker.seats)

    def plan_of(step: int) -> ElasticPlan | None:
        return next((plans[at] for at in sorted(plans, reverse=True) if at <= step), None)

    for number, worker in enumerate(changed):
        for step, seat in enumerate(worker.seats):
            plan = plan_of(step)
            if plan is not None:
                at = plan.placement.seat(number)
                assert seat == (at.stage, at.lane), f"worker {number} in step {step}"
    got, want = losses(changed), losses(calm)
    assert list(got) == list(want) == list(range(1, len(want) + 1)), f"lines {list(got)}, undisturbed {list(want)}"
    for iteration, loss in want.items():
        assert abs(got[iteration] - loss) <= 1e-5 * loss, f"iteration {iteration}: {got[iteration]}, undisturbed {loss}"
    stages = lambda step: plan.placement.num_stages if (plan := plan_of(step)) is not None else first_stages  # noqa: E731
    for step, (first, last) in read_samples(changed, stages).items():
        assert first == last == list(range(step * BATCH, (step + 1) * BATCH)), f"step {step}: samples {first}, {last}"
    ours, theirs = states(changed), states(calm)
    twins = {key for key in theirs if key[1] == HEAD and (key[0], EMBEDDING) in ours and key not in ours}
    assert ours.keys() == theirs.keys() - twins, "other parameters than in the undisturbed run"
    for key in ours:
        scale = theirs[key].abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
        error = float(((ours[key] - theirs[key]).abs() / scale).amax())
        assert error <= 1e-3, f"{key}: differs by {error:.1e} of its largest entry"
