"""Runs prepare_data in a forked process that has Megatron loaded; see tests/forker.py."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

REPO = Path(__file__).resolve().parents[2]


def load_script() -> ModuleType:
    """scripts/prepare_data.py as a module."""
    spec = importlib.util.spec_from_file_location("prepare_data", REPO / "scripts/prepare_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepare(words: list[str]) -> int:
    """Run the program."""
    return int(load_script().main(words))


def read(output: str, result: str) -> int:
    """Write to ``result`` what the data hold: vocabulary size, and per document its last token and its text."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    script = load_script()
    tokenizer = script.load_tokenizer(script.parse_options(["x", "--output", output]))
    data = IndexedDataset(output)
    documents = [list(map(int, data[index])) for index in range(len(data))]
    found = {
        "vocab_size": tokenizer.vocab_size,
        "ended": [document[-1] == tokenizer.eod for document in documents],
        "texts": [tokenizer.detokenize(document[:-1]) for document in documents],
    }
    Path(result).write_text(json.dumps(found))
    return 0
