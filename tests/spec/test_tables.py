"""Files become values; what is wrong in them is said in one sentence with the place."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.tables import as_table, build, find_table, read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    spokes: int
    size: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cart:
    name: str
    wheels: tuple[Wheel, ...]
    spare: Wheel | None = None
    sold: bool = False

    def __post_init__(self) -> None:
        if not self.wheels:
            raise BadUsage("wheels is empty: a cart has some")


CART = Cart(name="c", wheels=(Wheel(spokes=8), Wheel(spokes=6, size=2.0)), spare=Wheel(spokes=1))


def test_a_value_comes_back_from_its_table_in_json() -> None:
    assert build(Cart, json.loads(json.dumps(as_table(CART))), "here") == CART


def test_whole_numbers_stand_for_numbers_and_the_other_way_round() -> None:
    assert build(Wheel, {"spokes": 8.0, "size": 3}, "here") == Wheel(spokes=8, size=3.0)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"name": "c", "wheels": [], "sold": True}, "f: wheels is empty: a cart has some"),
        ({"name": "c"}, "f: 'wheels' is missing: add it"),
        ({"name": "c", "wheel": []}, "f: 'wheel' is not known: it has name, wheels, spare, sold"),
        ({"name": 3, "wheels": []}, "f: name is 3: write a word"),
        ({"name": "c", "wheels": 4}, "f: wheels is 4: write a list"),
        ({"name": "c", "wheels": [4]}, "f: wheels[0] is 4: write a table"),
        ({"name": "c", "wheels": [{"spokes": 1.5}]}, "f: wheels[0]: spokes is 1.5: write a whole number"),
        ({"name": "c", "wheels": [{"spokes": True}]}, "f: wheels[0]: spokes is True: write a whole number"),
        ({"name": "c", "wheels": [], "sold": 1}, "f: sold is 1: write a true or false"),
    ],
)
def test_what_does_not_fit_is_named(table: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadUsage) as caught:
        build(Cart, table, "f")
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("none.toml", None, "cannot be read (No such file or directory): name another file"),
        ("bad.toml", "a = ", "is no valid TOML"),
        ("bad.json", "{", "is no valid JSON"),
        ("list.json", "[1]", "holds a list where names and values are wanted"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, name: str, text: str | None, sentence: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(BadUsage) as caught:
        read_table(tmp_path / name)
    assert sentence in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_an_unknown_profile_gets_the_known_names() -> None:
    with pytest.raises(BadUsage, match=r"there is no 'npu-7' in configs/clusters: name one of .*npu-96.*, or a .toml"):
        find_table("clusters", "npu-7")
