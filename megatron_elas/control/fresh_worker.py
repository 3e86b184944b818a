"""A worker that is a Python of its own: takes its slot in the agent's death watch, then runs the user's script."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from megatron_elas.control import death_watch
from megatron_elas.control.starter_messages import Target
from megatron_elas.control.worker_start import end, run_target


def main() -> NoReturn:
    """``python -m megatron_elas.control.fresh_worker WATCH_FD SLOT module|script NAME [ARGUMENTS]``."""
    watch_fd, slot, kind, name, *arguments = sys.argv[1:]
    os.set_inheritable(int(watch_fd), False)
    death_watch.hold(int(watch_fd), int(slot))
    end(run_target(Target(name=name, is_module=kind == "module", arguments=tuple(arguments))))


if __name__ == "__main__":
    main()
