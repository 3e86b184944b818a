"""Who keeps whose copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_elas.spec.layout import Placement


def place_backups(placement: Placement, domains: Mapping[int, str]) -> tuple[tuple[int, int], ...]:
    """Give every seated worker a backup, in another failure domain where there is one.

    The backup of a worker is the next one on the ring of its replicas (same stage and lane) that
    lives in another failure domain; failing that, the next on the ring. A worker without replicas
    has none: with its cell the stage's layers are gone, so a copy of its optimizer would not help.

    Example: stages [0 1 4] [2], domains a a b | a: 0->4, 1->4, 4->0, and 2 has none.

    Returns:
        Pairs (owner, backup) by ascending owner.
    """
    pairs = []
    for stage in range(placement.num_stages):
        for lane in range(placement.tensor_parallel):
            ring = placement.replicas(stage, lane)
            for i, owner in enumerate(ring):
                others = ring[i + 1 :] + ring[:i]
                if others:
                    pairs.append((owner, _in_other_domain(owner, others, domains)))
    return tuple(sorted(pairs))


def _in_other_domain(owner: int, others: Sequence[int], domains: Mapping[int, str]) -> int:
    mine = domains.get(owner)
    return next((w for w in others if domains.get(w) != mine), others[0])
