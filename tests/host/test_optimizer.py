"""Optimizers are built anew from what Megatron said at first, without asking Megatron to talk to the whole world."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_elas.host.optimizer import OptimizerFactory


class Builder:
    """Stands for Megatron's function: overwrites the parameter lists that it gets, as DistributedOptimizer does."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, config: Any, param_groups: list[dict[str, Any]], data_parallel_group_idx: int = 0) -> Any:
        self.calls.append(
            {"params": [list(group["params"]) for group in param_groups], "index": data_parallel_group_idx}
        )
        for group in param_groups:
            group["params"][:] = [f"shard of {name}" for name in group["params"]]
            group["lr"] = config.lr
        return SimpleNamespace(optimizer=SimpleNamespace(param_groups=param_groups), grad_scaler=None)


def test_a_rebuilt_optimizer_has_the_parameters_index_and_learning_rate_of_the_one_it_replaces() -> None:
    builder = Builder()
    factory = OptimizerFactory(builder)
    groups = [{"params": ["a", "b"], "wd_mult": 1.0}, {"params": ["c"], "wd_mult": 0.0}]
    first = factory.record(SimpleNamespace(lr=1e-3), param_groups=groups, data_parallel_group_idx=3)
    chained = SimpleNamespace(chained_optimizers=[first])
    kept = chained.chained_optimizers
    for lr in (4e-4, 3e-4):
        for group in chained.chained_optimizers[0].optimizer.param_groups:
            group["lr"] = lr  # by the schedule
        before = chained.chained_optimizers[0]
        factory.rebuild(chained)
        (after,) = chained.chained_optimizers
        assert chained.chained_optimizers is kept and after is not before
        assert [group["lr"] for group in after.optimizer.param_groups] == [lr, lr]
        assert [group["wd_mult"] for group in after.optimizer.param_groups] == [1.0, 0.0]
        assert after.optimizer.param_groups[0]["params"] == ["shard of a", "shard of b"]
    assert builder.calls == [{"params": [["a", "b"], ["c"]], "index": 3}] * 3
