"""Orders as text, and orders that a running job can carry out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elas.schedule.actions import Schedule, parse_order
from megatron_elas.schedule.cell_orders import fit_orders, read_orders, write_orders
from megatron_elas.schedule.checks import check_schedule, out_of_order
from megatron_elas.schedule.greedy import Limit, Problem, Taste
from megatron_elas.schedule.items import cut, deal_round
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.timing import Deadlock, Durations, Program
from megatron_elas.spec.cost import PassTime, StageTimes
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.items import Item, StageItems

TIMES = StageTimes(
    forward=PassTime(sample_s=1.0), input_gradient=PassTime(sample_s=1.5), weight_gradient=PassTime(sample_s=1.0)
)
PAIR = (deal_round(2, 1, 1), deal_round(2, 1, 1))


@st.composite
def deals(draw: st.DrawFn) -> tuple[StageItems, ...]:
    """Any items of up to four stages."""
    batch = draw(st.integers(4, 14))
    stages = []
    for _ in range(draw(st.integers(1, 4))):
        cells = draw(st.integers(1, 4))
        inner = draw(st.lists(st.integers(1, batch - 1), min_size=cells - 1, max_size=batch - 1, unique=True))
        sizes = [stop - start for start, stop in pairwise([0, *sorted(inner), batch])]
        stages.append(cut(batch, [sizes[cell::cells] for cell in range(cells)]))
    return tuple(stages)


@st.composite
def tastes(draw: st.DrawFn) -> Taste:
    return Taste(
        split=draw(st.booleans()),
        ahead=draw(st.sampled_from((1, 2, 1 << 30))),
        forward_first=draw(st.booleans()),
        deferred=draw(st.sampled_from((0, 1, 1 << 30))),
        patience=draw(st.sampled_from((0.0, 0.5, 2.0))),
    )


@given(items=deals(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_orders_that_are_fitted_are_taken_as_they_are_sent_and_are_the_same_when_read_again(
    items: tuple[StageItems, ...], data: st.DataObject
) -> None:
    flow = Flow(items)
    times = [data.draw(st.floats(0.5, 3.0)) for _ in items]
    stages = [
        StageTimes(
            forward=PassTime(sample_s=each),
            input_gradient=PassTime(sample_s=each),
            weight_gradient=PassTime(sample_s=1.0),
        )
        for each in times
    ]
    durations = Durations.of(stages, items, [PassTime(sample_s=0.3, fixed_s=0.1)] * (len(items) - 1))
    limits = [Limit(samples=1000)] * len(items)
    try:
        program = Problem(flow, durations, limits).run([data.draw(tastes()) for _ in items]).program()
    except Deadlock:
        return
    fitted = fit_orders(program)
    if fitted is None:
        assert out_of_order(program.schedule) or not program.runs_joined()
        return
    check_schedule(fitted.schedule)
    assert not out_of_order(fitted.schedule) and fitted.runs_joined()
    if not out_of_order(program.schedule):
        assert fitted is program
    again = read_orders(items, write_orders(fitted))
    assert again.schedule == fitted.schedule
    assert again.run(durations).step_s == pytest.approx(fitted.run(durations).step_s)


def test_gradients_change_places_where_a_link_hands_them_over_in_another_order() -> None:
    items: tuple[StageItems, ...] = (deal_round(2, 1, 1), deal_round(2, 1, 1))
    orders = (((parse_order("0F0 0F1 0B0 0W0 0B1 0W1")),), ((parse_order("1F0 1F1 1B1 1B0")),))
    fitted = fit_orders(Program(Schedule(items=items, orders=orders)))
    assert fitted is not None
    assert write_orders(fitted) == (("F0 F1 B1 W1 B0 W0",), ("F0 F1 B1 B0",))


def test_forward_passes_that_are_taken_in_another_order_than_sent_are_refused() -> None:
    orders = (((parse_order("0F0 0F1 0B0 0B1")),), ((parse_order("1F1 1F0 1B0 1B1")),))
    assert fit_orders(Program(Schedule(items=PAIR, orders=orders))) is None


def test_an_order_in_which_cells_that_join_wait_in_a_circle_is_refused() -> None:
    # The second cell of stage 1 gets its first input only after the first one has run backward.
    items = (deal_round(2, 1, 1), deal_round(2, 1, 2))
    orders = (
        ((parse_order("0F0 0B0 0F1 0B1")),),
        ((parse_order("1F0 1B0")), (parse_order("1F1 1B1"))),
    )
    program = Program(Schedule(items=items, orders=orders))
    assert not program.runs_joined() and fit_orders(program) is None


def test_an_item_that_is_sent_in_turns_with_another_one_is_refused() -> None:
    # Stage 0 has two items; of the later stage's samples every other one goes to each of them.
    early: StageItems = ((Item(0, ((0, 1), (2, 3))), Item(1, ((1, 2), (3, 4)))),)
    late = deal_round(4, 1, 1)
    orders = (
        ((parse_order("0F0 0F1 0B0 0B1")),),
        ((parse_order("1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3")),),
    )
    assert fit_orders(Program(Schedule(items=(early, late), orders=orders))) is None


@pytest.mark.parametrize(
    ("orders", "error"),
    [
        ((("F0 F1 B0 B1",),), "orders are of"),
        ((("F0 F1 B0 B1", ""), ("F0 F1 B0 B1",)), "orders are of"),
        ((("F0 F1 B0 X1",), ("F0 F1 B0 B1",)), "'X1' in the order of cell 0 of stage 0 is no pass"),
        ((("F0 F1 B0 B2",), ("F0 F1 B0 B1",)), "'B2' in the order of cell 0 of stage 0 is no pass"),
        ((("F0 F1 B0 B1",), ("F0 F1 B0 B0",)), "'B0' in the order of cell 0 of stage 1 comes twice"),
        ((("F0 F1 W0 B0 B1",), ("F0 F1 B0 B1",)), "'W0' in the order of cell 0 of stage 0 comes twice, or too early"),
        ((("F0 F1 B0",), ("F0 F1 B0 B1",)), "lacks passes"),
        ((("F0 B0 F1 B1",), ("F0 F1 B0 B1",)), "wait for each other"),
    ],
)
def test_text_that_is_no_order_is_refused(orders: tuple[tuple[str, ...], ...], error: str) -> None:
    with pytest.raises(BadUsage, match=error):
        read_orders(PAIR, orders)
