"""Memberships for tests, made from what a communicator has."""

from __future__ import annotations

from collections.abc import Collection

from megatron_elas.runtime.communicator.communicator import Communicator
from megatron_elas.runtime.communicator.membership import GroupMembers, Membership


def membership_of(
    communicator: Communicator, epoch: int, living: Collection[int], groups: dict[str, GroupMembers] | None = None
) -> Membership:
    """All groups without those who left; ``groups`` has the members of those that are to have others."""
    addresses = communicator.transport._connections._addresses
    kept = {
        group.group_name: GroupMembers(members=tuple(worker for worker in group.members if worker in living))
        for group in communicator.groups
    }
    return Membership(
        epoch=epoch,
        addresses={worker: addresses[worker] for worker in sorted(living)},
        ranks={worker: rank for rank, worker in enumerate(sorted(living))},
        groups=kept | (groups or {}),
    )


def edit_to(
    communicator: Communicator, epoch: int, living: Collection[int], groups: dict[str, GroupMembers] | None = None
) -> None:
    """Enter the epoch with these workers."""
    communicator.edit(membership_of(communicator, epoch, living, groups))
