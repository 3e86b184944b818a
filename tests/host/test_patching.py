"""Rows are checked before anything is applied, and applying leaves no trace once reverted."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_elas.host import patching
from megatron_elas.host.patching import Kind, Seam, apply, apply_missing, check, describe_signature, hash_source
from megatron_elas.spec.errors import WrongVersion

HOST = "elas_test_host"
USER = "elas_test_user"

SOURCE = """
def greet(name, *, loud=False):
    return f"hello {name}"

def count(numbers: list[int]) -> int:
    return len(numbers)

class Base:
    def inherited(self):
        return "base"

class Thing(Base):
    def method(self, x):
        return x
    @staticmethod
    def fixed(x):
        return x
    @classmethod
    def made(cls, x):
        return cls, x
    @property
    def size(self):
        return 1

table = {}
"""


@pytest.fixture
def host(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A host package, and a module that imported one of its functions by value."""
    (tmp_path / f"{HOST}.py").write_text(SOURCE)
    (tmp_path / f"{USER}.py").write_text(f"from {HOST} import greet\n\ndef use():\n    return greet('you')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(patching, "installed_megatron", lambda: "0.19.2")
    __import__(USER)
    yield sys.modules[HOST]
    assert not patching._active
    del sys.modules[HOST], sys.modules[USER]


def wrap(name: str, signature: str, build: Any = lambda original: original, id: str = "") -> Seam:
    return patching.wrap(
        id=id or f"test.{name}", symbol=f"{HOST}:{name}", signature=signature, reason="a test", build=build
    )


GREET = wrap("greet", "(name, *, loud=False)", lambda original: lambda name, **more: original(name) + "!")


def test_a_wrapper_is_seen_by_modules_that_imported_the_name_by_value(host: Any) -> None:
    user = sys.modules[USER]
    with apply([GREET]) as applied:
        assert host.greet("you") == "hello you!"
        assert user.use() == "hello you!"
        assert applied.touched == (f"{USER}.greet",)
        assert applied.describe() == [f"test.greet: wrap {HOST}:greet: a test"]


def test_reverting_restores_every_original(host: Any) -> None:
    user = sys.modules[USER]
    before = {name: dict(vars(owner)) for name, owner in (("host", host), ("user", user), ("thing", host.Thing))}
    rows = [
        GREET,
        wrap("Thing.method", "(self, x)", lambda original: lambda self, x: 2),
        wrap("Thing.fixed", "(x)", lambda original: lambda x: 2),
        wrap("Thing.made", "(cls, x)", lambda original: lambda cls, x: (cls, 2)),
        wrap("Thing.inherited", "(self)", lambda original: lambda self: original(self) + " changed"),
    ]
    applied = apply(rows)
    thing = host.Thing()
    assert (thing.method(1), thing.fixed(1), host.Thing.made(1), thing.inherited()) == (
        2,
        2,
        (host.Thing, 2),
        "base changed",
    )
    assert host.Base().inherited() == "base"
    applied.revert()
    applied.revert()
    assert before == {
        name: dict(vars(owner)) for name, owner in (("host", host), ("user", user), ("thing", host.Thing))
    }


def test_a_substitute_imported_while_in_force_is_taken_back_too(host: Any) -> None:
    late = types.ModuleType("elas_test_late")
    sys.modules["elas_test_late"] = late
    try:
        with apply([GREET]):
            late.greet = host.greet  # type: ignore[attr-defined]
        assert late.greet is host.greet
        assert late.greet("you") == "hello you"
    finally:
        del sys.modules["elas_test_late"]


def test_a_missing_symbol_is_told_in_one_sentence(host: Any) -> None:
    with pytest.raises(WrongVersion) as refused:
        apply([wrap("gone", "(x)")])
    text = str(refused.value)
    assert f"{HOST}:gone (test.gone) is missing from megatron-core 0.19.2" in text
    assert "expected (x)" in text
    assert "install megatron-core 0.19.*" in text
    assert "\n" not in text


def test_a_missing_module_is_told_in_one_sentence(host: Any) -> None:
    row = patching.use(id="test.nowhere", symbol="elas_test_nowhere:f", signature="()", reason="a test")
    (finding,) = check([row])
    assert "is missing from megatron-core 0.19.2 (No module named 'elas_test_nowhere')" in finding.problem


def test_a_changed_signature_is_told_with_both_signatures(host: Any) -> None:
    with pytest.raises(WrongVersion, match=r"expected \(name\), megatron-core 0.19.2 has \(name, \*, loud=False\)"):
        apply([wrap("greet", "(name)")])


def test_a_replacement_notices_changed_code_behind_the_same_signature(host: Any) -> None:
    def row(sha: str) -> Seam:
        return patching.replace(
            id="test.count", symbol=f"{HOST}:count", signature="(numbers)", reason="a test", source_sha256=sha, new=len
        )

    with pytest.raises(WrongVersion, match=r"other code in megatron-core 0.19.2 .*expected 0123"):
        apply([row("0123")])
    with apply([row(hash_source(host.count))]):
        assert host.count is len


def test_nothing_is_applied_when_one_row_does_not_match(host: Any) -> None:
    original = host.greet
    with pytest.raises(WrongVersion, match=r"\(1 more: run `elas doctor`\)"):
        apply([GREET, wrap("gone", "()"), wrap("Thing.gone", "()")])
    assert host.greet is original


def test_two_owners_of_one_symbol_are_refused(host: Any) -> None:
    other = wrap("greet", "(name, *, loud=False)", id="test.other")
    with pytest.raises(ValueError, match=r"both 'test\.greet' and"):
        apply([GREET, other])
    with apply([GREET]), pytest.raises(ValueError, match=r"both 'test\.greet' and"):
        apply([other])


def test_reverting_leaves_the_place_where_a_substitute_came_from(host: Any) -> None:
    user = sys.modules[USER]
    user.substitute = substitute = lambda name, *, loud=False: "else"  # type: ignore[attr-defined]
    with apply([wrap("greet", "(name, *, loud=False)", lambda original: substitute)]):
        assert user.use() == "else"
    assert user.substitute is substitute  # type: ignore[attr-defined]
    assert user.use() == "hello you"


def test_rows_in_force_can_be_asked_for_again(host: Any) -> None:
    with apply([GREET]):
        wrapped = host.greet
        assert apply_missing([GREET]).rows == ()
        assert host.greet is wrapped


def test_rows_are_checked_against_the_originals_while_in_force(host: Any) -> None:
    with apply([GREET]):
        assert check([GREET]) == ()


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("count", "(numbers)"),
        ("Thing", "()"),
        ("Thing.size", "(self)"),
        ("Thing.made", "(cls, x)"),
        ("table", "<dict>"),
    ],
)
def test_a_signature_has_names_and_defaults_but_no_annotations(host: Any, name: str, signature: str) -> None:
    assert describe_signature(patching._locate(f"{HOST}:{name}").original) == signature


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"symbol": "no.colon"}, "must read 'module:Qualified.name'"),
        ({"kind": Kind.WRAP}, "do not go together"),
        ({"kind": Kind.REPLACE, "build": len}, "must pin the source"),
    ],
)
def test_a_row_that_makes_no_sense_is_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Seam(**{"id": "x", "symbol": "a:b", "kind": Kind.USE, "signature": "()", "reason": "a test", **fields})
