"""The data-parallel loop that ours and torchft's replicas run: a small network, one flat gradient, AdamW.

Imports torch only, so that both environments have it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

# B samples, F features, H hidden
B, F, H = 16, 64, 256


class Network:
    """Two layers in one flat parameter, so that its gradient is flat too."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._sizes = [H * F, H, F * H, F]
        self.weights = torch.nn.Parameter(0.1 * torch.randn(sum(self._sizes), generator=generator))
        self.optimizer = torch.optim.AdamW([self.weights], lr=1e-3)

    def compute_gradient(self, step: int, replica: int, step_s: float) -> torch.Tensor:
        """The replica's own gradient of a step, flat; sleeps ``step_s`` for a larger network's computation."""
        inputs_BF = torch.randn(B, F, generator=torch.Generator().manual_seed(1000 * step + replica))
        first, first_bias, second, second_bias = self.weights.split(self._sizes)
        time.sleep(step_s)
        hidden_BH = functional.relu(functional.linear(inputs_BF, first.view(H, F), first_bias))
        self.optimizer.zero_grad()
        functional.linear(hidden_BH, second.view(F, H), second_bias).pow(2).mean().backward()
        assert self.weights.grad is not None
        return self.weights.grad


class Diary:
    """What a replica tells the benchmark: lines of JSON, each whole."""

    def __init__(self, folder: Path, replica: int) -> None:
        self._file = os.open(folder / f"{replica}.diary", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._replica = replica

    def started(self) -> None:
        """Before the first step."""
        self._write(event="start", pid=os.getpid())

    def committed(self, step: int, replicas: int) -> None:
        """A step counts, in which so many replicas took part."""
        self._write(event="commit", step=step, replicas=replicas)

    def _write(self, **told: Any) -> None:
        line = json.dumps({"at_s": time.time(), "replica": self._replica, **told})
        os.write(self._file, line.encode() + b"\n")


def read_diaries(folder: Path) -> list[dict[str, Any]]:
    """All whole lines of all replicas so far, in the order of time."""
    told = []
    for path in folder.glob("*.diary"):
        whole, _, _ = path.read_text().rpartition("\n")
        told += [json.loads(line) for line in whole.splitlines()]
    return sorted(told, key=lambda one: one["at_s"])
