"""Who owns what follows from the catalogue and the plan."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_elas.planner.plan import initial_plan
from megatron_elas.spec.catalogue import Catalogue, Parameter, StageContents
from megatron_elas.spec.errors import StateInvalid
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.plan import ElasticPlan

WORD, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def unit(*entries: tuple[str, int], tied: str = "") -> tuple[Parameter, ...]:
    return tuple(Parameter(name=name, count=count, tied=name == tied) for name, count in entries)


def make_contents(stage_layers: tuple[int, ...], *, tied: bool) -> list[StageContents]:
    """Of a small model, as each stage says it."""
    contents = []
    first, last = 1, sum(stage_layers) + 1
    both = tied and len(stage_layers) > 1
    for stage, layers in enumerate(stage_layers):
        units = {
            number: unit((f"decoder.layers.{number - 1}.qkv", 1000), (f"decoder.layers.{number - 1}.norm", 30))
            for number in range(first, first + layers)
        }
        first += layers
        if stage == 0:
            units[0] = unit((WORD, 700), ("embedding.position_embeddings.weight", 100), tied=WORD if both else "")
        if stage == len(stage_layers) - 1:
            head = [("decoder.final_layernorm.weight", 30)]
            units[last] = unit(*head, *([(OUTPUT, 700)] if both or not tied else []), tied=OUTPUT if both else "")
        contents.append(StageContents(stage=stage, units=units))
    return contents


def make_plan(rows: int, *stage_layers: int) -> ElasticPlan:
    job = JobSpec(
        tensor_parallel=1,
        pipeline_parallel=len(stage_layers),
        data_parallel=rows,
        micro_batch_size=1,
        num_microbatches=rows,
        stage_layers=stage_layers,
    )
    return initial_plan(job, {})


def names(catalogue: Catalogue, plan: ElasticPlan, stage: int) -> list[str]:
    return [parameter.name for parameter in catalogue.parameters(plan, stage)]


def test_a_stage_holds_its_layers_and_the_ends_hold_embedding_and_head() -> None:
    catalogue = Catalogue.gathered(make_contents((1, 2), tied=False))
    assert catalogue.num_layers == 3
    plan = make_plan(1, 2, 1)
    assert names(catalogue, plan, 0) == [
        WORD, "embedding.position_embeddings.weight", "decoder.layers.0.qkv", "decoder.layers.0.norm",
        "decoder.layers.1.qkv", "decoder.layers.1.norm",
    ]  # fmt: skip
    assert names(catalogue, plan, 1) == [
        "decoder.layers.2.qkv", "decoder.layers.2.norm", "decoder.final_layernorm.weight", OUTPUT
    ]  # fmt: skip


def test_a_tied_weight_has_two_copies_until_one_stage_holds_both_ends() -> None:
    catalogue = Catalogue.gathered(make_contents((1, 2), tied=True))
    assert catalogue.twins == {WORD: OUTPUT, OUTPUT: WORD}
    assert OUTPUT in names(catalogue, make_plan(1, 2, 1), 1)
    assert OUTPUT not in names(catalogue, make_plan(2, 3), 0)
    assert catalogue.total_count(make_plan(2, 3), 0) == 700 + 100 + 3 * 1030 + 30


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("stage_layers", [(3,), (1, 2), (1, 1, 1)])
def test_the_shards_of_a_stage_hold_every_element_once(rows: int, stage_layers: tuple[int, ...], tied: bool) -> None:
    catalogue = Catalogue.gathered(make_contents((1, 1, 1), tied=tied))
    plan = make_plan(rows, *stage_layers)
    layouts = catalogue.layouts(plan, lane=0)
    for stage, cells in enumerate(plan.placement.stages):
        held = [
            (piece.name, element)
            for cell in cells
            for piece in layouts[cell.workers[0]].pieces
            for element in range(piece.start, piece.stop)
        ]
        assert len(held) == len(set(held)) == catalogue.total_count(plan, stage)


def test_contents_travel_as_text() -> None:
    for contents in make_contents((1, 2), tied=True):
        assert StageContents.from_json(contents.to_json()) == contents


def test_lanes_that_disagree_and_missing_units_are_refused() -> None:
    first, last = make_contents((1, 2), tied=False)
    other = dataclasses.replace(first, units={**first.units, 1: unit(("decoder.layers.0.qkv", 999))})
    with pytest.raises(StateInvalid, match="workers of stage 0 disagree on the parameters of layer 0"):
        Catalogue.gathered([first, other, last])
    with pytest.raises(StateInvalid, match="no worker holds the embedding, layer 0"):
        Catalogue.gathered([last])
