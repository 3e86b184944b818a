"""The tree that small operations of larger groups go up and down. It follows from worker ids, not from positions.

Write the ids as binary numbers into a trie. Each of its subtrees is led by its smallest member, and a member's parent
leads the smallest subtree that the member is in and does not lead itself. Of members 2, 6, 10, 14 the root is 2, with
children 6 and 10, and 14 hangs on 10. So

* members that go or come leave the others where they are: with k children of its own, one that goes takes at most
  k + 1 edges with it and at most k are new;
* what hangs below a member, itself included, is a run of the members in the order of their ids;
* no way to the root has more edges than the longest id has bits, and ids without gaps give a binomial tree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple


class Branch(NamedTuple):
    """A member with all that hangs below it: a run of the members in the order of their ids."""

    top: int
    """Worker id."""
    start: int
    """Place of ``top``, its first member, among all ids in order."""
    count: int
    """Members, with ``top``."""


class Perch(NamedTuple):
    """One member's place in the tree."""

    parent: int | None
    """Worker id; None for the root."""
    children: tuple[Branch, ...]
    """In the order of their ids."""
    own: Branch

    @property
    def neighbours(self) -> list[int]:
        """Worker ids of parent and children."""
        parent = [] if self.parent is None else [self.parent]
        return parent + [child.top for child in self.children]


def find_perch(members: Sequence[int], worker: int) -> Perch:
    """Where ``worker`` is in the tree of ``members``, which may be in any order.

    Args:
        members: Worker ids, not negative, each once.
        worker: One of them.
    """
    ids = sorted(members)
    own = _branch(ids, ids.index(worker))
    children = []
    at = own.start + 1
    while at < own.start + own.count:
        children.append(_branch(ids, at))
        at += children[-1].count
    return Perch(_parent(ids, own.start), tuple(children), own)


def _branch(ids: Sequence[int], at: int) -> Branch:
    """All that share with ``ids[at]`` what tells it from the id before it. Not so for the first: all."""
    if at == 0:
        return Branch(ids[0], 0, len(ids))
    bits = (ids[at] ^ ids[at - 1]).bit_length() - 1  # below the highest bit that differs
    end = bisect_left(ids, ((ids[at] >> bits) + 1) << bits)
    return Branch(ids[at], at, end - at)


def _parent(ids: Sequence[int], at: int) -> int | None:
    if at == 0:
        return None
    bits = (ids[at] ^ ids[at - 1]).bit_length()
    return ids[bisect_left(ids, ids[at] >> bits << bits)]
