"""Wrappers around a training step: a step becomes a transaction, over the items of the plan."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from megatron_elas.host import orders
from megatron_elas.host.attachment import Attachment, attachment
from megatron_elas.host.data import sample_ids
from megatron_elas.host.gradient_sums import PassesAgain
from megatron_elas.host.losses import Losses, gather_losses, told_once
from megatron_elas.host.pipeline import RoutedPipeline
from megatron_elas.host.schedule import Weights, route_schedule
from megatron_elas.host.split_backward import deferred
from megatron_elas.host.training import MegatronHost
from megatron_elas.schedule.actions import Order
from megatron_elas.spec.errors import EpochChanged
from megatron_elas.spec.items import CellItems, Item, micro_batch


def wrap_train_step(original: Any) -> Any:
    """``train_step`` that runs as a transaction of the session."""

    @functools.wraps(original)
    def train_step(
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        config: Any,
        forward_backward_func: Any,
        iteration: int,
        **kwargs: Any,
    ) -> Any:
        attached = attachment()
        if attached.host is None:
            attached.host = _make_host(attached, model, optimizer, opt_param_scheduler, iteration)
            attached.session.attach(attached.host, iteration)
        host = attached.host
        host.check_counters(iteration)

        def body(step: int) -> Any:
            if attached.sums is None:
                return run(step)
            while True:
                try:
                    return run(step)
                except PassesAgain as again:
                    again.__traceback__ = None  # it holds what the passes have made
                    host.clear_step()
                    host.rewind(attached.session.captured(step))
                    attached.sums.retry(again)

        def run(step: int) -> Any:
            host.begin_step(step, data_iterator)
            if attached.emulation is not None:
                attached.emulation.begin_step()
            attached.samples.clear()
            if attached.audit is not None:
                attached.audit.begin_step(step)
            attached.norm = attached.zeros = None
            attached.counter.begin(step)
            attached.timer.begin(attached.session.plan.epoch, step)
            if attached.sums is not None:
                with attached.timer.exchanging():
                    attached.sums.begin(step, attached.session.plan.epoch)
            outcome = original(
                forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config,
                forward_backward_func, iteration=step, **kwargs,
            )  # fmt: skip
            attached.counter.begin(-1)
            host.end_step()
            attached.timer.end(attached.session.plan, step)
            # Whoever comes to tell the step's line knows its losses, whether it was on the last stage or not.
            return (outcome[0] or host.losses, *outcome[1:])

        attached.timer.enter()
        outcome = attached.session.run_step(iteration, body)
        attached.timer.leave(attached.session.plan.epoch)
        return outcome

    return train_step


def _make_host(attached: Attachment, model: Any, optimizer: Any, scheduler: Any, first_step: int) -> MegatronHost:
    assert attached.factory is not None and attached.models is not None, "Megatron has built no distributed optimizer"
    return MegatronHost(
        worker=attached.worker,
        initial=attached.initial,
        communicator=attached.communicator,
        route=attached.route,
        pipeline=attached.pipeline,
        factory=attached.factory,
        models=attached.models,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        train_loader=attached.train_loader,
        first_step=first_step,
        log=attached.log,
        sums=attached.sums,
    )


def wrap_schedule_lookup(original: Any) -> Any:
    """``get_forward_backward_func`` whose schedules run the items of the plan."""

    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        attached = attachment()

        def keep_losses(losses: Any) -> None:
            attached.losses = losses

        def run_order(order: Order, items: CellItems, pipeline: RoutedPipeline, **arguments: Any) -> Any:
            return orders.run_order(order, items, pipeline, attached.timer.pass_, **arguments)

        def run_stock(**arguments: Any) -> Any:
            """The stock schedule for the number of stages there are now; Megatron asks for it once."""
            return original(*args, **kwargs)(**arguments)

        return route_schedule(
            run_stock,
            attached.route,
            attached.pipeline,
            attached.counter,
            attached.job.data_parallel,
            None if get_args().calculate_per_token_loss else _weights(attached),
            micro_batches_of,
            keep_losses,
            run_order,
            functools.partial(_draw_for, attached),
            _share_losses if attached.job.consistency == "bitwise" else None,
        )

    return get_forward_backward_func


def _share_losses(losses: Losses, items: CellItems, num_microbatches: int) -> tuple[Losses, Losses]:
    """See ``host.schedule.ShareLosses``."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    with attachment().timer.exchanging():
        everybodys = gather_losses(losses, items, num_microbatches, group)
    return everybodys, told_once(everybodys, group.rank())


def _weights(attached: Attachment) -> Weights:
    job = attached.job

    def count_tokens(number: int) -> int:
        assert attached.train_loader is not None
        # Not by what the loader has handed out: one worker of a cell reads for all.
        return attached.train_loader.count_tokens(_samples_before(attached), micro_batch(number, job.micro_batch_size))

    return Weights(micro_batch_size=job.micro_batch_size, count_tokens=count_tokens)


def _samples_before(attached: Attachment) -> int:
    """Samples of all steps before the one under way, which the loop may be ahead of: steps are run again behind it."""
    assert attached.host is not None
    return attached.host.consumed_samples(attached.counter.step)


def _draw_for(attached: Attachment, item: Item) -> contextlib.AbstractContextManager[None]:
    """Inside is the forward pass of this item of the step under way."""
    from megatron.training import get_args

    if attached.streams is None:
        return contextlib.nullcontext()
    args, route = get_args(), attached.route
    stage = route.seat.stage
    start, stop = route.plan.layers[stage]
    behind = stage > 0 and start == stop == args.num_layers
    samples = sample_ids(_samples_before(attached), item)
    return attached.streams.forward_pass(attached.counter.step, samples, args.num_layers + 1 if behind else 0)


@contextlib.contextmanager
def micro_batches_of(samples: int) -> Iterator[None]:
    """Inside, Megatron's arguments say that a micro-batch has so many samples: a script makes its tensors by them."""
    from megatron.training import get_args

    args = get_args()
    size, args.micro_batch_size = args.micro_batch_size, samples
    try:
        yield
    finally:
        args.micro_batch_size = size


def wrap_forward_step(original: Any) -> Any:
    """``forward_step`` that takes its time, and divides losses by the micro-batches of the whole batch."""

    @functools.wraps(original)
    def forward_step(
        forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int, *args: Any, **kwargs: Any
    ) -> Any:
        attached = attachment()
        if attached.counter.step >= 0:  # What a cell happens to run of them must not show in a single bit.
            num_microbatches = attached.job.num_microbatches // attached.summed_rows
        with attached.timer.pass_("forward"):
            return original(forward_step_func, data_iterator, model, num_microbatches, *args, **kwargs)

    return forward_step


def wrap_backward_step(original: Any) -> Any:
    """``backward_step`` that counts and takes its time."""

    @functools.wraps(original)
    def backward_step(*args: Any, **kwargs: Any) -> Any:
        attachment().counter.backward()
        with attachment().timer.pass_("backward" if deferred() is None else "input_gradient"):
            return original(*args, **kwargs)

    return backward_step


def wrap_finish_gather(original: Any) -> Any:
    """The wait for a bucket's parameters in the pass that needs them first, which is no part of the pass."""

    @functools.wraps(original)
    def finish_param_sync(*args: Any, **kwargs: Any) -> Any:
        with attachment().timer.apart():
            return original(*args, **kwargs)

    return finish_param_sync


def wrap_straggler_exit(original: Any) -> Any:
    """The end of a straggler measurement, without a traceback for a membership change."""

    @functools.wraps(original)
    def __exit__(self: Any, ex_type: Any, ex_val: Any, ex_tb: Any) -> Any:
        if ex_type is not None and issubclass(ex_type, EpochChanged):
            return original(self, None, None, None)
        return original(self, ex_type, ex_val, ex_tb)

    return __exit__
