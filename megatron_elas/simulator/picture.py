"""A picture of plain shapes, written as SVG, where a shape can say what it is, or as PNG."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from megatron_elas.spec.errors import BadUsage

Point = tuple[float, float]

ANCHORS = {"start": 0.0, "middle": 0.5, "end": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    """As ``#rrggbb``."""
    about: str = ""
    """For the mouse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line through points."""

    points: Sequence[Point]
    colour: str
    width: float = 1.0
    about: str = ""
    """For the mouse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One line of text."""

    x: float
    """Of the anchor."""
    y: float
    """Of the baseline."""
    text: str
    size: int = 12
    anchor: str = "start"
    """``start``, ``middle`` or ``end`` of the text."""
    colour: str = "#222222"


Shape = Box | Line | Text


@dataclass(slots=True)
class Picture:
    """Shapes, later ones above earlier ones. Pixels; the origin is at the top left."""

    width: int
    height: int
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Put shapes on top."""
        self.shapes += shapes

    def svg(self) -> str:
        """As SVG text."""
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="sans-serif">',
            f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>',
            *map(_as_svg, self.shapes),
            "</svg>\n",
        ]
        return "\n".join(lines)

    def png(self) -> bytes:
        """As the content of a PNG file.

        Raises:
            BadUsage: Pillow is not installed.
        """
        try:
            from PIL import Image, ImageDraw, ImageFont
        except ImportError as error:
            raise BadUsage("PNG needs Pillow, which is missing: 'pip install pillow'") from error
        image = Image.new("RGB", (self.width, self.height), "#ffffff")
        draw: Any = ImageDraw.Draw(image)
        for shape in self.shapes:
            match shape:
                case Box():
                    # A box narrower than a pixel still shows.
                    right = max(shape.x, shape.x + shape.width - 1)
                    draw.rectangle((shape.x, shape.y, right, shape.y + shape.height - 1), fill=shape.colour)
                case Line():
                    draw.line(list(shape.points), fill=shape.colour, width=max(1, round(shape.width)), joint="curve")
                case Text():
                    font: Any = ImageFont.load_default(size=shape.size)
                    left = shape.x - ANCHORS[shape.anchor] * draw.textlength(shape.text, font=font)
                    draw.text((left, shape.y - shape.size), shape.text, fill=shape.colour, font=font)
        content = BytesIO()
        image.save(content, format="PNG")
        return content.getvalue()


def _as_svg(shape: Shape) -> str:
    match shape:
        case Box():
            place = f'x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" height="{shape.height:.2f}"'
            return _close(f'<rect {place} fill="{shape.colour}"', "rect", shape.about)
        case Line():
            points = " ".join(f"{x:.2f},{y:.2f}" for x, y in shape.points)
            style = f'fill="none" stroke="{shape.colour}" stroke-width="{shape.width:g}"'
            return _close(f'<polyline points="{points}" {style}', "polyline", shape.about)
        case Text():
            place = f'x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size}" text-anchor="{shape.anchor}"'
            return f'<text {place} fill="{shape.colour}">{html.escape(shape.text)}</text>'


def _close(tag: str, name: str, about: str) -> str:
    return f"{tag}><title>{html.escape(about)}</title></{name}>" if about else f"{tag}/>"
