"""Backups are those that the rule gives when everybody is looked at."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elas.planner.backups import place_backups
from megatron_elas.spec.layout import Cell, Placement


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    lanes = draw(st.integers(1, 2))
    workers = iter(draw(st.permutations(range(32))))
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    return Placement(
        stages=tuple(
            tuple(Cell(row=row, workers=tuple(next(workers) for _ in range(lanes))) for row in range(size))
            for size in sizes
        )
    )


def ring_from(ring: tuple[int, ...], worker: int) -> Iterator[int]:
    at = ring.index(worker)
    return iter(ring[at + 1 :] + ring[:at])


def by_rule(placement: Placement, domains: dict[int, str], replicas: int) -> tuple[tuple[int, int], ...]:
    wards = dict.fromkeys(placement.workers, 0)
    chosen: dict[int, list[int]] = {worker: [] for worker in placement.workers}
    seats = {worker: placement.seat(worker) for worker in placement.workers}
    for most in range(replicas):
        for owner in sorted(chosen, key=lambda worker: (seats[worker].stage, seats[worker].lane, seats[worker].cell)):
            taken, own = chosen[owner], seats[owner]
            used = {domains[worker] for worker in (owner, *taken)}
            replicas_of = placement.replicas(own.stage, own.lane)
            everybody = list(ring_from(placement.workers, taken[-1] if taken else owner))
            lanes = [w for w in everybody if seats[w].stage == own.stage and w not in replicas_of]
            classes = (
                list(ring_from(replicas_of, owner)),
                [w for w in everybody if seats[w].stage != own.stage],
                lanes,
            )
            for far, candidates in ((far, each) for far in (True, False) for each in classes):
                free = [w for w in candidates if (domains[w] not in used) == far and w not in (owner, *taken)]
                if free:
                    few = [worker for worker in free if wards[worker] <= most]
                    backup = few[0] if few else min(free, key=wards.__getitem__)
                    taken.append(backup)
                    wards[backup] += 1
                    break
    return tuple((owner, backup) for owner in sorted(chosen) for backup in chosen[owner])


@given(placement=placements(), nodes=st.integers(1, 6), replicas=st.integers(1, 3), adjacent=st.booleans())
@settings(max_examples=300, deadline=None)
def test_backups_are_those_of_the_rule(placement: Placement, nodes: int, replicas: int, adjacent: bool) -> None:
    domains = {
        worker: f"node{at * nodes // len(placement.workers) if adjacent else worker % nodes}"
        for at, worker in enumerate(placement.workers)
    }
    assert place_backups(placement, domains, replicas) == by_rule(placement, domains, replicas)
