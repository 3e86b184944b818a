"""The tree over worker ids: its shape, and how little of it changes with the members."""

from __future__ import annotations

import random

import pytest

from megatron_elas.runtime.communicator.tree import Branch, Perch, find_perch

COUNTS = range(1, 18)


def draw(count: int, limit: int = 1000) -> list[int]:
    """Ids in any order."""
    return random.Random(count * limit).sample(range(limit), count)


def edges(members: list[int]) -> set[tuple[int, int]]:
    """Child and parent."""
    perches = {worker: find_perch(members, worker) for worker in members}
    return {(worker, perch.parent) for worker, perch in perches.items() if perch.parent is not None}


def test_members_hang_on_who_leads_the_next_larger_subtree() -> None:
    assert edges([14, 2, 10, 6]) == {(6, 2), (14, 10), (10, 2)}
    assert find_perch([14, 2, 10, 6], 2) == Perch(None, (Branch(6, 1, 1), Branch(10, 2, 2)), Branch(2, 0, 4))
    assert [child.top for child in find_perch(range(32), 0).children] == [1, 2, 4, 8, 16], "a binomial tree"


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("limit", [17, 1000, 1 << 40])
def test_all_hang_below_one_root_and_each_knows_its_branch(count: int, limit: int) -> None:
    members = draw(count, limit)
    ids = sorted(members)
    perches = {worker: find_perch(members, worker) for worker in members}
    assert [worker for worker, perch in perches.items() if perch.parent is None] == [ids[0]]
    for worker, perch in perches.items():
        below = {worker, *(one for child in perch.children for one in branch(ids, child))}
        assert branch(ids, perch.own) == below and perch.own.top == worker
        for child in perch.children:
            assert perches[child.top].parent == worker and perches[child.top].own == child
        steps, at = 0, worker
        while (parent := perches[at].parent) is not None:
            assert worker in branch(ids, perches[parent].own)
            steps, at = steps + 1, parent
        assert at == ids[0] and steps <= max(ids).bit_length()


def branch(ids: list[int], of: Branch) -> set[int]:
    return set(ids[of.start : of.start + of.count])


@pytest.mark.parametrize("count", COUNTS[1:])
@pytest.mark.parametrize("limit", [17, 1000])
def test_who_goes_or_comes_moves_only_its_own_children(count: int, limit: int) -> None:
    members = draw(count, limit)
    before = edges(members)
    for gone in members:
        children = len(find_perch(members, gone).children)
        after = edges([worker for worker in members if worker != gone])
        assert all(gone in edge for edge in before - after)
        assert len(before - after) <= children + 1 and len(after - before) <= children
