"""Data that leave samples with different numbers of tokens that count, to be masked in two ways.

Run as a program with a prefix: writes PREFIX.bin and PREFIX.idx, documents of few tokens, whose ends --eod-mask-loss
masks, and PREFIX-answers.bin and PREFIX-answers.idx, where prompts are made of a token that
``--null-tokenizer-pad-id`` masks, as in fine-tuning.
"""

from __future__ import annotations

import sys

import numpy
import torch

END = 254
"""NullTokenizer's end of a document with ``--vocab-size 255``."""
PROMPT = 253
"""Every token of a prompt, in the data with answers."""
NUM_DOCUMENTS = 4000


def write(prefix: str) -> None:
    """Documents of 1 to 40 tokens, most of them short, that count up in steps of 1 to 4."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = numpy.random.default_rng(7)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for _ in range(NUM_DOCUMENTS):
        length = min(40, 1 + int(random.geometric(0.15)))
        first, stride = random.integers(0, END), random.integers(1, 5)
        tokens = (first + stride * numpy.arange(length)) % END
        builder.add_document(torch.tensor([*tokens, END]), [length + 1])
    builder.finalize(f"{prefix}.idx")


def write_answers(prefix: str) -> None:
    """Prompts of 1 to 120 tokens, some longer than a sample, each with an answer of 1 to 30 tokens."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = numpy.random.default_rng(8)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for _ in range(NUM_DOCUMENTS):
        prompt, answer = min(120, int(random.geometric(0.07))), min(30, int(random.geometric(0.1)))
        first, stride = random.integers(0, PROMPT), random.integers(1, 5)
        tokens = (first + stride * numpy.arange(answer)) % PROMPT
        builder.add_document(torch.tensor([*[PROMPT] * prompt, *tokens, END]), [prompt + answer + 1])
    builder.finalize(f"{prefix}.idx")


if __name__ == "__main__":
    write(sys.argv[1])
    write_answers(f"{sys.argv[1]}-answers")
