"""Data with documents of few tokens, so that masks at their ends leave samples with different numbers of tokens.

Run as a program with the prefix of the .bin/.idx pair to write.
"""

from __future__ import annotations

import sys

import numpy
import torch

END = 254
"""NullTokenizer's end of a document with ``--vocab-size 255``."""
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


if __name__ == "__main__":
    write(sys.argv[1])
