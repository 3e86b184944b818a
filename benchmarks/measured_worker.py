"""Trains as ``megatron_elas.pretrain_gpt`` does, and prints what only a worker itself can measure.

Started by ``training_jobs.run_elastic``. After every recovery a line tells the marks of this worker's phases, the
processor time it spent from the plan to the first step, and the size of its stage. With ELAS_BENCH_WIRE=count a line at
the end tells the bytes that this worker gave its transport to send, by purpose.

ELAS_BENCH_ORDERS gives every plan orders: ``1f1b``, those of 1F1B; ``1f1b-split``, with every weight gradient a pass of
its own, right after its item's other gradients; ``1f1b-late``, after all of these. With ELAS_BENCH_STREAMS=alternate
every other step, from the second on, draws from Megatron's random streams.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any

from training_jobs import MEASURED_MARK

from megatron_elas import pretrain_gpt


def measure_recoveries() -> None:
    """Print a line for each."""
    from megatron_elas.control.port import LinkPort
    from megatron_elas.runtime.executor import Executor

    seen: dict[str, Any] = {}
    apply, recovered = Executor.apply, LinkPort.recovered

    @functools.wraps(apply)
    def measured_apply(self: Any, *args: Any) -> Any:
        before_s = time.process_time()
        report = apply(self, *args)
        seen["cpu_ms"] = (time.process_time() - before_s) * 1e3
        state = self._state
        seat = state.plan.placement.find_seat(state.worker)
        if seat is not None:
            seen["stage_numel"] = state.catalogue.total_count(state.plan, seat.stage)
        return report

    @functools.wraps(recovered)
    def printed_recovered(self: Any, report: Any) -> None:
        print(MEASURED_MARK + json.dumps({**seen, "worker": report.worker, "marks_s": report.marks_s}), flush=True)
        recovered(self, report)

    Executor.apply = measured_apply  # type: ignore[method-assign]
    LinkPort.recovered = printed_recovered  # type: ignore[method-assign]


def count_wire_bytes() -> None:
    """Print a line at the end."""
    from megatron_elas import worker
    from megatron_elas.runtime import channels
    from megatron_elas.runtime.communicator.signatures import unpack
    from megatron_elas.runtime.transport.sockets import SocketTransport

    purposes = {channels.SNAPSHOTS: "backups", channels.MIGRATION: "moves", channels.PIPELINE: "pipeline"}
    sent: Counter[str] = Counter()
    exchange, run, send, post = (
        SocketTransport.exchange, SocketTransport.run, SocketTransport.send, SocketTransport.post,
    )  # fmt: skip

    def purpose(channel: int, tag: int) -> str:
        signature = unpack(tag)
        return purposes.get(channel) or (signature.kind if signature is not None else "other")

    @functools.wraps(exchange)
    def counted_exchange(self: Any, channel: int, tag: int, sends: Any, *rest: Any, **more: Any) -> None:
        sent[purpose(channel, tag)] += sum(buffer.nbytes for _, buffer in sends)
        exchange(self, channel, tag, sends, *rest, **more)

    @functools.wraps(run)
    def counted_run(self: Any, channel: int, tag: int, program: Any, *rest: Any, **more: Any) -> None:
        transfers = (transfer for turn in program.rounds for transfer in turn.sends)
        sent[purpose(channel, tag)] += sum(transfer.region.size for transfer in transfers)
        run(self, channel, tag, program, *rest, **more)

    def counted(original: Any) -> Any:
        @functools.wraps(original)
        def one(self: Any, channel: int, tag: int, part: Any) -> None:
            sent[purpose(channel, tag)] += part.buffer.nbytes
            original(self, channel, tag, part)

        return one

    finish = worker.finish

    def told_finish() -> None:
        finish()
        print(MEASURED_MARK + json.dumps({"wire_bytes": dict(sent)}), flush=True)

    SocketTransport.exchange = counted_exchange  # type: ignore[method-assign]
    SocketTransport.run = counted_run  # type: ignore[method-assign]
    SocketTransport.send, SocketTransport.post = counted(send), counted(post)  # type: ignore[method-assign]
    worker.finish = told_finish


def force_orders(kind: str) -> None:
    """Add the same orders to every plan, on every worker."""
    from megatron_elas.control import messages
    from megatron_elas.schedule.one_f_one_b import one_f_one_b
    from megatron_elas.schedule.orders import write_orders

    original = messages.unpack_plan

    def ordered(text: str) -> str:
        words = text.split()
        if kind == "1f1b-split":
            return " ".join(f"{word} W{word[1:]}" if word[0] == "B" else word for word in words)
        late = [f"W{word[1:]}" for word in words if word[0] == "B"] if kind == "1f1b-late" else []
        return " ".join([*words, *late])

    @functools.wraps(original)
    def unpack_plan(text: Any) -> Any:
        plan = original(text)
        orders = write_orders(one_f_one_b(plan.items, plan.warmups or None))
        return replace(plan, orders=tuple(tuple(map(ordered, cells)) for cells in orders))

    messages.unpack_plan = unpack_plan


def alternate_streams() -> None:
    """Every other step without ours."""
    from megatron_elas.host.attachment import attachment
    from megatron_elas.host.training import MegatronHost

    begin_step = MegatronHost.begin_step
    kept: list[Any] = []

    @functools.wraps(begin_step)
    def begin_step_with(self: Any, step: int, data_iterator: Any) -> None:
        attached = attachment()
        if not kept:
            kept.append(attached.streams)
        attached.streams = kept[0] if step % 2 == 0 else None
        begin_step(self, step, data_iterator)

    MegatronHost.begin_step = begin_step_with  # type: ignore[method-assign]


if __name__ == "__main__":
    pretrain_gpt.preload()
    if orders := os.environ.get("ELAS_BENCH_ORDERS"):
        force_orders(orders)
    measure_recoveries()
    if os.environ.get("ELAS_BENCH_WIRE") == "count":
        count_wire_bytes()
    if os.environ.get("ELAS_BENCH_STREAMS") == "alternate":
        alternate_streams()
    sys.exit(pretrain_gpt.main())
