"""elas patch: whole or not at all, twice is once, and back to the byte."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_elas.cli import elas, patch
from megatron_elas.spec.errors import BadUsage
from tests.megatron_checkout import find_checkout

SCRIPT = "pretrain_gpt.py"
CALL = "megatron_elas.install()"


def original_lines() -> list[str]:
    """Those that the patch expects, in order, with what it adds left out."""
    text = patch.read_patches(patch.patch_folders()["0.19"]).decode()
    hunk = text[text.index("\n@@") + 1 :].splitlines()[1:]
    return [line[1:] for line in hunk if not line.startswith("+")]


def make_checkout(folder: Path, *, version: str = "0.19.0", before: str = "# above\n" * 40 + "if True:\n") -> Path:
    """The least that is taken for a checkout; ``before`` stands above the place where the patch applies."""
    (folder / patch.VERSION_FILE).parent.mkdir(parents=True)
    names = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    (folder / patch.VERSION_FILE).write_text("".join(f"{name} = {number}\n" for name, number in names))
    (folder / SCRIPT).write_text(before + "\n".join(original_lines()) + "\nprint('the end')")
    return folder


@pytest.fixture(params=["made-up", "real"])
def checkout(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A made-up checkout, and the two files of a real one; neither is a repository."""
    if request.param == "made-up":
        return make_checkout(tmp_path / "Megatron-LM")
    root, copy = find_checkout(), tmp_path / "Megatron-LM"
    (copy / patch.VERSION_FILE).parent.mkdir(parents=True)
    for name in (SCRIPT, patch.VERSION_FILE):
        shutil.copy(root / name, copy / name)
    patch.change("revert", str(copy))
    return copy


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def call(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = elas.main(["patch", *words])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_apply_and_revert_give_the_same_bytes_and_mode_back(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / SCRIPT).chmod(0o755)
    before = contents(checkout)
    assert call("status", str(checkout), capsys=capsys)[:2] == (0, f"{described(checkout)} is unpatched\n")
    code, out, _ = call("apply", str(checkout), capsys=capsys)
    assert (code, out) == (0, f"{described(checkout)} is patched now (changed: {SCRIPT})\n")
    after = contents(checkout)
    assert {name for name in after if after[name] != before.get(name)} == {SCRIPT}
    assert after.keys() == before.keys()
    assert after[SCRIPT].count(CALL.encode()) == 1
    compile(after[SCRIPT], SCRIPT, "exec")
    assert call("status", str(checkout), capsys=capsys)[:2] == (0, f"{described(checkout)} is patched\n")
    assert call("revert", str(checkout), capsys=capsys)[0] == 0
    assert contents(checkout) == before
    assert stat.S_IMODE((checkout / SCRIPT).stat().st_mode) == 0o755


def described(checkout: Path) -> str:
    return f"megatron-core {patch.read_version(checkout)} in {checkout}"


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_a_second_time_does_nothing_and_says_so(
    action: str, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("apply", str(checkout), capsys=capsys)[0] == 0
    assert call(action, str(checkout), capsys=capsys)[0] == 0
    before, time_ns = contents(checkout), (checkout / SCRIPT).stat().st_mtime_ns
    code, out, _ = call(action, str(checkout), capsys=capsys)
    assert code == 0 and "already, nothing to do" in out
    assert (contents(checkout), (checkout / SCRIPT).stat().st_mtime_ns) == (before, time_ns)


def test_the_patch_adds_a_call_and_takes_nothing_away() -> None:
    text = patch.read_patches(patch.patch_folders()["0.19"]).decode()
    changed = re.findall(r"^([+-])(?!\+\+|--)(.*)$", text, re.MULTILINE)
    assert [sign for sign, _ in changed] == ["+"] * len(changed)
    assert len([line for _, line in changed if line.strip()]) == 2


def test_other_lines_may_have_been_changed_by_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkout = make_checkout(tmp_path / "mine", before="# my own\n" * 300)
    before = contents(checkout)
    assert call("apply", str(checkout), capsys=capsys)[0] == 0
    assert (checkout / SCRIPT).read_text().count(CALL) == 1
    assert call("revert", str(checkout), capsys=capsys)[0] == 0
    assert contents(checkout) == before


@pytest.mark.parametrize("enclosing", [False, True], ids=["top", "below-another-repository"])
def test_a_repository_is_patched_too_and_stays_unstaged(
    enclosing: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = make_checkout(tmp_path / "outer" / "Megatron-LM")
    top = checkout.parent if enclosing else checkout
    for words in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *words], cwd=top, check=True)
    assert call("apply", str(checkout), capsys=capsys)[0] == 0
    changed = subprocess.run(["git", "diff", "--name-only"], cwd=top, check=True, capture_output=True, text=True)
    assert changed.stdout.split() == [str((checkout / SCRIPT).relative_to(top))]


@pytest.mark.parametrize("action", list(patch.ACTIONS))
@pytest.mark.parametrize("version", ["0.16.1", "0.20.0", "1.19.0"])
def test_another_release_is_refused_with_code_6(
    action: str, version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = make_checkout(tmp_path / "old", version=version)
    before = contents(checkout)
    code, out, err = call(action, str(checkout), capsys=capsys)
    assert (code, out) == (6, "")
    assert err == f"elas: there is no patch for megatron-core {version}: use a checkout of core_v0.19.x\n"
    assert contents(checkout) == before


@pytest.mark.parametrize("action", list(patch.ACTIONS))
@pytest.mark.parametrize("patched", [False, True])
def test_files_that_differ_where_the_patch_applies_are_left_alone(
    patched: bool, action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = make_checkout(tmp_path / "mine")
    if patched:
        patch.change("apply", str(checkout))
    script = checkout / SCRIPT
    line = original_lines()[2]
    script.write_text(script.read_text().replace(line, line + "  # mine"))
    before = contents(checkout)
    code, _, err = call(action, str(checkout), capsys=capsys)
    assert code == 6
    assert len(err.splitlines()) == 1 and "are not those that the patch was made for" in err
    assert contents(checkout) == before


@pytest.mark.parametrize("missing", [patch.VERSION_FILE, SCRIPT])
def test_what_is_no_checkout_is_refused_with_code_2(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = make_checkout(tmp_path / "half")
    (checkout / missing).unlink()
    code, _, err = call("apply", str(checkout), capsys=capsys)
    assert code == 2
    assert len(err.splitlines()) == 1 and missing in err


def test_a_version_that_cannot_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkout = make_checkout(tmp_path / "odd")
    (checkout / patch.VERSION_FILE).write_text("VERSION = 'unknown'\n")
    code, _, err = call("status", str(checkout), capsys=capsys)
    assert code == 6 and "does not say which release it is: use a checkout of core_v0.19.x" in err


def test_a_failing_write_leaves_everything_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = make_checkout(tmp_path / "full")
    before = contents(checkout)

    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    code, _, err = call("apply", str(checkout), capsys=capsys)
    assert code == 2
    assert err == f"elas: cannot write {checkout / SCRIPT} (No space left on device): nothing was changed\n"
    assert contents(checkout) == before


def test_of_two_files_the_first_gets_its_contents_back_when_the_second_cannot_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_text("old")
    replaced, replace = [], os.replace

    def refuse_second(source: Path, target: Path) -> None:
        replaced.append(target.read_text() if target == files[0] else "refused")
        if target == files[1]:
            assert files[0].read_text() == "new"
            raise OSError(30, "Read-only file system")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse_second)
    with pytest.raises(BadUsage, match="nothing was changed"):
        patch._replace_files(dict.fromkeys(files, b"new"))
    assert replaced == ["old", "refused"]
    assert contents(tmp_path) == {"a": b"old", "b": b"old"}


def test_a_script_behind_a_link_is_changed_where_it_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkout = make_checkout(tmp_path / "Megatron-LM")
    elsewhere = (checkout / SCRIPT).rename(tmp_path / "real.py")
    (checkout / SCRIPT).symlink_to(elsewhere)
    assert call("apply", str(checkout), capsys=capsys)[0] == 0
    assert (checkout / SCRIPT).is_symlink() and CALL in elsewhere.read_text()


def test_the_users_own_git_settings_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "settings").write_text("[apply]\n\twhitespace = fix\n\tignoreWhitespace = change\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "settings"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    checkout = make_checkout(tmp_path / "Megatron-LM", before="# ends with blanks   \n" * 3)
    before = contents(checkout)
    assert [call(action, str(checkout), capsys=capsys)[0] for action in ("apply", "revert")] == [0, 0]
    assert contents(checkout) == before


def test_without_git_one_sentence_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = call("apply", str(make_checkout(tmp_path / "Megatron-LM")), capsys=capsys)
    assert (code, err) == (6, "elas: git is missing, which applies the patch: install git\n")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as a wheel would have it."""
    repo, folder = Path(__file__).resolve().parents[2], tmp_path_factory.mktemp("wheel")
    (folder / "source").mkdir()
    for name in ("megatron_elas", "patches", "configs"):
        shutil.copytree(repo / name, folder / "source" / name)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE"):
        shutil.copy(repo / name, folder / "source")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(folder / "lib")],
        cwd=folder / "source",
        env={**os.environ, "PYTHONPATH": ""},
        check=True,
        capture_output=True,
        timeout=100,
    )
    return folder / "lib"


@pytest.mark.process
def test_an_installed_wheel_has_the_patches(built: Path, tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "Megatron-LM")
    ran = subprocess.run(
        [sys.executable, "-m", "megatron_elas.cli.elas", "patch", "apply", str(checkout)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(built)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert CALL in (checkout / SCRIPT).read_text()
    assert (built / "megatron_elas/_data/patches/core_v0.19/series").is_file()
