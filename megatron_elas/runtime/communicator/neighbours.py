"""With whom a member of a group exchanges in its collectives."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_elas.runtime.communicator import collectives
from megatron_elas.runtime.communicator.tree import find_perch


def neighbours(members: Sequence[int], own: int) -> list[int]:
    """Worker ids that the member at position ``own`` exchanges with in barriers and collectives of small tensors.

    In groups of up to ``collectives.EXCHANGE_MEMBERS`` those 1, 2, 4, ... places ahead and behind, in larger ones
    parent and children in the tree. What other operations need comes about when they are first used.
    """
    count = len(members)
    if count > collectives.EXCHANGE_MEMBERS:
        return find_perch(members, members[own]).neighbours
    places: dict[int, None] = {}
    step = 1
    while step < count:
        places[(own + step) % count] = places[(own - step) % count] = None
        step *= 2
    return [members[at] for at in places if at != own]
