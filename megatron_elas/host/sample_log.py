"""Which samples went into every step: written by the workers, read by whoever wants to check.

One JSON line per worker and step, ``{"epoch": 1, "step": 5, "stage": 0, "samples": [40, 41]}``, in
the file ``PREFIX.WORKER``. A step that was run again after a recovery is there more than once; the
run with the highest epoch is the one that counts.
"""

from __future__ import annotations

import json
from pathlib import Path


class SampleLog:
    """One worker's file. Only workers that read data (first and last stage) write lines."""

    def __init__(self, prefix: str, worker: int) -> None:
        path = Path(f"{prefix}.{worker}")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", buffering=1)  # line by line: a killed worker's lines must be there

    def write(self, epoch: int, step: int, stage: int, samples: list[int]) -> None:
        """Add a step."""
        if samples:
            self._file.write(json.dumps({"epoch": epoch, "step": step, "stage": stage, "samples": samples}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_samples(prefix: str) -> dict[int, dict[int, list[int]]]:
    """Sample ids of every step that counted, by step and stage, ascending.

    Args:
        prefix: As given to ``--elastic-sample-log``.
    """
    newest: dict[int, int] = {}
    lines = []
    folder, name = Path(prefix).parent, Path(prefix).name
    for path in sorted(folder.glob(f"{name}.*")):
        lines += [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        newest[line["step"]] = max(newest.get(line["step"], 0), line["epoch"])
    samples: dict[int, dict[int, list[int]]] = {}
    for line in lines:
        if line["epoch"] == newest[line["step"]]:
            samples.setdefault(line["step"], {}).setdefault(line["stage"], []).extend(line["samples"])
    return {step: {stage: sorted(ids) for stage, ids in stages.items()} for step, stages in sorted(samples.items())}
