"""The controller's journal: every event that changed its state, so that a new process can take its place.

The controller is a pure function, so its state is what the events make of the initial one, in order: no decision is
made a second time, and what was decided (plans come in as events) comes out the same. An event is written before
anything that follows from it is sent, in one write(2). That survives the end of the process, however sudden. It is
not synced to the disk, which would take milliseconds of every recovery: when the machine goes down, the launcher that
would start another controller goes down with it.

One JSON object per line. The first says which version this is and what was launched. Each other line has an event, its
time, and what the state was after it: ``state``, ``epoch``, ``lost``, ``settlement`` where one had been made, and
``target``, the epoch that all were going over to.
Replaying compares those, so a journal of other code is noticed. A last line that is cut short was never acted upon, and
is dropped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_elas.control import messages
from megatron_elas.control.commands import Command, Note, Reply
from megatron_elas.control.controller import initial_state, step
from megatron_elas.control.events import (
    AgentLost,
    ChangeAsked,
    Event,
    PlanImproved,
    PlanKept,
    PlanMade,
    PlanRefused,
    Restarted,
    Tick,
    WorkerSilent,
)
from megatron_elas.control.launch import Launch
from megatron_elas.control.states import Resuming, Running, Settling, State
from megatron_elas.spec.errors import ElasticError, ExitCode
from megatron_elas.spec.plan import Settlement

JOURNAL_VERSION = 1

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        AgentLost,
        ChangeAsked,
        PlanImproved,
        PlanKept,
        PlanMade,
        PlanRefused,
        Restarted,
        Tick,
        WorkerSilent,
        messages.AgentHello,
        messages.CopyDiffered,
        messages.Crashed,
        messages.Declined,
        messages.Drained,
        messages.Failed,
        messages.FaultFired,
        messages.Finished,
        messages.Hello,
        messages.Inject,
        messages.LeaveOut,
        messages.Migrated,
        messages.PeerUnreachable,
        messages.Recovered,
        messages.Settled,
        messages.Stalled,
        messages.Terminate,
        messages.Unverified,
        messages.WorkerExited,
        messages.WorkerHung,
    )
}
"""Every kind of event, by name."""


class BadJournal(ElasticError):
    """The journal cannot be gone on from."""

    exit_code = ExitCode.STATE_INVALID


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The first line."""

    journal: int
    launch: Launch


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Any other line."""

    at_s: float
    """As the controller's function was told."""
    event: str
    """Its kind."""
    data: msgspec.Raw
    state: str
    epoch: int | None = None
    lost: tuple[int, ...] = ()
    settlement: Settlement | None = None
    target: int | None = None

    def decode(self) -> Event:
        """The event. Raises msgspec's errors."""
        event: Event = msgspec.json.decode(self.data, type=_KINDS[self.event])
        return event


_encoder = msgspec.json.Encoder()
_head: msgspec.json.Decoder[Head] = msgspec.json.Decoder(Head)
_entry: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


def make_entry(event: Event, at_s: float, after: State) -> Entry:
    """The line for an event that led to the state ``after``."""
    return Entry(
        at_s=at_s,
        event=type(event).__name__,
        data=msgspec.Raw(_encoder.encode(event)),
        state=type(after).__name__,
        epoch=after.epoch if isinstance(after, Running | Settling | Resuming) else None,
        lost=tuple(sorted(after.roster.lost)),
        settlement=after.settlement if isinstance(after, Resuming) else None,
        target=after.migration.epoch if isinstance(after, Running) and after.migration is not None else None,
    )


def matters(before: State, after: State, commands: Sequence[Command]) -> bool:
    """Whether the event between two states has to be written down."""
    return after is not before or any(not isinstance(command, Note | Reply) for command in commands)


class Journal:
    """One open journal. Make it with ``create`` or ``resume``."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @staticmethod
    def create(path: Path, launch: Launch) -> Journal:
        """A new one. Raises OSError."""
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        journal = Journal(path, os.open(path, flags, 0o600))
        journal._append(_encoder.encode(Head(journal=JOURNAL_VERSION, launch=launch)))
        return journal

    @staticmethod
    def resume(path: Path, launch: Launch) -> tuple[Journal, State, float]:
        """Open an existing one for more.

        Returns:
            The journal, the state that it leads to, and the time of its last event (0 without one).

        Raises:
            BadJournal: It is not there, not of this launch or of this version, or damaged before its last line.
        """
        if _incomplete(path).exists():
            raise BadJournal("the controller cannot go on: its journal could not be written to the end (see above)")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BadJournal(f"the controller cannot go on: its journal cannot be read ({error})") from error
        whole = data[: data.rfind(b"\n") + 1]
        state, at_s = replay(whole, launch)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(descriptor, len(whole))
        return Journal(path, descriptor), state, at_s

    def write(self, event: Event, at_s: float, after: State) -> None:
        """Append an event. Raises OSError; then the journal is of no more use."""
        self._append(_encoder.encode(make_entry(event, at_s, after)))

    def _append(self, line: bytes) -> None:
        data = line + b"\n"
        written = os.write(self._descriptor, data)
        if written < len(data):  # a disk that is just full
            raise OSError(f"only {written} of {len(data)} bytes could be written")

    def close(self) -> None:
        """Let go."""
        os.close(self._descriptor)

    def discard(self) -> None:
        """Have nobody go on from it: it lacks something."""
        self._path.rename(_incomplete(self._path))
        self.close()


def _incomplete(path: Path) -> Path:
    return path.with_name(f"{path.name}.incomplete")


def replay(data: bytes, launch: Launch) -> tuple[State, float]:
    """The state that the lines lead to, and the time of the last event. The last line may be cut short.

    Raises:
        BadJournal: Not of this launch or version, damaged before its last line, or not from this code.
    """
    *lines, _ = data.split(b"\n")
    if not lines:
        raise BadJournal("the controller cannot go on: its journal is empty")
    try:
        head = _head.decode(lines[0])
    except msgspec.MsgspecError as error:
        raise BadJournal(f"the controller cannot go on: its journal begins with no head ({error})") from error
    if head.journal != JOURNAL_VERSION or head.launch != launch:
        raise BadJournal(
            f"the controller cannot go on: its journal is version {head.journal} of {head.launch}, this is version "
            f"{JOURNAL_VERSION} of {launch}"
        )
    state: State = initial_state(launch)
    at_s = 0.0
    for number, line in enumerate(lines[1:], start=2):
        try:
            entry = _entry.decode(line)
            event = entry.decode()
        except (msgspec.MsgspecError, KeyError) as error:
            raise BadJournal(
                f"the controller cannot go on: line {number} of its journal is damaged ({error})"
            ) from error
        state, _ = step(state, event, entry.at_s)
        at_s = entry.at_s
        _compare(number, entry, make_entry(event, at_s, state))
    return state, at_s


def _compare(number: int, then: Entry, now: Entry) -> None:
    for name in ("state", "epoch", "lost", "settlement", "target"):
        if getattr(then, name) != getattr(now, name):
            raise BadJournal(
                f"the controller cannot go on: after line {number} of its journal {name} was {getattr(then, name)}, "
                f"now it is {getattr(now, name)}: was megatron_elas changed while the job ran?"
            )


def is_new(path: Path) -> bool:
    """Whether no controller has written there yet. One that was killed before its first line was whole has not."""
    try:
        return b"\n" not in path.read_bytes()
    except FileNotFoundError:
        return not _incomplete(path).exists()
