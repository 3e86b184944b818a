"""Runs the programs of all members of a team in one thread, round by round, without a transport."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from megatron_elas.runtime.communicator.collectives import Team
from megatron_elas.runtime.transport.program import SCRATCH, Copy, Program, Region

Memory = list[bytearray]
"""Buffers of one member, in the order of the program's numbers."""


def teams(count: int, *, deterministic: bool = False) -> list[Team]:
    """Members whose worker ids are not their positions."""
    workers = tuple(100 - 3 * at for at in range(count))
    return [Team(workers, at, deterministic) for at in range(count)]


def find_unaware(members: Sequence[Team], programs: Sequence[Program], operations: Sequence[str]) -> list[int]:
    """Positions of who never learns that members called different operations.

    A frame says the operation. Who meets one of another operation fails, and so does, as objections do it, who waits
    for one that has failed. Who came to the end counts as unaware.
    """
    pipes: defaultdict[tuple[int, int], deque[str]] = defaultdict(deque)
    ids = members[0].members
    at, entered, failed = [0] * len(ids), [-1] * len(ids), [False] * len(ids)
    missing: list[list[int]] = [[] for _ in ids]

    def advance(me: int) -> bool:
        if failed[me] or at[me] == len(programs[me].rounds):
            return False
        sends, receives, _ = programs[me].rounds[at[me]]
        moved = entered[me] < at[me]
        if moved:
            entered[me] = at[me]
            missing[me] = [peer for peer, _ in receives]
            for peer, _ in sends:
                pipes[ids[me], peer].append(operations[me])
        for peer in list(missing[me]):
            if pipes[peer, ids[me]]:
                failed[me] |= pipes[peer, ids[me]].popleft() != operations[me]
                missing[me].remove(peer)
                moved = True
            else:
                failed[me] |= failed[ids.index(peer)]
        if not failed[me] and missing[me]:
            return moved
        at[me] += 1
        return True

    while any([advance(me) for me in range(len(ids))]):
        pass
    return [me for me in range(len(ids)) if not failed[me]]


def run(members: Sequence[Team], programs: Sequence[Program], memories: Sequence[Memory]) -> None:
    """Run them all to the end.

    Raises:
        AssertionError: They wait for each other, lengths differ, or something was sent that nobody received.
    """
    pipes: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)
    ids = members[0].members
    places = [[*memory, bytearray(program.scratch_bytes)] for memory, program in zip(memories, programs, strict=True)]
    at = [0] * len(programs)
    entered = [-1] * len(programs)

    def view(member: int, region: Region) -> memoryview:
        if region.buffer == SCRATCH:
            assert region.start + region.size <= programs[member].scratch_bytes, f"{region} is beyond the scratch"
        whole = memoryview(places[member][region.buffer])
        assert region.start + region.size <= len(whole), f"{region} is beyond its buffer of {len(whole)} bytes"
        return whole[region.start : region.start + region.size]

    def advance(member: int) -> bool:
        """Do what can be done of the next round; True when it was completed."""
        program = programs[member]
        if at[member] == len(program.rounds):
            return False
        sends, receives, then = program.rounds[at[member]]
        if entered[member] < at[member]:
            entered[member] = at[member]
            for peer, region in sends:
                assert peer != ids[member], "a member sends to itself"
                pipes[ids[member], peer].append(bytes(view(member, region)))
        wanted: defaultdict[int, int] = defaultdict(int)
        for peer, _ in receives:
            wanted[peer] += 1
        if any(len(pipes[peer, ids[member]]) < number for peer, number in wanted.items()):
            return False
        for peer, region in receives:
            data = pipes[peer, ids[member]].popleft()
            assert len(data) == region.size, f"{peer} sent {len(data)} bytes, {ids[member]} expected {region.size}"
            view(member, region)[:] = data
        for step in then:
            if isinstance(step, Copy):
                view(member, step.target)[:] = bytes(view(member, step.source))
            else:
                assert program.reducer is not None
                assert {source.size for source in step.sources} == {step.target.size}
                before = [bytes(view(member, source)) for source in step.sources]
                program.reducer.reduce([view(member, source) for source in step.sources], view(member, step.target))
                for source, data in zip(step.sources, before, strict=True):
                    assert source == step.target or bytes(view(member, source)) == data, "a source was overwritten"
        at[member] += 1
        return True

    while any([advance(member) for member in range(len(programs))]):
        pass
    stuck = [member for member, program in enumerate(programs) if at[member] < len(program.rounds)]
    assert not stuck, f"members {stuck} wait for ever in rounds {[at[member] for member in stuck]}"
    assert not any(pipes.values()), "something was sent that nobody received"
