"""The six checks before training goes on. Pure: each looks at the rows of all workers and says what does not fit.

Every check is blind to what the others look at:

=============  ==========================================================================================
parameters     the model itself holds every parameter of its stage, once, under its global name and in full size
replicas       workers of one stage and lane have the same weights, bit for bit, each at its place
owners         the ranges that the optimizers of a stage and lane own tile every parameter: no gap, no overlap
contents       masters and moments in use are what the source sent, and what the backups hold, slot by slot
cast           weights are exactly the masters, cast to the weights' type
counters       steps, samples, learning-rate schedule, loss scale, optimizer updates and random streams are equal
               everywhere
=============  ==========================================================================================
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_elas.runtime.verification.checksum import MODULUS, edge_of, key_of
from megatron_elas.runtime.verification.inspection import UNKNOWN
from megatron_elas.runtime.verification.rows import Row
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.shards import SLOTS, Piece


class Check(enum.StrEnum):
    """Which of the six."""

    PARAMETERS = "parameters"
    REPLICAS = "replicas"
    OWNERS = "owners"
    CONTENTS = "contents"
    CAST = "cast"
    COUNTERS = "counters"


BEFORE_FORWARD = (Check.PARAMETERS, Check.REPLICAS, Check.OWNERS)
"""Those of what is in place when optimizer state is still on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What one check found."""

    check: Check
    workers: tuple[int, ...]
    """Whose state does not fit, or who disagree."""
    sentence: str
    """With the values, without the name of a parameter."""
    mirrors: tuple[tuple[int, int], ...] = ()
    """Pairs (owner, backup) of copies that are not what their owners have."""


Rows = Mapping[int, Row]
"""By worker: all seated ones."""


def find_failures(plan: ElasticPlan, rows: Rows) -> tuple[Failure, ...]:
    """What does not fit, in the order of the checks; the same on all workers. Empty when training can go on."""
    found = (check(plan, rows) for check in CHECKS.values())
    return tuple(failure for failure in found if failure is not None)


def _check_parameters(plan: ElasticPlan, rows: Rows) -> Failure | None:
    wrong = tuple(worker for worker, row in rows.items() if row.parameters != row.expected_parameters)
    if not wrong:
        return None
    row = rows[wrong[0]]
    return Failure(
        check=Check.PARAMETERS,
        workers=wrong,
        sentence=f"the model of {_join(wrong)} holds {row.num_parameters} parameters, the stage has "
        f"{row.num_expected}, or one has another name or size",
    )


def _check_replicas(plan: ElasticPlan, rows: Rows) -> Failure | None:
    for stage, lane, members in _teams(plan):
        if len({rows[worker].weights for worker in members}) > 1:
            sums = {worker: f"{rows[worker].weights % MODULUS:016x}" for worker in members}
            return Failure(
                check=Check.REPLICAS,
                workers=members,
                sentence=f"the weights of stage {stage} lane {lane} differ between its replicas (checksums by worker: "
                f"{sums})",
            )
    return None


def _check_owners(plan: ElasticPlan, rows: Rows) -> Failure | None:
    for stage, lane, members in _teams(plan):
        covered = sum(rows[worker].covered for worker in members) % MODULUS
        owned = sum(rows[worker].owned for worker in members)
        first = rows[members[0]]
        if covered != first.expected_cover % MODULUS:
            return Failure(
                check=Check.OWNERS,
                workers=members,
                sentence=f"{_join(members)} own optimizer state of {owned} elements of stage {stage} lane {lane}, "
                f"which has {first.num_elements}: an element has no owner, or two",
            )
    return None


def _check_contents(plan: ElasticPlan, rows: Rows) -> Failure | None:
    for worker, row in rows.items():
        for slot, used, sent in zip(SLOTS, row.used, row.sent, strict=True):
            if used != sent:
                return Failure(
                    check=Check.CONTENTS,
                    workers=(worker,),
                    sentence=f"{slot} in use on worker {worker} is not what it got (checksum {used % MODULUS:016x}, "
                    f"sent were {sent % MODULUS:016x})",
                )
    wrong = [
        (owner, backup, slot)
        for backup, row in rows.items()
        for owner, sums in zip(plan.wards_of(backup), row.wards, strict=False)
        for slot, mirrored, used in zip(SLOTS, sums, rows[owner].used, strict=True)
        if mirrored != used
    ]
    if wrong:
        owner, backup, slot = wrong[0]
        return Failure(
            check=Check.CONTENTS,
            workers=(owner, backup),
            sentence=f"the copy of worker {owner}'s {slot} on its backup, worker {backup}, is not what worker "
            f"{owner} uses",
            mirrors=tuple(dict.fromkeys((owner, backup) for owner, backup, _ in wrong)),
        )
    return None


def _check_cast(plan: ElasticPlan, rows: Rows) -> Failure | None:
    wrong = tuple(worker for worker, row in rows.items() if row.uncast)
    if not wrong:
        return None
    return Failure(
        check=Check.CAST,
        workers=wrong,
        sentence=f"{rows[wrong[0]].uncast} weights on worker {wrong[0]} are not their masters, cast",
    )


def _check_counters(plan: ElasticPlan, rows: Rows) -> Failure | None:
    first_worker, first = next(iter(rows.items()))
    for what, get in _COUNTERS.items():
        for worker, row in rows.items():
            if get(row) != get(first):
                return Failure(
                    check=Check.COUNTERS,
                    workers=(first_worker, worker),
                    sentence=f"worker {worker} is at {what} {get(row)}, worker {first_worker} at {get(first)}",
                )
    said = [
        (worker, steps)
        for worker, row in rows.items()
        for steps in (row.fewest_updates, row.most_updates)
        if steps != UNKNOWN
    ]
    said += [
        (owner, steps)
        for backup, row in rows.items()
        for owner, steps in zip(plan.wards_of(backup), row.ward_updates, strict=False)
        if rows[owner].fewest_updates != UNKNOWN
    ]
    for worker, steps in said:
        if steps != said[0][1]:
            return Failure(
                check=Check.COUNTERS,
                workers=(said[0][0], worker),
                sentence=f"the optimizer of worker {worker}, or a copy of it, has counted {steps} updates, that of "
                f"worker {said[0][0]} {said[0][1]}",
            )
    return None


_COUNTERS: Mapping[str, Callable[[Row], int]] = {
    "resume step": lambda row: row.version,
    "consumed samples": lambda row: row.consumed_samples,
    "samples of the learning-rate schedule": lambda row: row.schedule_samples,
    "loss scaler's state (checksum)": lambda row: row.loss_scale,
    "random streams": lambda row: row.streams,
}

CHECKS: Mapping[Check, Callable[[ElasticPlan, Rows], Failure | None]] = {
    Check.PARAMETERS: _check_parameters,
    Check.REPLICAS: _check_replicas,
    Check.OWNERS: _check_owners,
    Check.CONTENTS: _check_contents,
    Check.CAST: _check_cast,
    Check.COUNTERS: _check_counters,
}


def cover(pieces: Sequence[Piece]) -> dict[str, int]:
    """By name, a number that adds up over owners: the same for every tiling of a parameter, and for nothing else.

    An edge ``i`` of a parameter has a random number ``e(i)``, and a piece counts ``e(stop) - e(start)``: inner edges of
    a tiling cancel out, those of a gap or an overlap stay.
    """
    covered: dict[str, int] = {}
    for piece in pieces:
        key = key_of("edge", piece.name)
        step = edge_of(key, piece.stop) - edge_of(key, piece.start)
        covered[piece.name] = (covered.get(piece.name, 0) + step) % MODULUS
    return covered


def _teams(plan: ElasticPlan) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """(stage, lane, workers) of all that hold the same parameters."""
    for stage in range(plan.placement.num_stages):
        for lane in range(plan.placement.tensor_parallel):
            yield stage, lane, plan.placement.replicas(stage, lane)


def _join(workers: Sequence[int]) -> str:
    return f"worker {workers[0]}" if len(workers) == 1 else f"workers {', '.join(map(str, workers))}"
