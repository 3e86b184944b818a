"""Attributes of torch that were replaced, and how to put them back."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Substitutions:
    """Replaces attributes and remembers the originals."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` to ``value``."""
        self._originals.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def revert(self) -> None:
        """Put every original back, the latest first."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
