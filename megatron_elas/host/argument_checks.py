"""What can be seen to be wrong before any process group is made. Each check raises BadUsage with one sentence."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path

from megatron_elas.spec.errors import BadUsage

UNSUPPORTED_FLAGS = {
    "sft": "--sft",
    "fim_data": "--fim-data",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "logits_load_dir": "--logits-load-dir",
    "perform_rl_step": "--perform-rl-step",
    "yaml_cfg": "--yaml-cfg",
}
"""Attribute of args -> flag of what this entry does not do."""

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")

_REMOTE_PREFIXES = ("s3://", "msc://")


def check_arguments(args: argparse.Namespace) -> None:
    """Run all checks on parsed, not yet validated arguments."""
    check_supported(args)
    check_grid(args)
    check_batch(args)
    check_evaluation(args)
    check_data(args)
    check_tokenizer(args)


def check_supported(args: argparse.Namespace) -> None:
    """Refuse what only other entry scripts of Megatron do."""
    for name, flag in UNSUPPORTED_FLAGS.items():
        if getattr(args, name, None):
            raise BadUsage(
                f"{flag} is not supported by megatron_elas, which pretrains on plain GPT samples: "
                f"leave it out, or use Megatron's own pretrain_gpt.py without --elastic"
            )


def check_grid(args: argparse.Namespace) -> None:
    """The workers must fill the grid of tensor, pipeline and context parallelism."""
    sizes = {
        "--tensor-model-parallel-size": args.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": args.pipeline_model_parallel_size,
        "--context-parallel-size": args.context_parallel_size,
    }
    for flag, size in sizes.items():
        if size < 1:
            raise BadUsage(f"{flag} must be at least 1, got {size}")
    cell = _model_size(args)
    if args.world_size % cell:
        shape = " * ".join(str(size) for size in sizes.values())
        raise BadUsage(
            f"{args.world_size} workers cannot form a grid of tensor * pipeline * context = {shape} = {cell}: "
            f"start a multiple of {cell} workers, or change {' or '.join(list(sizes)[:2])}"
        )


def check_batch(args: argparse.Namespace) -> None:
    """The global batch must be a whole number of micro-batches for each data-parallel row."""
    micro, whole = args.micro_batch_size, args.global_batch_size
    if micro is None:
        raise BadUsage("--micro-batch-size is missing: give the number of samples in one micro-batch")
    if micro < 1:
        raise BadUsage(f"--micro-batch-size must be at least 1, got {micro}")
    if whole is None or args.step_batch_size_schedule is not None:
        return
    if whole < 1:
        raise BadUsage(f"--global-batch-size must be at least 1, got {whole}")
    rows = args.world_size // _model_size(args)
    if whole % (micro * rows) and not args.decrease_batch_size_if_needed:
        raise BadUsage(
            f"--global-batch-size {whole} does not divide into micro-batches of {micro} on {rows} data-parallel rows: "
            f"choose a multiple of {micro * rows}"
        )


def check_evaluation(args: argparse.Namespace) -> None:
    """Megatron divides by the evaluation interval, also when nothing is evaluated."""
    if args.eval_interval is None and not args.full_validation and not args.skip_train:
        raise BadUsage("--eval-interval is missing: give a number of steps, with --eval-iters 0 to evaluate nothing")


def check_data(args: argparse.Namespace) -> None:
    """Every data file that is named must exist, and some must be named."""
    if args.mock_data or args.dataloader_type == "external":
        return
    for flag in ("data_args_path", "per_split_data_args_path", "per_dataset_sequences_path"):
        path = getattr(args, flag)
        if path is not None and not os.path.isfile(path):
            raise BadUsage(f"--{flag.replace('_', '-')} {path} does not exist: give the path of an existing file")
    prefixes = list(_data_prefixes(args))
    if not prefixes:
        raise BadUsage("no training data: give --data-path PREFIX (scripts/prepare_data.py makes one), or --mock-data")
    for prefix in prefixes:
        for ending in (".bin", ".idx"):
            if not prefix.startswith(_REMOTE_PREFIXES) and not os.path.isfile(prefix + ending):
                raise BadUsage(
                    f"data file {prefix}{ending} does not exist: --data-path takes the path of a .bin/.idx pair "
                    f"without its ending (scripts/prepare_data.py makes one)"
                )


def check_tokenizer(args: argparse.Namespace) -> None:
    """Files that the tokenizer reads must exist."""
    kind, model = args.tokenizer_type, args.tokenizer_model
    if kind in (*SENTENCEPIECE_TYPES, "TikTokenizer"):
        if model is None:
            raise BadUsage(f"--tokenizer-type {kind} needs --tokenizer-model with the path of its file")
        if not os.path.isfile(model):
            raise BadUsage(f"tokenizer file {model} does not exist: check --tokenizer-model")
    if kind == "HuggingFaceTokenizer":
        if model is None:
            raise BadUsage("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model with a local folder")
        if model.startswith(("/", "./", "../", "~")) and not os.path.exists(model):
            raise BadUsage(f"tokenizer folder {model} does not exist: check --tokenizer-model")
    if kind == "NullTokenizer" and args.vocab_size is None:
        raise BadUsage("--tokenizer-type NullTokenizer needs --vocab-size with the number of token ids")
    for flag, path in (("--vocab-file", args.vocab_file), ("--merge-file", args.merge_file)):
        if path is not None and not os.path.isfile(path):
            raise BadUsage(f"tokenizer file {path} does not exist: check {flag}")


def check_save(args: argparse.Namespace) -> None:
    """Checkpoints must be asked for at an interval, and go where they can be written; the folder is made."""
    if args.save is None:
        return
    if args.save_interval is None:
        raise BadUsage("--save needs --save-interval with the number of steps from one checkpoint to the next")
    if args.save.startswith(_REMOTE_PREFIXES):
        return
    try:
        os.makedirs(args.save, exist_ok=True)
        reason = None if os.access(args.save, os.W_OK | os.X_OK) else "no permission"
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise BadUsage(f"--save {args.save} cannot be written ({reason}): give a folder that can be made and written")


def _model_size(args: argparse.Namespace) -> int:
    """Workers that hold one copy of the model."""
    return int(args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size)


def _data_prefixes(args: argparse.Namespace) -> Iterable[str]:
    """Paths named by any data flag, in order, without weights."""
    lists = [args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path]
    if args.data_args_path is not None:
        lists.append(Path(args.data_args_path).read_text(encoding="utf-8").split())
    if args.per_split_data_args_path is not None:
        for words in json.loads(Path(args.per_split_data_args_path).read_text(encoding="utf-8")).values():
            lists.append(words.split() if isinstance(words, str) else words)
    for words in lists:
        yield from _without_weights(words or [])


def _without_weights(words: list[str]) -> list[str]:
    """Prefixes of a list such as ``0.3 first 0.7 second``, or of one without weights."""
    if len(words) % 2 == 0 and all(_is_number(word) for word in words[::2]):
        return words[1::2]
    return words


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
