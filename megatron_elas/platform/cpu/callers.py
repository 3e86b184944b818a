"""Who is asking. A few answers must differ for Megatron and for everyone else."""

from __future__ import annotations

import sys


def megatron_asks(depth: int = 2) -> bool:
    """Whether the function ``depth`` frames up belongs to a module of Megatron.

    The default is for use in a substitute: the frame that called the substitute.
    """
    module: str = sys._getframe(depth).f_globals.get("__name__", "")
    return module.startswith("megatron.")
