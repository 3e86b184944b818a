"""``@file`` on the command line: flags kept in a text file, such as configs/llama/tiny.args."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_elas.spec.errors import BadUsage

_PACKAGE = Path(__file__).resolve().parent.parent


def search_folders() -> tuple[Path, ...]:
    """Where a relative path is looked for, in order: the working directory, a checkout, an installed package."""
    checkout, data = _PACKAGE.parent, _PACKAGE / "_data"
    return Path.cwd(), checkout, checkout / "configs", data, data / "configs"


def expand_files(argv: Sequence[str], within: tuple[Path, ...] = ()) -> list[str]:
    """Replace each ``@path`` by the words of that file, split as a shell would, with ``#`` comments.

    A file may name other files. Later words win in argparse, so flags after ``@path`` override the file's.

    Args:
        argv: Command line without the program's name.
        within: Files being expanded, outermost first.

    Raises:
        BadUsage: A file is missing, cannot be split, or names itself.
    """
    words: list[str] = []
    for word in argv:
        if len(word) > 1 and word.startswith("@"):
            words.extend(_read_words(_find_file(word[1:]), within))
        else:
            words.append(word)
    return words


def _find_file(name: str) -> Path:
    for folder in search_folders():
        path = folder / name
        if path.is_file():
            return path.resolve()
    looked = ", ".join(str(folder) for folder in search_folders()[:3])
    raise BadUsage(
        f"argument file '{name}' does not exist (looked in {looked}): give @ and the path of a file of flags"
    )


def _read_words(path: Path, within: tuple[Path, ...]) -> list[str]:
    if path in within:
        chain = " -> ".join(map(str, (*within, path)))
        raise BadUsage(f"argument file '{path}' names itself ({chain}): take the @ line out of one of them")
    try:
        words = shlex.split(path.read_text(encoding="utf-8"), comments=True)
    except ValueError as error:
        raise BadUsage(f"argument file '{path}' cannot be split into words ({error}): check its quotes") from error
    return expand_files(words, (*within, path))
