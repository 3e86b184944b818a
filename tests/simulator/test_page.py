"""The page needs no other file and says what the table and the trace say."""

from __future__ import annotations

import math

from megatron_elas.simulator.page import draw_page
from megatron_elas.simulator.plots import plot_throughput
from megatron_elas.simulator.traces import Failure, Slowdown, Trace
from tests.simulator.outcomes import make_outcome

TRACE = Trace(
    name="mine & yours",
    seconds=1e6,
    events=(
        Failure(at_s=60, devices=tuple(range(8)), repair_s=7200, cause="host"),
        Failure(at_s=90, devices=(9,), repair_s=math.inf),
        Slowdown(at_s=7200, device=3, factor=1.3, seconds=600, cause="heat"),
    ),
)


def test_the_page_has_table_pictures_and_events() -> None:
    outcomes = [make_outcome(), make_outcome("recycle")]
    picture = plot_throughput(outcomes)
    page = draw_page(outcomes, TRACE, [picture], {"job": "<b>"})
    assert "<title>llama2-34b on npu-96, mine &amp; yours</title>" in page and "job: &lt;b&gt;" in page
    assert page.count("<td>0.8200</td>") == 4 and picture.svg() in page
    assert "<tr><td>1 min</td><td>host</td><td>0-7</td><td>2 h</td></tr>" in page
    assert "<tr><td>1.5 min</td><td>failure</td><td>9</td><td>ever</td></tr>" in page
    assert "<tr><td>2 h</td><td>heat x1.3</td><td>3</td><td>10 min</td></tr>" in page
    assert "src=" not in page and "href=" not in page and "and 0 more" not in page


def test_of_many_events_the_first_ones_are_listed() -> None:
    events = tuple(Failure(at_s=at, devices=(1,)) for at in range(250))
    page = draw_page([make_outcome()], Trace(name="t", seconds=300, events=events), [], {})
    assert "<h2>250 events</h2>" in page and "<p>and 50 more</p>" in page
