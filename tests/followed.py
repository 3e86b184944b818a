"""A process whose output is read as it comes."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


class Followed:
    """Runs from the start; both output streams are in ``output``, as far as they have come."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], folder: Path, patience_s: float) -> None:
        """Start it in ``folder``; ``patience_s`` limits each ``wait_for``."""
        self.process = subprocess.Popen(
            command, env=environ, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.output = ""
        self._patience_s = patience_s
        self._seen = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._seen:
                self.output += line
                self._seen.notify_all()

    def wait_for(self, pattern: str) -> None:
        """Until its output holds the pattern."""
        with self._seen:
            assert self._seen.wait_for(lambda: re.search(pattern, self.output), self._patience_s), self.output[-4000:]
