"""What a worker tells all others before training goes on: one row of integers, of the same length everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from megatron_elas.runtime.verification.checksum import MODULUS, to_row
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.shards import SLOTS

Sums = tuple[int, ...]
"""A checksum per slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One worker's row. Checksums are 64-bit integers with a sign."""

    version: int
    """The step that is run next."""
    consumed_samples: int
    schedule_samples: int
    loss_scale: int
    streams: int
    fewest_updates: int
    most_updates: int
    num_parameters: int
    parameters: int
    """Of the names and sizes in the model."""
    num_expected: int
    expected_parameters: int
    """Of those that the stage holds under the plan."""
    num_elements: int
    """Of the stage and lane."""
    weights: int
    """Of the weights of all parameters."""
    owned: int
    """Elements whose optimizer state is here."""
    covered: int
    """See ``checks.cover``."""
    expected_cover: int
    """What ``covered`` of all owners adds up to."""
    uncast: int
    used: Sums
    """Of the optimizer state in use."""
    sent: Sums
    """Of what this worker was to get."""
    wards: tuple[Sums, ...] = ()
    """Of the copies that it keeps of others, in the order of ``ElasticPlan.wards_of``."""
    ward_updates: tuple[int, ...] = ()
    """The updates that those copies have counted."""

    def to_ints(self, plan: ElasticPlan) -> list[int]:
        """For the exchange."""
        numbers = [getattr(self, name) for name in _SINGLE]
        numbers += [*self.used, *self.sent]
        for sums, updates in zip(self.wards, self.ward_updates, strict=True):
            numbers += [*sums, updates]
        return [to_row(number) for number in numbers] + [0] * (_length(plan) - len(numbers))

    @staticmethod
    def from_ints(plan: ElasticPlan, worker: int, numbers: Sequence[int]) -> Row:
        """What ``to_ints`` of that worker gave."""
        single = dict(zip(_SINGLE, numbers, strict=False))
        slots = len(SLOTS)
        rest = numbers[len(_SINGLE) :]
        wards = [rest[at : at + slots + 1] for at in range(2 * slots, len(rest), slots + 1)]
        wards = wards[: len(plan.wards_of(worker))]
        return Row(
            **single,
            used=tuple(rest[:slots]),
            sent=tuple(rest[slots : 2 * slots]),
            wards=tuple(tuple(ward[:slots]) for ward in wards),
            ward_updates=tuple(ward[slots] for ward in wards),
        )


_SINGLE = tuple(entry.name for entry in fields(Row) if entry.type == "int")


def _length(plan: ElasticPlan) -> int:
    most = max(len(plan.wards_of(worker)) for worker in plan.placement.workers)
    return len(_SINGLE) + 2 * len(SLOTS) + most * (len(SLOTS) + 1)


def total(sums: Mapping[str, int]) -> int:
    """One number for the numbers of all names."""
    return sum(sums.values()) % MODULUS
