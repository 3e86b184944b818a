"""The table says what outcomes say, and leaves out what is empty."""

from __future__ import annotations

import json

from megatron_elas.simulator.table import as_values, format_table, table_rows
from tests.simulator.outcomes import make_outcome


def test_a_row_per_policy_and_a_column_per_cause_that_took_time() -> None:
    quiet = make_outcome("recycle", energy_j=None, recoveries=0, dropped=2.5e6, redone=0.0)
    head, ours, recycle = table_rows([make_outcome(), quiet])
    assert dict(zip(head, ours, strict=True)) == {
        "policy": "ours",
        "goodput": "0.8200",
        "of own": "0.8200",
        "dropped": "0",
        "redone": "12",
        "recoveries": "1",
        "restarts": "0",
        "mean": "10 s",
        "worst": "10 s",
        "slower %": "8.00",
        "detecting %": "2.00",
        "recovering %": "8.00",
        "energy": "2 MWh",
    }
    quiet_row = dict(zip(head, recycle, strict=True))
    assert (quiet_row["mean"], quiet_row["energy"], quiet_row["dropped"]) == ("-", "-", "2.5e+06")


def test_columns_are_aligned() -> None:
    lines = format_table([make_outcome("ours"), make_outcome("elaswave")]).splitlines()
    assert [line.split()[0] for line in lines] == ["policy", "ours", "elaswave"]
    for column, value in (("goodput", "0.8200"), ("slower %", "8.00"), ("energy", "2 MWh")):
        end = lines[0].index(column) + len(column)
        assert all(line[:end].endswith(f" {value}") for line in lines[1:])


def test_values_are_json_without_segments() -> None:
    values = json.loads(json.dumps(as_values(make_outcome())))
    assert values["goodput"] == 0.82 and values["seconds_by_cause"]["recovering"] == 8
    assert values["energy_j"] == 7.2e9 and "segments" not in values
