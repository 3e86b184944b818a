"""Training, validation and test samples of GPT pretraining, from Megatron's own dataset classes."""

from __future__ import annotations

import functools
import json
from typing import Any

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args
from megatron.training.utils import get_blend_and_blend_per_split, print_rank_0

from megatron_elas.host.gpt_step import needs_data


def builds_data(vp_stage: int | None) -> bool:
    """Whether this rank reads samples: TP rank 0 of the stages that need them."""
    return parallel_state.get_tensor_model_parallel_rank() == 0 and needs_data(vp_stage)


def make_dataset_config(args: Any) -> GPTDatasetConfig:
    """Megatron's dataset description of the command line."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path, encoding="utf-8") as file:
            sequences_per_dataset = json.load(file)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        sequences_per_dataset=sequences_per_dataset,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )


def provide_datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build the three datasets. All ranks must call.

    Args:
        num_samples: For training, validation and test.
        vp_stage: Of the model chunk the samples are for.
    """
    args = get_args()
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    train, valid, test = BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        num_samples,
        functools.partial(builds_data, vp_stage),
        make_dataset_config(args),
    ).build()
    print_rank_0("> finished creating GPT datasets ...")
    return train, valid, test


provide_datasets.is_distributed = True  # type: ignore[attr-defined]  # tells Megatron that every rank may call it
