"""What an accelerator library's errors mean for the membership."""

from __future__ import annotations

import enum
from typing import NamedTuple

from megatron_elas.spec.errors import ElasticError, ExitCode


class Failure(enum.Enum):
    """Why an inner group could not do its work, as far as it says so. Anything else is the caller's error."""

    ABORTED = "aborted"
    """Ended on purpose, here or by a peer."""
    PEER = "peer"
    """A peer, or the way to it, is gone."""
    TIMEOUT = "timeout"
    """It waited too long."""
    DEVICE = "device"
    """This worker's own device memory can no longer be trusted."""


class DeviceFault(ElasticError):
    """The memory of this worker's device is damaged: the worker must leave, the others can go on without it."""

    exit_code = ExitCode.CRASHED


class Sign(NamedTuple):
    """A text that tells a failure."""

    text: str
    failure: Failure


def read_signs(error: BaseException, signs: tuple[Sign, ...]) -> Failure | None:
    """The failure that the first fitting sign names; letter case does not count."""
    words = str(error).lower()
    for text, failure in signs:
        if text.lower() in words:
            return failure
    return None
