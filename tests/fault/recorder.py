"""Run by ``elasrun`` in fault tests: ``pretrain_gpt``, which also writes down what each worker held.

In the folder ELAS_TEST_OUT: ``final.W.pt`` at the end of training, ``walk.E.W.pt`` after the first step committed in
epoch E (what is stale then, and what the worker costs), and ``version.V.epoch.E.W.pt`` in every run of the steps
named in ELAS_TEST_VERSIONS, before it or, when optimizer state moves beside it, as soon as that has arrived. With
ELAS_TEST_TRACE it writes ``trace.W`` (traces.py) and walks nowhere. Before the step
ELAS_TEST_KILL_SPARES the spares are killed: they run no step in which a scripted fault could strike.
ELAS_TEST_SLEEPER names a worker that falls asleep (``sleeper.py``), ELAS_TEST_KILL_CONTROLLER moments at which the
controller is killed (``controller_killer.py``), ELAS_TEST_KILL_JOB workers, or the launcher, that are killed
together (``job_killer.py``), ELAS_TEST_SPOIL a fault to plant in a recovery's state
(``verification_plants.py``), ELAS_TEST_DEAF a worker that an answer does not reach (``deaf.py``), ELAS_TEST_ORDERS
gives every plan orders (``forced_orders.py``), ELAS_TEST_SLOW_MOVES holds optimizer state up (``slow_moves.py``),
ELAS_TEST_ASK asks for other plans (``asker.py``), ELAS_TEST_MASKS records dropout masks (``masks.py``), and
ELAS_TEST_PART makes the run part from others (``audit_plants.py``).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from megatron_elas import pretrain_gpt
from tests.fault import (
    asker,
    audit_plants,
    controller_killer,
    deaf,
    forced_orders,
    job_killer,
    masks,
    planting,
    sleeper,
    slow_moves,
    update_killer,
    verification_plants,
    weights_killer,
)
from tests.fault.footprint import ancestors, count_objects, count_tensor_bytes, take_lasting_footprint
from tests.fault.stale import Scene, find_stale
from tests.fault.traces import Tracer


def main() -> int:
    """Train with recording switched on."""
    pretrain_gpt.preload()
    from megatron_elas import worker
    from megatron_elas.host.training import MegatronHost
    from megatron_elas.runtime.executor import Executor
    from megatron_elas.runtime.session import Session

    begin_step, run_step, finish = MegatronHost.begin_step, Session.run_step, worker.finish
    complete = Executor.complete
    walked: set[int] = set()
    footprints: list[dict[str, Any]] = []
    wanted = {int(v) for v in os.environ.get("ELAS_TEST_VERSIONS", "").split(",") if v}

    mask_recorder = masks.MaskRecorder()
    tracers: list[Tracer] = []
    traced = bool(os.environ.get("ELAS_TEST_TRACE"))

    def tracer() -> Tracer:
        if not tracers:
            tracers.append(Tracer(Path(os.environ["ELAS_TEST_OUT"]), attachment().worker))
        return tracers[0]

    update_killer.install(Path(os.environ["ELAS_TEST_OUT"]))
    weights_killer.install(Path(os.environ["ELAS_TEST_OUT"]))
    deaf.install(Path(os.environ["ELAS_TEST_OUT"]))
    audit_plants.install(Path(os.environ["ELAS_TEST_OUT"]))
    kill_step = int(os.environ.get("ELAS_TEST_KILL_SPARES", "-1"))

    def record_version(host: Any, step: int, data_iterator: Any) -> None:
        if kill_step >= 0:
            kill_spares(kill_step, step)
        if not attachment().session._executor.remapping:
            record_shard(step)
        mask_recorder.watch(attachment())
        sleeper.fall_asleep(attachment().worker, step)
        controller_killer.step_begins(attachment().worker, step)
        job_killer.step_begins(attachment(), step)
        slow_moves.step_begins(attachment())
        asker.step_begins(attachment(), step)
        begin_step(host, step, data_iterator)

    def record_arrival(executor: Any) -> Any:
        arrived = complete(executor)
        if arrived is not None:
            record_shard(executor._state.live)
        return arrived

    def record_shard(step: int) -> None:
        attached = attachment()
        if traced:
            tracer().tell_version(attached.session.plan, step, shard(attached))
        if step in wanted:
            epoch = attached.session.plan.epoch
            trains = {"trains": is_training(attached.host)}
            save(f"version.{step}.epoch.{epoch}", attached.worker, shard(attached) | trains)

    def record_walk(session: Any, step: int, body: Any) -> Any:
        outcome = run_step(session, step, body)
        footprint = take_lasting_footprint(attachment(), footprints[-1] if footprints else None)
        footprints.append({"step": step, **footprint})
        if traced:
            tracer().tell_step(step, outcome, footprint)
            return outcome
        # A worker whose step was finished in the recovery has run none under the new plan yet.
        ran = session._state.live == step + 1 and set(session._state.stores) == {session.plan.epoch}
        if session.plan.epoch not in walked and ran:
            walked.add(session.plan.epoch)
            sleeper.wake_up(session.worker, session.plan.epoch)
            save(f"walk.{session.plan.epoch}", session.worker, walk(attachment(), step, footprint))
            if os.environ.get("ELAS_TEST_PLANTS") == str(session.worker):
                if session.plan.epoch == 0:
                    planting.switch_straggler_detector_on(attachment())
                else:
                    save("plants", session.worker, planting.find_planted(attachment()))
        return outcome

    def record_end() -> None:
        sleeper.let_it_be_killed()
        attached = attachment()
        attached.communicator.muted = attached.communicator.tolerant = False
        state = shard(attached)
        state |= {"footprints": footprints, "reduced": reduce_all(attached)}
        state["problems"] = [] if traced else find_lasting(attached)
        state["parameters"] = {name: param.detach().clone() for name, param in parameters(attached)}
        save("final", attached.worker, state)
        if mask_recorder.masks:
            save("masks", attached.worker, mask_recorder.record())
        finish()

    MegatronHost.begin_step = record_version  # type: ignore[method-assign]
    Session.run_step = record_walk  # type: ignore[method-assign]
    Executor.complete = record_arrival  # type: ignore[method-assign]
    slow_moves.install()
    forced_orders.install()
    worker.finish = record_end
    controller_killer.install()
    job_killer.install(attachment)
    if text := os.environ.get("ELAS_TEST_SPOIL"):
        verification_plants.plant_before_checks(text)
    return pretrain_gpt.main()


def kill_spares(kill_step: int, step: int) -> None:
    """Called on all workers before each step: note the own pid; in ``kill_step`` the first worker kills all spares."""
    attached = attachment()
    placement = attached.session.plan.placement
    folder = Path(os.environ["ELAS_TEST_OUT"])
    pid = folder / f"pid.{attached.worker}"
    if not pid.exists():  # once: another worker may be reading it
        pid.write_text(str(os.getpid()))
    if step == kill_step and attached.worker == placement.workers[0] and placement.spares:
        print(f"spares killed before step {step}: {', '.join(map(str, placement.spares))}", file=sys.stderr, flush=True)
        for spare in placement.spares:
            os.kill(int((folder / f"pid.{spare}").read_text()), signal.SIGKILL)


def attachment() -> Any:
    """Of this process."""
    from megatron_elas.host.attachment import attachment

    return attachment()


def is_training(host: Any) -> bool:
    """Whether model, timers and rerun machine are as training needs them, and not as an evaluation does."""
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
    from megatron.core.utils import get_model_config

    enabled = get_rerun_state_machine().get_mode() is not RerunMode.DISABLED
    return enabled and all(chunk.training and get_model_config(chunk).timers is not None for chunk in host._model)


def parameters(attached: Any) -> Any:
    """(name, parameter) of this worker's stage."""
    from megatron_elas.host.model import named_parameters

    return named_parameters(attached.host._model)


def shard(attached: Any) -> dict[str, Any]:
    """Where this worker sits, how many samples its items have, and its optimizer shard, piece by piece."""
    import torch

    access = attached.host._access
    layout = access.layout()
    flat = torch.empty(layout.flat_numel)
    access.read(flat)
    slots = flat[:-1].view(3, -1)
    seat = attached.route.seat
    pieces = [
        (piece.name, piece.start, piece.stop, slots[:, offset : offset + piece.numel].clone())
        for piece, offset in zip(layout.pieces, layout.offsets(), strict=True)
    ]
    items = [item.samples for item in attached.route.step_items]
    order = " ".join(f"{action.kind}{action.item}" for action in attached.route._step.order or ())
    place = {"stage": seat.stage, "cell": seat.cell, "lane": seat.lane, "items": items, "order": order}
    return place | {"pieces": pieces, "step": float(flat[-1]), "pid": os.getpid()}


def find_lasting(attached: Any) -> list[str]:
    """What is stale and stays so. Another thread may just be letting go of what a recovery left over."""
    deadline = time.monotonic() + 5
    while (problems := find_stale(Scene(attached))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return problems


def walk(attached: Any, step: int, before: dict[str, Any]) -> dict[str, Any]:
    """What is stale after a committed step, and what the worker costs; ``before``: its footprint until now."""
    footprint = take_lasting_footprint(attached, before)
    problems = find_lasting(attached)
    objects = gc.get_objects()  # only now: the first walk imports what it looks at
    return footprint | {
        "step": step,
        "problems": problems,
        "wards": len(attached.session._state.store.wards),
        "objects": count_objects(objects),
        "tensor_bytes": count_tensor_bytes(objects),
        "ancestors": ancestors(),
    }


def save(name: str, worker: int, value: dict[str, Any]) -> None:
    """Write a record."""
    import torch

    torch.save(value, Path(os.environ["ELAS_TEST_OUT"]) / f"{name}.{worker}.pt")


def reduce_all(attached: Any) -> dict[str, tuple[int, float]]:
    """(size, sum of ones) of every group that may carry collectives, by name."""
    import torch
    import torch.distributed as dist

    from megatron_elas.host.groups import GroupKind, classify_group

    sums = {}
    for number, group in enumerate(attached.communicator.groups):
        if classify_group(group.original_members, group.description, attached.initial) is not GroupKind.CHAIN:
            one = torch.ones(1)
            dist.all_reduce(one, group=group)
            sums[f"{number} {group.description}"] = (group.size(), float(one))
    return sums


if __name__ == "__main__":
    sys.exit(main())
