"""Which links of one transport there are, who may be dialled where, and who dials whom just now."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from megatron_elas.runtime.transport.handshake import Hello
from megatron_elas.runtime.transport.link import Link
from megatron_elas.spec.errors import EpochChanged, PeerLost

Key = tuple[int, int]
"""Peer and channel."""


class Owner(Protocol):
    """What connections ask of their transport."""

    @property
    def worker(self) -> int:
        """Own worker id."""

    @property
    def epoch(self) -> int:
        """Epoch that frames carry now."""

    @property
    def cancelled(self) -> bool:
        """True between a cancel and the next epoch."""

    @property
    def wake_fd(self) -> int:
        """Readable while cancelled."""

    def refusal(self) -> EpochChanged:
        """The error of an operation that may not run."""

    def make_link(self, peer: int, channel: int, sock: socket.socket) -> Link:
        """Wrap a connected, non-blocking socket."""


class LinkTable:
    """The links of one transport, by peer and channel."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.name_channel: Callable[[int], str] = "channel {}".format
        """For error texts."""
        self.links: dict[Key, Link] = {}
        self._closed = False
        self._addresses: dict[int, str] = {}
        self._lost: set[int] = set()
        self._back: dict[int, int] = {}
        """Lost workers that live again, with their first epoch: an earlier self may still be running somewhere."""
        self._dialling: set[Key] = set()
        self._wakers: set[int] = set()
        """Event descriptors of the threads that open links."""
        self.changed = threading.Condition()
        """Guards links, addresses, losses and dials."""

    def set_addresses(self, addresses: Mapping[int, str]) -> None:
        """Say where the living are. A lost worker that is among them lives again, from the next epoch on."""
        with self.changed:
            for peer in self._lost & addresses.keys():
                self._lost.discard(peer)
                self._back[peer] = self.owner.epoch + 1
            self._addresses = dict(addresses)
            self._tell()

    def adopt(self, epoch: int, lost: Collection[int]) -> None:
        """Close the links to ``lost`` and make the others usable in a new epoch. The caller holds ``changed``."""
        self._lost.update(lost)
        for key, link in list(self.links.items()):
            if link.peer in self._lost or link.hung_up():  # a broken one between the living is dialled anew
                link.close(f"worker {link.peer} left before epoch {epoch}")
                del self.links[key]
            else:
                link.cut()
                link.resume(epoch)

    def keep(self, is_used: Callable[[int, int], bool]) -> None:
        """See ``base.Transport.keep_links``."""
        with self.changed:
            for key, link in list(self.links.items()):
                if not is_used(*key):
                    link.close("no operation uses it any more")
                    del self.links[key]

    def address_of(self, peer: int, channel: int) -> str:
        """Where a peer can be dialled. Raises as ``Connections.open_all``."""
        if peer == self.owner.worker:
            raise ValueError(f"worker {peer} cannot send to itself")
        if peer in self._lost:
            raise PeerLost(peer, f"it left before epoch {self.owner.epoch}")
        address = self._addresses.get(peer)
        if address is None:
            raise ValueError(
                f"worker {peer} has no address; call set_addresses before using {self.name_channel(channel)}"
            )
        return address

    def describe_failure(self, key: Key, address: str, why: str) -> str:
        """The sentence of a dial that failed."""
        return f"could not dial {address}: {why} ({self.name_channel(key[1])}, epoch {self.owner.epoch})"

    def claim(self, key: Key) -> bool:
        """Reserve the right to dial for this key; False when another thread has it. The caller holds ``changed``."""
        if key in self._dialling:
            return False
        self._dialling.add(key)
        return True

    def unclaim(self, keys: Collection[Key]) -> None:
        """Give it back."""
        with self.changed:
            self._dialling.difference_update(keys)
            self._tell()

    def enrol(self, key: Key, sock: socket.socket) -> Link:
        """Make a dialled connection a link and give back the claim. Gives the link to use.

        Raises:
            EpochChanged: The transport was closed meanwhile.
            PeerLost: The peer has left meanwhile.
        """
        with self.changed:
            self._dialling.discard(key)
            self._tell()
            known = self.links.get(key)
            if known is None and not self._closed and key[0] not in self._lost:
                known = self.links[key] = self.owner.make_link(*key, sock)
                return known
            sock.close()
            if self._closed:
                raise self.owner.refusal()
            if known is None:
                raise PeerLost(key[0], f"it left before epoch {self.owner.epoch}")
            return known

    def has_left(self, hello: Hello) -> bool:
        """Whether it is one we counted as lost; not one that took its place, perhaps in an epoch that is to come."""
        if hello.worker in self._lost:
            return hello.epoch <= self.owner.epoch
        return hello.epoch < self._back.get(hello.worker, 0)

    def _tell(self) -> None:
        """Wake the threads that open links. The caller holds ``changed``."""
        for waker in self._wakers:
            os.eventfd_write(waker, 1)
