"""Commit or abort, exhaustively: the real controller, planner and settling with modelled workers (``protocol_model``).

Small grids are searched completely: every order of what workers do and of what they hear, with kills at every point.
Larger ones, with messages that are late, repeated or lost and links that break, are walked through at random.
What must hold is asserted in the model; the last tests break a rule each, and see that this is noticed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from megatron_elas.control import migrating, recovering
from megatron_elas.control.commands import Tell
from megatron_elas.control.ending import Step
from megatron_elas.control.messages import Drained
from megatron_elas.control.states import Outage, Resuming, Running
from megatron_elas.planner import settle as settling
from megatron_elas.spec.errors import ExitCode
from megatron_elas.spec.events import ActivityFailed, WorkerLost
from megatron_elas.spec.plan import ElasticPlan, Settlement
from megatron_elas.spec.report import SettleReport
from megatron_elas.spec.transaction import Update
from tests.control import protocol_model
from tests.control.jobs import make_job
from tests.control.protocol_model import Action, Rules, World, begin, program_of
from tests.control.worker_model import Mode, Place, Worker, changed, describe

both_modes = pytest.mark.parametrize("mode", list(Mode))


def small(stages: int, rows: int, steps: int, mode: Mode, evaluate_after: Sequence[int] = ()) -> Rules:
    """For a complete search: only what decides is in any order."""
    return Rules(
        job=make_job(pipeline=stages, data=rows), program=program_of(steps, evaluate_after), mode=mode,
        upstream_at_once=True,
    )  # fmt: skip


def search(rules: Rules, kills: int, changes: int = 0) -> Counter[str]:
    """Visit every world that can be reached with so many kills, and changes of plan that somebody asks for. Gives how
    often each kind of end was found.
    """
    start = begin(rules), kills, changes
    seen, todo, ends = {start}, [start], Counter[str]()
    while todo:
        world, left, asks = todo.pop()
        nexts = [(after, left, asks) for _, after in world.goes_on()]
        if not nexts:
            assert world.over, f"nothing goes on in state {world.state}:\n{describe(world.workers)}"
            ends[end_of(world)] += 1
            ends["went over"] += not world.state.roster.lost and any(worker.epoch for worker in world.workers)
            ends["drained"] += bool(world.state.roster.drained)
        else:
            if left:
                nexts += [(world.after(fault), left - 1, asks) for fault in world.faults() if fault[0] == "kill"]
            if asks:
                nexts += [(world.after(change), left, asks - 1) for change in world.changes()]
        new = [entry for entry in nexts if entry not in seen]
        seen.update(new)
        todo.extend(new)
    ends["worlds"] = len(seen)
    return ends


def moving(stages: int, rows: int, steps: int, mode: Mode) -> Rules:
    """For a complete search in which all go over to other plans: after every recovery, and when somebody asks."""
    job = make_job(pipeline=stages, data=rows, layers=(2,) * stages, migration="async")
    return Rules(job=job, program=program_of(steps), mode=mode, upstream_at_once=True)


def end_of(world: World) -> str:
    """How the job ended, in a word."""
    return "finished" if world.state.roster.finished else ExitCode(world.state.exit_code).name.lower()  # type: ignore[union-attr]


# ---------------------------------------------------------------- every interleaving


@both_modes
@pytest.mark.parametrize("kills", [0, 1, 2])
def test_two_replicas_in_every_interleaving(mode: Mode, kills: int) -> None:
    ends = search(small(1, 2, 2, mode), kills)
    assert ends["finished"]
    assert bool(ends["state_invalid"]) == bool(kills)  # before the first copies are there
    assert bool(ends["gave_up"]) == (kills == 2)


@both_modes
def test_an_evaluation_between_steps_in_every_interleaving(mode: Mode) -> None:
    assert search(small(1, 2, 2, mode, evaluate_after=[0]), kills=2)["finished"]


def test_three_replicas_in_every_interleaving_of_a_step() -> None:
    ends = search(small(1, 3, 1, Mode.REPLAY), kills=1)
    assert ends["finished"] and ends["state_invalid"] and not ends["gave_up"]
    assert ends["worlds"] > 5_000


@both_modes
def test_two_stages_that_go_over_to_another_plan_in_every_interleaving(mode: Mode) -> None:
    ends = search(moving(2, 1, 2, mode), kills=0, changes=1)
    assert ends["finished"] and ends["went over"] and ends["drained"]
    assert not ends["state_invalid"] and not ends["gave_up"]


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("stages", "rows", "steps", "mode"),
    [(1, 2, 2, Mode.REPLAY), (1, 2, 2, Mode.COPY), (2, 1, 3, Mode.REPLAY), (2, 1, 3, Mode.COPY)],
)
def test_kills_on_the_way_to_another_plan_in_every_interleaving(stages: int, rows: int, steps: int, mode: Mode) -> None:
    ends = search(moving(stages, rows, steps, mode), kills=1, changes=1)
    assert ends["finished"] and ends["went over"] and ends["drained"]
    print(f"{stages} stages x {rows} rows, {steps} steps, {mode}: {dict(ends)}")


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("stages", "rows", "steps", "kills", "mode"),
    [
        (1, 3, 1, 2, Mode.REPLAY),
        (1, 3, 1, 2, Mode.COPY),
        (1, 3, 2, 2, Mode.REPLAY),
        (1, 3, 2, 2, Mode.COPY),
        (2, 2, 1, 1, Mode.REPLAY),
        (2, 1, 2, 2, Mode.REPLAY),
    ],
)
def test_small_grids_in_every_interleaving(stages: int, rows: int, steps: int, kills: int, mode: Mode) -> None:
    ends = search(small(stages, rows, steps, mode), kills)
    assert ends["finished"]
    print(f"{stages} stages x {rows} rows, {steps} steps, {kills} kills, {mode}: {dict(ends)}")


# ---------------------------------------------------------------- two moments that matter


def let(world: World, workers: Sequence[int], place: Place) -> World:
    """These workers, and nobody else, go on until each is at the place."""
    while True:
        for (kind, who, _), after in world.goes_on():
            if kind not in ("tell", "fence") and who in workers and world.workers[who].place is not place:
                world = after
                break
        else:
            assert all(world.workers[who].place is place for who in workers), describe(world.workers)
            return world


def report_death(world: World) -> World:
    """The agent tells of the process that has ended."""
    return world.after(("tell", 0, 0))


def only_one_knows_the_norm() -> World:
    """Four workers in two stages: worker 3 is PREPARED for step 1, nobody else is, and worker 0 is lost."""
    world = let(begin(small(2, 2, 2, Mode.REPLAY)), range(4), Place.NORM)
    world = let(world, range(4), Place.SYNC)
    world = let(world, range(4), Place.NORM)
    assert all(worker.running == 1 for worker in world.workers)
    world = report_death(let(world, [3], Place.APPLY).after(("kill", 0, 0)))
    for who in (1, 2):  # they hear of it before the norm
        world = world.after(("hear", who, 0))
    return world


def the_one_is_lost_after_the_order(takers: Sequence[int]) -> World:
    """The same; all have settled, ``takers`` have followed the order, and worker 3, who alone had known, is lost."""
    world = let(only_one_knows_the_norm(), [1, 2, 3], Place.SETTLED)
    state = world.state
    assert isinstance(state, Resuming) and state.outage.commit is not None
    for who in takers:
        while world.workers[who].epoch < 1:
            world = next(after for (_, acts, _), after in world.goes_on() if acts == who)
    world = report_death(world.after(("kill", 3, 0)))
    for who in (1, 2):  # they hear of it before they do anything more
        while world.workers[who].quiesced < 2:
            world = world.after(("hear", who, 0))
    return world


def finish(world: World) -> World:
    """Everything goes its way."""
    while picked := world.pick(0):
        world = picked[1]
    return world


def test_what_one_survivor_knows_commits_the_step_for_all() -> None:
    world = only_one_knows_the_norm()
    end = finish(world)
    assert end_of(end) == "finished"
    assert end.workers[1].live == ((0, 0), (1, 0)), "both steps are those of epoch 0"


@pytest.mark.parametrize("takers", [[], [1], [2], [1, 2]])
def test_a_commit_that_only_a_lost_worker_had_known_is_kept(takers: list[int]) -> None:
    end = finish(the_one_is_lost_after_the_order(takers))
    assert end_of(end) == "finished"
    assert end.workers[1].live == end.workers[2].live == ((0, 0), (1, 0))


def test_a_step_whose_norm_nobody_left_knows_is_run_again() -> None:
    world = only_one_knows_the_norm()
    end = finish(report_death(world.after(("kill", 3, 0))))
    assert end_of(end) == "finished"
    assert end.workers[1].live == ((0, 0), (1, 2))


# ---------------------------------------------------------------- random walks


class Walk(RuleBasedStateMachine):
    """A job in which anything may go wrong, in any order, up to four times, and plans may change up to three times."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World
        self.faults = 0
        self.asked = 0
        self.log: list[Action] = []

    @initialize(
        stages=st.integers(1, 2),
        rows=st.sampled_from([1, 2, 2, 3, 3]),
        lanes=st.sampled_from([1, 1, 2]),
        replicas=st.integers(1, 2),
        mode=st.sampled_from(Mode),
        evaluate_after=st.sets(st.integers(0, 2), max_size=2),
        moves=st.booleans(),
    )
    def start(
        self, stages: int, rows: int, lanes: int, replicas: int, mode: Mode, evaluate_after: set[int], moves: bool
    ) -> None:
        """A grid and a program of three steps, of four where plans change."""
        layers, migration = ((2,) * stages, "async") if moves else ((), "off")
        job = make_job(pipeline=stages, data=rows, tensor=lanes, layers=layers, migration=migration)
        rules = Rules(
            job=replace(job, snapshot_replicas=replicas), program=program_of(3 + moves, evaluate_after), mode=mode,
            links_break=True,
        )  # fmt: skip
        self.world = begin(rules)

    def _go(self, choice: int) -> bool:
        picked = self.world.pick(choice)
        if picked is not None:
            self.log.append(picked[0])
            self.world = picked[1]
        return picked is not None

    @rule(choices=st.lists(st.integers(0, 47), min_size=1, max_size=25))
    def go_on(self, choices: list[int]) -> None:
        """Workers, links and agents do what they do, in this order."""
        for choice in choices:
            self._go(choice)

    @rule(times=st.integers(1, 120), seed=st.integers(0, 2**16))
    def go_far(self, times: int, seed: int) -> None:
        """The same for longer."""
        order = random.Random(seed)
        for _ in range(times):
            self._go(order.randrange(48))

    @precondition(lambda self: not self.world.over and self.faults < 4)
    @rule(choice=st.integers(0, 199))
    def fail(self, choice: int) -> None:
        """Something goes wrong."""
        if faults := self.world.faults():
            action = faults[choice % len(faults)]
            self.log.append(action)
            self.faults += not action[0].startswith("repeat")
            self.world = self.world.after(action)

    @precondition(lambda self: self.asked < 3 and bool(self.world.changes()))
    @rule(choice=st.integers(0, 199))
    def ask(self, choice: int) -> None:
        """Somebody wants another plan."""
        changes = self.world.changes()
        action = changes[choice % len(changes)]
        self.log.append(action)
        self.asked += 1
        self.world = self.world.after(action)

    def teardown(self) -> None:
        """What is left goes its way, and the job ends."""
        while self._go(0):
            assert len(self.log) < 5000, "the job does not end"
        note(f"actions: {self.log}")
        assert self.world.over, f"nothing goes on in state {self.world.state}:\n{describe(self.world.workers)}"


def walk(examples: int, rules: int, *, new: bool = False) -> None:
    """Random walks of so many jobs, others each time if ``new``; one that breaks a rule is shrunk and printed."""
    run_state_machine_as_test(
        Walk,
        settings=settings(
            max_examples=examples, stateful_step_count=rules, suppress_health_check=list(HealthCheck), deadline=None,
            derandomize=not new, print_blob=True,
        ),
    )  # fmt: skip


def test_random_walks_keep_every_rule() -> None:
    walk(examples=40, rules=30)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_many_random_walks_keep_every_rule() -> None:
    walk(examples=500, rules=50, new=True)


# ---------------------------------------------------------------- the model notices


def forget_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settling does not look at who is PREPARED."""
    monkeypatch.setattr(settling, "_find_commit", lambda holdings, decided: None)


def undo_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An open step is dropped also when somebody is PREPARED for it."""

    def settle(
        reports: Sequence[SettleReport], plans: Mapping[int, ElasticPlan], decided: Update | None = None
    ) -> Settlement:
        settlement = settling.settle(reports, plans, decided)
        if settlement.commit is None or any(h.live == settlement.resume_step for r in reports for h in r.holdings):
            return settlement
        return replace(settlement, resume_step=settlement.resume_step - 1, commit=None)

    monkeypatch.setattr(recovering, "settle", settle)


def join_the_norm_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker joins the norm before its wards' gradients are there."""
    real = World._duty

    def duty(world: World, worker: Worker) -> World:
        ahead = real(world, worker)
        assert worker.running is not None
        if ahead is None:
            ahead = world._post(worker, "norm", worker.running)._put(changed(worker, place=Place.NORM))
        return ahead

    monkeypatch.setitem(protocol_model._STRETCHES, Place.DUTY, duty)


def leave_copies_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is told to finish the open step does so with its own shard only."""
    real = protocol_model.finish_open_step

    def finish_open_step(worker: Worker, settlement: Settlement) -> Worker:
        after = real(worker, settlement)
        before, store = worker.store_of(settlement.base_epoch), after.store_of(settlement.base_epoch)
        if before is None or store is None:
            return after
        return after.with_store(settlement.base_epoch, changed(store, wards=before.wards))

    monkeypatch.setattr(protocol_model, "finish_open_step", finish_open_step)


@pytest.mark.parametrize("mistake", [forget_commits, undo_commits, join_the_norm_early, leave_copies_behind])
def test_the_search_notices(mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        search(small(1, 3, 1, Mode.REPLAY), kills=1)


def forget_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a loss on the way the controller does not know of the layout that some may be in."""
    real = recovering._extend_outage

    def extend(state: recovering.Training, losses: Sequence[WorkerLost], failures: Sequence[ActivityFailed]) -> Outage:
        return real(replace(state, migration=None) if isinstance(state, Running) else state, losses, failures)

    monkeypatch.setattr(recovering, "_extend_outage", extend)


def let_them_leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is drained is let go when it has done its part, though nobody has finished a step without it."""

    def drained(state: Running, event: Drained) -> Step:
        roster = replace(state.roster, drained=state.roster.drained | {event.worker})
        return replace(state, roster=roster), (Tell(workers=(event.worker,), message=migrating.FAREWELL),)

    monkeypatch.setattr(migrating, "drained", drained)


def go_over_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker goes over when it knows of the new plan, whether or not all others do."""
    real = World._norm

    def norm(world: World, worker: Worker) -> World | None:
        ahead, target = real(world, worker), protocol_model._known_target(worker)
        if ahead is None or target is None:
            return ahead
        return ahead._put(changed(ahead.workers[worker.me], due=target.plan.epoch))

    monkeypatch.setitem(protocol_model._STRETCHES, Place.NORM, norm)


@pytest.mark.parametrize(
    "mistake",
    [
        let_them_leave_at_once,
        pytest.param(forget_the_target, marks=pytest.mark.slow),
        pytest.param(go_over_alone, marks=pytest.mark.slow),
    ],
)
def test_the_search_notices_mistakes_on_the_way_to_another_plan(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        search(moving(1, 3, 2, Mode.REPLAY), kills=1, changes=1)


def test_a_controller_that_forgets_what_it_settled_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovering, "settle", lambda reports, plans, decided: settling.settle(reports, plans, None))
    with pytest.raises(AssertionError):
        finish(the_one_is_lost_after_the_order([]))
