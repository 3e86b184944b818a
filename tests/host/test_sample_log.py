"""The sample log tells which samples counted in each step."""

from __future__ import annotations

from pathlib import Path

from megatron_elas.host.sample_log import SampleLog, read_samples


def test_of_a_step_that_was_run_again_only_the_last_run_counts(tmp_path: Path) -> None:
    prefix = str(tmp_path / "logs" / "samples")
    lost, stays = SampleLog(prefix, 1), SampleLog(prefix, 0)
    lost.write(0, 5, 0, [42, 43])
    stays.write(0, 5, 0, [40, 41])
    stays.write(1, 5, 0, [40, 41, 42, 43])
    stays.write(1, 6, 0, [44, 45, 46, 47])
    stays.write(1, 6, 1, [])
    for log in (lost, stays):
        log.close()
    assert read_samples(prefix) == {5: {0: [40, 41, 42, 43]}, 6: {0: [44, 45, 46, 47]}}
