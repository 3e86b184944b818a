"""Attaching to Megatron: rows say what is touched, and all are checked before any is applied.

Invariants: importing changes nothing; a symbol has at most one owner; when one row does not match the installed
Megatron none is applied; ``Applied.revert`` gives every name back what it held.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import importlib
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from megatron_elas.host.versions import installed_megatron
from megatron_elas.spec.errors import WrongVersion

_ABSENT = object()


class Kind(enum.StrEnum):
    """How a row treats its symbol."""

    USE = "use"
    """Called or read as it is, or done otherwise elsewhere; then its source may be pinned."""
    WRAP = "wrap"
    """Replaced by a function that calls the original."""
    REPLACE = "replace"
    """Replaced by a function that does not; the original's source is pinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """One symbol of Megatron that this project depends on. Make rows with ``use``, ``wrap`` and ``replace``."""

    id: str
    """Name for logs and for ``elas doctor``: ``cpu.rng-state``."""
    symbol: str
    """``module:Qualified.name``."""
    kind: Kind
    signature: str
    """As ``describe_signature`` gives it: parameter names and defaults, no annotations."""
    reason: str
    """Why it is touched, and when the row can go."""
    versions: str = "0.19"
    """Release of megatron-core that the signature was read from: ``major.minor``."""
    source_sha256: str | None = None
    """Of the original's source (``hash_source``); required for ``replace``."""
    build: Callable[[Any], Any] | None = None
    """Makes the substitute from the original. None for ``use``."""

    def __post_init__(self) -> None:
        module, _, name = self.symbol.partition(":")
        if not module or not name:
            raise ValueError(f"seam {self.id}: symbol must read 'module:Qualified.name', got '{self.symbol}'")
        if (self.build is None) != (self.kind is Kind.USE):
            raise ValueError(f"seam {self.id}: kind {self.kind.value} and build={self.build} do not go together")
        if self.kind is Kind.REPLACE and self.source_sha256 is None:
            raise ValueError(f"seam {self.id}: a replacement must pin the source it replaces with source_sha256")


def use(id: str, symbol: str, signature: str, reason: str, source_sha256: str | None = None) -> Seam:
    """A row for a symbol that is only called or read; with its source pinned where this project does what it does."""
    return Seam(
        id=id, symbol=symbol, kind=Kind.USE, signature=signature, reason=reason, source_sha256=source_sha256
    )  # fmt: skip


def wrap(
    id: str,
    symbol: str,
    signature: str,
    reason: str,
    build: Callable[[Any], Any],
    source_sha256: str | None = None,
) -> Seam:
    """A row for a symbol that gets a wrapper; ``build(original)`` makes it. With its source pinned where this project
    does what it does.
    """
    return Seam(
        id=id,
        symbol=symbol,
        kind=Kind.WRAP,
        signature=signature,
        reason=reason,
        source_sha256=source_sha256,
        build=build,
    )


def replace(id: str, symbol: str, signature: str, reason: str, source_sha256: str, new: Any) -> Seam:
    """A row for a symbol that is replaced by ``new``."""
    return Seam(
        id=id,
        symbol=symbol,
        kind=Kind.REPLACE,
        signature=signature,
        reason=reason,
        source_sha256=source_sha256,
        build=lambda original: new,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A row that does not match what is installed."""

    id: str
    symbol: str
    problem: str
    """One sentence: symbol, expected, found, version, remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """Where a symbol lives and what it held before this project touched it."""

    owner: Any
    """Module or class."""
    name: str
    stored: Any
    """The value in the owner's namespace, a descriptor where there is one; _ABSENT when inherited."""
    original: Any
    """What looking the name up gives."""


_active: dict[str, tuple[str, _Target]] = {}
"""Symbol -> (row id, target) of everything that is patched now."""


def describe_signature(function: Any) -> str:
    """Parameters of a function, class or descriptor, without annotations: ``(model, *, flag=False)``.

    A value that cannot be called gives its type: ``<dict>``.
    """
    function = _unwrap_descriptor(function)
    if not callable(function):
        return f"<{type(function).__name__}>"
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)  # of a function that is a default


def hash_source(function: Any) -> str:
    """SHA-256 of a function's source, without its indentation."""
    source = inspect.getsource(inspect.unwrap(_unwrap_descriptor(function)))
    return hashlib.sha256(textwrap.dedent(source).encode()).hexdigest()


def is_applied(row: Seam) -> bool:
    """Whether this row is in force."""
    return row.symbol in _active and _active[row.symbol][0] == row.id


def check(rows: Iterable[Seam]) -> tuple[Finding, ...]:
    """Compare rows with the installed Megatron. Imports the modules they name; changes nothing."""
    findings = []
    for row in rows:
        problem = _find_problem(row)
        if problem is not None:
            findings.append(Finding(id=row.id, symbol=row.symbol, problem=problem))
    return tuple(findings)


def require(rows: Iterable[Seam]) -> None:
    """Raise WrongVersion, with the first finding's sentence, unless every row matches."""
    findings = check(rows)
    if findings:
        more = f" ({len(findings) - 1} more: run `elas doctor`)" if len(findings) > 1 else ""
        raise WrongVersion(findings[0].problem + more)


def apply(rows: Sequence[Seam]) -> Applied:
    """Check all rows, then put every substitute in place, then rebind names that modules imported by value.

    Returns:
        The handle that takes the substitutes away again, also usable as a context manager.

    Raises:
        WrongVersion: A row does not match; nothing was changed.
        ValueError: Two rows own one symbol, or the symbol is already patched; nothing was changed.
    """
    patches = tuple(row for row in rows if row.build is not None)
    _refuse_second_owners(patches)
    require(rows)
    targets = {row.symbol: _locate(row.symbol) for row in patches}
    substitutes = {row.symbol: row.build(targets[row.symbol].original) for row in patches if row.build is not None}
    holders = _find_globals([*(target.original for target in targets.values()), *substitutes.values()])
    for row in patches:
        target = targets[row.symbol]
        setattr(target.owner, target.name, _wrap_descriptor(substitutes[row.symbol], target.stored))
        _active[row.symbol] = (row.id, target)
    touched = []
    for symbol, target in targets.items():
        if isinstance(target.owner, types.ModuleType):
            for module, name in holders[id(target.original)]:
                if (module, name) != (target.owner, target.name):
                    setattr(module, name, substitutes[symbol])
                    touched.append(f"{module.__name__}.{name}")
    own = tuple(place for substitute in substitutes.values() for place in holders[id(substitute)])
    return Applied(rows=patches, substitutes=substitutes, touched=tuple(touched), own=own)


def apply_missing(rows: Sequence[Seam]) -> Applied:
    """``apply`` without the rows that are in force already, for example since before a fork."""
    return apply([row for row in rows if not is_applied(row)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied(contextlib.AbstractContextManager["Applied"]):
    """Substitutes in force. ``revert`` takes them away."""

    rows: tuple[Seam, ...]
    substitutes: dict[str, Any]
    """By symbol."""
    touched: tuple[str, ...]
    """``module.name`` of every copy that a module had imported by value and that was rebound too."""
    own: tuple[tuple[types.ModuleType, str], ...]
    """Globals that held a substitute before: where it is defined, or came from. ``revert`` leaves them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.revert()

    def describe(self) -> list[str]:
        """One line per row, for the log."""
        return [f"{row.id}: {row.kind.value} {row.symbol}: {row.reason}" for row in self.rows]

    def revert(self) -> None:
        """Give every name back what it held, also in modules that imported a substitute since. Harmless twice."""
        reverted = [row for row in reversed(self.rows) if is_applied(row)]
        holders = _find_globals([self.substitutes[row.symbol] for row in reverted])
        for row in reverted:
            _, target = _active.pop(row.symbol)
            if target.stored is _ABSENT:
                delattr(target.owner, target.name)
            else:
                setattr(target.owner, target.name, target.stored)
            if isinstance(target.owner, types.ModuleType):
                for module, name in holders[id(self.substitutes[row.symbol])]:
                    if (module, name) not in self.own:
                        setattr(module, name, target.original)


def _refuse_second_owners(patches: Iterable[Seam]) -> None:
    owners = {symbol: id for symbol, (id, _) in _active.items()}
    for row in patches:
        if row.symbol in owners:
            raise ValueError(
                f"{row.symbol} is patched by both '{owners[row.symbol]}' and '{row.id}': merge the two rows"
            )
        owners[row.symbol] = row.id


def _locate(symbol: str) -> _Target:
    """Find a symbol. Raises ImportError or AttributeError, with Python's text, when it is not there."""
    if symbol in _active:
        return _active[symbol][1]
    module_name, _, path = symbol.partition(":")
    owner: Any = importlib.import_module(module_name)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original = inspect.getattr_static(owner, name) if isinstance(owner, type) else getattr(owner, name)
    return _Target(owner=owner, name=name, stored=vars(owner).get(name, _ABSENT), original=_unwrap_descriptor(original))


def _find_problem(row: Seam) -> str | None:
    where = f"{row.symbol} ({row.id})"
    remedy = f"install megatron-core {row.versions}.*, or adapt the row in megatron_elas/host"
    version = installed_megatron()
    try:
        target = _locate(row.symbol)
    except (ImportError, AttributeError) as error:
        return f"{where} is missing from megatron-core {version} ({error}): expected {row.signature}; {remedy}"
    found = describe_signature(target.original)
    if found != row.signature:
        return f"{where} has changed: expected {row.signature}, megatron-core {version} has {found}; {remedy}"
    if row.source_sha256 is not None and hash_source(target.original) != row.source_sha256:
        return (
            f"{where} has the expected signature {found} but other code in megatron-core {version} "
            f"(sha256 {hash_source(target.original)[:12]}, expected {row.source_sha256[:12]}); {remedy}"
        )
    return None


def _unwrap_descriptor(value: Any) -> Any:
    """The function inside a staticmethod, classmethod or property."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    return value


def _wrap_descriptor(substitute: Any, stored: Any) -> Any:
    """``substitute`` in the kind of descriptor that ``stored`` is."""
    if isinstance(stored, staticmethod | classmethod | property) and not isinstance(substitute, type(stored)):
        return type(stored)(substitute)
    return substitute


def _find_globals(values: Sequence[Any]) -> dict[int, list[tuple[types.ModuleType, str]]]:
    """Which modules hold which of the values in a global, by the value's ``id``. One pass over ``sys.modules``."""
    holders: dict[int, list[tuple[types.ModuleType, str]]] = {id(value): [] for value in values}
    for module in list(sys.modules.values()) if holders else ():
        if isinstance(module, types.ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in holders:
                    holders[id(value)].append((module, name))
    return holders
