"""What an agent and its starter process say to each other: lines of JSON over a socket pair."""

from __future__ import annotations

import msgspec


class StarterMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all lines."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker runs, as on Python's command line."""

    name: str
    """A script's path, or a module's name."""
    is_module: bool
    arguments: tuple[str, ...] = ()


# ---------------------------------------------------------------- agent -> starter


class StartWorker(StarterMessage, frozen=True, kw_only=True):
    """Start one worker process."""

    worker: int
    target: Target
    environ: dict[str, str]
    """The whole environment of the worker."""
    log_path: str | None = None
    """Where both its output streams go; None leaves them those of the launcher."""
    watch_slot: int | None = None
    """To hold in the agent's death watch."""
    fresh: bool = False
    """Run a new Python instead of a fork of the starter. Needed where a device library must be
    loaded after the process began."""


class SignalWorker(StarterMessage, frozen=True, kw_only=True):
    """Send a signal to a worker, if it still runs."""

    worker: int
    signum: int


# ---------------------------------------------------------------- starter -> agent


class Ready(StarterMessage, frozen=True, kw_only=True):
    """Preloading is done."""


class PreloadFailed(StarterMessage, frozen=True, kw_only=True):
    """The function to preload raised; the starter ends."""

    sentence: str


class WorkerEnded(StarterMessage, frozen=True, kw_only=True):
    """A worker ended. ``status`` is its exit code, or minus the signal number."""

    worker: int
    status: int
    at_s: float
    why: str = ""
    """What else is known, for people."""


ToStarter = StartWorker | SignalWorker
FromStarter = Ready | PreloadFailed | WorkerEnded

_encoder = msgspec.json.Encoder()
_to_starter: msgspec.json.Decoder[ToStarter] = msgspec.json.Decoder(ToStarter)
_from_starter: msgspec.json.Decoder[FromStarter] = msgspec.json.Decoder(FromStarter)


def encode_line(message: StarterMessage) -> bytes:
    """One line, its newline included."""
    return _encoder.encode(message) + b"\n"


def decode_to_starter(line: bytes) -> ToStarter:
    """Read what the agent wrote."""
    return _to_starter.decode(line)


def decode_from_starter(line: bytes) -> FromStarter:
    """Read what the starter wrote."""
    return _from_starter.decode(line)
