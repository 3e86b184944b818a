"""Small cases, added up by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_elas.simulator.engine import simulate
from megatron_elas.simulator.outcome import Outcome
from megatron_elas.simulator.rates import StepRates
from megatron_elas.simulator.recovery import load_recovery
from megatron_elas.simulator.seats import Seats
from megatron_elas.simulator.traces import Slowdown, Trace
from megatron_elas.spec.errors import BadUsage
from tests.simulator.small_jobs import ROWS, STAGES, STEPS, costs, failure, small_cluster, small_job, trace

BATCH = ROWS * STEPS
JOB = small_job()
CLUSTER = small_cluster(JOB)
"""Of one device for every cell: device ``stage * ROWS + row``."""
_RATES: dict[str, StepRates] = {}


def rates_of(policy: str) -> StepRates:
    if policy not in _RATES:
        _RATES[policy] = StepRates(JOB, CLUSTER, policy)
    return _RATES[policy]


def step_s(policy: str, *lost: int) -> float:
    """Of a policy, without some cells."""
    seats = Seats(STAGES, ROWS, STAGES * ROWS)
    for cell in lost:
        seats.lose(cell)
    rate = rates_of(policy).rate(seats)
    assert rate is not None
    return rate.step_s


def run(policy: str, events: Trace, **own: object) -> Outcome:
    return simulate(JOB, CLUSTER, events, policy, recovery=costs(**own), rates=rates_of(policy))  # type: ignore[arg-type]


def spent(outcome: Outcome) -> dict[str, float]:
    return {cause: seconds for cause, seconds in outcome.seconds_by_cause.items() if seconds > 1e-9}


def test_nothing_happens() -> None:
    outcome = run("elaswave", trace(10.5 * step_s("elaswave")))
    assert spent(outcome) == {"training": pytest.approx(10.5 * step_s("elaswave"))}
    assert outcome.trained == pytest.approx(10.5 * BATCH)
    assert outcome.own_goodput == pytest.approx(1.0) and outcome.recoveries == 0
    assert outcome.goodput == pytest.approx(outcome.own_samples_per_s / outcome.stock_samples_per_s)


def test_one_failure() -> None:
    whole, less = step_s("elaswave"), step_s("elaswave", 4)
    outcome = run("elaswave", trace(10.25 * whole + 9 + 20 * less, failure(10.25 * whole, 4)))
    assert spent(outcome) == {
        "training": pytest.approx(10 * whole + 20 * less),
        "redone": pytest.approx(0.25 * whole),
        "detecting": pytest.approx(2.0),
        "recovering": pytest.approx(7.0),
    }
    assert outcome.seconds_by_phase == {
        "detect": pytest.approx(2.0),
        "phase 0": pytest.approx(3.0),
        "phase 1": pytest.approx(4.0),
    }
    assert outcome.trained == pytest.approx(30 * BATCH)
    assert outcome.redone == pytest.approx(0.25 * BATCH)
    assert (outcome.failures, outcome.recoveries, outcome.restarts, outcome.joins) == (1, 1, 0, 0)
    assert outcome.mean_recovery_s == outcome.worst_recovery_s == pytest.approx(9 + 0.25 * whole)


def test_a_device_that_is_repaired_joins_at_the_end_of_a_step() -> None:
    whole, less = step_s("elaswave"), step_s("elaswave", 4)
    begin = 9.0
    events = trace(begin + 20.0 * less + 5 + 30 * whole, failure(0.0, 4, repair_s=begin + 19.5 * less))
    outcome = run("elaswave", events)
    assert spent(outcome) == {
        "training": pytest.approx(20 * less + 30 * whole),
        "detecting": pytest.approx(2.0),
        "recovering": pytest.approx(7.0),
        "joining": pytest.approx(5.0),
    }
    assert outcome.trained == pytest.approx(50 * BATCH) and outcome.joins == 1
    # Not when it takes longer than the time until the next failure that is to be expected is worth.
    dear = run("elaswave", events, join_s=1e6)
    assert dear.joins == 0 and "joining" not in spent(dear)


def test_a_second_failure_in_a_recovery_begins_it_anew() -> None:
    whole, less = step_s("elaswave"), step_s("elaswave", 4, 8)
    at_s = 2 * whole
    outcome = run("elaswave", trace(at_s + 6 + 9 + 5 * less, failure(at_s, 4), failure(at_s + 6, 8)))
    assert spent(outcome) == {
        "training": pytest.approx(2 * whole + 5 * less),
        "detecting": pytest.approx(4.0),
        "recovering": pytest.approx(4 + 7.0),
    }
    assert (outcome.failures, outcome.recoveries) == (2, 1)
    assert outcome.worst_recovery_s == pytest.approx(15.0)


def test_a_spare_node_takes_the_seat_in_the_recovery() -> None:
    cluster = small_cluster(JOB, spare_nodes=1)
    whole = step_s("elaswave")
    outcome = simulate(JOB, cluster, trace(9 + 10 * whole, failure(0.0, 4)), "elaswave", recovery=costs())
    assert outcome.trained == pytest.approx(10 * BATCH) and outcome.joins == 0
    # And a spare one that fails is no loss.
    idle = simulate(JOB, cluster, trace(10 * whole, failure(0.5, 12)), "elaswave", recovery=costs())
    assert idle.failures == idle.recoveries == 0 and idle.trained == pytest.approx(10 * BATCH)


def test_a_restart_goes_back_to_the_newest_checkpoint_that_can_be_read() -> None:
    whole = step_s("restart")
    assert 2.9 < whole < 3.0
    # Saved after steps 5 and 10; at the failure, half a step later, the second checkpoint is still being written.
    at_s = 10.5 * whole + 2
    less = step_s("restart", 4)
    outcome = run("restart", trace(at_s + 102 + 2 * less, failure(at_s, 4)), phases=(), interval_s=4.5 * whole)
    assert spent(outcome) == {
        "training": pytest.approx(5 * whole + 2 * less),
        "redone": pytest.approx(5.5 * whole),
        "checkpointing": pytest.approx(2.0),
        "detecting": pytest.approx(2.0),
        "restarting": pytest.approx(100.0),
    }
    assert outcome.redone == pytest.approx(5.5 * BATCH) and outcome.restarts == 1
    assert outcome.worst_recovery_s == pytest.approx(102 + 5.5 * whole)
    # Four steps later it can be read.
    later_s = 14.5 * whole + 2
    later = run("restart", trace(later_s + 102, failure(later_s, 4)), phases=(), interval_s=4.5 * whole)
    assert spent(later)["redone"] == pytest.approx(4.5 * whole)


def test_a_restarted_job_leaves_cells_idle_and_takes_them_in_by_restarting_again_if_that_pays() -> None:
    less, whole = step_s("restart", 4), step_s("restart")
    seconds = 102 + 1000 * less
    one = trace(seconds, failure(0.0, 4))
    # Two replicas of three are left: three cells wait, and may fail.
    two = trace(seconds, failure(0.0, 4), failure(500.0, 5))
    assert run("restart", one, phases=()).trained == run("restart", two, phases=()).trained
    assert run("restart", two, phases=()).failures == 1
    back = run("restart", trace(seconds, failure(0.0, 4, repair_s=102 + 9.5 * less)), phases=())
    assert back.restarts == 2 and back.joins == 1
    assert spent(back)["joining"] == pytest.approx(1 + 10 + 100)
    assert back.trained == pytest.approx(BATCH * (10 + (seconds - 102 - 10 * less - 111) / whole))


def test_a_node_that_says_nothing_is_noticed_later_than_a_device() -> None:
    job = small_job()
    cluster = small_cluster(job, per_node=2)
    own = costs(detect_node_s=30.0)
    one = simulate(job, cluster, trace(500.0, failure(0.0, 4)), "elaswave", recovery=own)
    both = simulate(job, cluster, trace(500.0, failure(0.0, 4, 5)), "elaswave", recovery=own)
    assert (one.seconds_by_cause["detecting"], both.seconds_by_cause["detecting"]) == (2.0, 30.0)


def test_a_stage_without_cells_is_a_restart_and_waits_for_repairs() -> None:
    # All of stage 0, one after the other; with four stages and no cells to spare ReCycle cannot go on.
    whole = step_s("recycle")
    gone = trace(4000.0, failure(whole, 0, 1, 2, repair_s=1000.0))
    outcome = run("recycle", gone)
    # The cells that are left are dealt anew: nine cells, two or three for every stage.
    assert outcome.restarts == 1 and outcome.seconds_by_cause["stopped"] == 0
    assert outcome.seconds_by_cause["redone"] == pytest.approx(whole)
    everything = tuple(range(STAGES * ROWS - 1))
    stopped = run("recycle", trace(4000.0, failure(whole, *everything, repair_s=1000.0)))
    assert stopped.seconds_by_cause["stopped"] == pytest.approx(1000.0 - 2)
    assert stopped.restarts == 1 and stopped.trained > 0


def test_ours_goes_on_without_a_stage_from_its_backups() -> None:
    # The cells of stage 0, one by one: the last one's backup is with another stage.
    one_by_one = trace(3000.0, failure(100.0, 0), failure(500.0, 1), failure(900.0, 2))
    own = costs(backups=True)
    outcome = simulate(JOB, CLUSTER, one_by_one, "ours", recovery=own, exact=False)
    assert (outcome.recoveries, outcome.restarts) == (3, 0)
    assert outcome.segments[-1].cause == "training"
    assert run("elaswave", one_by_one, backups=True).restarts == 1


def test_no_whole_replica_is_a_restart_for_torchft() -> None:
    events = trace(2000.0, failure(100.0, 0), failure(200.0, 4), failure(300.0, 8))
    outcome = run("torchft", events)
    assert (outcome.recoveries, outcome.restarts) == (3, 1)
    # Nine cells are left: two whole replicas.
    assert outcome.segments[-1].cells == 8


def test_torchft_waits_with_a_replica_that_is_not_whole() -> None:
    whole = step_s("torchft")
    less = step_s("torchft", 0)
    at_s = 2.5 * whole
    seconds = at_s + 9 + 10 * less
    outcome = run("torchft", trace(seconds, failure(at_s, 0), failure(at_s + 9.5, 3)), drops_step=True)
    assert outcome.failures == 1 and outcome.trained == pytest.approx(12 * BATCH)
    assert outcome.dropped == BATCH and outcome.redone == pytest.approx(0.5 * BATCH)


def test_owner_and_backup_together_are_a_restart() -> None:
    # Cells 3, 4 and 5 are stage 1; the backup of a cell's state is at the next one.
    both = trace(2000.0, failure(100.0, 3, 4))
    apart = trace(2000.0, failure(100.0, 3), failure(1000.0, 4))
    at_once = trace(2000.0, failure(100.0, 3), failure(104.0, 4))
    other = trace(2000.0, failure(100.0, 3, 7))
    assert run("elaswave", both, backups=True).restarts == 1
    assert run("elaswave", at_once, backups=True).restarts == 1
    assert run("elaswave", apart, backups=True).restarts == 0
    assert run("elaswave", other, backups=True).restarts == 0
    assert run("elaswave", both).restarts == 0


def test_backups_are_in_another_failure_domain() -> None:
    job = small_job(rows=4)
    cluster = small_cluster(job, per_node=2)
    own = costs(backups=True)
    # Rows 0 and 1 of stage 0 are one node: their backups are at rows 2 and 3.
    node = simulate(job, cluster, trace(2000.0, failure(100.0, 0, 1)), "elaswave", recovery=own)
    two = simulate(job, cluster, trace(2000.0, failure(100.0, 0, 2)), "elaswave", recovery=own)
    assert (node.restarts, two.restarts) == (0, 1)


def test_a_slow_device_slows_the_step_while_it_is_slow() -> None:
    whole = step_s("recycle")
    slow = Slowdown(at_s=2.5 * whole, device=4, factor=2.0, seconds=3 * whole)
    outcome = run("recycle", trace(10 * whole, slow))
    assert outcome.trained == pytest.approx(BATCH * (7 + 1.5))
    assert spent(outcome) == {"training": pytest.approx(10 * whole)}


def test_a_slow_device_is_left_out_where_that_is_faster() -> None:
    whole, less = step_s("elaswave"), step_s("elaswave", 4)
    assert less < 2 * whole
    events = trace(200 * whole, Slowdown(at_s=0.0, device=4, factor=3.0, seconds=150 * whole))
    outcome = run("elaswave", events, leaves_slow_out=True)
    assert outcome.joins == 2
    # Three slow steps, then without it, until it is as fast as the others.
    fast = (200 - 150) * whole
    assert outcome.trained == pytest.approx(BATCH * (3 + (141 * whole - 5) / less + (fast - 5) / whole), abs=BATCH)
    kept = run("elaswave", events)
    assert kept.joins == 0 and kept.trained == pytest.approx(BATCH * (50 + 50), abs=BATCH)
    mild = run("elaswave", replace(events, events=(replace(events.events[0], factor=1.01),)), leaves_slow_out=True)
    assert mild.joins == 0


def test_energy_is_that_of_waiting_devices_and_of_computing() -> None:
    rates = rates_of("elaswave")
    seconds = 100 * step_s("elaswave")
    outcome = run("elaswave", trace(seconds))
    assert outcome.energy_j == pytest.approx(12 * 330 * seconds + outcome.trained * rates.busy_j_per_sample)
    # A device draws at most 400 W, and at least what it draws while it waits.
    assert outcome.energy_j is not None and 330 < outcome.energy_j / 12 / seconds < 400


def test_events_and_grids_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BadUsage, match="devices 0 to 11, not 12"):
        run("elaswave", trace(10.0, failure(1.0, 12)))
    with pytest.raises(BadUsage, match="needs 24 devices and small has 12"):
        simulate(small_job(rows=6), CLUSTER, trace(10.0), "elaswave")
    with pytest.raises(BadUsage, match="no policy 'hope'"):
        simulate(JOB, CLUSTER, trace(10.0), "hope")


def test_costs_that_come_with_the_project_are_used_unless_others_are_given() -> None:
    events = trace(3000.0, failure(1000.0, 4))
    plain = simulate(JOB, CLUSTER, events, "torchft", rates=rates_of("torchft"))
    given = simulate(JOB, CLUSTER, events, "torchft", recovery=load_recovery("torchft"), rates=rates_of("torchft"))
    assert plain == given and plain.seconds_by_cause["detecting"] == pytest.approx(5.0)
