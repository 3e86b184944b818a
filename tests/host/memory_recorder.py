"""Run by ``elasrun``: ``pretrain_gpt``, which at its end writes down the memory that each worker holds.

In the folder ELAS_TEST_OUT, ``memory.W.json``: where the worker sits, and bytes by kind. Activations are what autograd
keeps of the first micro-batch, each storage once, without the parameters. "tensors" are those of all tensors after each
step, and "tensors in recovery" when the first step after one is done, with old and new copies there.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from megatron_elas import pretrain_gpt
from tests.fault.footprint import count_tensor_bytes


def main() -> int:
    """Train with recording switched on."""
    pretrain_gpt.preload()
    from megatron.core.models.gpt import GPTModel

    from megatron_elas import worker
    from megatron_elas.runtime.session import Session
    from megatron_elas.runtime.state import WorkerState

    finish, forward = worker.finish, GPTModel.forward
    run_step, retire = Session.run_step, WorkerState.retire_old_layouts
    kept: dict[int, int] = {}
    tensors: list[int] = []
    in_recovery: list[int] = []

    def first_forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        from torch.autograd.graph import saved_tensors_hooks

        GPTModel.forward = forward
        with saved_tensors_hooks(note, lambda tensor: tensor):
            return forward(model, *args, **kwargs)

    def note(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def record_step(session: Any, step: int, body: Any) -> Any:
        outcome = run_step(session, step, body)
        tensors.append(count_tensor_bytes(gc.get_objects()))
        return outcome

    def record_recovery(state: Any) -> None:
        if len(state.stores) > 1:
            in_recovery.append(count_tensor_bytes(gc.get_objects()))
        retire(state)

    def record_end() -> None:
        from megatron_elas.host.attachment import attachment

        attached = attachment()
        sizes = measure(attached)
        for buffer in all_buffers(attached):
            kept.pop(buffer.param_data.untyped_storage().data_ptr(), None)
        sizes["activations"] = sum(kept.values())
        sizes |= {"tensors": tensors, "tensors in recovery": in_recovery}
        path = Path(os.environ["ELAS_TEST_OUT"]) / f"memory.{attached.worker}.json"
        path.write_text(json.dumps(sizes))
        finish()

    GPTModel.forward = first_forward
    Session.run_step = record_step  # type: ignore[method-assign]
    WorkerState.retire_old_layouts = record_recovery  # type: ignore[method-assign]
    worker.finish = record_end
    return pretrain_gpt.main()


def all_buffers(attached: Any) -> list[Any]:
    """Parameter and gradient buffers of this worker."""
    from megatron_elas.host.model import buffers_of

    return list(buffers_of(attached.host._model))


def measure(attached: Any) -> dict[str, Any]:
    """Stage, and bytes by kind."""
    import torch

    buffers = all_buffers(attached)
    weights = {buffer.param_data.untyped_storage().data_ptr() for buffer in buffers}
    optimizer = 0
    for part in attached.host._optimizer.chained_optimizers:
        for main, state in part.optimizer.state.items():
            tensors = [main, *(t for t in state.values() if isinstance(t, torch.Tensor) and t.numel() > 1)]
            # Masters of fp32 weights are views of them.
            optimizer += sum(t.nbytes for t in tensors if t.untyped_storage().data_ptr() not in weights)
    store = attached.session._state.store
    return {
        "stage": attached.route.seat.stage,
        "weights": sum(buffer.param_data.nbytes for buffer in buffers),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": optimizer,
        "own_copies": allocated(store.own, store._gradients.get(None)),
        "backup_copies": sum(allocated(copies, store._gradients.get(ward)) for ward, copies in store.wards.items()),
    }


def allocated(copies: Any, gradients: Any) -> int:
    """Bytes of the buffers in use of one shard's copies, and of its gradients on their way."""
    buffers = [buffer for buffer in copies._buffers if buffer is not None]
    return sum(buffer.nbytes for buffer in buffers) + (0 if gradients is None else gradients.nbytes)


if __name__ == "__main__":
    sys.exit(main())
