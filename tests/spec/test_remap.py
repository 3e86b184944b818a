"""Which parameters a worker's model lacks when it goes over to another plan."""

from __future__ import annotations

from dataclasses import replace

from megatron_elas.spec.catalogue import Catalogue
from megatron_elas.spec.layout import Cell, Placement
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.remap import lacking_parameters
from tests.spec.test_catalogue import OUTPUT, make_contents, make_plan


def placed(plan: ElasticPlan, *stages: tuple[tuple[int, ...], ...]) -> ElasticPlan:
    cells = (tuple(Cell(row=row, workers=workers) for row, workers in enumerate(stage)) for stage in stages)
    return replace(plan, placement=Placement(stages=tuple(cells)))


def lacking(before: ElasticPlan, after: ElasticPlan, *, tied: bool = False) -> dict[int, frozenset[str]]:
    catalogue = Catalogue.gathered(make_contents((2, 2), tied=tied))
    return {worker: lacking_parameters(catalogue, before, after, worker) for worker in after.placement.workers}


def layer(number: int) -> set[str]:
    return {f"decoder.layers.{number}.qkv", f"decoder.layers.{number}.norm"}


def test_only_layers_that_come_are_lacking() -> None:
    found = lacking(make_plan(2, 2, 2), make_plan(2, 3, 1))
    assert found == {0: layer(2), 1: layer(2), 2: set(), 3: set()}


def test_all_replicas_lack_what_one_of_them_lacks() -> None:
    plan = make_plan(2, 2, 2)
    before = placed(plan, ((0,), (1,), (2,)), ((3,),))
    after = placed(plan, ((0,), (1,)), ((3,), (2,)))
    found = lacking(before, after)
    assert found[0] == found[1] == set()
    assert found[2] == found[3] == {*layer(2), *layer(3), "decoder.final_layernorm.weight", OUTPUT}


def test_a_worker_that_had_no_seat_or_was_in_another_lane_lacks_everything_and_its_replicas_with_it() -> None:
    plan = make_plan(2, 2, 2)
    before = placed(plan, ((0, 1), (2, 3)), ((4, 5), (6, 7)))
    after = placed(plan, ((0, 1), (3, 2)), ((4, 5), (8, 7)))
    catalogue = Catalogue.gathered(make_contents((2, 2), tied=False))
    everything = [{own.name for own in catalogue.parameters(plan, stage)} for stage in (0, 1)]
    found = lacking(before, after)
    assert [found[worker] for worker in (0, 1, 2, 3)] == [everything[0]] * 4
    assert found[4] == found[8] == everything[1], "those of the first lane"
    assert found[5] == found[7] == set()


def test_the_copy_of_a_tied_weight_at_the_end_is_lacking_where_there_was_one_stage() -> None:
    before, after = placed(make_plan(2, 4), ((0,), (1,))), placed(make_plan(1, 2, 2), ((0,),), ((1,),))
    found = lacking(before, after, tied=True)
    assert found == {0: set(), 1: {OUTPUT}}
