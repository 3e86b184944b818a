"""Who takes part from an epoch on: one value, from which survivors edit their groups and joiners make theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_elas.runtime.communicator.channels import POINT_TO_POINT

DEFAULT_GROUP = "0"
"""c10d's name of its default group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMembers:
    """One group in a membership."""

    members: tuple[int, ...]
    """Worker ids, in group order."""
    channel: int | None = None
    """Of its collectives. None: as it is, or for a new group the one that follows from its name."""
    description: str = "undefined"
    """What it is for; given to a group that is made."""
    is_view: bool = False
    """Its members may disagree about who they are, so no operation uses it and it needs no links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Who takes part in an epoch. Equal on all workers, except for views.

    Raises:
        ValueError: It contradicts itself, whoever reads it.
    """

    epoch: int
    addresses: Mapping[int, str]
    """Of every living worker, also of those without a rank (spares)."""
    ranks: Mapping[int, int]
    """Global rank of each worker that takes part: 0 to len - 1."""
    groups: Mapping[str, GroupMembers] = field(default_factory=dict)
    """By c10d's name, also those that the reader is no member of. Groups that are not named stay as they are."""

    def __post_init__(self) -> None:
        if sorted(self.ranks.values()) != list(range(len(self.ranks))):
            raise ValueError(f"epoch {self.epoch}: global ranks must be 0 to {len(self.ranks) - 1}, got {self.ranks}")
        unknown = sorted(self.ranks.keys() - self.addresses.keys())
        if unknown:
            raise ValueError(f"epoch {self.epoch}: workers {unknown} have a rank and no address")
        for name, group in self.groups.items():
            members = group.members
            if group.channel is not None and not 0 <= group.channel < POINT_TO_POINT:
                raise ValueError(
                    f"epoch {self.epoch}: group {name} must have a channel from 0 to {POINT_TO_POINT - 1}, "
                    f"got {group.channel}"
                )
            if not members or len(set(members)) != len(members):
                raise ValueError(
                    f"epoch {self.epoch}: group {name} must have members, each only once, got {list(members)}"
                )
            outside = [worker for worker in members if worker not in self.ranks]
            if outside:
                raise ValueError(
                    f"epoch {self.epoch}: workers {outside} are members of group {name} and have no global rank in "
                    f"{dict(self.ranks)}"
                )
        default = self.groups.get(DEFAULT_GROUP)
        if default is not None and default.members != self.world:
            raise ValueError(
                f"epoch {self.epoch}: the default group has members {list(default.members)}, the ranks say "
                f"{list(self.world)}"
            )

    @property
    def world(self) -> tuple[int, ...]:
        """Worker id of each global rank."""
        return tuple(sorted(self.ranks, key=self.ranks.__getitem__))

    def of(self, worker: int) -> dict[str, GroupMembers]:
        """The named groups that the worker is a member of."""
        return {name: group for name, group in self.groups.items() if worker in group.members}
