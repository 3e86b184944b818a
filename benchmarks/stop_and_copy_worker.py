"""Trains as ``megatron_elas.pretrain_gpt`` does, but a migration stops the job and brings everybody's whole state anew.

Started by ``migration.py``, to compare with: at the switch every shard of the new layout, also of workers whose layers
stay, is filled over the links from the copies that backups keep, as after a restart without a checkpoint. No process
ends, and nobody reads a disk, so a real restart takes longer.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron_elas import pretrain_gpt


def copy_everything() -> None:
    """Have no worker keep its shard, nor be asked for it."""
    from megatron_elas.runtime import executor, restoring
    from megatron_elas.spec import remap

    restoring_of = executor.Restoring

    def keeps_nothing(*_: Any) -> bool:
        return False

    def from_backups(**fields: Any) -> Any:
        plan = fields["base_plan"]
        holders = {owner: plan.backups_of(owner)[0] for owner in plan.placement.workers}
        return restoring_of(**{**fields, "holders": holders, "moves": None})

    remap.keeps_shard = restoring.keeps_shard = keeps_nothing
    executor.Restoring = from_backups  # type: ignore[assignment,misc]


if __name__ == "__main__":
    pretrain_gpt.preload()
    copy_everything()
    sys.exit(pretrain_gpt.main())
