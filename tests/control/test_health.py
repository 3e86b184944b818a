"""Heartbeats and silence, with times as plain numbers."""

from __future__ import annotations

from megatron_elas.control.health import LINK_GRACE_S, Health


def beating(health: Health, now: float, *workers: int) -> None:
    for worker in workers:
        health.hear(worker, now)


def test_a_worker_is_silent_when_nothing_came_for_longer_than_the_limit() -> None:
    health = Health(10.0)
    beating(health, 100.0, 0, 1)
    for now in range(101, 111):
        health.hear(0, now)
        assert not health.find_silent(float(now))
    assert health.find_silent(110.5) == ((1, 10.5),)


def test_workers_that_never_joined_or_are_forgotten_are_not_watched() -> None:
    health = Health(1.0)
    assert not health.find_silent(1000.0)
    health.hear(0, 1000.0)
    health.forget(0)
    assert not health.find_silent(1000.4) and health.step_of(0) is None and health.silence_of(0, 1.0) is None


def test_a_worker_that_hung_up_is_given_a_short_time() -> None:
    health = Health(10.0)
    beating(health, 0.0, 0)
    health.hang_up(0, 5.0)
    assert not health.find_silent(5.0 + LINK_GRACE_S / 2)
    assert health.find_silent(5.1 + LINK_GRACE_S)


def test_a_worker_that_comes_back_has_the_whole_limit_again() -> None:
    health = Health(10.0)
    beating(health, 0.0, 0)
    health.hang_up(0, 1.0)
    health.hear(0, 1.2)
    for now in range(2, 10):
        assert not health.find_silent(float(now))


def test_time_in_which_the_controller_itself_was_held_up_counts_against_nobody() -> None:
    health = Health(10.0)
    beating(health, 0.0, 0)
    assert not health.find_silent(1.0)
    assert not health.find_silent(1000.0), "it was stopped for 999 s"
    assert not health.find_silent(1004.0)
    assert not health.find_silent(1008.0)
    assert health.find_silent(1009.5)


def test_progress_is_that_of_the_last_heartbeat() -> None:
    health = Health(10.0)
    health.hear_progress(3, epoch=1, step=7, now=2.0)
    assert health.step_of(3) == 7 and health.silence_of(3, 2.5) == 0.5


def test_a_worker_whose_process_runs_may_be_silent_for_longer() -> None:
    health = Health(1.0, interpreter_timeout_s=100.0)
    beating(health, 0.0, 0, 1)
    for tick in range(1, 500):
        now = tick / 5
        health.vouch(0, now)
        health.vouch(7, now)
        silent = [worker for worker, _ in health.find_silent(now)]
        assert silent == ([1] if now > 1.0 else []), now
    health.vouch(0, 100.1)
    assert health.find_silent(100.1) == ((0, 100.1), (1, 100.1)), "but not for ever"


def test_a_worker_that_nobody_vouches_for_any_more_is_silent() -> None:
    health = Health(1.0, interpreter_timeout_s=100.0)
    beating(health, 0.0, 0)
    for now in (0.3, 0.6, 0.9, 1.2, 1.5):
        health.vouch(0, now)
        assert not health.find_silent(now)
    assert not health.find_silent(2.0) and not health.find_silent(2.4)
    assert health.find_silent(2.6) == ((0, 2.6),)


def test_a_worker_that_hung_up_is_lost_though_its_process_runs() -> None:
    health = Health(10.0, interpreter_timeout_s=100.0)
    beating(health, 0.0, 0)
    health.hang_up(0, 1.0)
    health.vouch(0, 2.0)
    assert health.find_silent(2.1) == ((0, 1.1),)
