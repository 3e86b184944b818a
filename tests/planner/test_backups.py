"""Copies are kept apart from their owners, and every worker keeps about as many."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from megatron_elas.planner.backups import place_backups
from megatron_elas.spec.layout import Cell, Placement


def place(*stages: str) -> Placement:
    """Of stages such as ``0,1 2,3``: cells by lanes."""
    return Placement(
        stages=tuple(
            tuple(Cell(row=row, workers=tuple(map(int, cell.split(",")))) for row, cell in enumerate(stage.split()))
            for stage in stages
        )
    )


EXAMPLE = place("0 1 4", "2")
DOMAINS = {0: "a", 1: "a", 4: "b", 2: "b"}


def test_the_example_of_the_docstring() -> None:
    assert place_backups(EXAMPLE, DOMAINS) == ((0, 4), (1, 4), (2, 1), (4, 0))
    assert place_backups(EXAMPLE, DOMAINS, 2) == (
        (0, 4), (0, 1), (1, 4), (1, 0), (2, 1), (2, 4), (4, 0), (4, 1),
    )  # fmt: skip


def test_a_ring_over_two_nodes_crosses_them_and_stays_even() -> None:
    domains = {0: "a", 1: "a", 2: "b", 3: "b"}
    assert place_backups(place("0 1 2 3"), domains) == ((0, 2), (1, 3), (2, 0), (3, 1))


def test_a_stage_of_one_cell_is_kept_by_its_neighbours_and_a_stage_on_one_node_by_another_node() -> None:
    each = {worker: str(worker) for worker in range(8)}
    assert place_backups(place("0", "1", "2", "3"), each) == ((0, 1), (1, 2), (2, 3), (3, 0))
    nodes = {0: "a", 1: "a", 2: "b", 3: "b"}
    assert place_backups(place("0 1", "2 3"), nodes) == ((0, 2), (1, 3), (2, 0), (3, 1))


def test_lanes_of_one_cell_keep_each_others_copies_only_when_there_is_nobody_else() -> None:
    each = {worker: str(worker) for worker in range(4)}
    assert place_backups(place("0,1"), each) == ((0, 1), (1, 0))
    backups = place_backups(place("0,1", "2,3"), each)
    assert all({owner // 2, backup // 2} == {0, 1} for owner, backup in backups)
    assert Counter(backup for _, backup in backups) == Counter(range(4))


def test_nobody_keeps_the_copy_of_the_only_worker_and_no_copies_are_none() -> None:
    assert place_backups(place("3"), {}) == ()
    assert place_backups(EXAMPLE, DOMAINS, 0) == ()


@st.composite
def grids(draw: st.DrawFn) -> Placement:
    lanes = draw(st.integers(1, 2))
    workers = iter(draw(st.permutations(range(30))))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    return Placement(
        stages=tuple(
            tuple(Cell(row=row, workers=tuple(next(workers) for _ in range(lanes))) for row in range(size))
            for size in sizes
        )
    )


@given(placement=grids(), nodes=st.integers(1, 5), replicas=st.integers(1, 3))
def test_backups_are_others_in_other_domains_where_there_are_such(
    placement: Placement, nodes: int, replicas: int
) -> None:
    domains = {worker: f"node{worker % nodes}" for worker in placement.workers}
    pairs = place_backups(placement, domains, replicas)
    assert pairs == place_backups(placement, domains, replicas)
    assert [owner for owner, _ in pairs] == sorted(owner for owner, _ in pairs)
    for owner in placement.workers:
        kept = [backup for other, backup in pairs if other == owner]
        assert owner not in kept and len(set(kept)) == len(kept)
        assert len(kept) == min(replicas, len(placement.workers) - 1)
        elsewhere = {domains[worker] for worker in placement.workers} - {domains[owner]}
        far = [domains[backup] for backup in kept if domains[backup] != domains[owner]]
        assert len(set(far)) >= min(len(kept), len(elsewhere)), "a domain is used twice while another is not used"


@given(cells=st.integers(1, 6), stages=st.integers(1, 5), lanes=st.integers(1, 3), replicas=st.integers(1, 2))
def test_without_domains_to_mind_everybody_keeps_equally_many(
    cells: int, stages: int, lanes: int, replicas: int
) -> None:
    count = cells * stages * lanes
    if count <= replicas:
        return
    numbers = iter(range(count))
    placement = Placement(
        stages=tuple(
            tuple(Cell(row=row, workers=tuple(next(numbers) for _ in range(lanes))) for row in range(cells))
            for _ in range(stages)
        )
    )
    wards = Counter(backup for _, backup in place_backups(placement, {w: str(w) for w in range(count)}, replicas))
    assert max(wards.values()) - min(wards[worker] for worker in range(count)) <= 1
