"""The simulation of a job: events in the order of their time, whole steps between them. No clock, no chance.

What is assumed:

* A device that fails breaks its cell; its other lanes are spares, see ``fleet``. The step in progress is thrown away,
  and what detecting and recovering take is lost, see ``recovery``. A failure in the middle of a recovery begins it
  anew. Devices that the policy does not compute on may fail without harm.
* Repaired devices are whole cells' lanes again; cells without a seat wait. They are seated in the next recovery, which
  has to remake groups anyway, or alone, at a step's end, when what they add until the next failure is expected pays
  for ``RecoveryCosts.join``. That goes for every policy. For ``restart`` to join is to save and to restart, so it
  mostly waits for the next failure.
* A failure that a policy cannot go on after (no cell of a stage is left, no replica is whole, owner and backup are both
  gone) is a restart from the newest checkpoint, with the cells that are left dealt to the grid anew. While even that
  has no plan, the job waits for repairs.
* A slow device slows the whole step: others wait for it. A policy that leaves slow devices out does so at a step's end
  when that is faster and pays for itself, and takes them in again later; it has noticed after ``SLOW_STEPS`` steps.
* Which cell broke matters by its stage and row at the job's begin, not by where a plan had moved it meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from megatron_elas.simulator.fleet import Change, Fleet
from megatron_elas.simulator.ledger import Ledger
from megatron_elas.simulator.outcome import Outcome
from megatron_elas.simulator.rates import Rate, StepRates
from megatron_elas.simulator.recovery import (
    Phase,
    RecoveryCosts,
    Sizes,
    checkpoint_interval_s,
    load_recovery,
    load_restart,
)
from megatron_elas.simulator.seats import Seat, Seats
from megatron_elas.simulator.traces import Failure, Trace
from megatron_elas.spec.cluster import Cluster
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.job_profile import JobProfile

SLOW_STEPS = 3
"""Slow steps after which a slow device is known; MindSpeed's monitor asks for three in a row."""
_TINY = 1e-9
"""Part of a step that rounding may add."""
_BY_ROW = frozenset({"torchft"})
"""Policies that can use whole rows only."""
_PACKED = frozenset({"torchft", "oobleck", "restart"})
"""Policies whose cells are dealt row by row when a checkpoint is read; those of others stage by stage."""


def simulate(
    job: JobProfile,
    cluster: Cluster,
    trace: Trace,
    policy: str,
    *,
    recovery: RecoveryCosts | None = None,
    rates: StepRates | None = None,
    exact: bool | None = None,
) -> Outcome:
    """Run a job through a trace.

    Args:
        job: What is trained, on a grid that the cluster has devices for.
        cluster: Devices that the grid does not need are spares.
        trace: What happens.
        policy: One of ``planner.policies.POLICIES``.
        recovery: What recoveries cost; None: as ``configs/recovery`` has it.
        rates: Of the same job, cluster and policy, to be used by several simulations; None: made anew.
        exact: Whether every situation has a step time of its own; None: if the job is small. See ``rates``.

    Raises:
        BadUsage: The trace or the grid does not fit the cluster, or there is no such policy.
        NoFeasiblePlan: The job does not even begin.
    """
    if job.spec.world_size > cluster.num_devices:
        raise BadUsage(
            f"{job.name} needs {job.spec.world_size} devices and {cluster.name} has {cluster.num_devices}: "
            f"choose a smaller grid or a larger cluster"
        )
    rates = rates or StepRates(job, cluster, policy, exact=exact)
    return _Run(rates, trace, recovery or load_recovery(policy)).run()


Kind = Literal["failure", "repair", "slow", "fast"]


class _Happening(NamedTuple):
    """Of the trace, or what follows from it. Compared by time, then by the order in which it became known."""

    at_s: float
    number: int
    kind: Kind
    devices: tuple[int, ...]
    value: float = 0.0
    """Of a failure: its end; of a slow device: how many times as slow."""


class _Over(Exception):
    """The trace's time is up."""


class _Run:
    def __init__(self, rates: StepRates, trace: Trace, costs: RecoveryCosts) -> None:
        self.rates, self.trace, self.costs = rates, trace, costs
        spec, cluster = rates.job.spec, rates.cluster
        self.fleet = Fleet(cluster, spec.tensor_parallel)
        stages, rows = spec.pipeline_parallel, spec.data_parallel
        self.seats = Seats(stages, rows, self.fleet.num_cells)
        self.restart = costs.restart or load_restart()
        self.sizes = Sizes.of(rates.begin, cluster, self.restart.storage_bandwidth)
        self.save_s, self.write_s = self._sum(self.restart.save), self._sum(self.restart.write)
        # What a policy may know of the trace: how often devices fail.
        failures = sum(isinstance(event, Failure) for event in trace.events)
        self.between_s = trace.seconds / max(1, failures)
        wanted_s = costs.checkpoint_s or self.restart.interval_s or checkpoint_interval_s(self.save_s, self.between_s)
        self.interval_s = max(wanted_s, self.write_s)

        self.ledger = Ledger()
        self.rate: Rate | None = rates.own
        self.carried_out = rates.own
        """With the plan that cells have their state for."""
        self.step_begin_s, self.step_end_s = 0.0, rates.own.step_s
        self.between_steps = True
        self.happenings: list[_Happening] = []
        self.known = 0
        for event in trace.events:
            if isinstance(event, Failure):
                self._expect(event.at_s, "failure", event.devices, event.at_s + event.repair_s)
            else:
                self._expect(event.at_s, "slow", (event.device,), event.factor)
                self._expect(event.at_s + event.seconds, "fast", (event.device,), event.factor)

        self.slow: dict[int, list[float]] = {}
        """Of every slow device: how slow, by each slowdown that lasts."""
        self.change_due_s = math.inf
        """From when on cells may be taken in, or slow ones left out."""
        self.struck = False
        """Cells that compute were lost, and the job has not begun to recover."""
        self.silent = False
        """A whole node of them was."""
        self.recovering = False
        self.gone: dict[Seat, int] = {}
        """Of every seat whose backup may not be there yet: the failure domain that its cell was lost in."""
        self.exposed_until_s = 0.0
        self.saved_s = 0.0
        """When the newest checkpoint was taken that can be read."""
        self.writing: tuple[float, float] | None = None
        """When a newer one was taken, and when it can be read."""
        self.save_due_s = self.interval_s

        self.dropped = 0
        self.failures = self.recoveries = self.restarts = self.joins = 0
        self.recovery_s: list[float] = []

    # ------------------------------------------------------------ the whole

    def run(self) -> Outcome:
        """From the begin to the end of the trace."""
        with suppress(_Over):
            while True:
                if self.struck:
                    self._recover()
                elif self.between_steps and self.ledger.now >= self.change_due_s:
                    self._change()
                elif self.between_steps and self.ledger.now >= self.save_due_s:
                    self._save()
                else:
                    self._train()
        return self._outcome()

    def _outcome(self) -> Outcome:
        rates, ledger, power = self.rates, self.ledger, self.rates.begin.power
        trained, redone = ledger.samples("training"), ledger.samples("redone")
        energy_j = None
        if power is not None:
            energy_j = power.waiting_w * ledger.device_seconds() + rates.busy_j_per_sample * (trained + redone)
        return Outcome(
            policy=rates.policy,
            job=rates.job.name,
            cluster=rates.cluster.name,
            trace=self.trace.name,
            seconds=self.trace.seconds,
            stock_samples_per_s=rates.stock_samples_per_s,
            own_samples_per_s=rates.own.samples_per_s,
            trained=trained,
            dropped=self.dropped,
            redone=redone,
            seconds_by_cause=ledger.seconds_by_cause(),
            seconds_by_phase=ledger.seconds_by_phase(),
            energy_j=energy_j,
            failures=self.failures,
            recoveries=self.recoveries,
            mean_recovery_s=sum(self.recovery_s) / max(1, len(self.recovery_s)),
            worst_recovery_s=max(self.recovery_s, default=0.0),
            restarts=self.restarts,
            joins=self.joins,
            segments=tuple(ledger.segments),
        )

    # ------------------------------------------------------------ time

    def _expect(self, at_s: float, kind: Kind, devices: tuple[int, ...], value: float = 0.0) -> None:
        if at_s < self.trace.seconds:
            heappush(self.happenings, _Happening(at_s, self.known, kind, devices, value))
            self.known += 1

    def _next_s(self) -> float:
        return self.happenings[0].at_s if self.happenings else self.trace.seconds

    def _spend(self, phases: Iterable[tuple[str, float]], cause: str) -> bool:
        """The job waits for some phases; False when a failure strikes meanwhile."""
        for name, seconds in phases:
            end_s = self.ledger.now + seconds
            while self._next_s() < end_s:
                self._happen(cause, name)
                if self.struck:
                    return False
            self.ledger.advance(end_s, cause, name, devices=self.fleet.working)
        return True

    def _happen(self, cause: str, phase: str = "", samples_per_s: float = 0.0) -> None:
        """Time passes to the next happening, which takes place."""
        at_s = self._next_s()
        cells = self.rate.cells if self.rate and samples_per_s else 0
        self.ledger.advance(at_s, cause, phase, devices=self.fleet.working, cells=cells, samples_per_s=samples_per_s)
        if not self.happenings:
            raise _Over
        _, _, kind, devices, value = heappop(self.happenings)
        if kind == "failure":
            self._expect(value, "repair", devices)
            self._lose(self.fleet.fail(devices, value), devices)
        elif kind == "repair":
            self._gain(self.fleet.repair(devices, at_s))
        elif kind == "slow":
            self.slow.setdefault(devices[0], []).append(value)
            if self.costs.leaves_slow_out:
                self.change_due_s = min(self.change_due_s, at_s + SLOW_STEPS * self._step_s())
        else:
            self.slow[devices[0]].remove(value)
            if not self.slow[devices[0]]:
                del self.slow[devices[0]]
            if self.seats.idle:
                self.change_due_s = at_s

    def _lose(self, change: Change, devices: tuple[int, ...]) -> None:
        lost = {cell: seat for cell in change.broken if (seat := self.seats.seat_of(cell)) is not None}
        struck = any(map(self._computes, lost.values()))
        if not self.recovering and self.ledger.now > self.exposed_until_s:
            self.gone.clear()
        self.gone.update((seat, self.fleet.domain_of(cell)) for cell, seat in lost.items())
        for cell in change.broken:
            self.seats.lose(cell)
        if struck:
            self.failures += 1
            self.struck = True
            self.silent = self.silent or any(map(self.fleet.is_node_gone, devices))
        self._gain(change)

    def _gain(self, change: Change) -> None:
        for cell in change.made:
            self.seats.add(cell)
            self.change_due_s = min(self.change_due_s, self.ledger.now)

    # ------------------------------------------------------------ training

    def _computes(self, seat: Seat) -> bool:
        """Whether the job computes on a seat's cell."""
        if self.rate is None:
            return False
        if self.rates.policy in _BY_ROW:
            return seat[1] not in self.seats.missing_of_row
        if self.rates.policy == "restart":
            return seat[1] < self.rate.cells // self.seats.stages
        return True

    def _slow_cells(self) -> dict[int, float]:
        """Of every slow cell: how many times as long its passes take."""
        slow: dict[int, float] = {}
        for device, factors in self.slow.items():
            cell = self.fleet.cell_of(device)
            if cell is not None:
                slow[cell] = max(slow.get(cell, 1.0), *factors)
        return slow

    def _step_s(self) -> float:
        """With the slowest device that the job computes on."""
        assert self.rate is not None
        factor = 1.0
        if self.slow:
            for cell, own in self._slow_cells().items():
                seat = self.seats.seat_of(cell)
                if seat is not None and self._computes(seat):
                    factor = max(factor, own)
        return self.rate.step_s * factor

    def _begin_step(self) -> None:
        assert self.rate is not None
        self.carried_out = self.rate
        self.step_begin_s = self.ledger.now
        self.step_end_s = self.ledger.now + self._step_s()
        self.between_steps = True

    def _train(self) -> None:
        """To the next happening, or to the end of a step after which something is due."""
        assert self.rate is not None
        step_s = self._step_s()
        speed = self.rate.samples / step_s
        due_s = min(self.save_due_s, self.change_due_s)
        more = max(0, math.ceil((due_s - self.step_end_s) / step_s - _TINY))
        end_s = self.step_end_s + more * step_s
        if end_s <= self._next_s():
            self.ledger.advance(
                end_s, "training", devices=self.fleet.working, cells=self.rate.cells, samples_per_s=speed
            )
            self._begin_step()
            return
        if self._next_s() > self.step_end_s:
            self.step_begin_s = self.step_end_s + (self._next_s() - self.step_end_s) // step_s * step_s
            self.step_end_s = self.step_begin_s + step_s
        self._happen("training", samples_per_s=speed)
        self.between_steps = False
        if not self.struck:
            # What is left of the step takes longer, or less long, where a device became slow or fast.
            left_s = self.step_end_s - self.ledger.now
            self.step_end_s = self.ledger.now + left_s * self._step_s() / step_s

    # ------------------------------------------------------------ checkpoints

    def _sum(self, phases: tuple[Phase, ...]) -> float:
        return sum(phase.seconds(self.sizes) for phase in phases)

    def _timed(self, phases: tuple[Phase, ...]) -> Iterable[tuple[str, float]]:
        return ((phase.name, phase.seconds(self.sizes)) for phase in phases)

    def _save(self) -> None:
        taken_s = self.ledger.now
        self._settle_writing()
        if self._spend(self._timed(self.restart.save), "checkpointing"):
            self.writing = (taken_s, self.ledger.now + self.write_s)
            self.save_due_s = taken_s + max(self.interval_s, self.save_s + self.write_s)
            self._begin_step()

    def _settle_writing(self) -> None:
        """A checkpoint that was being written can be read by now, or never."""
        if self.writing is not None and self.writing[1] <= self.ledger.now:
            self.saved_s = self.writing[0]
        self.writing = None

    # ------------------------------------------------------------ changes

    def _fill(self, *, by_row: bool) -> list[tuple[int, Seat]]:
        barred = frozenset(self._slow_cells()) if self.costs.leaves_slow_out else frozenset()
        return self.seats.fill(by_row=by_row, barred=barred)

    def _change(self) -> None:
        """Take idle cells in, and leave slow ones out, if that pays."""
        self.change_due_s = math.inf
        assert self.rate is not None
        now_s = self.rate.samples / self._step_s()
        before = self.rate
        slow = [cell for cell in self._slow_cells() if self.seats.seat_of(cell) is not None]
        for out in [slow, []] if slow and self.costs.leaves_slow_out else [[]]:
            stood = [(cell, seat) for cell in out if (seat := self.seats.stand_up(cell)) is not None]
            taken = self._fill(by_row=self.rates.policy in _BY_ROW)
            new = self.rates.rate(self.seats) if stood or taken else None
            if new is not None:
                self.rate = new
                self.sizes = self.sizes.moving(self.rates.moved_s(before, new))
                gain = new.samples / self._step_s() / now_s - 1
                if gain * self.between_s > self._change_s():
                    self._carry_out()
                    return
                self.rate = before
            for cell, _ in taken:
                self.seats.stand_up(cell)
            for cell, seat in stood:
                self.seats.sit(cell, seat)

    def _change_s(self) -> float:
        if self.costs.phases:
            return self._sum(self.costs.join)
        return self.save_s + self.write_s + self._sum(self.restart.phases)

    def _carry_out(self) -> None:
        if self.costs.phases:
            done = self._spend(self._timed(self.costs.join), "joining")
        else:
            self.seats.pack_rows()
            taken_s = self.ledger.now
            done = self._spend(self._timed(self.restart.save + self.restart.write), "joining")
            if done:
                self.saved_s, self.writing = taken_s, None
                done = self._spend(self._timed(self.restart.phases), "joining")
                self.restarts += done
                self.save_due_s = self.ledger.now + self.interval_s
        if done:
            self.joins += 1
            self._begin_step()

    # ------------------------------------------------------------ failures

    def _recover(self) -> None:
        """From a failure to training."""
        begin_s = self.ledger.now
        lost_s = 0.0
        if not self.between_steps:
            lost_s = self.ledger.throw_away(self.step_begin_s)
            if self.costs.drops_step and self.rate is not None:
                self.dropped += self.rate.samples
        self.recoveries += 1
        self.recovering = True
        restarting = not self.costs.phases
        try:
            while True:
                detect_s = self.costs.detect_node_s if self.silent else self.costs.detect_s
                self.struck = self.silent = False
                if not self._spend([("detect", detect_s)], "detecting"):
                    continue
                if not restarting:
                    restarting = not self._regroup()
                if not restarting:
                    if self._spend(self._timed(self.costs.phases), "recovering"):
                        break
                    continue
                self._settle_writing()
                lost_s += self.ledger.throw_away(self.saved_s)
                self.ledger.settle()
                self._deal_anew()
                while self.rate is None:
                    self._happen("stopped")
                    self._deal_anew()
                if self._spend(self._timed(self.restart.phases), "restarting"):
                    self.restarts += 1
                    self.save_due_s = self.ledger.now + self.interval_s
                    break
        finally:
            self.recovery_s.append(self.ledger.now - begin_s + lost_s)
        self.recovering = False
        self.exposed_until_s = self.ledger.now + self.sizes.load_s["shard"]
        self._begin_step()

    def _regroup(self) -> bool:
        """Go on with the cells that are left; False when that cannot be."""
        if self.costs.backups and self._is_state_gone():
            return False
        self._fill(by_row=self.rates.policy in _BY_ROW)
        rate = self.rates.rate(self.seats)
        if rate is None:
            return False
        self.rate = rate
        self.sizes = self.sizes.moving(self.rates.moved_s(self.carried_out, rate, self.gone))
        return True

    def _deal_anew(self) -> None:
        """All cells that are left take seats, wherever they were."""
        self.gone.clear()
        self._fill(by_row=False)
        if self.rates.policy in _PACKED:
            self.seats.pack_rows()
        else:
            self.seats.spread()
        self.rate = self.rates.rate(self.seats)

    def _is_state_gone(self) -> bool:
        """Whether a cell and the one that had its backup are both gone."""
        return any(self._backup_of(seat, domain) in self.gone for seat, domain in self.gone.items())

    def _backup_of(self, seat: Seat, domain: int) -> Seat | None:
        """The next row of the stage that was in another failure domain; the next row where there is none."""
        stage, row = seat
        nearest = None
        for step in range(1, self.seats.rows):
            other = (stage, (row + step) % self.seats.rows)
            cell = self.seats.cell_at(other)
            if cell is None and other not in self.gone:
                continue
            nearest = nearest or other
            if (self.gone[other] if cell is None else self.fleet.domain_of(cell)) != domain:
                return other
        return nearest
