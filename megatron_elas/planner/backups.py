"""Who keeps whose copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property

from megatron_elas.spec.layout import Placement


def place_backups(placement: Placement, domains: Mapping[int, str], replicas: int = 1) -> tuple[tuple[int, int], ...]:
    """Give every seated worker backups: in other failure domains where there are such, and all of them different.

    Owners choose one after the other, by stage, lane and cell, in as many rounds as there are replicas. Candidates
    for an owner are, in this order,

    1. its replicas (same stage and lane) in other domains, from the next one on the ring of replicas,
    2. workers of other stages in other domains, from the next one on the ring of all seated workers,
    3. other lanes of its own stage in other domains, on the same ring,
    4. to 6. the same in its own domain.

    In round ``r`` (from 0), of the first of these classes with anybody in it, the first one is taken who has at most
    ``r`` wards; if there is none, the first of those with the fewest. From the second round on, domains that the
    owner has a backup in already count as its own, and the ring of all workers begins behind the last backup. So
    copies are spread evenly, a lost cell's state is mostly with the cells that take its place, and the state of a
    whole stage is found elsewhere if it has one cell, or if all its cells are in one domain.

    Example: ``stage 0: [0] [1] [4] | stage 1: [2]``, domains 0 a, 1 a, 4 b, 2 b. First round: 0 -> 4, its only replica
    in another domain, and so 1 -> 4; 4 -> 0, next on its ring; 2 -> 1, because 0, next on the ring of all, has a ward
    and 1 has none. Second round: the two domains count as own for everybody, so replicas come first again, 0 -> 1 and
    1 -> 0, 4 -> 1; and 2 -> 4, which comes behind 1 and has no more wards than 0.

    Args:
        placement: The seats.
        domains: Failure domain of each worker.
        replicas: Backups of every worker; fewer where there are not as many other workers.

    Returns:
        Pairs (owner, backup) by ascending owner, nearest backup first.
    """
    return _Placing(placement, domains).place(replicas)


class _Placing:
    """Backups chosen so far."""

    def __init__(self, placement: Placement, domains: Mapping[int, str]) -> None:
        self.placement = placement
        self.everybody = placement.workers
        self.domain_of = {worker: domains.get(worker) for worker in self.everybody}
        self.all_domains = frozenset(self.domain_of.values())
        self.wards = dict.fromkeys(self.everybody, 0)
        self.rounds: list[dict[int, int]] = []
        """Of every round: owner -> backup."""

    @cached_property
    def position(self) -> dict[int, int]:
        """Of every seated worker on the ring of all."""
        return {worker: at for at, worker in enumerate(self.everybody)}

    @cached_property
    def stage_of(self) -> dict[int, int]:
        """Of every seated worker."""
        return {
            worker: stage
            for stage, cells in enumerate(self.placement.stages)
            for cell in cells
            for worker in cell.workers
        }

    def place(self, replicas: int) -> tuple[tuple[int, int], ...]:
        """See place_backups."""
        for most in range(replicas):
            self.rounds.append({})
            for stage in range(self.placement.num_stages):
                for lane in range(self.placement.tensor_parallel):
                    self._serve(self.placement.replicas(stage, lane), most)
        owners = sorted(self.everybody)
        return tuple([(owner, chosen[owner]) for owner in owners for chosen in self.rounds if owner in chosen])

    def _taken(self, owner: int) -> list[int]:
        """Backups that an owner has already."""
        return [chosen[owner] for chosen in self.rounds if owner in chosen]

    def _serve(self, ring: Sequence[int], most: int) -> None:
        """Have every replica of a ring choose."""
        ring_domains = frozenset([self.domain_of[worker] for worker in ring])
        for at, owner in enumerate(ring):
            used = {self.domain_of[owner]}
            if most:
                used.update([self.domain_of[worker] for worker in self._taken(owner)])
            backup = None if used >= ring_domains else self._next(ring, at, used, most)
            if backup is None:
                backup = self._choose(self._classes(owner, ring, at, used, ring_domains), most)
            if backup is not None:
                self.rounds[most][owner] = backup
                self.wards[backup] += 1

    def _next(self, ring: Sequence[int], at: int, used: Set[str | None], most: int) -> int | None:
        """The next one on the ring in another domain, if nobody else has to be looked at, as nearly always."""
        for step in range(at + 1, at + len(ring)):
            worker = ring[step % len(ring)]
            if self.domain_of[worker] not in used:
                return worker if self.wards[worker] <= most else None
        return None

    def _choose(self, classes: Iterator[Iterator[int]], most: int) -> int | None:
        for candidates in classes:
            fewest = None
            for worker in candidates:
                if fewest is None or self.wards[worker] < self.wards[fewest]:
                    fewest = worker
                if self.wards[fewest] <= most:
                    break
            if fewest is not None:
                return fewest
        return None

    def _classes(
        self, owner: int, ring: Sequence[int], at: int, used: Set[str | None], ring_domains: Set[str | None]
    ) -> Iterator[Iterator[int]]:
        """Candidates, best class first, the nearest first in each."""
        taken = self._taken(owner)
        start = self.position[taken[-1] if taken else owner]
        stage = self.stage_of[owner]

        def kept(workers: Iterator[int], far: bool) -> Iterator[int]:
            return (w for w in workers if (self.domain_of[w] not in used) == far and w not in (owner, *taken))

        def of_stage(own: bool) -> Iterator[int]:
            return (w for w in _after(self.everybody, start) if (self.stage_of[w] == stage) == own)

        for far in (True, False):
            # Nobody is looked for in vain where everybody is in these domains.
            if far and used >= self.all_domains:
                continue
            if not (far and used >= ring_domains):
                yield kept(_after(ring, at), far)
            yield kept(of_stage(own=False), far)
            yield kept((w for w in of_stage(own=True) if w not in ring), far)


def _after(ring: Sequence[int], at: int) -> Iterator[int]:
    """The others, from the next one on."""
    for step in range(1, len(ring)):
        yield ring[(at + step) % len(ring)]
