"""A model with layers that stayed, came and went is what Megatron builds at once for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.host.restage_jobs import UNTIED, Worker, make_plan, run_job

pytestmark = pytest.mark.process

STAGES = [[[0]], [[1]], [[2]]]
FLAGS = ("--pipeline-model-parallel-size=3", "--decoder-first-pipeline-num-layers=2")
"""Layers 0-1, 2 and 3 at first."""
PLANS = {
    2: make_plan(1, STAGES, [(0, 1), (1, 3), (3, 4)]),
    4: make_plan(2, STAGES, [(0, 1), (1, 2), (2, 4)]),
}
OF_A_RUN = {"input_tensor", "current_microbatch"}
"""Attributes of modules that forward passes set."""


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    """Imported before workers are forked, because it takes seconds."""
    import megatron.training  # noqa: F401


def compare(attached: Any) -> dict[str, Any]:
    """How this worker's model differs from one that Megatron builds at once; what was taken over."""
    from megatron.core.utils import get_model_config

    from megatron_elas.host.layer_edit import can_exchange
    from megatron_elas.host.model import named_parameters, sum_gradients
    from megatron_elas.host.restage import _nothing_drawn

    host = attached.host
    config = get_model_config(host._model[0])
    with host._muted(), _nothing_drawn(config):
        fresh = host._models._build(config)
    sum_gradients(fresh)
    if not host._model[0].remove_forward_pre_hook_handles and fresh[0].use_forward_hook:  # training has ended
        fresh[0].disable_forward_pre_hook(param_sync=False)
    ours, theirs = host._model[0], fresh[0]
    host._models.sort_parameters(fresh)
    found = [*differing_modules(ours, theirs), *differing_buffers(ours, theirs)]
    if not can_exchange(host._model):
        found.append("the model was made anew as a whole")
    mine, other = dict(named_parameters(host._model)), dict(named_parameters(fresh))
    if list(mine) != list(other):
        found.append(f"parameters {list(mine)}, at once {list(other)}")
    with torch.no_grad():
        for name, param in other.items():
            found += differing_attributes(name, mine[name], param)
            param.copy_(mine[name])
    passes = [run_once(chunk, config) for chunk in (ours, theirs)]
    if not torch.equal(passes[0], passes[1]):
        found.append("forward passes differ")
    for name, param in other.items():
        if not torch.equal(mine[name].main_grad, param.main_grad) or not param.main_grad.any():
            found.append(f"gradients of {name} differ or are none")
    return {"differences": found}


def differing_modules(ours: torch.nn.Module, theirs: torch.nn.Module) -> list[str]:
    """Names, types and plain attributes."""
    mine, other = dict(ours.named_modules()), dict(theirs.named_modules())
    if list(mine) != list(other):
        return [f"modules {list(mine)}, at once {list(other)}"]
    found = []
    for name, module in other.items():
        if type(mine[name]) is not type(module):
            found.append(f"{name} is a {type(mine[name])}")
        found += differing_entries(name, plain_attributes(mine[name]), plain_attributes(module))
    return found


def plain_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Numbers and texts, and how many hooks there are of each kind."""
    plain = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, int | float | str | tuple | torch.dtype | torch.device | None) and key not in OF_A_RUN
    }
    return plain | {key: len(value) for key, value in vars(module).items() if "hooks" in key and hasattr(value, "keys")}


def differing_buffers(ours: Any, theirs: Any) -> list[str]:
    """How buffers are cut."""

    def cuts(ddp: Any) -> Any:
        names = {param: name for name, param in ddp.module.named_parameters()}
        return [
            (
                buffer.numel,
                [(bucket.offset, bucket.numel_unpadded, bucket.grad_data.numel()) for bucket in buffer.buckets],
                {names[param]: place for param, place in buffer.param_index_map.items()},
                [names[param] for bucket in buffer.buckets for param in bucket.params_list],
            )
            for buffer in ddp.buffers
        ] + [len(ddp.bucket_groups), len(ddp.grad_accs), len(ddp.param_to_bucket_group)]

    return [] if cuts(ours) == cuts(theirs) else [f"buffers are cut {cuts(ours)}, at once {cuts(theirs)}"]


def differing_attributes(name: str, ours: torch.nn.Parameter, theirs: torch.nn.Parameter) -> list[str]:
    """What Megatron has written on a parameter. The fresh one has no optimizer."""

    def written(param: torch.nn.Parameter) -> dict[str, Any]:
        values = {key: value for key, value in vars(param).items() if not key.startswith("main_param")}
        return {key: list(value.shape) if isinstance(value, torch.Tensor) else value for key, value in values.items()}

    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return [f"{name} is of shape {ours.shape} and {ours.dtype}"]
    return list(differing_entries(name, written(ours), written(theirs)))


def differing_entries(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    """One sentence for each."""
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key, "-") != theirs.get(key, "-"):
            yield f"{name}: {key} is {ours.get(key, '-')}, at once {theirs.get(key, '-')}"


def run_once(ddp: Any, config: Any) -> torch.Tensor:
    """A forward and a backward pass of the stage over made-up input; gives the output."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 200, (1, 32), generator=generator)
    entry = torch.randn(32, 1, config.hidden_size, generator=generator).to(config.params_dtype).requires_grad_()
    ddp.zero_grad_buffer()
    with ddp.no_sync():
        ddp.module.set_input_tensor(entry)
        output: torch.Tensor = ddp(ids, torch.arange(32)[None], None)
        output.float().square().sum().backward()
    return output.detach().clone()


def differences(workers: list[Worker]) -> list[list[str]]:
    """Of each worker."""
    return [worker.found["differences"] for worker in workers]


def test_a_stage_with_other_layers_is_what_megatron_builds_at_once(tmp_path: Path) -> None:
    workers = run_job(tmp_path / "job", (*FLAGS, UNTIED), 3, PLANS, look=compare)
    assert differences(workers) == [[], [], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--overlap-grad-reduce", "--overlap-param-gather"), id="tied-overlap"),
        pytest.param((UNTIED, "--bf16"), id="bf16"),
        pytest.param((UNTIED, "--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"),
                     id="recompute"),
    ],
)  # fmt: skip
def test_and_with_other_settings(flags: tuple[str, ...], tmp_path: Path) -> None:
    workers = run_job(tmp_path / "job", (*FLAGS, *flags), 3, PLANS, look=compare)
    assert differences(workers) == [[], [], []]
