"""``elas patch``: lets a Megatron-LM checkout's own pretraining script take ``--elastic``, and takes that back.

Invariants: a checkout is changed whole or not at all; what was applied can be taken back to the byte; a checkout that
is not as the patch expects it is left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_elas.spec.errors import BadUsage, ExitCode, WrongVersion

VERSION_FILE = "megatron/core/package_info.py"
_PACKAGE = Path(__file__).resolve().parent.parent
_GIT_SETTINGS = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "LC_ALL": "C"}
"""Nobody's own git settings change how whitespace is applied."""


ACTIONS = {
    "apply": "put the patch in, if it is not",
    "status": "say whether it is in",
    "revert": "take it out again, if it is in",
}
"""What ``change`` can do."""


class State(enum.StrEnum):
    """Of a checkout, as far as the patches go."""

    PATCHED = "patched"
    NOT_PATCHED = "unpatched"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do, and where."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in ACTIONS.items():
        action = actions.add_parser(name, help=text, allow_abbrev=False)
        action.add_argument("path", metavar="PATH", help="the top folder of a checkout of Megatron-LM")


def run(flags: argparse.Namespace) -> int:
    """Do it, and print what was done."""
    print(change(flags.action, flags.path))
    return ExitCode.FINISHED


def change(action: str, path: str) -> str:
    """Do one of ``ACTIONS``.

    Args:
        action: ``apply``, ``status`` or ``revert``.
        path: The checkout's top folder.

    Returns:
        A sentence on what was done.

    Raises:
        BadUsage: There is no checkout at ``path``, or its files cannot be written.
        WrongVersion: There are no patches for its version, its files differ where they apply, or git is missing.
    """
    checkout = Path(path).resolve()
    version = read_version(checkout)
    folder = find_patches(version)
    text = read_patches(folder)
    state = find_state(checkout, text)
    if state is None:
        raise WrongVersion(
            f"the files of {checkout} are not those that the patch was made for: restore them, or add its lines by "
            f"hand (they are in {folder})"
        )
    what = f"megatron-core {version} in {checkout}"
    if action == "status":
        return f"{what} is {state}"
    wanted = State.PATCHED if action == "apply" else State.NOT_PATCHED
    if state is wanted:
        return f"{what} is {state} already, nothing to do"
    names = rewrite(checkout, text, reverse=action == "revert")
    return f"{what} is {wanted} now (changed: {', '.join(names)})"


def read_version(checkout: Path) -> str:
    """``major.minor.patch`` of a checkout, as its text says; nothing of it is run."""
    try:
        text = (checkout / VERSION_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadUsage(
            f"{checkout} is no Megatron-LM checkout (it has no {VERSION_FILE}): give its top folder"
        ) from error
    numbers = [re.search(rf"^{name}\s*=\s*(\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    if not all(numbers):
        raise WrongVersion(f"{checkout / VERSION_FILE} does not say which release it is: use {_supported()}")
    return ".".join(found[1] for found in numbers if found)


def patch_folders() -> dict[str, Path]:
    """Folders of patches by ``major.minor`` of the Megatron they are for; from a wheel, or beside this package."""
    inside = _PACKAGE / "_data" / "patches"
    root = inside if inside.is_dir() else _PACKAGE.parent / "patches"
    return {folder.name.removeprefix("core_v"): folder for folder in sorted(root.glob("core_v*")) if folder.is_dir()}


def find_patches(version: str) -> Path:
    """The folder of patches for a release. Raises WrongVersion when there is none."""
    folder = patch_folders().get(version.rpartition(".")[0])
    if folder is None:
        raise WrongVersion(f"there is no patch for megatron-core {version}: use {_supported()}")
    return folder


def _supported() -> str:
    return f"a checkout of {' or '.join(f'core_v{minor}.x' for minor in patch_folders())}"


def read_patches(folder: Path) -> bytes:
    """All patches that the file ``series`` names, in its order, as one."""
    lines = (line.partition("#")[0].strip() for line in (folder / "series").read_text(encoding="utf-8").splitlines())
    return b"".join((folder / name).read_bytes() for name in lines if name)


def find_state(checkout: Path, patches: bytes) -> State | None:
    """Whether the patches are in the checkout. None when they are neither in it nor fit it."""
    with _copy_of_files(checkout, patches) as (copy, _):
        if _git_accepts(copy, patches, "--check"):
            return State.NOT_PATCHED
        return State.PATCHED if _git_accepts(copy, patches, "--check", "--reverse") else None


def rewrite(checkout: Path, patches: bytes, *, reverse: bool) -> list[str]:
    """Apply to a copy, then put the new files in place of the old ones. Gives the files' names."""
    with _copy_of_files(checkout, patches) as (copy, names):
        if not _git_accepts(copy, patches, *(["--reverse"] if reverse else [])):
            raise WrongVersion(f"the files of {checkout} were changed meanwhile: run the command again")
        _replace_files({(checkout / name).resolve(): (copy / name).read_bytes() for name in names})
    return names


@contextlib.contextmanager
def _copy_of_files(checkout: Path, patches: bytes) -> Iterator[tuple[Path, list[str]]]:
    """A folder that holds the files to patch and nothing else, and their names.

    A copy, so that git takes no enclosing repository for the files' own, and so that it can stop halfway.
    """
    names = [name.decode() for name in re.findall(rb"^\+\+\+ b/(.+)$", patches, re.MULTILINE)]
    with tempfile.TemporaryDirectory(prefix="elas-patch-") as folder:
        copy = Path(folder)
        for name in names:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copyfile(checkout / name, copy / name)
            except OSError as error:
                raise BadUsage(f"cannot read {checkout / name} ({error.strerror}): give a whole checkout") from error
        yield copy, names


def _git_accepts(folder: Path, patches: bytes, *flags: str) -> bool:
    """Run ``git apply``; whether it found nothing against it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= _GIT_SETTINGS | {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    command = ["git", "apply", *flags, "-"]
    try:
        ran = subprocess.run(command, input=patches, cwd=folder, env=environment, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise WrongVersion("git is missing, which applies the patch: install git") from error
    return ran.returncode == 0


def _replace_files(contents: Mapping[Path, bytes]) -> None:
    """Put new contents in place: each file at once, and none when one cannot be.

    Permissions stay. A reader sees the old file or the new one.
    """
    written: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            written[path] = _write_beside(path, content)
        previous = {path: path.read_bytes() for path in contents}
        done: list[Path] = []
        try:
            for path in contents:
                os.replace(written[path], path)
                done.append(path)
        except OSError:
            for path in done:
                path.write_bytes(previous[path])
            raise
    except OSError as error:
        names = ", ".join(map(str, contents))
        raise BadUsage(f"cannot write {names} ({error.strerror}): nothing was changed") from error
    finally:
        for beside in written.values():
            beside.unlink(missing_ok=True)


def _write_beside(path: Path, content: bytes) -> Path:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    beside = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, beside)
    except BaseException:
        beside.unlink()
        raise
    return beside
