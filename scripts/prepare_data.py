#!/usr/bin/env python3
"""Turn text files into Megatron's .bin/.idx pair, with a tokenizer that is trained here or loaded.

    scripts/prepare_data.py docs/ src/ --ending .md .py --output data/text --vocab-size 4096
    scripts/prepare_data.py corpus.txt --output data/text --tokenizer-model tokenizer.model
    scripts/prepare_data.py corpus.txt --output data/text --tokenizer-type HuggingFaceTokenizer --tokenizer-model folder

Folders are searched for files with the endings; hidden folders (such as .git and .venv) and __pycache__ are left out.
Every file becomes one document, ended by the tokenizer's end-of-document token. Prints the flags that train on the
result and keeps them in OUTPUT.args, for ``@OUTPUT.args``. The same input gives the same bytes; when inputs and
options have not changed since the last run, nothing is done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, whatever else is installed

from megatron_elas.prerequisites import exit_without_prerequisites
from megatron_elas.spec.errors import BadUsage

PREREQUISITES = ("torch", "megatron", "numpy", "sentencepiece")
MANIFEST_VERSION = 1
DEFAULT_ENDINGS = (".txt", ".md", ".rst", ".py")
MIN_VOCAB_SIZE = 300
"""256 byte pieces, a few special ones, and something to learn."""
TOO_LARGE = re.compile(r"Vocabulary size too high .* value <= (\d+)")
TOO_SMALL = re.compile(r"Vocabulary size is smaller than required_chars\. \d+ vs (\d+)")
"""What SentencePiece says."""


class BadInput(Exception):
    """An input or option that cannot work, in one sentence."""


class Parser(argparse.ArgumentParser):
    """Reports errors in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; --help lists the options")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program. Gives 0, or 2 after a sentence about bad input.

    Ends the process with 6, after a sentence, without the Python and packages that it needs.
    """
    exit_without_prerequisites(*PREREQUISITES)
    try:
        prepare(parse_options(argv))
    except (BadInput, BadUsage) as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return 2
    return 0


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line. Raises BadInput for values that cannot work."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", type=Path, metavar="INPUT", help="text file, or folder of text files")
    parser.add_argument("--output", required=True, type=Path, help="path of the result without its ending")
    parser.add_argument(
        "--ending",
        nargs="+",
        default=DEFAULT_ENDINGS,
        help=f"of the files taken from folders (default {' '.join(DEFAULT_ENDINGS)})",
    )
    parser.add_argument("--max-mb", type=float, help="stop before the file that exceeds this much text in all")
    parser.add_argument("--vocab-size", type=int, default=4096, help="of the tokenizer that is trained (default 4096)")
    parser.add_argument("--train-mb", type=float, default=2.0, help="text that the tokenizer is trained on (default 2)")
    parser.add_argument(
        "--tokenizer-type", choices=["SentencePieceTokenizer", "Llama2Tokenizer", "HuggingFaceTokenizer"]
    )
    parser.add_argument("--tokenizer-model", type=Path, help="SentencePiece .model file or Hugging Face folder to load")
    parser.add_argument("--force", action="store_true", help="do it again even when nothing has changed")
    options = parser.parse_args(argv)
    if options.tokenizer_model is not None and not options.tokenizer_model.exists():
        raise BadInput(f"tokenizer {options.tokenizer_model} does not exist: check --tokenizer-model")
    if options.tokenizer_type == "HuggingFaceTokenizer" and options.tokenizer_model is None:
        raise BadInput("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model with a local folder")
    if options.vocab_size < MIN_VOCAB_SIZE:
        raise BadInput(f"--vocab-size must be at least {MIN_VOCAB_SIZE}, got {options.vocab_size}")
    if options.max_mb is not None and options.max_mb <= 0:
        raise BadInput(f"--max-mb must be more than 0, got {options.max_mb}")
    options.tokenizer_type = options.tokenizer_type or "SentencePieceTokenizer"
    return options


def prepare(options: argparse.Namespace) -> None:
    """Do what the options say, or nothing when it is done already."""
    files = choose_files(find_files(options.inputs, options.ending), options.max_mb)
    manifest = describe(options, files)
    if not options.force and read_manifest(options.output) == manifest and outputs_exist(options):
        print(f"{options.output}: up to date ({len(files)} files)")
    else:
        started_s = time.monotonic()
        silence_known_noise()
        with_ending(options.output, ".manifest.json").unlink(missing_ok=True)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        if options.tokenizer_model is None:
            train_tokenizer(files, options)
        num_tokens = encode(files, options)
        with replaced(with_ending(options.output, ".args")) as path:
            path.write_text("\n".join(training_flags(options, len(files))) + "\n", encoding="utf-8")
        with replaced(with_ending(options.output, ".manifest.json")) as path:
            path.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        seconds = time.monotonic() - started_s
        print(f"{options.output}: {len(files)} documents, {num_tokens} tokens, in {seconds:.1f} s")
    print(" ".join(training_flags(options, len(files))))


# ---------------------------------------------------------------- input


def find_files(inputs: Sequence[Path], endings: Sequence[str]) -> list[Path]:
    """All files named, and those with the endings below folders named, in the order of their paths."""
    found: list[Path] = []
    for path in inputs:
        if path.is_dir():
            inside = sorted(file for file in walk(path) if file.name.endswith(tuple(endings)) and file.is_file())
            if not inside:
                raise BadInput(
                    f"folder {path} holds no file that ends with {' or '.join(endings)} (hidden folders are left out): "
                    f"give --ending"
                )
            found.extend(inside)
        elif path.is_file():
            found.append(path)
        else:
            raise BadInput(f"input {path} does not exist: give text files or folders")
    return list(dict.fromkeys(found))


def walk(folder: Path) -> Iterator[Path]:
    """Everything below that is no folder; hidden folders and __pycache__ are left out, but may be named themselves."""
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        yield from (Path(path, name) for name in names)


def choose_files(files: Sequence[Path], max_mb: float | None) -> list[Path]:
    """The first files that together stay within the limit; empty files are left out."""
    chosen, left = [], float("inf") if max_mb is None else max_mb * 1e6
    for file in files:
        size = file.stat().st_size
        if size > left:
            break
        left -= size
        if size:
            chosen.append(file)
    if not chosen:
        raise BadInput(f"no text within --max-mb {max_mb}: the first of {len(files)} files is larger, or all are empty")
    return chosen


def read_text(file: Path) -> str:
    """The file as UTF-8; bytes that are not become the replacement character."""
    return file.read_text(encoding="utf-8", errors="replace")


# ---------------------------------------------------------------- what was done before


def describe(options: argparse.Namespace, files: Sequence[Path]) -> dict[str, Any]:
    """Everything that the result depends on. A file counts as unchanged when its size and time are."""
    described = [*files] if options.tokenizer_model is None else [*files, *files_of(options.tokenizer_model)]
    return {
        "version": MANIFEST_VERSION,
        "tokenizer": [options.tokenizer_type, str(options.tokenizer_model), options.vocab_size, options.train_mb],
        "files": [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in described],
    }


def files_of(path: Path) -> list[Path]:
    """The file itself, or those in the folder."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def read_manifest(output: Path) -> Any:
    """What the last run left; None without one."""
    try:
        return json.loads(with_ending(output, ".manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def outputs_exist(options: argparse.Namespace) -> bool:
    """Whether the files of the last run are there."""
    endings = [".bin", ".idx", ".args"] + ([".model"] if options.tokenizer_model is None else [])
    return all(with_ending(options.output, ending).is_file() for ending in endings)


# ---------------------------------------------------------------- tokenizer


def train_tokenizer(files: Sequence[Path], options: argparse.Namespace) -> None:
    """Train a SentencePiece BPE that keeps every byte of the text, on the first --train-mb of it."""
    import sentencepiece

    with replaced(with_ending(options.output, ".model")) as path, path.open("wb") as model:
        try:
            sentencepiece.SentencePieceTrainer.Train(
                sentence_iterator=training_lines(files, options.train_mb),
                model_writer=model,
                model_type="bpe",
                vocab_size=options.vocab_size,
                num_threads=1,
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                allow_whitespace_only_pieces=True,
                split_digits=True,
                user_defined_symbols=["\n", "\t"],
                minloglevel=2,
            )
        except RuntimeError as error:
            raise BadInput(explain_training_error(str(error), options.vocab_size)) from error


def explain_training_error(error: str, vocab_size: int) -> str:
    """SentencePiece's error in our words."""
    told = f"no tokenizer of {vocab_size} pieces can be trained on this text"
    if (match := TOO_LARGE.search(error)) and int(match[1]) >= MIN_VOCAB_SIZE:
        return f"{told}, at most one of {match[1]}: give --vocab-size {match[1]} or less, or more text"
    if match := TOO_SMALL.search(error):
        return f"{told}, which has many different characters: give --vocab-size {match[1]} or more"
    return f"{told}: give more text"


def training_lines(files: Sequence[Path], max_mb: float) -> Iterator[str]:
    """Lines of text, up to the limit."""
    left = max_mb * 1e6
    for file in files:
        for line in read_text(file).splitlines():
            left -= len(line)
            if left < 0:
                return
            if line.strip():
                yield line


def load_tokenizer(options: argparse.Namespace) -> Any:
    """The tokenizer as Megatron builds it for training."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.config import TokenizerConfig

    config = TokenizerConfig(
        tokenizer_type=options.tokenizer_type, tokenizer_model=str(tokenizer_path(options)), pad_vocab_size=False
    )
    try:
        return build_tokenizer(config)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise BadInput(f"tokenizer {tokenizer_path(options)} cannot be loaded: {error}") from error


def tokenizer_path(options: argparse.Namespace) -> Path:
    """The tokenizer that is loaded, or the one trained here."""
    model: Path | None = options.tokenizer_model
    return with_ending(options.output, ".model") if model is None else model


def silence_known_noise() -> None:
    """Without an accelerator, leave out what Megatron then always says while it is imported."""
    from megatron_elas.host.cpu_noise import silence_cpu_noise
    from megatron_elas.platform.detect import detect

    if detect() == "cpu":
        silence_cpu_noise()


# ---------------------------------------------------------------- output


def encode(files: Sequence[Path], options: argparse.Namespace) -> int:
    """Write the .bin/.idx pair. Gives the number of tokens."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    tokenizer = load_tokenizer(options)
    num_tokens = 0
    with replaced(with_ending(options.output, ".idx")) as index, replaced(with_ending(options.output, ".bin")) as data:
        builder = IndexedDatasetBuilder(str(data), dtype=DType.optimal_dtype(tokenizer.vocab_size))
        for file in files:
            ids = [*tokenizer.tokenize(read_text(file)), tokenizer.eod]
            builder.add_document(ids, [len(ids)])
            num_tokens += len(ids)
        builder.finalize(str(index))
    return num_tokens


def training_flags(options: argparse.Namespace, num_documents: int) -> list[str]:
    """The flags that train on the result."""
    # Megatron's default split, 969,30,1, leaves no document for testing below 1000, and looking for samples in an
    # empty split never ends.
    split = [] if num_documents >= 1000 else ["--split 100,0,0"]
    return [
        *split,
        f"--data-path {shlex.quote(str(options.output.resolve()))}",
        f"--tokenizer-type {options.tokenizer_type}",
        f"--tokenizer-model {shlex.quote(str(tokenizer_path(options).resolve()))}",
    ]


def with_ending(output: Path, ending: str) -> Path:
    """A file of the result."""
    return output.with_name(output.name + ending)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path to write to; it takes ``path``'s place when all went well, and is removed otherwise."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
