"""How links come about: who dials whom, and who is let in.

Of two workers the one with the higher id dials ("this is a link"). The lower one offers ("may this be a link?"): the
higher one takes the offer, unless it has a link for the channel or is dialling one, so two links for one channel cannot
arise. Offers are answered by the listener's thread, so neither side waits for the other's main thread.

A peer that is dialled without success within a limit is lost; whoever reads ``PeerLost`` tells the controller.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection

from megatron_elas.runtime.transport.dialler import Dialler
from megatron_elas.runtime.transport.handshake import Hello, HelloKind, Verdict, make_key
from megatron_elas.runtime.transport.link import Link
from megatron_elas.runtime.transport.link_table import Key, LinkTable, Owner
from megatron_elas.runtime.transport.listener import Listener


class Connections(LinkTable):
    """The links of one transport, and its listener."""

    def __init__(self, owner: Owner, listen: str, token: str) -> None:
        """Listen and start accepting. Raises as ``SocketTransport``."""
        super().__init__(owner)
        self._secret = make_key(token)
        self._listener = Listener(listen, self._secret, owner.worker, self._welcome, f"elastic-accept-{owner.worker}")

    @property
    def address(self) -> str:
        """Where peers dial this worker."""
        return self._listener.address

    def close(self) -> None:
        """Close links and listener, remove the socket file, end the thread. The transport is cancelled before."""
        with self.changed:
            self._closed = True
        self._listener.close()
        with self.changed:
            for link in self.links.values():
                link.close("the transport was closed")
            self.links.clear()

    # ------------------------------------------------------------------ opening links

    def open_all(self, wanted: Collection[Key], limit_s: float | None = None) -> dict[Key, Link]:
        """Make the missing ones of these links, all at once.

        Args:
            wanted: Peers and channels.
            limit_s: For all together. Each peer has its own limits besides, see ``dialler``.

        Returns:
            All of them.

        Raises:
            EpochChanged: Cancelled meanwhile.
            PeerLost: A peer has left, refused, or did not answer in time; the first one that did so.
            ValueError: A peer is this worker, or has no address; nothing was dialled.
        """
        with self.changed:
            for peer, channel in wanted:
                self.address_of(peer, channel)
            waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._wakers.add(waker)
        try:
            return Dialler(self, self._secret, wanted, limit_s).run(waker)
        finally:
            with self.changed:
                self._wakers.discard(waker)
                os.close(waker)

    # ------------------------------------------------------------------ being dialled

    def _welcome(self, hello: Hello, sock: socket.socket) -> None:
        """A peer has connected and proven itself. Runs on the listener's thread."""
        key = (hello.worker, hello.channel)
        with self.changed:
            if self._closed or self.has_left(hello) or (hello.kind is HelloKind.LINK) != (hello.worker > hello.peer):
                sock.close()
                return
            old = self.links.get(key)
            if hello.kind is HelloKind.OFFER:
                crossed = key in self._dialling or (old is not None and not old.hung_up())
                if not _say(sock, Verdict.CROSSED if crossed else Verdict.TAKEN) or crossed:
                    sock.close()
                    return
            if old is not None:  # the peer lost its end of the old one
                old.close("dialled anew by the peer")
            self.links[key] = self.owner.make_link(*key, sock)
            self._tell()


def _say(sock: socket.socket, verdict: Verdict) -> bool:
    """Send it, before any frame; False when the peer is gone again."""
    try:
        return sock.send(bytes([verdict])) == 1
    except OSError:
        return False
