"""Processes that die with their parent, also when the parent is killed and can say nothing.

The kernel sends the signal when the *thread* that started the process ends, so start such processes
from the main thread.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""


def die_with_parent(parent_pid: int) -> None:
    """Have this process killed when its parent ends.

    Args:
        parent_pid: The parent as seen by itself. When it is gone already, this process ends now.
            Survives ``exec``, not ``fork``.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)
