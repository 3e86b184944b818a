"""Collective algorithms as programs: who sends which bytes to whom, and what is computed between.

Pure: a ``Team`` says who the members are, ``Region``s say where the bytes are, and what comes back is data
(``transport.program``). Nothing here knows tensors, processes or epochs. Sizes are bytes; ``item`` is the size of an
element, and regions hold whole elements.

Sums. Up to ``DIRECT_MEMBERS`` members, and in larger teams that are ``deterministic``, every element is summed in the
order of the members, whichever algorithm its size selects: the bits of a sum depend on the logical members alone. In
larger teams that are not, large reductions go round a ring, which needs links to two neighbours only; each segment is
then summed once, in an order rotated by its place, so members still agree bit for bit.

Small tensors and barriers. Teams of up to ``EXCHANGE_MEMBERS`` exchange in log2(n) rounds with members 1, 2, 4, ...
places away; everybody reduces. In larger ones contributions go up a tree and the result, reduced by its root, comes
down. Who is whose parent follows from worker ids (``tree``), so few links are new after an edit.

Wrong use. When members disagree about the operation, one meets a frame with a wrong tag, and all others wait, directly
or through others, for one who has met it: the transport's objections reach everybody who has not returned before. For
that operations with a root begin with a roll call, and

* in teams of up to ``EXCHANGE_MEMBERS``, each member sends in its first round to the one before it and receives from
  the one behind it, at least;
* in larger ones, each receives in its first round from all its children in the tree, and sends to its parent: in that
  round too, or, where the operation goes up the tree, in the next. So of a child and a parent that disagree, with no
  such two below them, the parent meets the child's frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_elas.runtime.communicator.tree import Perch, find_perch
from megatron_elas.runtime.transport.program import SCRATCH, Copy, Program, Reduce, Reducer, Region, Round, Transfer

DIRECT_MEMBERS = 8
"""Largest team in which everybody talks to everybody in operations on large tensors: (n - 1) links per member."""

EXCHANGE_MEMBERS = 4
"""Largest team that does not use the tree: everybody is told at first hand."""

SMALL_BYTES = 64 << 10
"""Up to this size, and for two members up to ``PAIR_BYTES``, whole tensors are brought to who reduces them, everybody
or the root of the tree: fewer messages for more bytes."""

PAIR_BYTES = 512 << 10

SCRATCH_BYTES = 2 << 20
"""Received and not yet reduced bytes at one time: they should still be in the cache when they are reduced."""

SPREAD_BYTES = 1 << 20
"""From this size on a broadcast to three or more is a scatter and an all-gather: no member sends the whole more than
about twice, where a tree's root sends it log2(n) times."""

TOGETHER_BYTES = 4 << 20
"""Scratch that operations on several tensors may use to run at once."""

_ALIGNMENT = 64


class Team(NamedTuple):
    """Who takes part."""

    members: tuple[int, ...]
    """Worker ids, in group order."""
    me: int
    """Own position in ``members``."""
    deterministic: bool = False
    """Sum in member order also where a ring would need fewer links."""

    @property
    def others(self) -> list[int]:
        """Positions of the other members, starting behind the own one so that not everybody sends to the first."""
        count = len(self.members)
        return [(self.me + step) % count for step in range(1, count)]

    @property
    def sums_in_order(self) -> bool:
        """Large reductions are direct."""
        return self.deterministic or len(self.members) <= DIRECT_MEMBERS

    @property
    def uses_tree(self) -> bool:
        """Small operations go up and down the tree."""
        return len(self.members) > EXCHANGE_MEMBERS

    @property
    def perch(self) -> Perch:
        """Own place in the tree."""
        return find_perch(self.members, self.members[self.me])

    def to(self, place: int, region: Region) -> Transfer:
        """A transfer to or from the member at ``place``, modulo their number."""
        return Transfer(self.members[place % len(self.members)], region)


# ---------------------------------------------------------------------------------------------- reductions


def rings(team: Team, size: int) -> bool:
    """Whether an ``all_reduce`` of ``size`` bytes passes partial sums round a ring."""
    return size > SMALL_BYTES and not team.sums_in_order


def all_reduce(team: Team, whole: Region, item: int, reducer: Reducer) -> Program:
    """Reduce over all members, in place."""
    count = len(team.members)
    if whole.size <= SMALL_BYTES or (count == 2 and whole.size <= PAIR_BYTES):
        return _all_reduce_whole(team, whole, reducer)
    segments = cut(whole, item, count)
    return chain(
        reduce_scatter(team, segments[team.me], segments, item, reducer),
        all_gather(team, segments, segments[team.me]),
    )


def _all_reduce_whole(team: Team, whole: Region, reducer: Reducer) -> Program:
    if team.uses_tree:
        perch = team.perch
        rounds, rows = _climb(team, perch, whole)
        if perch.parent is None:
            rows[team.me] = whole
            rounds[-1] = rounds[-1]._replace(then=_reduce([rows[at] for at in range(len(rows))], whole))
        return Program((*rounds, *_descend(perch, whole)), _aligned(len(rows) * whole.size), reducer)
    rounds, rows = _gather_rows(team, whole, keep_own=False)
    last = rounds[-1]
    rounds[-1] = last._replace(then=(*last.then, *_reduce([rows[at] for at in range(len(rows))], whole)))
    return Program(tuple(rounds), _aligned(len(rows) * whole.size), reducer)


def reduce_scatter(team: Team, output: Region, inputs: Sequence[Region], item: int, reducer: Reducer) -> Program:
    """Reduce ``inputs[i]`` over all members to member i's ``output``.

    Inputs may differ in length by member, as long as all members agree; ``output`` may be ``inputs[me]``. The other
    inputs are left as they are.
    """
    if team.sums_in_order:
        return _reduce_scatter_direct(team, output, inputs, item, reducer)
    return _reduce_scatter_ring(team, output, inputs, reducer)


def _reduce_scatter_direct(
    team: Team, output: Region, inputs: Sequence[Region], item: int, reducer: Reducer
) -> Program:
    others = team.others
    step = max(item, SCRATCH_BYTES // len(others) // item * item)
    width = _aligned(min(step, output.size))
    rounds = []
    for start in range(0, max(1, *(region.size for region in inputs)), step):
        mine = _part(inputs[team.me], start, step)
        rows = {peer: Region(SCRATCH, at * width, mine.size) for at, peer in enumerate(others)}
        rounds.append(
            Round(
                tuple(team.to(peer, _part(inputs[peer], start, step)) for peer in others),
                tuple(team.to(peer, rows[peer]) for peer in others),
                _reduce([rows.get(at, mine) for at in range(len(inputs))], _part(output, start, step)),
            )
        )
    return Program(tuple(rounds), len(others) * width, reducer)


def _reduce_scatter_ring(team: Team, output: Region, inputs: Sequence[Region], reducer: Reducer) -> Program:
    count, me = len(team.members), team.me
    width = _aligned(max(region.size for region in inputs))
    outgoing = inputs[(me + 1) % count]
    rounds = []
    for step in range(count - 1):
        mine = inputs[(me + step + 2) % count]
        incoming = Region(SCRATCH, step % 2 * width, mine.size)
        target = output if step == count - 2 else incoming
        rounds.append(
            Round((team.to(me - 1, outgoing),), (team.to(me + 1, incoming),), _reduce([incoming, mine], target))
        )
        outgoing = incoming
    return Program(_met(team, rounds), 2 * width, reducer)


def reduce(team: Team, whole: Region, item: int, root: int, reducer: Reducer) -> Program:
    """Reduce to the root's ``whole``; the others' is left as it is. In member order, as all sums with a root."""
    roll = barrier(team)
    others = [at for at in range(len(team.members)) if at != root]
    step = max(item, SCRATCH_BYTES // len(others) // item * item)
    width = _aligned(min(step, whole.size))
    rounds = []
    for start in range(0, max(1, whole.size), step):
        mine = _part(whole, start, step)
        if team.me != root:
            rounds.append(Round(sends=(team.to(root, mine),)))
            continue
        rows = {peer: Region(SCRATCH, at * width, mine.size) for at, peer in enumerate(others)}
        rounds.append(
            Round(
                receives=tuple(team.to(peer, rows[peer]) for peer in team.others),
                then=_reduce([rows.get(at, mine) for at in range(len(team.members))], mine),
            )
        )
    return chain(roll, Program(tuple(rounds), len(others) * width if team.me == root else 0, reducer))


# ---------------------------------------------------------------------------------------------- moving


def all_gather(team: Team, outputs: Sequence[Region], own: Region) -> Program:
    """Bring member i's ``own`` to everybody's ``outputs[i]``. The own output may be ``own``."""
    count, me = len(team.members), team.me
    if count > 2 and own.size <= SMALL_BYTES and all(output.size == own.size for output in outputs):
        if team.uses_tree:
            return _all_gather_tree(team, outputs, own)
        rounds, rows = _gather_rows(team, own, keep_own=outputs[me] != own)
        last = rounds[-1]
        rounds[-1] = last._replace(
            then=(*last.then, *(step for at in range(count) for step in _copy(rows[at], outputs[at])))
        )
        return Program(tuple(rounds), _aligned(count * own.size))
    if count <= DIRECT_MEMBERS:
        return Program(
            (
                Round(
                    tuple(team.to(peer, own) for peer in team.others),
                    tuple(team.to(peer, outputs[peer]) for peer in team.others),
                    _copy(own, outputs[me]),
                ),
            )
        )
    rounds = [
        Round(
            (team.to(me - 1, outputs[(me + step) % count] if step else own),),
            (team.to(me + 1, outputs[(me + step + 1) % count]),),
        )
        for step in range(count - 1)
    ]
    rounds[0] = rounds[0]._replace(then=_copy(own, outputs[me]))
    return Program(_met(team, rounds))


def _all_gather_tree(team: Team, outputs: Sequence[Region], own: Region) -> Program:
    perch = team.perch
    rounds, rows = _climb(team, perch, own)
    size = len(rows) * own.size
    if perch.parent is None:
        rounds[-1] = rounds[-1]._replace(then=_copy(own, rows[team.me]))
    rounds += _descend(perch, Region(SCRATCH, 0, size))
    copies = tuple(step for at, output in enumerate(outputs) for step in _copy(rows[at], output))
    rounds[-1] = rounds[-1]._replace(then=(*rounds[-1].then, *copies))
    return Program(tuple(rounds), _aligned(size))


def _gather_rows(team: Team, own: Region, *, keep_own: bool) -> tuple[list[Round], dict[int, Region]]:
    """Bring all members' regions of one size to scratch. Bruck's algorithm: log2(n) rounds, one message each.

    Args:
        team: The members.
        own: What this one brings.
        keep_own: Own row in scratch too; else it stays where it is, unless it is needed there for sending.

    Returns:
        The rounds, and where each member's bytes are in the end.
    """
    count, me, size = len(team.members), team.me, own.size
    rounds = []
    have = 1  # row j of scratch holds what the member j places behind brought, for j < have
    while have < count:
        more = min(have, count - have)
        rounds.append(
            Round(
                (team.to(me - have, own if have == 1 else Region(SCRATCH, 0, more * size)),),
                (team.to(me + have, Region(SCRATCH, have * size, more * size)),),
                _copy(own, Region(SCRATCH, 0, size)) if have == 1 and (count > 2 or keep_own) else (),
            )
        )
        have += more
    rows = {(me + at) % count: Region(SCRATCH, at * size, size) for at in range(1, count)}
    return rounds, {**rows, me: own}


def broadcast(team: Team, whole: Region, item: int, root: int) -> Program:
    """Copy the root's region to everybody: down a binomial tree, or scattered and gathered where it is large."""
    count = len(team.members)
    if count > 2 and whole.size >= SPREAD_BYTES:
        segments = cut(whole, item, count)
        return chain(
            scatter(team, segments[team.me], segments, root),
            all_gather(team, segments, segments[team.me]),
        )
    place = (team.me - root) % count  # place in the tree: 0 is the root
    low = place & -place  # the lowest set bit leads to the parent; all lower ones to children
    rounds = []
    if place:
        rounds.append(Round(receives=(team.to(place - low + root, whole),)))
    else:
        low = 1 << (count - 1).bit_length()
    children = []
    while (low := low >> 1) > 0:
        if place + low < count:
            children.append(team.to(place + low + root, whole))
    if children:
        rounds.append(Round(sends=tuple(children)))
    return chain(barrier(team), Program(tuple(rounds)))


def gather(team: Team, outputs: Sequence[Region], own: Region, root: int) -> Program:
    """Bring member i's ``own`` to the root's ``outputs[i]``; elsewhere ``outputs`` is not looked at."""
    if team.me != root:
        move = Round(sends=(team.to(root, own),))
    else:
        move = Round(
            receives=tuple(team.to(peer, outputs[peer]) for peer in team.others), then=_copy(own, outputs[root])
        )
    return chain(barrier(team), Program((move,)))


def scatter(team: Team, output: Region, inputs: Sequence[Region], root: int) -> Program:
    """Bring the root's ``inputs[i]`` to member i; elsewhere ``inputs`` is not looked at."""
    if team.me != root:
        move = Round(receives=(team.to(root, output),))
    else:
        move = Round(sends=tuple(team.to(peer, inputs[peer]) for peer in team.others), then=_copy(inputs[root], output))
    return chain(barrier(team), Program((move,)))


def all_to_all(team: Team, outputs: Sequence[Region], inputs: Sequence[Region]) -> Program:
    """Bring ``inputs[i]`` to member i's ``outputs[me]``. Lengths may differ; both sides must agree on each."""
    return Program(
        (
            Round(
                tuple(team.to(peer, inputs[peer]) for peer in team.others),
                tuple(team.to(peer, outputs[peer]) for peer in team.others),
                _copy(inputs[team.me], outputs[team.me]),
            ),
        )
    )


def barrier(team: Team) -> Program:
    """Return when everybody has called it. Empty messages up and down the tree, or log2(n) rounds of them."""
    nothing = Region(SCRATCH, 0, 0)
    if team.uses_tree:
        perch = team.perch
        rounds, _ = _climb(team, perch, nothing)
        return Program((*rounds, *_descend(perch, nothing)))
    rounds = []
    step = 1
    while step < len(team.members):
        rounds.append(Round((team.to(team.me - step, nothing),), (team.to(team.me + step, nothing),)))
        step *= 2
    return Program(tuple(rounds))


# ---------------------------------------------------------------------------------------------- the tree


def _climb(team: Team, perch: Perch, own: Region) -> tuple[list[Round], dict[int, Region]]:
    """Bring all members' regions of one size to the root's scratch, in the order of worker ids.

    Returns:
        The own rounds, and which part of scratch is each member's: at the root all but the own one is filled then, and
        elsewhere what is in the own branch.
    """
    size = own.size
    rows = {at: Region(SCRATCH, place * size, size) for place, at in enumerate(_by_worker(team))}
    first = perch.own.start
    rounds = []
    if perch.children:
        children = tuple(
            Transfer(child.top, Region(SCRATCH, child.start * size, child.count * size)) for child in perch.children
        )
        rounds.append(Round(receives=children, then=() if perch.parent is None else _copy(own, rows[team.me])))
    if perch.parent is not None:
        packed = Region(SCRATCH, first * size, perch.own.count * size) if perch.children else own
        rounds.append(Round(sends=(Transfer(perch.parent, packed),)))
    return rounds, rows


def _descend(perch: Perch, whole: Region) -> list[Round]:
    """Copy the root's region to everybody."""
    rounds = []
    if perch.parent is not None:
        rounds.append(Round(receives=(Transfer(perch.parent, whole),)))
    if perch.children:
        rounds.append(Round(sends=tuple(Transfer(child.top, whole) for child in perch.children)))
    return rounds


def _met(team: Team, rounds: Sequence[Round]) -> tuple[Round, ...]:
    """With an empty message from child to parent in the first round, where the team uses the tree."""
    if not team.uses_tree:
        return tuple(rounds)
    nothing = Region(SCRATCH, 0, 0)
    perch = team.perch
    first = rounds[0]
    parent = () if perch.parent is None else (Transfer(perch.parent, nothing),)
    children = tuple(Transfer(child.top, nothing) for child in perch.children)
    return (first._replace(sends=first.sends + parent, receives=first.receives + children), *rounds[1:])


def _by_worker(team: Team) -> list[int]:
    """Positions in the order of worker ids."""
    return sorted(range(len(team.members)), key=team.members.__getitem__)


# ---------------------------------------------------------------------------------------------- several at once


def chain(*programs: Program) -> Program:
    """One after the other. They use the same scratch memory."""
    return Program(
        tuple(one for program in programs for one in program.rounds),
        max(program.scratch_bytes for program in programs),
        next((program.reducer for program in programs if program.reducer is not None), None),
    )


def together(programs: Sequence[Program]) -> Program:
    """Operations of one kind on several tensors: at once where they talk to the same peers in the same rounds.

    Which do is the same on all members, as sizes are, so both ends of a link use it in the same order.
    """
    batches: list[list[Program]] = []
    used = 0
    for program in programs:
        fits = used + program.scratch_bytes <= TOGETHER_BYTES
        if batches and fits and _partners(batches[-1][0]) == _partners(program):
            batches[-1].append(program)
            used += program.scratch_bytes
        else:
            batches.append([program])
            used = program.scratch_bytes
    return chain(*map(_abreast, batches))


def _partners(program: Program) -> list[tuple[list[int], list[int]]]:
    return [([send.peer for send in one.sends], [receive.peer for receive in one.receives]) for one in program.rounds]


def _abreast(programs: Sequence[Program]) -> Program:
    if len(programs) == 1:
        return programs[0]
    scratch = 0
    moved = []
    for program in programs:
        moved.append([_with_scratch_from(one, scratch) for one in program.rounds])
        scratch += _aligned(program.scratch_bytes)
    rounds = tuple(
        Round(
            tuple(send for one in abreast for send in one.sends),
            tuple(receive for one in abreast for receive in one.receives),
            tuple(step for one in abreast for step in one.then),
        )
        for abreast in zip(*moved, strict=True)
    )
    return Program(rounds, scratch, programs[0].reducer)


def _with_scratch_from(one: Round, start: int) -> Round:
    def at(region: Region) -> Region:
        return region._replace(start=region.start + start) if region.buffer == SCRATCH else region

    return Round(
        tuple(Transfer(send.peer, at(send.region)) for send in one.sends),
        tuple(Transfer(receive.peer, at(receive.region)) for receive in one.receives),
        tuple(
            Copy(at(step.source), at(step.target))
            if isinstance(step, Copy)
            else Reduce(tuple(map(at, step.sources)), at(step.target))
            for step in one.then
        ),
    )


# ---------------------------------------------------------------------------------------------- parts


def cut(whole: Region, item: int, count: int) -> list[Region]:
    """Cut into ``count`` regions whose lengths differ by at most one element."""
    return list(_cuts(whole, item, count))


def _cuts(whole: Region, item: int, count: int) -> Iterator[Region]:
    base, more = divmod(whole.size // item, count)
    start = whole.start
    for at in range(count):
        size = (base + (at < more)) * item
        yield Region(whole.buffer, start, size)
        start += size


def _part(region: Region, start: int, size: int) -> Region:
    """``size`` bytes from ``start`` on, or what there is of them."""
    start = min(start, region.size)
    return Region(region.buffer, region.start + start, min(size, region.size - start))


def _copy(source: Region, target: Region) -> tuple[Copy, ...]:
    return () if source == target or not source.size else (Copy(source, target),)


def _reduce(sources: Sequence[Region], target: Region) -> tuple[Reduce, ...]:
    return (Reduce(tuple(sources), target),) if target.size else ()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
