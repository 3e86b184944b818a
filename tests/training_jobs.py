"""What the forked workers of tests run: our entry, a plain use of Megatron's, and a checkout's own script.

Each trains as its arguments say and writes the state it ends with to ``folder/stateN.json``, as hashes by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

TINY = [
    *("--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "1", "--global-batch-size", "4"),
    *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--position-embedding-type", "rope"),
    *("--untie-embeddings-and-output-weights", "--attention-dropout", "0.0", "--hidden-dropout", "0.0"),
    *("--lr", "1e-3", "--lr-decay-style", "constant", "--log-interval", "1", "--num-workers", "0"),
    *("--eval-interval", "1000", "--eval-iters", "0", "--use-distributed-optimizer"),
]
"""A model small enough to train three steps in a second."""

MOCK_DATA = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "64"]

CPU_FLAGS = [
    *("--transformer-impl", "local", "--distributed-backend", "gloo", "--no-rope-fusion", "--no-persist-layer-norm"),
    *("--no-masked-softmax-fusion", "--no-gradient-accumulation-fusion"),
]
"""What our entry adds by itself on the CPU."""


def run_entry(folder: str, argv: list[str]) -> int:
    """``megatron_elas.pretrain_gpt.main``."""
    from megatron_elas.pretrain_gpt import main

    built = _record_model()
    status = main(argv)
    if built:
        _write_state(folder, *built)
    return status


def run_stock(folder: str, argv: list[str]) -> int:
    """The least that a user of Megatron's ``pretrain`` has to write; nothing of it comes from this project."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    sys.argv = ["stock", *argv]
    args = parse_and_validate_args()
    built = _record_model()
    _stock_provider.is_distributed = True  # type: ignore[attr-defined]
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        _stock_provider,
        ModelType.encoder_or_decoder,
        _stock_forward_step,
    )
    _write_state(folder, *built)
    return 0


def run_checkout(folder: str, argv: list[str], root: str) -> int:
    """A Megatron checkout's own pretrain_gpt.py, with the packages that are loaded already."""
    built = _record_model()
    sys.path.insert(0, root)
    sys.argv = ["pretrain_gpt.py", *argv]
    runpy.run_path(str(Path(root) / "pretrain_gpt.py"), run_name="__main__")
    _write_state(folder, *built)
    return 0


def report_threads(folder: str) -> int:
    """Exit with the number of threads a forked worker starts with."""
    return len(os.listdir("/proc/self/task"))


def _stock_provider(num_samples: list[int], vp_stage: int | None = None) -> Any:
    from megatron.core import mpu
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args
    from megatron.training.utils import get_blend_and_blend_per_split

    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        num_samples,
        lambda: mpu.get_tensor_model_parallel_rank() == 0,
        config,
    ).build()


def _stock_forward_step(data_iterator: Any, model: Any) -> Any:
    import torch
    from megatron.core import mpu

    batch: dict[str, Any] = {}
    keys = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    if mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage():
        group, source = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_src_rank()
        found = [next(data_iterator) if mpu.get_tensor_model_parallel_rank() == 0 else None]
        torch.distributed.broadcast_object_list(found, source, group=group)
        batch = found[0]
    tokens, labels, loss_mask, attention_mask, position_ids = (batch.get(key) for key in keys)
    output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)

    def loss_func(output: Any) -> Any:
        assert loss_mask is not None
        loss = torch.sum(output.view(-1).float() * loss_mask.view(-1).float())
        tokens = loss_mask.sum().to(torch.int)
        return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}

    return output, loss_func


def _record_model() -> list[Any]:
    """Catch the model and optimizer that ``pretrain`` builds."""
    from megatron.training import training

    built: list[Any] = []
    original = training.setup_model_and_optimizer

    def setup(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        built.extend(result[:2])
        return result

    training.setup_model_and_optimizer = setup
    return built


def _write_state(folder: str, model: Any, optimizer: Any) -> None:
    import torch

    values: dict[str, Any] = {}
    for index, chunk in enumerate(model):
        for name, parameter in chunk.named_parameters():
            values[f"model{index}.{name}"] = parameter
    for part, chained in enumerate(optimizer.chained_optimizers):
        for number, (main, state) in enumerate(chained.optimizer.state.items()):
            values[f"optimizer{part}.{number}.main"] = main
            values |= {f"optimizer{part}.{number}.{key}": value for key, value in state.items()}
    hashes = {name: _hash(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
    Path(folder, f"state{os.environ['RANK']}.json").write_text(json.dumps(hashes))


def _hash(tensor: Any) -> str:
    import torch

    whole = tensor.detach().contiguous().view(-1)
    return hashlib.sha256(whole.view(torch.uint8).numpy().tobytes()).hexdigest()
