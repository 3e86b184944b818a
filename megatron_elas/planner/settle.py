"""Where the survivors go on: the newest state that exists completely."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_elas.spec.errors import StateInvalid
from megatron_elas.spec.plan import ElasticPlan, Settlement
from megatron_elas.spec.report import Holding, SettleReport


def settle(reports: Sequence[SettleReport], plans: Mapping[int, ElasticPlan]) -> Settlement:
    """Pick the newest version that every survivor and every lost worker's backup holds.

    Layouts are tried from the newest that all survivors hold who had a seat in it: after a second fault
    during a recovery some may already have the new layout while others only have the old one. A spare
    holds nothing that counts, so a spare that is behind is in nobody's way.

    Args:
        reports: One per survivor (spares included), all of the same epoch.
        plans: Every plan that a report mentions, by epoch.

    Raises:
        StateInvalid: No version is complete; the text names what is missing.
    """
    layouts = {report.worker: {holding.epoch: holding for holding in report.holdings} for report in reports}
    shared = {
        epoch
        for epoch in set().union(*layouts.values())
        if all(epoch in held or plans[epoch].placement.find_seat(worker) is None for worker, held in layouts.items())
    }
    reasons = []
    for epoch in sorted(shared, reverse=True):
        holdings = {worker: held[epoch] for worker, held in layouts.items() if epoch in held}
        version, reason = _newest_complete(holdings, plans[epoch])
        if version is not None:
            return Settlement(
                base_epoch=epoch,
                resume_step=version,
                lead_activity=max(report.activity for report in reports),
                waived_activity=max(report.waived for report in reports),
            )
        reasons.append(f"layout of epoch {epoch}: {reason}")
    if not shared:
        seen = {worker: sorted(held) for worker, held in layouts.items()}
        reasons.append(f"survivors share no layout (epochs held by worker: {seen})")
    raise StateInvalid(
        f"no step's state is whole on the survivors: {'; '.join(reasons)}. "
        f"Restart from the newest checkpoint with --load"
    )


def _newest_complete(holdings: Mapping[int, Holding], plan: ElasticPlan) -> tuple[int | None, str]:
    """The newest version everybody has under this layout, or None and why not."""
    held: dict[str, set[int]] = {}
    for worker in plan.placement.workers:
        if worker in holdings:
            held[f"worker {worker}"] = _versions(holdings[worker])
        else:
            copies = (set(holding.wards.get(worker, ())) for holding in holdings.values())
            backup = plan.backup_of(worker)
            where = f"at its backup, worker {backup}" if backup is not None else "which has no backup"
            held[f"the shard of worker {worker} ({where})"] = set().union(*copies)
    common = set.intersection(*held.values())
    if common:
        return max(common), ""
    return None, ", ".join(f"{name} has versions {sorted(versions)}" for name, versions in held.items())


def _versions(holding: Holding) -> set[int]:
    versions = set(holding.kept)
    if holding.live is not None:
        versions.add(holding.live)
    return versions
