"""Wrappers around Megatron's optimizer: they tell the session where in the step the worker is.

``ChainedOptimizer.step`` takes the gradients over, computes their norm with one all-reduce over all workers, clips them
and makes the update. Before the all-reduce the gradients go to the backups; after it the step is finished,
whoever is lost.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_elas.host.attachment import Attachment, attachment
from megatron_elas.spec.transaction import Update


def wrap_chain_step(original: Any) -> Any:
    """The optimizer's step, with the gradients at the backups before any worker can finish it."""

    @functools.wraps(original)
    def step(self: Any) -> Any:
        attached = attachment()
        if attached.counter.step < 0:  # not of a training step
            return original(self)
        assert attached.host is not None
        with attached.timer.exchanging():
            votes = attached.host.share_losses(attached.losses, attached.session.ballot())
            attached.session.count_ballots(votes, len(attached.route.plan.placement.workers))
            attached.session.exchange_gradients()
        _log_samples(attached)
        if attached.audit is not None:
            attached.host.tell_audit(attached.audit)
        with attached.timer.optimizing():
            outcome = original(self)
        success, norm, zeros = outcome
        if not success:
            attached.session.prepare(_update(attached, norm, zeros, applies=False))
        return outcome

    return step


def _log_samples(attached: Attachment) -> None:
    """Before the step can count, so that those of a worker that is lost then are told."""
    if attached.sample_log is not None:
        plan, seat = attached.route.plan, attached.route.seat
        attached.sample_log.write(plan.epoch, attached.counter.step, seat.stage, attached.samples)


def wrap_chain_norm(original: Any) -> Any:
    """The gradient norm, remembered."""

    @functools.wraps(original)
    def get_grad_norm(self: Any) -> Any:
        attached = attachment()
        if attached.counter.step >= 0:
            attached.strike(attached.counter.step, "norm", None)
        with attached.timer.apart():
            attached.norm = original(self)
        return attached.norm

    return get_grad_norm


def wrap_chain_zeros(original: Any) -> Any:
    """The number of zeros, remembered."""

    @functools.wraps(original)
    def count_zeros(self: Any) -> Any:
        attached = attachment()
        with attached.timer.apart():
            attached.zeros = original(self)
        return attached.zeros

    return count_zeros


def wrap_chain_update(original: Any) -> Any:
    """The update of all optimizers of the chain, before which the step is sure to be finished."""

    @functools.wraps(original)
    def step_with_ready_grads(self: Any) -> Any:
        attached = attachment()
        if attached.counter.step >= 0:
            attached.strike(attached.counter.step, "optimizer", None)
            attached.session.prepare(_update(attached, attached.norm, attached.zeros, applies=True))
        with attached.timer.apart():  # but for what the parts compute
            return original(self)

    return step_with_ready_grads


def wrap_part_update(original: Any) -> Any:
    """The update of one optimizer of the chain; what follows it in the step gathers parameters."""

    @functools.wraps(original)
    def step_with_ready_grads(self: Any) -> Any:
        attached = attachment()
        if attached.counter.step < 0:
            return original(self)
        assert attached.host is not None
        # A timer may begin with a barrier. Cut in one behind the update, this worker would make the update again.
        barriers, self.config.barrier_with_L1_time = self.config.barrier_with_L1_time, False
        try:
            with attached.timer.optimizing(), attached.host.updating():
                outcome = original(self)
        finally:
            self.config.barrier_with_L1_time = barriers
        attached.session.applied()
        attached.strike(attached.counter.step, "gather", None)
        return outcome

    return step_with_ready_grads


def _update(attached: Attachment, norm: Any, zeros: Any, *, applies: bool) -> Update:
    zeros = None if zeros is None else float(zeros)
    assert attached.host is not None
    losses = {name: float(loss) for name, loss in attached.host.told_losses.items()}
    norm = None if norm is None else float(norm)
    return Update.of(attached.counter.step, norm, zeros, applies=applies, losses=losses)
