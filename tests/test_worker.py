"""How a worker is reached, and how it ends when it cannot go on."""

from __future__ import annotations

from megatron_elas import worker
from megatron_elas.spec.errors import BadUsage, EpochChanged, comes_of


def test_the_first_node_is_reached_by_the_name_that_the_others_were_given() -> None:
    assert worker._own_address("ws://127.0.0.1:29400", "127.0.0.7") == "127.0.0.7"


def test_an_error_of_our_own_ends_a_worker_that_never_joined_and_any_other_is_left_alone() -> None:
    refusal = BadUsage("a flag is wrong")
    assert worker.fail(refusal) is refusal
    assert worker.fail(ValueError("a bug")) is None


def test_what_megatron_wraps_is_still_known_to_come_of_a_lost_worker() -> None:
    try:
        try:
            raise EpochChanged("epoch 0 ended")
        except EpochChanged as error:
            raise RuntimeError("building the dataset failed") from error
    except RuntimeError as wrapped:
        assert comes_of(wrapped, EpochChanged)
        assert not comes_of(wrapped, BadUsage)
