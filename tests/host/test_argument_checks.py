"""Arguments that cannot work are refused, with the values and the remedy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from megatron_elas.cli.launch_flags import build_parser
from megatron_elas.host.argument_checks import check_arguments, check_save
from megatron_elas.host.arguments import (
    LAUNCHER_FLAGS,
    add_dry_run_argument,
    add_elastic_arguments,
    add_entry_arguments,
)
from megatron_elas.spec.errors import BadUsage

GOOD = {
    "world_size": 8,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 1,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "step_batch_size_schedule": None,
    "decrease_batch_size_if_needed": False,
    "eval_interval": 10,
    "full_validation": False,
    "skip_train": False,
    "mock_data": True,
    "dataloader_type": None,
    "data_path": None,
    "train_data_path": None,
    "valid_data_path": None,
    "test_data_path": None,
    "data_args_path": None,
    "per_split_data_args_path": None,
    "per_dataset_sequences_path": None,
    "tokenizer_type": "NullTokenizer",
    "tokenizer_model": None,
    "vocab_size": 64,
    "vocab_file": None,
    "merge_file": None,
}


def check(**changes: Any) -> None:
    check_arguments(argparse.Namespace(**{**GOOD, **changes}))


def test_good_arguments_pass() -> None:
    check()
    check(global_batch_size=None)
    check(global_batch_size=6, decrease_batch_size_if_needed=True)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"world_size": 6}, r"6 workers cannot form a grid of tensor \* pipeline \* context = 2 \* 2 \* 1 = 4"),
        ({"tensor_model_parallel_size": 0}, "--tensor-model-parallel-size must be at least 1, got 0"),
        ({"micro_batch_size": None}, "--micro-batch-size is missing"),
        ({"micro_batch_size": -1}, "--micro-batch-size must be at least 1, got -1"),
        ({"global_batch_size": 0}, "--global-batch-size must be at least 1, got 0"),
        ({"global_batch_size": 10}, "does not divide into micro-batches of 2 on 2 data-parallel rows: .*multiple of 4"),
        ({"eval_interval": None}, "--eval-interval is missing"),
        ({"mock_data": False}, "no training data"),
        ({"sft": True}, "--sft is not supported"),
        ({"fim_data": True}, "--fim-data is not supported"),
        ({"vocab_size": None}, "NullTokenizer needs --vocab-size"),
        ({"tokenizer_type": "Llama2Tokenizer"}, "Llama2Tokenizer needs --tokenizer-model"),
        (
            {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "/no/folder"},
            "folder /no/folder does not exist",
        ),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "/no/vocab.json"}, "check --vocab-file"),
    ],
)
def test_a_bad_value_is_told(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(BadUsage, match=text):
        check(**changes)


def make_data(folder: Path, name: str) -> str:
    for ending in (".bin", ".idx"):
        (folder / f"{name}{ending}").touch()
    return str(folder / name)


def test_data_files_are_looked_for_in_every_form_of_the_flag(tmp_path: Path) -> None:
    a, b = make_data(tmp_path, "a"), make_data(tmp_path, "b")
    listed = tmp_path / "list.txt"
    listed.write_text(f"0.5 {a} 0.5 /no/listed")
    check(mock_data=False, data_path=[a])
    check(mock_data=False, data_path=["0.3", a, "0.7", b])
    check(mock_data=False, train_data_path=[a, b], valid_data_path=[b])
    check(mock_data=False, data_path=["s3://bucket/a"])
    with pytest.raises(BadUsage, match=r"data file /no/file.bin does not exist"):
        check(mock_data=False, data_path=[a, "/no/file"])
    with pytest.raises(BadUsage, match=r"data file /no/listed.bin does not exist"):
        check(mock_data=False, data_args_path=str(listed))
    (tmp_path / "b.idx").unlink()
    with pytest.raises(BadUsage, match=r"b.idx does not exist"):
        check(mock_data=False, data_path=[a, b])


def test_elastic_is_off_unless_asked_for() -> None:
    parser = add_elastic_arguments(argparse.ArgumentParser())
    args = parser.parse_args([])
    assert args.elastic is False
    assert args.elastic_inject is None
    args = parser.parse_args(["--elastic", "--elastic-inject", "a", "--elastic-inject", "b"])
    assert args.elastic is True
    assert args.elastic_inject == ["a", "b"]


def test_each_worker_has_one_backup_that_replays_unless_told_otherwise() -> None:
    args = add_elastic_arguments(argparse.ArgumentParser()).parse_args([])
    assert (args.elastic_snapshot, args.elastic_snapshot_replicas) == ("replay", 1)
    parser = add_entry_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--elastic-snapshot", "copy", "--elastic-snapshot-replicas", "2"])
    assert (args.elastic_snapshot, args.elastic_snapshot_replicas) == ("copy", 2)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--elastic-snapshot", "none"], "invalid choice: 'none'"),
        (["--elastic-snapshot-replicas", "0"], r"must be a whole number from 1 up, got '0' \(none: --elastic-snapshot"),
        (["--elastic-snapshot-replicas", "-1"], "from 1 up, got '-1'"),
        (["--elastic-snapshot-verify-interval", "-1"], "whole number of steps from 0 up, got '-1'"),
        (["--elastic-snapshot-replicas", "1.5"], "from 1 up, got '1.5'"),
    ],
)
def test_a_bad_number_of_backups_is_told(words: list[str], text: str) -> None:
    with pytest.raises(BadUsage, match=text) as refusal:
        add_entry_arguments(argparse.ArgumentParser()).parse_args(words)
    assert "\n" not in str(refusal.value)


def test_a_misspelt_flag_gets_a_proposal() -> None:
    parser = add_entry_arguments(argparse.ArgumentParser())
    with pytest.raises(BadUsage, match=r"unrecognized arguments: --elastc; did you mean --elastic\?"):
        parser.parse_args(["--elastc"])


def test_a_flag_of_the_launcher_behind_the_script_is_told() -> None:
    parser = add_dry_run_argument(argparse.ArgumentParser())
    launcher = build_parser()._option_string_actions
    assert launcher.keys() >= LAUNCHER_FLAGS and not LAUNCHER_FLAGS & parser._option_string_actions.keys()
    for flag in sorted(LAUNCHER_FLAGS):
        with pytest.raises(BadUsage, match=f"arguments: {flag}; {flag} is a flag of elasrun: write it before"):
            parser.parse_args([flag])


def saving(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"save": None, "save_interval": 5, **changes})


def test_a_folder_for_checkpoints_is_made(tmp_path: Path) -> None:
    check_save(saving())
    check_save(saving(save=str(tmp_path / "new" / "checkpoints")))
    check_save(saving(save="s3://bucket/elsewhere"))
    assert (tmp_path / "new" / "checkpoints").is_dir()


def test_checkpoints_without_an_interval_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="--save needs --save-interval"):
        check_save(saving(save=str(tmp_path), save_interval=None))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        BadUsage, match=r"--save .*/file/checkpoints cannot be written \(Not a directory\): give a folder"
    ):
        check_save(saving(save=str(tmp_path / "file" / "checkpoints")))
