"""Where the survivors go on: the newest state that exists completely, an open step finished if it must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_elas.spec.errors import StateInvalid
from megatron_elas.spec.plan import ElasticPlan, Settlement
from megatron_elas.spec.report import Holding, SettleReport
from megatron_elas.spec.transaction import Update


def settle(
    reports: Sequence[SettleReport], plans: Mapping[int, ElasticPlan], decided: Update | None = None
) -> Settlement:
    """Commit the open step if any survivor is PREPARED for it, else abort it; pick the version to go on from.

    Layouts are tried from the newest that all survivors hold who had a seat in it: after a second fault
    during a recovery some may already have the new layout while others only have the old one. A spare
    holds nothing that counts, so a spare that is behind is in nobody's way.

    In a layout a version is whole if every survivor holds it or can make it (``Holding.ready``) and so can, for
    every lost worker, one that backs it up. The newest whole version is taken. A step that is committed is in it: were
    the version after it not whole, the layout would be no good.

    Args:
        reports: One per survivor (spares included), all of the same epoch.
        plans: Every plan that a report mentions, by epoch.
        decided: The step that an earlier settlement of this outage committed, of which perhaps no survivor has heard.

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
        commit = _find_commit(holdings, decided)
        version, reason = _newest_complete(holdings, plans[epoch], commit)
        if version is not None:
            return Settlement(
                base_epoch=epoch,
                resume_step=version,
                lead_activity=max(report.activity for report in reports),
                waived_activity=max(report.waived for report in reports),
                holders=_find_holders(holdings, plans[epoch], commit, version),
                commit=commit if commit is not None and version == commit.step + 1 else None,
                parameters_whole=all(
                    holding.parameters == version
                    for worker, holding in holdings.items()
                    if plans[epoch].placement.find_seat(worker) is not None
                ),
            )
        reasons.append(f"layout of epoch {epoch}: {reason}")
    if not shared:
        seen = {worker: sorted(held) for worker, held in layouts.items()}
        reasons.append(f"survivors share no layout (epochs held by worker: {seen})")
    raise StateInvalid(
        f"no step's state is whole on the survivors: {'; '.join(reasons)}. "
        f"Restart from the newest checkpoint with --load"
    )


def _find_commit(holdings: Mapping[int, Holding], decided: Update | None) -> Update | None:
    """The newest step that a survivor is PREPARED for in this layout."""
    known = [holding.update for holding in holdings.values() if holding.update is not None]
    if decided is not None:
        known.append(decided)
    return max(known, key=lambda update: update.step, default=None)


def _newest_complete(
    holdings: Mapping[int, Holding], plan: ElasticPlan, commit: Update | None
) -> tuple[int | None, str]:
    """The newest version everybody has, or can make, under this layout, or None and why not."""
    held: dict[str, set[int]] = {}
    for worker in plan.placement.workers:
        if worker in holdings:
            held[f"worker {worker}"] = _versions(holdings[worker], commit)
        else:
            copies = (_ward_versions(holding, worker, commit) for holding in holdings.values())
            backup = plan.backup_of(worker)
            where = f"at its backup, worker {backup}" if backup is not None else "which has no backup"
            held[f"the shard of worker {worker} ({where})"] = set().union(*copies)
    common = set.intersection(*held.values())
    if common:
        return max(common), ""
    return None, ", ".join(f"{name} has versions {sorted(versions)}" for name, versions in held.items())


def _find_holders(
    holdings: Mapping[int, Holding], plan: ElasticPlan, commit: Update | None, version: int
) -> tuple[tuple[int, int], ...]:
    """For every lost worker, the nearest of those who have, or can make, the version of its shard."""
    holders = []
    for owner in plan.placement.workers:
        if owner not in holdings:
            nearest = {worker: None for worker in (*plan.backups_of(owner), *holdings) if worker in holdings}
            holders.append((owner, next(w for w in nearest if version in _ward_versions(holdings[w], owner, commit))))
    return tuple(holders)


def _versions(holding: Holding, commit: Update | None) -> set[int]:
    versions = set(holding.kept)
    if holding.live is not None:
        versions.add(holding.live)
    return _advance(versions, holding, commit)


def _ward_versions(holding: Holding, owner: int, commit: Update | None) -> set[int]:
    return _advance(set(holding.wards.get(owner, ())), holding, commit)


def _advance(versions: set[int], holding: Holding, commit: Update | None) -> set[int]:
    """The versions, and the one that the commit makes of one of them."""
    if commit is not None and holding.ready == commit.step and commit.step in versions:
        return versions | {commit.step + 1}
    return versions
