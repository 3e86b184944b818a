"""With whom a member of a group exchanges in its collectives."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_elas.runtime.communicator.collectives import DIRECT_MEMBERS


def neighbours(members: Sequence[int], own: int) -> list[int]:
    """Worker ids that the member at position ``own`` needs links to, in any size of tensor.

    Small groups: all others. Larger ones: those 1, 2, 4, ... places ahead and behind, which barriers, small tensors and
    rings go to.
    """
    count = len(members)
    if count <= DIRECT_MEMBERS:
        return [worker for at, worker in enumerate(members) if at != own]
    places: dict[int, None] = {}
    step = 1
    while step < count:
        places[(own + step) % count] = places[(own - step) % count] = None
        step *= 2
    return [members[at] for at in places if at != own]
