"""The algorithms alone: programs of all members, run in one thread."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron_elas.runtime.communicator import collectives
from megatron_elas.runtime.communicator.collectives import Team
from megatron_elas.runtime.communicator.reduction import Reduction
from megatron_elas.runtime.transport.program import Program, Region
from tests.runtime.communicator.programs import find_unaware, run, teams

COUNTS = [2, 3, 5, 8, 11]
"""On both sides of ``DIRECT_MEMBERS``."""
LENGTHS = [0, 1, 7, 1000, 70_000]
"""fp32 elements; the last one is beyond ``SMALL_BYTES``."""
SUM = ReduceOp.SUM


def values(at: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(at + 1)).to(dtype)


def memory(tensor: Tensor) -> bytearray:
    return bytearray(tensor.view(torch.uint8).numpy().tobytes()) if tensor.numel() else bytearray()


def tensor_of(data: bytearray, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def in_order(count: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The sum in member order, 16-bit floats in fp32."""
    total = values(0, length, dtype).float()
    for at in range(1, count):
        total += values(at, length, dtype).float()
    return total.to(dtype)


def whole(tensor: Tensor) -> Region:
    return Region(0, 0, tensor.nbytes)


def all_reduced(members: list[Team], inputs: list[Tensor], op: ReduceOp.RedOpType = SUM) -> list[Tensor]:
    dtype = inputs[0].dtype
    memories = [[memory(tensor)] for tensor in inputs]
    run(
        members,
        [
            collectives.all_reduce(team, whole(tensor), dtype.itemsize, Reduction(op, dtype))
            for team, tensor in zip(members, inputs, strict=True)
        ],
        memories,
    )
    return [tensor_of(data, dtype) for (data,) in memories]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_reduce_gives_everybody_the_same_bits(
    count: int, length: int, dtype: torch.dtype, deterministic: bool
) -> None:
    members = teams(count, deterministic=deterministic)
    results = all_reduced(members, [values(at, length, dtype) for at in range(count)])
    assert all(torch.equal(result, results[0]) for result in results)
    expected = in_order(count, length, dtype)
    if members[0].sums_in_order or not collectives.rings(members[0], length * dtype.itemsize):
        assert torch.equal(results[0], expected)
    else:
        torch.testing.assert_close(results[0], expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.25)


@pytest.fixture
def always_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree in teams of two and more."""
    monkeypatch.setattr(collectives, "EXCHANGE_MEMBERS", 1)


def any_teams(count: int, seed: int = 0) -> list[Team]:
    """Ids without order."""
    workers = tuple(random.Random(100 * count + seed).sample(range(64), count))
    return [Team(workers, at) for at in range(count)]


@pytest.mark.usefixtures("always_tree")
@pytest.mark.parametrize("count", range(2, 18))
def test_a_tree_sums_in_the_order_of_the_members(count: int) -> None:
    """Which differs from the order of their ids; the numbers are so different that the order shows."""
    numbers = [float(10 ** (at * 5 % 9)) * (-1) ** at for at in range(count)]
    expected = torch.zeros(3)
    for number in numbers:
        expected += number
    for seed in range(5):
        results = all_reduced(any_teams(count, seed), [torch.full((3,), number) for number in numbers])
        assert all(torch.equal(result, expected) for result in results)


@pytest.mark.usefixtures("always_tree")
@pytest.mark.parametrize("count", range(2, 18))
@pytest.mark.parametrize("in_place", [False, True])
def test_a_tree_gathers_in_the_order_of_the_members(count: int, in_place: bool) -> None:
    members = any_teams(count)
    rows = [bytes([at]) * 12 for at in range(count)]
    slots = [Region(0, at * 12, 12) for at in range(count)]
    memories = []
    for at, row in enumerate(rows):
        room = bytearray(12 * count)
        if in_place:
            room[at * 12 : at * 12 + 12] = row
        memories.append([room, bytearray(row)])
    owns = [slots[at] if in_place else Region(1, 0, 12) for at in range(count)]
    run(members, [collectives.all_gather(team, slots, owns[team.me]) for team in members], memories)
    assert all(room == b"".join(rows) and own == row for (room, own), row in zip(memories, rows, strict=True))


@pytest.mark.usefixtures("always_tree")
@pytest.mark.parametrize("count", range(2, 18))
def test_a_tree_needs_two_messages_for_each_edge(count: int) -> None:
    members = any_teams(count)
    for programs in (
        [collectives.barrier(team) for team in members],
        [collectives.all_reduce(team, Region(0, 0, 12), 4, Reduction(SUM, torch.float32)) for team in members],
    ):
        assert sum(len(one.sends) for program in programs for one in program.rounds) == 2 * (count - 1)
    assert len({program.scratch_bytes for program in programs}) == 1, "``together`` decides by it, on every member"


LIMITS = ("SMALL_BYTES", "PAIR_BYTES", "SCRATCH_BYTES", "DIRECT_MEMBERS", "SPREAD_BYTES")


@pytest.fixture(params=["as they are", "tiny", "huge"])
def thresholds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """All thresholds of size and member count moved, so that every algorithm serves every size."""
    if request.param != "as they are":
        for name in LIMITS:
            monkeypatch.setattr(collectives, name, 64 if request.param == "tiny" else 1 << 40)
        if request.param == "tiny":
            monkeypatch.setattr(collectives, "DIRECT_MEMBERS", 2)
    return request.param


@pytest.mark.parametrize("count", [2, 3, 5, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_sums_do_not_depend_on_the_algorithm(count: int, dtype: torch.dtype, thresholds: str) -> None:
    """``in_order`` knows no thresholds, so equal bits under all of them are equal bits among them."""
    length = 501
    members = teams(count, deterministic=True)
    inputs = [values(at, length, dtype) for at in range(count)]
    expected = in_order(count, length, dtype)
    for result in all_reduced(members, inputs):
        assert torch.equal(result, expected), thresholds
    shares = collectives.cut(Region(0, 0, length * dtype.itemsize), dtype.itemsize, count)
    memories = [[memory(tensor)] for tensor in inputs]
    reducer = Reduction(SUM, dtype)
    run(
        members,
        [collectives.reduce_scatter(team, shares[team.me], shares, dtype.itemsize, reducer) for team in members],
        memories,
    )
    for (data,), share in zip(memories, shares, strict=True):
        part = slice(share.start // dtype.itemsize, (share.start + share.size) // dtype.itemsize)
        assert torch.equal(tensor_of(data, dtype)[part], expected[part])
    for root in (0, count - 1):
        memories = [[memory(tensor)] for tensor in inputs]
        run(
            members,
            [collectives.reduce(team, whole(inputs[0]), dtype.itemsize, root, reducer) for team in members],
            memories,
        )
        assert torch.equal(tensor_of(memories[root][0], dtype), expected)


def test_the_order_of_sums_is_that_of_the_members_that_are_left() -> None:
    """(1e8 + 1) - 1e8 is 0 in fp32 and (1e8 - 1e8) + 1 is 1: order shows."""
    numbers = {100: 1e8, 97: 1.0, 94: -1e8, 91: 1.0}
    for workers, expected in (
        ((100, 97, 94, 91), 1.0),
        ((100, 94, 91), 1.0),
        ((100, 97, 94), 0.0),
        ((94, 100, 97), 1.0),
    ):
        members = [Team(workers, at, True) for at in range(len(workers))]
        for result in all_reduced(members, [torch.full((5,), numbers[worker]) for worker in workers]):
            assert result.tolist() == [expected] * 5


def test_a_direct_reduction_sends_as_many_bytes_as_a_ring() -> None:
    size = 9 << 20
    sent = []
    for deterministic in (False, True):
        (team, *_) = teams(9, deterministic=deterministic)
        program = collectives.all_reduce(team, Region(0, 0, size), 4, Reduction(SUM, torch.float32))
        sent.append(sum(send.region.size for one in program.rounds for send in one.sends))
        peers = {send.peer for one in program.rounds[:4] for send in one.sends if send.region.size}
        assert len(peers) == (8 if deterministic else 1)
    assert sent[0] == sent[1] == 2 * 8 * size // 9


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("length", [0, 5, 50_000, 1_000_000])
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_scatter_keeps_its_inputs_and_may_write_to_its_own(count: int, length: int, in_place: bool) -> None:
    if length == 1_000_000 and count > 4:
        pytest.skip("several slices of scratch are covered by the smaller groups")
    inputs = [values(at, length * count) for at in range(count)]
    expected = sum(inputs[1:], inputs[0]).view(count, length)
    members = teams(count)
    memories = [[bytearray(4 * length), memory(tensor)] for tensor in inputs]
    slots = [Region(1, at * 4 * length, 4 * length) for at in range(count)]
    targets = [slots[at] if in_place else Region(0, 0, 4 * length) for at in range(count)]
    reducer = Reduction(SUM, torch.float32)
    run(
        members,
        [collectives.reduce_scatter(team, targets[team.me], slots, 4, reducer) for team in members],
        memories,
    )
    for at, (output, data) in enumerate(memories):
        rows = tensor_of(data).view(count, length)
        others = [peer for peer in range(count) if peer != at or not in_place]
        assert torch.equal(rows[others], inputs[at].view(count, length)[others])
        result = rows[at] if in_place else tensor_of(output)
        torch.testing.assert_close(result, expected[at], rtol=0, atol=1e-5)
        assert count > collectives.DIRECT_MEMBERS or torch.equal(result, expected[at])


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("in_place", [False, True])
def test_all_gather_may_be_in_place(count: int, length: int, in_place: bool) -> None:
    expected = torch.cat([values(at, length) for at in range(count)])
    size = 4 * length
    slots = [Region(0, at * size, size) for at in range(count)]
    memories = []
    for at in range(count):
        own = memory(values(at, length))
        room = bytearray(count * size)
        if in_place:
            room[at * size : (at + 1) * size] = own
        memories.append([room, own])
    members = teams(count)
    owns = [slots[at] if in_place else Region(1, 0, size) for at in range(count)]
    run(members, [collectives.all_gather(team, slots, owns[team.me]) for team in members], memories)
    assert all(torch.equal(tensor_of(room), expected) for room, _ in memories)


def test_all_gather_takes_different_lengths() -> None:
    members = teams(4)
    memories = [[*(bytearray(4 * (3 + peer)) for peer in range(4)), memory(values(at, 3 + at))] for at in range(4)]
    slots = [Region(peer, 0, 4 * (3 + peer)) for peer in range(4)]
    run(
        members,
        [collectives.all_gather(team, slots, Region(4, 0, 4 * (3 + team.me))) for team in members],
        memories,
    )
    for rooms in memories:
        assert all(torch.equal(tensor_of(rooms[at]), values(at, 3 + at)) for at in range(4))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("length", [0, 1, 1000, 300_000])
def test_every_member_can_be_the_root(count: int, length: int) -> None:
    members = teams(count)
    size = 4 * length
    mine = [memory(values(at, length)) for at in range(count)]
    roots = range(count) if length == 1000 else (0, count - 1)

    def each(build: Callable[[Team], Program], memories: list[list[bytearray]]) -> list[list[bytearray]]:
        run(members, [build(team) for team in members], memories)
        return memories

    slots = [Region(1 + at, 0, size) for at in range(count)]
    reducer = Reduction(SUM, torch.float32)
    for root in roots:
        copied = each(
            lambda team, root=root: collectives.broadcast(team, Region(0, 0, size), 4, root),
            [[bytearray(data)] for data in mine],
        )
        assert all(data == mine[root] for (data,) in copied)
        reduced = each(
            lambda team, root=root: collectives.reduce(team, Region(0, 0, size), 4, root, reducer),
            [[bytearray(data)] for data in mine],
        )
        for at, (data,) in enumerate(reduced):
            assert torch.equal(tensor_of(data), in_order(count, length)) if at == root else data == mine[at]
        gathered = each(
            lambda team, root=root: collectives.gather(team, slots, Region(0, 0, size), root),
            [[bytearray(data), *(bytearray(size) for _ in range(count))] for data in mine],
        )
        assert gathered[root][1:] == mine
        scattered = each(
            lambda team, root=root: collectives.scatter(team, Region(0, 0, size), slots, root),
            [[bytearray(size), *map(bytearray, mine)] for _ in range(count)],
        )
        assert [own for own, *_ in scattered] == mine


@pytest.mark.parametrize("count", COUNTS)
def test_all_to_all_takes_uneven_and_empty_pieces(count: int) -> None:
    def length(source: int, target: int) -> int:
        return (source * 3 + target) % 4

    members = teams(count)
    memories = [
        [
            *(bytearray(length(peer, at)) for peer in range(count)),
            *(bytearray([16 * at + peer] * length(at, peer)) for peer in range(count)),
        ]
        for at in range(count)
    ]
    run(
        members,
        [
            collectives.all_to_all(
                team,
                [Region(peer, 0, length(peer, team.me)) for peer in range(count)],
                [Region(count + peer, 0, length(team.me, peer)) for peer in range(count)],
            )
            for team in members
        ],
        memories,
    )
    for at, rooms in enumerate(memories):
        assert rooms[:count] == [bytearray([16 * peer + at] * length(peer, at)) for peer in range(count)]


@pytest.mark.parametrize("count", COUNTS)
def test_nobody_leaves_a_barrier_before_everybody_has_entered(count: int) -> None:
    """With one member missing, nobody comes to the end: what it should send is needed by all."""
    members = teams(count)
    for missing in range(count):
        programs = [collectives.barrier(team) if team.me != missing else Program(()) for team in members]
        with pytest.raises(AssertionError, match="wait for ever") as told:
            run(members, programs, [[] for _ in members])
        stuck = {at for at in range(count) if at != missing}
        assert f"members {sorted(stuck)} wait" in str(told.value)


@pytest.mark.parametrize("count", [2, 3, 5, 9])
def test_several_tensors_run_at_once_where_they_use_one_algorithm(count: int) -> None:
    lengths = [3, 100_000, 5, 0, 120_000, 9]
    members = teams(count)
    reducer = Reduction(SUM, torch.float32)
    memories = [[memory(values(at + 50 * k, length)) for k, length in enumerate(lengths)] for at in range(count)]

    def program(team: Team) -> Program:
        return collectives.together(
            [collectives.all_reduce(team, Region(k, 0, 4 * length), 4, reducer) for k, length in enumerate(lengths)]
        )

    run(members, [program(team) for team in members], memories)
    for k, length in enumerate(lengths):
        total = values(50 * k, length)
        for at in range(1, count):
            total += values(at + 50 * k, length)
        for rooms in memories:
            torch.testing.assert_close(tensor_of(rooms[k]), total, rtol=0, atol=1e-5)
    team = members[0]
    alone = len(collectives.all_reduce(team, Region(0, 0, 12), 4, reducer).rounds)
    ten = [collectives.all_reduce(team, Region(k, 0, 12), 4, reducer) for k in range(10)]
    assert len(collectives.together(ten).rounds) == alone


def test_sixteen_bit_floats_are_rounded_once() -> None:
    """256 + 1 is 256 in bfloat16, so that summing in bfloat16 would lose all ones."""
    inputs = [torch.tensor([256.0 if at == 0 else 1.0], dtype=torch.bfloat16) for at in range(5)]
    assert [result.item() for result in all_reduced(teams(5), inputs)] == [260.0] * 5


@pytest.mark.parametrize("target", [0, 1, 2, 3, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_a_reduction_may_write_to_any_of_its_sources(target: int | None, dtype: torch.dtype) -> None:
    sources = [bytearray((torch.arange(6) * (at + 1)).to(dtype).view(torch.uint8).numpy().tobytes()) for at in range(4)]
    before = [bytes(source) for source in sources]
    out = bytearray(len(sources[0])) if target is None else sources[target]
    Reduction(SUM, dtype).reduce([memoryview(source) for source in sources], memoryview(out))
    assert tensor_of(out, dtype).tolist() == [10 * at for at in range(6)]
    assert [bytes(source) for at, source in enumerate(sources) if at != target] == [
        data for at, data in enumerate(before) if at != target
    ]


@pytest.mark.parametrize(
    ("op", "dtype", "error"),
    [
        (ReduceOp.AVG, torch.int32, TypeError),
        (ReduceOp.BAND, torch.float32, TypeError),
        (ReduceOp.MAX, torch.complex64, TypeError),
        (ReduceOp.SUM, torch.float8_e4m3fn, TypeError),
        (ReduceOp.PREMUL_SUM, torch.float32, NotImplementedError),
    ],
)
def test_a_reduction_that_makes_no_sense_is_refused(
    op: ReduceOp.RedOpType, dtype: torch.dtype, error: type[Exception]
) -> None:
    with pytest.raises(error):
        Reduction(op, dtype)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("length", [0, 3, 100_000, 1_000_000])
def test_every_operation_begins_with_the_neighbours(count: int, length: int) -> None:
    """What makes members meet who called different operations, see the module."""
    for team in teams(count):
        for program in every_operation(team, 4 * length).values():
            first = program.rounds[0]
            if not team.uses_tree:
                assert team.members[team.me - 1] in [send.peer for send in first.sends]
                assert team.members[(team.me + 1) % count] in [receive.peer for receive in first.receives]
                continue
            perch = team.perch
            assert {child.top for child in perch.children} <= {receive.peer for receive in first.receives}
            if perch.parent is not None:
                sends = [{send.peer for send in one.sends} for one in program.rounds[:2]]
                assert perch.parent in sends[0] or (not sends[0] and sends[1] == {perch.parent})


def every_operation(team: Team, size: int) -> dict[str, Program]:
    whole, reducer = Region(0, 0, size), Reduction(SUM, torch.float32)
    slots = [Region(1 + at, 0, size) for at in range(len(team.members))]
    return {
        "all_reduce": collectives.all_reduce(team, whole, 4, reducer),
        "reduce_scatter": collectives.reduce_scatter(team, whole, slots, 4, reducer),
        "reduce": collectives.reduce(team, whole, 4, 1, reducer),
        "all_gather": collectives.all_gather(team, slots, whole),
        "broadcast": collectives.broadcast(team, whole, 4, 1),
        "gather": collectives.gather(team, slots, whole, 1),
        "scatter": collectives.scatter(team, whole, slots, 1),
        "all_to_all": collectives.all_to_all(team, slots, slots),
        "barrier": collectives.barrier(team),
    }


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9, 16])
def test_whoever_mixes_operations_up_everybody_learns_it(count: int) -> None:
    """Kinds and sizes drawn for each member, mostly of few kinds, so that many agree."""
    draw = random.Random(count)
    for seed in range(40):
        members = any_teams(count, seed)
        sizes = {f"{kind} {size}": (kind, size) for kind in every_operation(members[0], 4) for size in (4, 400_000)}
        some = draw.sample(sorted(sizes), 2 + seed % 2)
        called = [draw.choice(some) for _ in members]
        called[draw.randrange(count)] = some[0]
        called[draw.randrange(count)] = some[1]
        if len(set(called)) == 1:
            continue
        programs = [
            every_operation(team, sizes[name][1])[sizes[name][0]] for team, name in zip(members, called, strict=True)
        ]
        assert find_unaware(members, programs, called) == [], (members[0].members, called)
    agreed = [collectives.barrier(team) for team in members]
    assert find_unaware(members, agreed, ["barrier"] * count) == list(range(count))


def test_programs_are_built_without_torch() -> None:
    import subprocess

    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from megatron_elas.runtime.communicator import collectives as c\n"
        "from megatron_elas.runtime.transport.program import Region\n"
        "print(len(c.all_reduce(c.Team((1, 2, 3), 0), Region(0, 0, 8), 4, None).rounds))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "2\n", done.stderr
