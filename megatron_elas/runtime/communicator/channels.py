"""Numbers of the channels that a process uses, equal on all its peers without talking.

======================== =====================================================
range                    use
======================== =====================================================
0 ... 2^31 - 1           collectives of a group that c10d numbered
2^31 ... 2^32 - 1        collectives of a group that c10d named by a hash
2^32 ... 2^33 - 1        point-to-point of the group whose channel is 2^32 less
2^33 ... 2^33 + 2^32 - 1 introductions of the accelerator's inner group of the
                         group whose channel is 2^33 less
2^34 ... 2^34 + 2^32 - 1 the same for inner groups of two members of it
2^40 and up              free for other users of the transport
======================== =====================================================
"""

from __future__ import annotations

import hashlib

POINT_TO_POINT = 1 << 32
"""Added to a group's channel for its sends and receives, so that they cannot mix with its collectives."""

INTRODUCTION = 1 << 33
"""Added to a group's channel where the members of its inner group on an accelerator meet."""

PAIR_INTRODUCTION = 1 << 34
"""Added to a group's channel where two of its members meet for sends and receives on an accelerator."""

FIRST_FREE = 1 << 40
"""Channels of snapshots, migration and the like start here."""

_HASHED = 1 << 31


def channels_of_group(channel: int) -> tuple[int, ...]:
    """All that a group whose channel this is may use."""
    return (channel, channel + POINT_TO_POINT, channel + INTRODUCTION, channel + PAIR_INTRODUCTION)


def related_to(channel: int) -> tuple[int, ...]:
    """Whose users may wait for a worker whose epoch ended on this one: a group's collectives and point-to-point."""
    if 0 <= channel < POINT_TO_POINT:
        return (channel + POINT_TO_POINT,)
    return (channel - POINT_TO_POINT,) if channel < 2 * POINT_TO_POINT else ()


def channel_of(group_name: str) -> int:
    """The channel of a group, from the name that c10d gives it.

    c10d counts groups (``"0"`` is the default one), also on processes that are not members, so the same group has the
    same name everywhere as long as all processes create groups in the same order. Groups made with
    ``use_local_synchronization`` are named by a hash of their ranks.
    """
    if group_name.isdecimal() and int(group_name) < _HASHED:
        return int(group_name)
    digest = hashlib.sha256(group_name.encode()).digest()
    return _HASHED | int.from_bytes(digest[:4], "little") >> 1
