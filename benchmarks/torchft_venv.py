"""An environment for torchft beside the tested one: sees what that has, and keeps what is missing in its own folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

REQUIREMENT = "torchft==0.2.0"
INSTALL_LIMIT_S = 300


class NotAvailable(RuntimeError):
    """torchft cannot be had; the text says why."""


def prepare_torchft() -> Path:
    """The Python of an environment with torchft and the tested torch, made at first use and kept in the user's cache.

    Raises:
        NotAvailable: No network, no pip, or no wheel for this Python and machine.
    """
    tested = sysconfig.get_path("purelib")
    key = hashlib.sha256(f"{REQUIREMENT} {tested} {sys.version}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_elas"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"torchft-{key}"
    python = folder / "bin" / "python"
    ready = folder / "ready"
    with (cache / f"torchft-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            _install(folder, python, tested)
            ready.touch()
    return python


def _install(folder: Path, python: Path, tested: str) -> None:
    venv.EnvBuilder(clear=True, with_pip=False).create(folder)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / version / "site-packages" / "tested.pth").write_text(f"{tested}\n")
    # pip of the tested environment, working on the new one: it sees the tested torch there and does not fetch another.
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-input", REQUIREMENT]
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=INSTALL_LIMIT_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NotAvailable(f"pip install {REQUIREMENT} took more than {INSTALL_LIMIT_S} s") from None
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if line.startswith("ERROR")] or done.stdout.splitlines()[-1:]
        raise NotAvailable(f"pip install {REQUIREMENT} failed: {' '.join(lines)}")
