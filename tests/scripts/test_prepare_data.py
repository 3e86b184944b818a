"""Text becomes data that Megatron trains on, byte for byte the same each time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forker import Forker, JobResult, running_forker
from tests.scripts.prepare_jobs import REPO, load_script

prepare_data = load_script()
Prepare = Callable[..., JobResult]

TEXT = "def main():\n\tprint('häl\U0001f600lo')\n\n    return  1234  \n"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    source = (REPO / "megatron_elas/spec/layout.py").read_text()
    for name in ("a.py", "deep/b.py", "c.md"):
        (folder / name).write_text(TEXT + source)
    (folder / "picture.bin").write_bytes(b"\xff\x00")
    (folder / "empty.py").touch()
    return folder


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    with running_forker() as running:
        yield running


@pytest.fixture
def prepare(forker: Forker, tmp_path: Path) -> Prepare:
    """Runs the program with an output and more words, in a process that has Megatron loaded."""

    def run(output: Path, *words: Any) -> JobResult:
        argv = [*map(str, words), "--output", str(output), "--vocab-size", "400"]
        result = forker.run(1, "tests.scripts.prepare_jobs:prepare", tmp_path, argv)
        assert result.statuses == [0], result.logs[0]
        return result

    return run


@pytest.mark.process
@pytest.mark.slow
def test_every_document_can_be_read_back_unchanged(
    forker: Forker, prepare: Prepare, texts: Path, tmp_path: Path
) -> None:
    output, result = tmp_path / "out/text", tmp_path / "result.json"
    prepare(output, texts, "--ending", ".py", ".md")
    forker.run(1, "tests.scripts.prepare_jobs:read", tmp_path, str(output), str(result))
    expected = [(texts / name).read_text() for name in ("a.py", "c.md", "deep/b.py")]
    assert json.loads(result.read_text()) == {"vocab_size": 400, "ended": [True] * 3, "texts": expected}


@pytest.mark.process
@pytest.mark.slow
def test_the_same_input_gives_the_same_bytes(prepare: Prepare, texts: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    prepare(first, texts)
    prepare(second, texts)
    for ending in (".bin", ".idx", ".model"):
        assert first.with_suffix(ending).read_bytes() == second.with_suffix(ending).read_bytes()


@pytest.mark.process
@pytest.mark.slow
def test_nothing_is_done_when_nothing_has_changed(prepare: Prepare, texts: Path, tmp_path: Path) -> None:
    output = tmp_path / "text"
    flags = prepare(output, texts).logs[0].splitlines()[-1]
    # Three documents leave nothing for testing in Megatron's default split.
    assert flags == (
        f"--split 100,0,0 --data-path {output} --tokenizer-type SentencePieceTokenizer --tokenizer-model {output}.model"
    )
    assert output.with_suffix(".args").read_text().split() == flags.split()
    written = output.with_suffix(".bin").stat().st_mtime_ns
    assert prepare(output, texts).logs[0].splitlines() == [f"{output}: up to date (3 files)", flags]
    assert output.with_suffix(".bin").stat().st_mtime_ns == written
    (texts / "a.py").write_text("something else")
    prepare(output, texts)
    assert output.with_suffix(".bin").stat().st_mtime_ns != written
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.process
@pytest.mark.slow
def test_a_tokenizer_can_be_loaded_and_its_file_counts_as_input(prepare: Prepare, texts: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    prepare(first, texts)
    model = first.with_suffix(".model")
    prepare(second, texts / "a.py", "--tokenizer-model", model)
    manifest = json.loads(second.with_suffix(".manifest.json").read_text())
    assert [file[0] for file in manifest["files"]] == [str(texts / "a.py"), str(model)]
    assert f"--tokenizer-model {model}" in second.with_suffix(".args").read_text()
    assert not second.with_suffix(".model").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["/no/text"], "input /no/text does not exist"),
        (["{texts}", "--ending", ".tex"], "holds no file that ends with .tex"),
        (["{texts}", "--tokenizer-model", "/no/model"], "tokenizer /no/model does not exist"),
        (["{texts}", "--tokenizer-type", "HuggingFaceTokenizer"], "needs --tokenizer-model"),
        (["{texts}", "--max-mb", "0"], "--max-mb must be more than 0, got 0.0"),
        (["{texts}", "--max-mb", "0.0001"], "no text within --max-mb 0.0001"),
        (["{texts}/picture.bin"], "no tokenizer of 400 pieces can be trained on this text: give more text"),
        (
            ["{texts}", "--vocab-size", "9000"],
            "no tokenizer of 9000 pieces can be trained on this text, at most one of",
        ),
        (["{texts}/han.txt"], "which has many different characters: give --vocab-size "),
        (["{texts}", "--max-mb", "much"], "argument --max-mb: invalid float value: 'much'; --help lists the options"),
    ],
)
def test_bad_input_gets_one_sentence(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    (texts / "han.txt").write_text("".join(map(chr, range(0x4E00, 0x5200))))
    output = ["--output", str(tmp_path / "text"), "--vocab-size", "400"]
    assert prepare_data.main([*output, *(word.format(texts=texts) for word in words)]) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert "INTERNAL" not in told
    assert len(told.strip().splitlines()) == 1
    assert not list(tmp_path.glob("text.*"))


def test_a_missing_output_gets_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare_data.main(["docs"]) == 2
    told = capsys.readouterr().err
    assert told == "prepare_data: the following arguments are required: --output; --help lists the options\n"


def test_the_largest_size_that_is_told_can_be_trained(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--output", str(tmp_path / "text"), "--vocab-size"]
    assert prepare_data.main([str(texts), *options, "9000"]) == 2
    largest = capsys.readouterr().err.partition("at most one of ")[2].partition(":")[0]
    files = prepare_data.find_files([texts], [".py", ".md"])
    prepare_data.train_tokenizer(files, prepare_data.parse_options([str(texts), *options, largest]))
    assert (tmp_path / "text.model").is_file()


def test_hidden_folders_and_caches_are_left_out_unless_named(texts: Path) -> None:
    for name in (".git", ".venv/lib", "__pycache__", "deep/.cache"):
        (texts / name).mkdir(parents=True)
        (texts / name / "hidden.py").write_text("x")
    found = [str(file.relative_to(texts)) for file in prepare_data.find_files([texts], [".py"])]
    assert found == ["a.py", "deep/b.py", "empty.py"]
    assert prepare_data.find_files([texts / ".venv"], [".py"]) == [texts / ".venv/lib/hidden.py"]


def test_the_limit_stops_before_the_file_that_exceeds_it(texts: Path) -> None:
    files = prepare_data.find_files([texts], [".py", ".md"])
    sizes = [file.stat().st_size for file in files]
    assert prepare_data.choose_files(files, (sizes[0] + 10) / 1e6) == files[:1]
