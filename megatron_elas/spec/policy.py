"""Who plans for a running job after a loss: our planner, or what another system would do, to compare with."""

from __future__ import annotations

from typing import Literal, get_args

RunningPolicy = Literal["ours", "elaswave", "recycle", "torchft"]
"""What each does: ``planner.running_policies``."""
RUNNING_POLICIES: tuple[RunningPolicy, ...] = get_args(RunningPolicy)
