"""The same shapes as SVG and as PNG."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from io import BytesIO

import pytest
from PIL import Image

from megatron_elas.simulator.picture import Box, Line, Picture, Text
from megatron_elas.spec.errors import BadUsage

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def picture() -> Picture:
    drawn = Picture(200, 100)
    drawn.add(Box(x=10, y=10, width=50, height=20, colour="#ff0000", about="a < b"))
    drawn.add(Box(x=100, y=10, width=0.2, height=20, colour="#00ff00"))
    drawn.add(Line(points=[(0, 50), (200, 50)], colour="#0000ff", width=3, about="a line"))
    drawn.add(Text(x=190, y=90, text="words & more", anchor="end"))
    return drawn


def test_svg_has_every_shape_and_what_it_is(picture: Picture) -> None:
    root = ET.fromstring(picture.svg())
    assert root.get("viewBox") == "0 0 200 100"
    _, box, thin = root.iter(f"{SVG}rect")
    assert (box.get("x"), box.get("width"), box.get("fill")) == ("10.00", "50.00", "#ff0000")
    assert (thin.get("width"), thin.find(f"{SVG}title")) == ("0.20", None)
    assert [title.text for title in root.iter(f"{SVG}title")] == ["a < b", "a line"]
    assert [(text.text, text.get("text-anchor")) for text in root.iter(f"{SVG}text")] == [("words & more", "end")]


def test_png_has_the_same_shapes_in_the_same_places(picture: Picture) -> None:
    with Image.open(BytesIO(picture.png())) as image:
        assert image.size == (200, 100)
        assert [image.getpixel(place) for place in ((9, 15), (10, 10), (59, 29), (60, 29))] == [
            (255, 255, 255),
            (255, 0, 0),
            (255, 0, 0),
            (255, 255, 255),
        ]
        assert image.getpixel((100, 15)) == (0, 255, 0), "a box that is narrower than a pixel is seen"
        assert image.getpixel((150, 50)) == (0, 0, 255)
        dark = [x for x in range(200) for y in range(75, 95) if sum(image.getpixel((x, y))) < 300]  # type: ignore[arg-type]
        assert 90 < min(dark) < max(dark) <= 190


def test_without_pillow_there_is_a_sentence(picture: Picture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(BadUsage, match="PNG needs Pillow, which is missing: 'pip install pillow'"):
        picture.png()
