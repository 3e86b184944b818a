"""What a membership may say, whoever reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from megatron_elas.runtime.communicator.collectives import EXCHANGE_MEMBERS, Team, all_gather, all_reduce, barrier
from megatron_elas.runtime.communicator.membership import GroupMembers, Membership
from megatron_elas.runtime.communicator.neighbours import neighbours
from megatron_elas.runtime.communicator.reduction import Reduction
from megatron_elas.runtime.transport.program import Region

ADDRESSES = {worker: f"unix:/{worker}" for worker in (2, 5, 9, 11)}


def make(**changes: Any) -> Membership:
    said: dict[str, Any] = {
        "epoch": 3,
        "addresses": ADDRESSES,
        "ranks": {9: 1, 2: 0, 5: 2},
        "groups": {"0": GroupMembers(members=(2, 9, 5)), "4": GroupMembers(members=(5, 2))},
    }
    return Membership(**said | changes)


def test_the_world_is_in_order_of_ranks() -> None:
    membership = make()
    assert membership.world == (2, 9, 5)
    assert list(membership.of(9)) == ["0"] and list(membership.of(5)) == ["0", "4"]
    assert not membership.of(11), "a spare is in no group"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ranks": {2: 0, 5: 2}}, r"must be 0 to 1, got \{2: 0, 5: 2\}"),
        ({"ranks": {2: 0, 5: 0}}, "must be 0 to 1"),
        ({"ranks": {2: 0, 7: 1}, "groups": {}}, r"workers \[7\] have a rank and no address"),
        ({"groups": {"4": GroupMembers(members=(2, 11))}}, r"workers \[11\] are members of group 4 and have no global"),
        ({"groups": {"4": GroupMembers(members=(2, 2))}}, r"group 4 must have members, each only once, got \[2, 2\]"),
        ({"groups": {"4": GroupMembers(members=())}}, "must have members"),
        (
            {"groups": {"4": GroupMembers(members=(2,), channel=1 << 32)}},
            "channel from 0 to 4294967295, got 4294967296",
        ),
        ({"groups": {"0": GroupMembers(members=(2, 5, 9))}}, r"default group has members \[2, 5, 9\]"),
    ],
)
def test_a_membership_that_contradicts_itself_cannot_be_made(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(**changes)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 16, 21])
def test_neighbours_are_mutual(count: int) -> None:
    members = [worker * 3 for worker in range(count)]
    near = [set(neighbours(members, own)) for own in range(count)]
    for own, found in enumerate(near):
        assert members[own] not in found
        assert all(members[own] in near[members.index(peer)] for peer in found)
        if count > EXCHANGE_MEMBERS:
            assert len(found) <= members[-1].bit_length() + 1
        elif count > 1:
            assert {members[(own + 1) % count], members[own - 1]} <= found


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 21])
@pytest.mark.parametrize("kind", ["barrier", "all_reduce", "all_gather"])
def test_small_operations_use_links_to_neighbours_only(count: int, kind: str) -> None:
    members = tuple((worker * 7) % 64 for worker in range(count))
    own, slots = Region(0, 0, 8), [Region(1, 8 * at, 8) for at in range(count)]
    for me in range(count):
        team = Team(members, me)
        program = {
            "barrier": lambda team: barrier(team),
            "all_reduce": lambda team: all_reduce(team, own, 4, Reduction(ReduceOp.SUM, torch.float32)),
            "all_gather": lambda team: all_gather(team, slots, own),
        }[kind](team)
        peers = {transfer.peer for one in program.rounds for transfer in (*one.sends, *one.receives)}
        assert peers == set(neighbours(members, me))
