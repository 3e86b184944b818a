"""Where two audited runs part: the first step, kind and place, in the order in which a step makes what is told."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_elas.cli.audit_files import AuditedRun, AuditedStep, Place, describe_span
from megatron_elas.spec.audit import ALL_LANES, GRADIENTS, KINDS, TENSORS, range_size
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.layout import describe_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One run at the place where they part."""

    value: str | None
    """Checksum, or loss; None: it has nothing there."""
    epoch: int
    placement: str
    workers: tuple[int, ...]
    """That told of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place, and what else differs in that step."""

    step: int
    kind: str
    place: Place
    what: str
    """The place in words, with its coordinates."""
    manner: str
    """``differs``, ``A only``, ``B only``, or ``size`` of a tensor that has other numbers of elements."""
    further: int
    """Other tensors, samples or masks of the kind that differ in the step, in any manner."""
    alike: int
    """Those of them that differ in the same manner."""
    others: tuple[str, ...]
    """Kinds after it that differ in the step too."""
    same: tuple[str, ...]
    """Kinds before it that are equal in the step."""
    distance: float | None
    """Of a tensor: norm of the difference over the norm in A, estimated. None for what is no tensor or not finite."""
    distances: Mapping[str, float | None]
    """The same of all tensors of each kind that differs in the step."""
    losses: Mapping[str, tuple[float, float]]
    """Losses that differ in the step."""
    a: Side
    b: Side


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Of two runs."""

    kinds: tuple[str, ...]
    """That both tell."""
    compared: tuple[str, ...]
    """Those of them of which there was something in a step: without dropout there are no masks."""
    final: int | None
    """The step that training has ended before, in one of the runs, so that only its state is told."""
    state: str
    """What it is called."""
    equal: tuple[int, ...]
    """Steps that both tell, before the one in which they part."""
    chain: str
    """Digest of what was told of these, the same for both."""
    difference: Difference | None
    last: int | None
    """The last step that both have losses of, if it is behind the one in which they part."""
    last_losses: Mapping[str, tuple[float, float]]
    """Of that step, in A and B."""


def compare(a: AuditedRun, b: AuditedRun) -> Comparison:
    """Go through the steps that both tell until they part.

    Raises:
        BadUsage: They have nothing in common that could be compared.
    """
    if a.lanes != b.lanes:
        raise BadUsage(
            f"{a.folder} is of a job of tensor-parallel size {a.lanes} and {b.folder} of {b.lanes}, whose shards are "
            f"not the same tensors: compare runs of one tensor-parallel size"
        )
    steps = sorted(set(a.steps) & set(b.steps))
    if not steps:
        raise BadUsage(
            f"{a.folder} tells {a.describe_steps()} and {b.folder} tells {b.describe_steps()}, so no step is in both: "
            f"audit both from the same step on, with the same --elastic-audit N"
        )
    kinds = tuple(kind for kind in a.kinds if kind in b.kinds)
    if not kinds:
        raise BadUsage(f"{a.folder} and {b.folder} tell no kind that the other tells too: audit both anew")
    final = a.final if a.final in steps else b.final if b.final in steps else None
    state = "the final state" if a.final == b.final else f"the state before step {final}"
    chain = ""
    difference = None
    equal = []
    compared: set[str] = set()
    for step in steps:
        one, two = a.read_step(step), b.read_step(step)
        compared.update(kind for kind in kinds if one.values.get(kind) or two.values.get(kind))
        difference = _part(one, two, kinds)
        if difference is not None:
            break
        chain = _chain(one, kinds, chain)
        equal.append(step)
    last = None
    if difference is not None and "losses" in kinds:
        begin = difference.step
        last = max((step for step in steps if step > begin and step not in (a.final, b.final)), default=None)
    return Comparison(
        kinds=kinds,
        compared=tuple(kind for kind in kinds if kind in compared),
        final=final,
        state=state,
        equal=tuple(equal),
        chain=chain,
        difference=difference,
        last=last,
        last_losses={} if last is None else _pair_losses(a.read_losses(last), b.read_losses(last)),
    )


def _chain(step: AuditedStep, kinds: tuple[str, ...], before: str) -> str:
    """The digest of a step's values and of all before it, which does not depend on who told them."""
    table = {
        kind: sorted((list(place), value) for place, value in _comparable(step, kind).items())
        for kind in kinds
        if kind in step.values
    }
    text = json.dumps([before, step.step, table])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _comparable(step: AuditedStep, kind: str) -> Mapping[Place, str]:
    """Without the copy of a tied embedding, which a run on one stage does not have."""
    values = step.values[kind]
    if kind not in TENSORS or not step.seats.tied:
        return values
    return {place: value for place, value in values.items() if place[0] not in step.seats.tied}


def _part(a: AuditedStep, b: AuditedStep, kinds: tuple[str, ...]) -> Difference | None:
    found: tuple[str, list[Place]] | None = None
    others, same = [], []
    for kind in (kind for kind in kinds if kind in a.values and kind in b.values):
        places = _differing(a, b, kind)
        if found is not None:
            others += [kind] if places else []
        elif places:
            found = kind, places
        elif a.values[kind]:
            same.append(kind)
    if found is None:
        return None
    kind, places = found
    place = places[0]
    manners = {_thing(kind, other): _manner(kind, other, a, b) for other in reversed(places)}  # that of the first place
    manner = manners.pop(_thing(kind, place))
    return Difference(
        step=a.step,
        kind=kind,
        place=place,
        what=_describe(kind, place, a, b),
        manner=manner,
        further=len(manners),
        alike=sum(other == manner for other in manners.values()),
        others=tuple(others),
        same=tuple(same),
        distance=relative_distance(a, b, kind, place[:2]) if kind in TENSORS else None,
        distances={own: relative_distance(a, b, own) for own in (kind, *others) if own in TENSORS},
        losses=_differing_losses(a, b),
        a=_side(a, kind, place),
        b=_side(b, kind, place),
    )


def relative_distance(a: AuditedStep, b: AuditedStep, kind: str, tensor: Place | None = None) -> float | None:
    """How far the tensors of a kind are apart, as a part of their norm in A; None where that is no number.

    An estimate: the squares of signed sums are, in the mean over their signs, those of norms, and there are up to 16
    sums of a tensor.

    Args:
        a: One run.
        b: The other one.
        kind: Of tensors.
        tensor: Name and lane of the only one; None: all that both have.
    """
    ours, theirs = a.signed[kind], b.signed[kind]
    places = [
        place
        for place in sorted(ours.keys() & theirs.keys())
        if tensor in (None, place[:2]) and len({step.counts[str(place[0]), int(place[1])] for step in (a, b)}) == 1
    ]
    apart = math.hypot(*(ours[place] - theirs[place] for place in places))
    norm = math.hypot(*(ours[place] for place in places))
    return apart / norm if norm and math.isfinite(apart) and math.isfinite(norm) else None


def _differing_losses(a: AuditedStep, b: AuditedStep) -> dict[str, tuple[float, float]]:
    ours, theirs = ({str(place[0]): loss for place, loss in step.values.get("losses", {}).items()} for step in (a, b))
    return {name: both for name, both in _pair_losses(ours, theirs).items() if ours[name] != theirs[name]}


def _pair_losses(ours: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, tuple[float, float]]:
    """Of those that both have."""
    found = {}
    for name in sorted(ours.keys() & theirs.keys()):
        try:
            found[name] = float.fromhex(ours[name]), float.fromhex(theirs[name])
        except ValueError:  # workers of one run tell of different ones
            continue
    return found


def describe_distances(difference: Difference) -> str:
    """How far the two are apart in that step; empty where no more is known than the sentence says."""
    parts = []
    if difference.kind in TENSORS:
        parts.append(f"this tensor {_describe_distance(difference.distance)}")
    parts += [f"all {kind} {_describe_distance(apart)}" for kind, apart in difference.distances.items()]
    for name, (ours, theirs) in difference.losses.items():
        if (difference.kind, difference.place) != ("losses", (name,)):
            parts.append(f"the {name} is {ours!r} in A and {theirs!r} in B")
    return "; ".join(parts)


def _describe_distance(apart: float | None) -> str:
    return "by no finite number" if apart is None else f"by about {apart:.1e} of the norm"


def _differing(a: AuditedStep, b: AuditedStep, kind: str) -> list[Place]:
    """Places, in order."""
    # A tied weight has its copy where there are several stages; that of one run only says nothing.
    ours, theirs = a.values[kind], b.values[kind]
    if kind in TENSORS and {place[0] for place in ours} != {place[0] for place in theirs}:
        ours, theirs = _comparable(a, kind), _comparable(b, kind)
    places = [place for place in ours.keys() | theirs.keys() if ours.get(place) != theirs.get(place)]
    return sorted(places, key=_order)


def _order(place: Place) -> tuple[object, ...]:
    """As people count: layer 2 before layer 10."""
    return tuple(
        tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", entry))
        if isinstance(entry, str)
        else entry
        for entry in place
    )


def _thing(kind: str, place: Place) -> Place:
    """What is counted: a tensor, not its ranges; a sample, not its readers."""
    return place[:2] if kind in TENSORS else place[1:] if kind == "samples" else place


def _manner(kind: str, place: Place, a: AuditedStep, b: AuditedStep) -> str:
    if kind in TENSORS:
        counts = [step.counts.get((str(place[0]), int(place[1]))) for step in (a, b)]
        if None not in counts and counts[0] != counts[1]:
            return "size"
    if place not in b.values[kind]:
        return "A only"
    return "differs" if place in a.values[kind] else "B only"


def _side(step: AuditedStep, kind: str, place: Place) -> Side:
    return Side(
        value=step.values[kind].get(place),
        epoch=step.epoch,
        placement=step.seats.placement.describe(step.seats.layers),
        workers=step.writers_of(kind, place),
    )


def _describe(kind: str, place: Place, a: AuditedStep, b: AuditedStep) -> str:
    ours, theirs = a.values[kind].get(place), b.values[kind].get(place)
    differs = "differs" if ours and theirs else f"is in {'A' if ours else 'B'} only"
    if kind == "samples":
        return f"sample {place[1]}, as read for the {place[0]} stage, {differs}"
    if kind == "losses":
        if ours and theirs:
            return f"the {place[0]} is {_read_float(ours)} in A and {_read_float(theirs)} in B"
        return f"the {place[0]} {differs}"
    if kind == "masks":
        sample, layer, site, lane = place
        lanes = "all lanes" if lane == ALL_LANES else f"lane {lane}"
        layers = max(stop for _, stop in a.seats.layers)
        where = "before the layers" if layer == 0 else f"in {_describe_layer(int(layer), layers)}"
        return f"the mask of sample {sample} {where} (site {site}, {lanes}) {differs}"
    name, lane, number = place
    noun = {"parameters": "the parameter", GRADIENTS: "the gradient of"}.get(kind, f"{kind} of")
    counts = [step.counts.get((str(name), int(lane))) for step in (a, b)]
    if None not in counts and counts[0] != counts[1]:
        return f"{noun} {name} (lane {lane}) has {counts[0]} elements in A and {counts[1]} in B"
    if None in counts:
        return f"{noun} {name} (lane {lane}) is in {'A' if ours else 'B'} only"
    count = counts[0] or 0
    size = range_size(count)
    first = int(number) * size
    last = min(first + size, count) - 1
    return f"{noun} {name} (lane {lane}, elements {first} to {last} of {count}) differs"


def _describe_layer(number: int, layers: int) -> str:
    return describe_layers(number - 1, number) if number <= layers else "the head"


def _read_float(text: str) -> str:
    try:
        return repr(float.fromhex(text))
    except ValueError:
        return text


def describe(a: AuditedRun, b: AuditedRun, found: Comparison) -> str:
    """One sentence."""
    until = describe_span(found.equal, found.state, found.final)
    difference = found.difference
    if difference is None:
        return f"A and B are equal in {until}: {_join(found.compared)}; chain {found.chain}"
    at_end = difference.step == found.final
    where = found.state if at_end else f"step {difference.step}"
    more = _describe_further(difference, "state" if at_end else "step")
    equal = [until] if until else []
    equal += [f"{_join(difference.same)} of {where}"] if difference.same else []
    common = f"until then {' and the '.join(equal)} are equal" if equal else "nothing before it is in both audits"
    return f"A and B part in {where}: {difference.what}{more}; {common}"


def _describe_further(difference: Difference, where: str) -> str:
    """What else differs there; it may be none."""
    others = f"{_join(difference.others)} of that {where}" if difference.others else ""
    differs = difference.manner == "differs" and difference.kind != "losses"  # so ends what is said of the first
    alike = difference.alike if differs or difference.manner.endswith("only") else 0
    text = ""
    if alike:
        verbs = ("does", "do") if differs else ("is", "are")
        text = f", as {verbs[alike > 1]} {_count_more(difference.kind, alike)}"
    if rest := difference.further - alike:
        text += f"; {_count_more(difference.kind, rest)} {'differs' if rest == 1 else 'differ'} otherwise"
    elif others and differs:
        return f"{text}{' and' if text else ', and so do'} {others}"
    return f"{text}; {others} differ" if others else text


def _count_more(kind: str, count: int) -> str:
    noun = {"samples": "sample", "masks": "mask", "losses": "loss"}.get(kind, "tensor")
    plural = noun + ("es" if noun == "loss" else "s")
    return f"{count} more {noun if count == 1 else plural}"


def _join(kinds: tuple[str, ...]) -> str:
    names = [kind for kind in KINDS if kind in kinds]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
