"""Compares copies of optimizer shards with what their owners use, while training goes on.

# P elements of one slot of a shard; a flat shard has 3 P + 1 elements, fp32, on the CPU.

Owners and backups exchange three checksums one way and one byte the other; only a copy that differs is sent anew.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from megatron_elas.runtime.channels import SNAPSHOTS
from megatron_elas.runtime.communicator.buffers import as_bytes
from megatron_elas.runtime.store import ShardStore
from megatron_elas.runtime.transport.base import Part, Transport
from megatron_elas.runtime.verification.inspection import flat_sums
from megatron_elas.spec.shards import SLOTS

SUMS = 1 << 18
"""Added to the tag of checksums; steps take the 16 lowest bits."""
VERDICTS = 1 << 19
COPIES = 1 << 20
_SUMS = struct.Struct(f"<{len(SLOTS)}Qf")
_SAME, _DIFFERENT = b"\0", b"\1"


@dataclass(frozen=True, slots=True, kw_only=True)
class BadCopy:
    """A copy kept here that was not what its owner uses; it was replaced."""

    owner: int
    step: int
    """Before which the two were compared."""
    slot: str
    """The first that differed; ``step`` if only the count of updates did; ``version`` if the copy was of another."""


def compare_copies(store: ShardStore, version: int, transport: Transport) -> list[BadCopy]:
    """Compare, and send anew what differs. Called by owners and backups at the same point of a step.

    Args:
        store: With the own copy complete with the version.
        version: Of the state in use.
        transport: Links to the others.

    Returns:
        The bad copies that were kept here.

    Raises:
        EpochChanged, PeerLost: Cut short; a copy that was to be replaced then is not held.
    """
    tag = version & 0xFFFF
    own = store.own.get(version)
    told = _SUMS.pack(*flat_sums(own), float(own[-1]))
    heard = {ward: bytearray(_SUMS.size) for ward in store.wards}
    transport.exchange(
        SNAPSHOTS,
        SUMS | tag,
        [Part(backup, memoryview(told)) for backup in store.backups],
        [Part(ward, memoryview(buffer)) for ward, buffer in heard.items()],
    )
    bad = []
    for ward, buffer in heard.items():
        slot = _find_difference(store, ward, version, _SUMS.unpack(buffer))
        if slot is not None:
            bad.append(BadCopy(owner=ward, step=version, slot=slot))
    owners = [copy.owner for copy in bad]
    verdicts = {backup: bytearray(1) for backup in store.backups}
    transport.exchange(
        SNAPSHOTS,
        VERDICTS | tag,
        [Part(ward, memoryview(_DIFFERENT if ward in owners else _SAME)) for ward in store.wards],
        [Part(backup, memoryview(buffer)) for backup, buffer in verdicts.items()],
    )
    sends = [Part(backup, as_bytes(own)) for backup, verdict in verdicts.items() if verdict == _DIFFERENT]
    if sends or owners:
        receives = [Part(ward, as_bytes(store.wards[ward].begin(version))) for ward in owners]
        transport.exchange(SNAPSHOTS, COPIES | tag, sends, receives)
        for ward in owners:
            store.wards[ward].complete(version)
    return bad


def _find_difference(store: ShardStore, ward: int, version: int, wanted: tuple[float, ...]) -> str | None:
    copies = store.wards[ward]
    if version not in copies.held:
        return "version"
    flat = copies.get(version)
    for name, got, want in zip((*SLOTS, "step"), (*flat_sums(flat), float(flat[-1])), wanted, strict=True):
        if got != want:
            return name
    return None
