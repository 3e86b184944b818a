"""How links come about: who dials whom, who is let in, and which links there are.

Of two workers the one with the higher id dials the link. The lower one knocks (connects, says for which channel, hangs
up) and the higher one dials back on a thread made for it, so neither waits for the other's main thread and two links
for one channel cannot arise. ``cancel`` does not stop that thread: the peer may be in the next epoch.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from megatron_elas.runtime.transport.dial import DialStopped, dial
from megatron_elas.runtime.transport.dial_backs import DialBacks
from megatron_elas.runtime.transport.frame import Hello, HelloKind, pack_hello, token_digest
from megatron_elas.runtime.transport.link import Link
from megatron_elas.runtime.transport.listener import Listener
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


class Connections:
    """The links of one transport, and its listener."""

    def __init__(self, owner: Owner, listen: str, token: str) -> None:
        """Listen and start accepting. Raises as ``SocketTransport``."""
        self._owner = owner
        self._worker = owner.worker
        self._digest = token_digest(token)
        self._closed = False
        self.links: dict[Key, Link] = {}
        self._addresses: dict[int, str] = {}
        self._lost: dict[int, str | None] = {}
        self._dialling: set[Key] = set()
        self._knocks: set[Key] = set()
        self.changed = threading.Condition()
        """Guards all of the above and tells of new links, addresses and cancels."""
        self._dial_backs = DialBacks(f"elastic-dial-back-{owner.worker}", self._answer_knock)
        try:
            self._listener = Listener(listen, self._digest, self._welcome, f"elastic-accept-{owner.worker}")
        except BaseException:
            self._dial_backs.close()
            raise

    @property
    def address(self) -> str:
        """Where peers dial this worker."""
        return self._listener.address

    def set_addresses(self, addresses: Mapping[int, str]) -> None:
        """Say where peers are. A lost worker counts as living again when its address is a new one."""
        with self.changed:
            for peer in [peer for peer, old in self._lost.items() if addresses.get(peer, old) != old]:
                del self._lost[peer]
            self._addresses = dict(addresses)
            knocks = [key for key in self._knocks if key[0] in self._addresses]
            self._knocks.difference_update(knocks)
            self.changed.notify_all()
        for peer, channel in knocks:
            self._dial_backs.ask(peer, channel)

    def adopt(self, epoch: int, lost: Collection[int]) -> None:
        """Close the links to ``lost`` and make the others usable in a new epoch. The caller holds ``changed``."""
        for peer in lost:
            self._lost[peer] = self._addresses.get(peer)
        self._knocks = {key for key in self._knocks if key[0] not in self._lost}
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

    def close(self) -> None:
        """Close links and listener, remove the socket file, end threads. The transport is cancelled before."""
        with self.changed:
            self._closed = True
        self._listener.close()
        self._dial_backs.close()
        with self.changed:
            for link in self.links.values():
                link.close("the transport was closed")
            self.links.clear()

    # ------------------------------------------------------------------ opening links

    def open(self, peer: int, channel: int) -> Link:
        """Dial, or knock and wait to be dialled.

        Raises:
            EpochChanged: Cancelled meanwhile.
            PeerLost: The peer has left or refused.
            ValueError: The peer is this worker, or has no address.
        """
        if peer == self._worker:
            raise ValueError(f"worker {peer} cannot send to itself")
        owner = self._owner
        key = (peer, channel)
        with self.changed:
            self._check_reachable(peer)
            address = self._addresses.get(peer)
        if address is None:
            raise ValueError(f"worker {peer} has no address; call set_addresses before using channel {channel}")
        try:
            if self._worker > peer:
                return self._dial(key, address, owner.wake_fd)
            dial_back = Hello(HelloKind.KNOCK, self._worker, channel)
            with dial(address, owner.wake_fd) as knock:
                knock.sendall(pack_hello(dial_back, self._digest))
        except DialStopped:
            raise owner.refusal() from None
        except OSError as error:
            detail = f"could not dial {address}: {error.strerror or error} (channel {channel}, epoch {owner.epoch})"
            raise PeerLost(peer, detail) from None
        with self.changed:
            while key not in self.links:
                if owner.cancelled:
                    raise owner.refusal()
                self._check_reachable(peer)
                self.changed.wait()
            return self.links[key]

    def _check_reachable(self, peer: int) -> None:
        if peer in self._lost:
            raise PeerLost(peer, f"it left before epoch {self._owner.epoch}")

    def _dial(self, key: Key, address: str, wake_fd: int) -> Link:
        """The link, dialled by this thread or by another one that was faster.

        Raises:
            DialStopped, OSError: See ``dial``.
        """
        peer, channel = key
        with self.changed:
            while key in self._dialling:
                if self._owner.cancelled and wake_fd == self._owner.wake_fd:
                    raise DialStopped
                self.changed.wait()
            if key in self.links:
                return self.links[key]
            self._dialling.add(key)
        sock: socket.socket | None = None
        try:
            sock = dial(address, wake_fd)
            sock.sendall(pack_hello(Hello(HelloKind.LINK, self._worker, channel), self._digest))
        except BaseException:
            if sock is not None:
                sock.close()
                sock = None
            raise
        finally:
            with self.changed:
                self._dialling.discard(key)
                if sock is not None:
                    link = self._owner.make_link(peer, channel, sock)
                    if peer in self._lost:  # only a dial back can be overtaken by an epoch
                        link.close(f"worker {peer} left before epoch {self._owner.epoch}")
                    else:
                        self.links[key] = link
                self.changed.notify_all()
        return link

    def _welcome(self, hello: Hello, sock: socket.socket) -> None:
        """A peer has connected. Runs on the listener's thread."""
        _, peer, channel = hello
        if hello.kind is HelloKind.KNOCK:
            sock.close()
            with self.changed:
                known = peer in self._addresses
                if not known and peer not in self._lost:
                    self._knocks.add((peer, channel))  # it learnt of us before we of it
            if known:
                self._dial_backs.ask(peer, channel)
            return
        with self.changed:
            if self._closed or peer in self._lost or peer <= self._worker:
                sock.close()
                return
            old = self.links.get((peer, channel))
            if old is not None:  # the peer lost its end of the old one
                old.close("dialled anew by the peer")
            self.links[(peer, channel)] = self._owner.make_link(peer, channel, sock)
            self.changed.notify_all()

    def _answer_knock(self, peer: int, channel: int) -> None:
        """Dial the peer back. Runs on a thread of its own."""
        key = (peer, channel)
        with self.changed:
            address = self._addresses.get(peer)
            if address is None or peer in self._lost or peer >= self._worker:
                return
            link = self.links.get(key)
            if link is not None:
                if not link.hung_up():
                    return  # dialled already; the knock crossed it
                link.close("closed by the peer")
                del self.links[key]
        with contextlib.suppress(DialStopped, OSError):  # the peer is gone, and waits for us no more
            self._dial(key, address, self._dial_backs.stop_fd)
