from __future__ import annotations

import inspect

import pytest

from posttrain.algorithms import ADVANTAGES, AGGREGATES, KL_ESTIMATORS, LOSSES

TABLES = {"ADVANTAGES": ADVANTAGES, "AGGREGATES": AGGREGATES, "KL_ESTIMATORS": KL_ESTIMATORS, "LOSSES": LOSSES}
POSITIONAL = {
    "ADVANTAGES": ["rewards", "mask", "episode_index", "group_index"],
    "LOSSES": ["logprobs", "old_logprobs", "advantages", "mask", "episode_index"],
    "AGGREGATES": ["mask", "episode_index"],
    "KL_ESTIMATORS": ["logprobs", "ref_logprobs", "mask"],
}
ROWS = [(table, name) for table, rows in TABLES.items() for name in rows]


@pytest.mark.parametrize(("table", "name"), ROWS)
def test_every_row_has_the_signature_of_its_table_and_says_what_it_is(table, name):
    fn = TABLES[table][name]
    parameters = inspect.signature(fn).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == POSITIONAL[table]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters if p.name not in positional)
    assert (fn.__doc__ or "").strip()


@pytest.mark.parametrize("table", sorted(TABLES))
def test_tables_are_sorted(table):
    assert list(TABLES[table]) == sorted(TABLES[table])
