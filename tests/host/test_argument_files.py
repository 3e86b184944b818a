"""``@file`` words become the flags in the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_elas.host import argument_files
from megatron_elas.host.argument_files import expand_files
from megatron_elas.spec.errors import BadUsage


def test_words_are_split_as_a_shell_would_and_comments_dropped(tmp_path: Path) -> None:
    file = tmp_path / "a.args"
    file.write_text("# a comment\n--one 1 # more\n--two 'with space' \"and quote\"\n\n--three\n")
    words = expand_files(["--zero", f"@{file}", "--last"])
    assert words == ["--zero", "--one", "1", "--two", "with space", "and quote", "--three", "--last"]


def test_a_file_may_name_another(tmp_path: Path) -> None:
    (tmp_path / "inner.args").write_text("--inner")
    (tmp_path / "outer.args").write_text(f"--outer @{tmp_path / 'inner.args'}")
    assert expand_files([f"@{tmp_path / 'outer.args'}"]) == ["--outer", "--inner"]


def test_the_working_directory_comes_before_the_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/tiny.args").write_text("--mine")
    monkeypatch.chdir(tmp_path)
    assert expand_files(["@llama/tiny.args"]) == ["--mine"]


@pytest.mark.parametrize("name", ["llama/tiny.args", "configs/llama/tiny.args"])
def test_the_configs_are_found_from_anywhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "--num-layers" in expand_files([f"@{name}"])


def test_an_installed_package_finds_the_configs_it_carries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "megatron_elas"
    (package / "_data/configs/llama").mkdir(parents=True)
    (package / "_data/configs/llama/tiny.args").write_text("--packaged")
    monkeypatch.setattr(argument_files, "_PACKAGE", package)
    monkeypatch.chdir(tmp_path)
    assert expand_files(["@llama/tiny.args"]) == expand_files(["@configs/llama/tiny.args"]) == ["--packaged"]


def test_a_missing_file_is_told_with_the_places_that_were_looked_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadUsage, match=f"argument file 'no.args' does not exist .looked in {tmp_path}, "):
        expand_files(["@no.args"])


def test_a_file_that_names_itself_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.args"
    file.write_text(f"@{file}")
    with pytest.raises(BadUsage, match="names itself"):
        expand_files([f"@{file}"])


def test_an_open_quote_is_told(tmp_path: Path) -> None:
    file = tmp_path / "a.args"
    file.write_text("--name 'open")
    with pytest.raises(BadUsage, match="check its quotes"):
        expand_files([f"@{file}"])


def test_a_lone_at_sign_is_an_ordinary_word() -> None:
    assert expand_files(["@"]) == ["@"]
