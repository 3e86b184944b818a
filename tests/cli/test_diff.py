"""``elas diff``: where two audited runs part, whoever ran what in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_elas.cli import elas
from megatron_elas.spec.audit import GRADIENTS, KINDS, link
from tests.cli.audited_jobs import ONE_STAGE, WITHOUT_THREE, AuditedJob, Grid

LANES: Grid = (((0, 1),), ((2, 3),))


def calm(folder: Path, steps: int = 6, **settings: Any) -> Path:
    """Nothing happens."""
    job = AuditedJob(folder=folder, **settings)
    job.run_steps(range(steps))
    job.end(steps)
    return folder


def struck(folder: Path, steps: int = 6, **settings: Any) -> Path:
    """Worker 3 is lost in step 2, which is run again; then worker 2 goes to stage 0, and there is one stage."""
    job = AuditedJob(folder=folder, **settings)
    job.run_steps([0, 1])
    job.run_steps([2], absent=[3])
    job.run_steps([2, 3], WITHOUT_THREE, epoch=1)
    job.run_steps(range(4, steps), ONE_STAGE, epoch=3)
    job.end(steps, ONE_STAGE, epoch=3)
    return folder


def diff(capsys: pytest.CaptureFixture[str], *folders: Path, words: Sequence[str] = ()) -> tuple[int, str]:
    code = elas.main(["diff", *map(str, folders), *words])
    out, err = capsys.readouterr()
    return code, out + err


@pytest.mark.parametrize("tied", [False, True])
def test_runs_that_computed_the_same_are_equal_whoever_computed_it(
    tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = calm(tmp_path / "a", tied=tied), struck(tmp_path / "b", tied=tied)
    code, text = diff(capsys, a, b)
    assert code == 0, text
    assert text.startswith("A and B are equal in steps 0-5 and the final state: samples, parameters, exp_avg,")
    _, again = diff(capsys, b, a)
    assert again.splitlines()[0] == text.splitlines()[0], "another chain"
    facts = json.loads(diff(capsys, a, b, words=["--json"])[1])
    assert facts["equal"] and facts["equal_steps"] == list(range(7)) and facts["difference"] is None
    assert f"chain {facts['chain']}" in text


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"planted": {(4, GRADIENTS, "decoder.layers.1.mlp.weight", 4097): 1e-6}},
            "A and B part in step 4: the gradient of decoder.layers.1.mlp.weight (lane 0, elements 4096 to 4607 of "
            "5000) differs; until then steps 0-3 and the samples, parameters, exp_avg, exp_avg_sq and masks of step 4 "
            "are equal",
        ),
        (
            {
                "planted": {
                    (3, "parameters", "decoder.layers.0.mlp.weight", 0): 1.0,
                    (3, "parameters", "output_layer.weight", 2999): 1.0,
                    (3, GRADIENTS, "output_layer.weight", 0): 1.0,
                    (4, "exp_avg", "output_layer.weight", 0): 1.0,
                }
            },
            "A and B part in step 3: the parameter decoder.layers.0.mlp.weight (lane 0, elements 0 to 511 of 5000) "
            "differs, as does 1 more tensor and gradients of that step; until then steps 0-2 and the samples of step 3 "
            "are equal",
        ),
        (
            {"flipped": {(5, 21, 2)}},
            "A and B part in step 5: the mask of sample 21 in layer 1 (site 0, lane 0) differs; until then steps 0-4 "
            "and the samples, parameters, exp_avg and exp_avg_sq of step 5 are equal",
        ),
        (
            {"data": {13: 14, 14: 13}},
            "A and B part in step 3: sample 13, as read for the first stage, differs, as does 1 more sample; until "
            "then steps 0-2 are equal",
        ),
        (
            {"planted": {(6, "exp_avg_sq", "embedding.word_embeddings.weight", 700): 1.0}},
            "A and B part in the final state: exp_avg_sq of embedding.word_embeddings.weight (lane 0, elements 512 to "
            "767 of 3000) differs; until then steps 0-5 and the parameters and exp_avg of the final state are equal",
        ),
        (
            {"planted": {(0, "parameters", "output_layer.weight", 0): 1.0}, "data": {0: 1, 1: 0, 2: 3, 3: 2}},
            "A and B part in step 0: sample 0, as read for the first stage, differs, as do 3 more samples and "
            "parameters of that step; nothing before it is in both audits",
        ),
    ],
    ids=["gradient", "parameters", "mask", "order", "moment-after-the-end", "first-step"],
)
@pytest.mark.parametrize("second", [calm, struck])
def test_the_first_difference_is_named_with_its_coordinates(
    second: Any, settings: dict[str, Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = diff(capsys, calm(tmp_path / "a"), second(tmp_path / "b", **settings))
    assert code == 1
    assert text.splitlines()[0] == sentence


def test_each_side_says_who_computed_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planted = {(3, GRADIENTS, "decoder.layers.1.mlp.weight", 2500): 1.0}
    a, b = calm(tmp_path / "a"), struck(tmp_path / "b", planted=planted)
    lines = diff(capsys, a, b)[1].splitlines()
    assert lines[1:3] == [
        f"A      {a}: steps 0-5 and the final state; where they part: epoch 0, stage 0 (layer 0): [0] [1] | stage 1 "
        "(layer 1): [2] [3]; told by workers 2-3",
        f"B      {b}: steps 0-5 and the final state; where they part: epoch 1, stage 0 (layer 0): [0] [1] | stage 1 "
        "(layer 1): [2]; told by worker 2",
    ]
    facts = json.loads(diff(capsys, a, b, words=["--json"])[1])["difference"]
    assert (facts["step"], facts["kind"], facts["further"]) == (3, "gradients", 0)
    assert facts["place"] == ["decoder.layers.1.mlp.weight", 0, 4]
    assert (facts["a"]["workers"], facts["b"]["workers"], facts["b"]["epoch"]) == ([2, 3], [2], 1)


@pytest.mark.parametrize("second", [calm, struck])
def test_how_far_the_runs_are_apart_is_told_with_both_losses(
    second: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thousandth is added to an element in each range of a tensor of 5000, whose norm is about the root of 5000."""
    name = "decoder.layers.1.mlp.weight"
    planted = {(3, GRADIENTS, name, index): 1e-3 for index in range(0, 5000, 512)}
    a = calm(tmp_path / "a")
    b = second(tmp_path / "b", planted=planted, losses={3: 0.25, 4: 1.0})
    facts = json.loads(diff(capsys, a, b, words=["--json"])[1])["difference"]
    true = (10 * 1e-6 / 5000) ** 0.5
    assert true / 2 < facts["distance"] < 2 * true
    assert 0 < facts["distances"][GRADIENTS] < facts["distance"], "other tensors are the same"
    assert (list(facts["distances"]), facts["losses"]) == ([GRADIENTS], {"lm loss": [5.0 - 3 / 64, 5.25 - 3 / 64]})
    text = diff(capsys, a, b)[1]
    told = f"this tensor by about {facts['distance']:.1e} of the norm; all gradients by about "
    assert told in text and "the lm loss is 4.953125 in A and 5.203125 in B" in text, text


@pytest.mark.parametrize("bare", ["A", "B"])
def test_masks_that_one_run_only_has_are_in_it_and_what_follows_differs(
    bare: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = {(0, GRADIENTS, "output_layer.weight", 0): 1.0}
    runs = {"A": calm(tmp_path / "a", dropout=bare != "A", level="numerical")}
    runs["B"] = calm(tmp_path / "b", dropout=bare != "B", level="numerical", planted=planted, losses={0: 1.0})
    code, text = diff(capsys, runs["A"], runs["B"])
    assert code == 1
    assert text.splitlines()[0] == (
        f"A and B part in step 0: the mask of sample 0 in layer 0 (site 0, lane 0) is in {'AB'[bare == 'A']} only, as "
        "are 7 more masks; gradients and losses of that step differ; until then samples, parameters, exp_avg and "
        "exp_avg_sq of step 0 are equal"
    )
    assert "numerical'" not in text, "masks are no matter of rounding"


def test_what_differs_otherwise_than_the_first_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (AuditedJob(folder=tmp_path / name, kinds=["masks"]) for name in "ab")
    one.run_steps([0])
    two.flipped = {(0, 0, 1)}
    two.run_steps([0], absent=[2, 3])
    two.dropout = False
    two.run_steps([0], absent=[0, 1])
    facts = json.loads(diff(capsys, one.folder, two.folder, words=["--json"])[1])["difference"]
    assert (facts["manner"], facts["further"], facts["alike"]) == ("differs", 4, 0)
    sentence = diff(capsys, one.folder, two.folder)[1].splitlines()[0]
    assert "(site 0, lane 0) differs; 4 more masks differ otherwise; nothing before it" in sentence


def test_kinds_of_which_there_is_nothing_are_not_called_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = calm(tmp_path / "a", dropout=False), calm(tmp_path / "b", dropout=False)
    text = diff(capsys, a, b)[1]
    told = "samples, parameters, exp_avg, exp_avg_sq, gradients and losses; chain "
    assert text.startswith(f"A and B are equal in steps 0-5 and the final state: {told}") and "left out" not in text
    assert "masks" not in json.loads(diff(capsys, a, b, words=["--json"])[1])["kinds"]
    c = calm(tmp_path / "c", dropout=False, losses={2: 1.0})
    assert "exp_avg_sq and gradients of step 2 are equal" in diff(capsys, a, c)[1].splitlines()[0]


def test_runs_that_part_say_what_their_level_allows_and_where_losses_have_come_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = {(3, GRADIENTS, "output_layer.weight", 0): 1e-7}
    a = calm(tmp_path / "a", level="numerical")
    b = struck(tmp_path / "b", level="numerical", planted=planted, losses={5: 2.0**-20})
    last = "later  in step 5, the last that both have, the lm loss is 4.921875 in A and 4.921875953674316 in B"
    allowed = "level  both ran at 'numerical', where sums may round otherwise after an event or on another layout: "
    lines = diff(capsys, a, b)[1].splitlines()
    assert last in lines and f"{allowed}docs/consistency.md has the bound" in lines
    facts = json.loads(diff(capsys, a, b, words=["--json"])[1])
    assert facts["last"] == {"step": 5, "losses": {"lm loss": [4.921875, 4.921875 + 2.0**-20]}}
    same = diff(capsys, a, calm(tmp_path / "c", level="numerical", planted=planted))[1]
    assert "later  in step 5, the last that both have, the lm loss is 4.921875 in both\n" in same
    for name, level, more in (("d", "bitwise", {}), ("e", "numerical", {"flipped": {(3, 13, 1)}})):
        a, b = calm(tmp_path / f"{name}a", level=level), calm(tmp_path / name, level=level, planted=planted, **more)
        assert "may round" not in diff(capsys, a, b)[1], name


def test_json_tells_which_step_is_the_final_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rare = calm(tmp_path / "rare", steps=9, every=3)
    facts = json.loads(diff(capsys, calm(tmp_path / "a"), rare, words=["--json"])[1])
    assert (facts["final"], [run["final"] for run in facts["runs"]]) == (6, [6, 9]) and facts["last"] is None


def test_where_only_losses_differ_both_are_in_the_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = calm(tmp_path / "a"), calm(tmp_path / "b", losses={2: 2.0**-20})
    text = diff(capsys, a, b)[1]
    assert "A and B part in step 2: the lm loss is 4.96875 in A and 4.968750953674316 in B; until" in text
    assert "apart" not in text


def test_tensors_with_infinite_numbers_are_no_finite_number_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = {(2, GRADIENTS, "output_layer.weight", 9): float("nan")}
    a, b = calm(tmp_path / "a"), calm(tmp_path / "b", planted=planted)
    code, text = diff(capsys, a, b)
    assert code == 1 and "apart  this tensor by no finite number; all gradients by no finite number" in text
    assert json.loads(diff(capsys, a, b, words=["--json"])[1])["difference"]["distance"] is None


def test_a_loss_that_is_no_number_is_text_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    a, b = calm(tmp_path / "a"), calm(tmp_path / "b", losses={2: float("nan")})
    facts = json.loads(diff(capsys, a, b, words=["--json"])[1], parse_constant=refuse)
    assert facts["difference"]["losses"] == {"lm loss": [4.96875, "nan"]}


def test_of_lanes_each_is_compared_on_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, flipped in (("a", set()), ("b", {(1, 6, 1)})):
        job = AuditedJob(folder=tmp_path / name, flipped=flipped)
        job.run_steps(range(3), LANES)
    code, text = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "in step 1: the mask of sample 6 in layer 0 (site 0, lane 0) differs, as does 1 more mask;" in text


def test_steps_that_one_run_does_not_tell_are_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rare = calm(tmp_path / "rare", steps=9, every=3)
    code, text = diff(capsys, calm(tmp_path / "a"), rare)
    assert code == 0 and text.startswith("A and B are equal in steps 0 3 and the state before step 6: "), text
    told = [kind for kind in KINDS if kind != "masks"]
    code, text = diff(capsys, calm(tmp_path / "some", kinds=told), rare)
    assert code == 0 and "left out  masks: only one of the runs tells them" in text


def test_a_worker_that_was_killed_in_a_line_leaves_the_steps_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = AuditedJob(folder=tmp_path / "b")
    job.run_steps(range(4))
    file = tmp_path / "b" / "audit.3.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    code, text = diff(capsys, calm(tmp_path / "a"), tmp_path / "b")
    assert code == 0 and f"B  {tmp_path / 'b'}: steps 0-2 (and 3 without a line of worker 3)" in text
    later = AuditedJob(folder=tmp_path / "b", run="next")  # in the same folder
    later.run_steps(range(2))
    code, text = diff(capsys, calm(tmp_path / "c"), tmp_path / "b")
    assert code == 0 and f"B  {tmp_path / 'b'}: steps 0-1" in text, text


def test_steps_of_a_run_that_went_back_to_a_checkpoint_are_void(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = AuditedJob(folder=tmp_path / "b", planted={(4, GRADIENTS, "output_layer.weight", 0): 1.0})
    job.run_steps(range(5))
    job.planted.clear()
    job.run_steps([1, 2], WITHOUT_THREE, epoch=1)
    code, text = diff(capsys, calm(tmp_path / "a"), tmp_path / "b")
    assert code == 0 and "equal in steps 0-2" in text, text


def test_what_cannot_be_compared_is_said_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = calm(tmp_path / "a")
    empty = tmp_path / "empty"
    empty.mkdir()
    late = AuditedJob(folder=tmp_path / "late")
    late.run_steps([7])
    lanes = AuditedJob(folder=tmp_path / "lanes")
    lanes.run_steps([0], LANES)
    partial = calm(tmp_path / "partial")
    (partial / "audit.2.jsonl").unlink()
    changed = calm(tmp_path / "changed")
    file = changed / "audit.1.jsonl"
    file.write_text(file.read_text().replace('"step": 2', '"step": 3'))
    newer = calm(tmp_path / "newer")
    for path in newer.iterdir():
        path.write_text('{"no": "chain"}\n')
    mixed = calm(tmp_path / "mixed")
    job = AuditedJob(folder=tmp_path / "other")
    job.run_steps([0], ONE_STAGE)
    (mixed / "audit.1.jsonl").write_bytes((tmp_path / "other" / "audit.1.jsonl").read_bytes())
    wanted = {
        tmp_path / "nowhere": f"{tmp_path / 'nowhere'} is no folder: give the one that elasrun --log-dir named",
        empty: f"{empty} holds no audit (audit.*.jsonl): run the job with --elastic-audit N",
        tmp_path / "late": f"{a} tells steps 0-5 and the final state and {tmp_path / 'late'} tells step 7, so no step",
        tmp_path / "lanes": f"{a} is of a job of tensor-parallel size 1 and {tmp_path / 'lanes'} of 2",
        partial: f"{partial} tells no whole step (0-6 without a line of worker 2), so no step is in both",
        changed: f"{file}, line 5 is not as a worker wrote it (it was changed, or a line before it is missing)",
        newer: "line 1 is not as a worker wrote it (it has no chain): take the file as it was written",
        mixed: f"{mixed}: workers 0 and 1 tell of other seats in epoch 0, so their files are not of one run",
    }
    for folder, sentence in wanted.items():
        code, text = diff(capsys, a, folder)
        assert code == 2 and text.startswith("elas: ") and len(text.splitlines()) == 1, text
        assert sentence in text


def test_a_step_without_a_workers_line_between_whole_ones_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = AuditedJob(folder=tmp_path / "b")
    job.run_steps([0, 1])
    job.run_steps([2], absent=[1, 3])
    job.run_steps([3])
    code, text = diff(capsys, calm(tmp_path / "a"), tmp_path / "b")
    assert code == 2 and f"{tmp_path / 'b'} has no line of workers 1 3 of step 2: put the audit files of all" in text


@pytest.mark.parametrize(
    ("line", "change"),
    [
        (1, {"began_s": "soon"}),
        (1, {"every": "soon"}),
        (1, {"kinds": 3}),
        (2, {"stages": []}),
        (2, {"stages": [{"layers": [0, 2], "cells": [[]]}]}),
    ],
)
def test_a_line_that_is_no_workers_is_refused_though_its_chain_is_right(
    line: int, change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = calm(tmp_path / "a"), calm(tmp_path / "b")
    rewrite(b / "audit.1.jsonl", line, change)
    code, text = diff(capsys, a, b)
    assert code == 2 and len(text.splitlines()) == 1, text
    assert f"audit.1.jsonl, line {line} is not as a worker wrote it" in text


def test_what_tells_nothing_of_a_tensor_or_of_any_kind_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = calm(tmp_path / "a"), calm(tmp_path / "b")
    rewrite(b / "audit.1.jsonl", 3, {"pieces": [["output_layer.weight", 0, 4, 4, {}, {}]]})
    code, text = diff(capsys, a, b)
    assert code == 2 and "step 0 of the audit makes no sense (nothing is told of output_layer.weight)" in text
    code, text = diff(capsys, a, calm(tmp_path / "c", kinds=()))
    assert code == 2 and f"{a} and {tmp_path / 'c'} tell no kind that the other tells too" in text


def rewrite(path: Path, number: int, change: dict[str, Any]) -> None:
    """Change a line, and make the chain anew."""
    chain, lines = "", []
    for at, line in enumerate(path.read_text().splitlines(), 1):
        table = json.loads(line)
        del table["chain"]
        text, chain = link(table | (change if at == number else {}), chain)
        lines.append(text + "\n")
    path.write_text("".join(lines))
