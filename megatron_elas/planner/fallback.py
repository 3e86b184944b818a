"""Where the survivors go on when no state is whole on them: a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_elas.spec.plan import ElasticPlan, Settlement
from megatron_elas.spec.report import SettleReport


def fall_back(reports: Sequence[SettleReport], plan: ElasticPlan) -> Settlement | None:
    """Go on from the newest checkpoint that any survivor knows to be complete; None when nobody knows of one.

    A checkpoint counts once all workers have written their parts and a worker has passed the barrier behind that; then
    it is complete for the others too, though they may not know yet. One that was cut short is known to nobody.

    Args:
        reports: One per survivor (spares included), all of the same epoch.
        plan: The one that they will follow.
    """
    newest = max((report.checkpoint for report in reports), default=-1)
    if newest < 0:
        return None
    return Settlement(
        base_epoch=plan.epoch,
        resume_step=newest,
        lead_activity=max(report.activity for report in reports),
        waived_activity=max(report.waived for report in reports),
        checkpoint=newest,
    )
