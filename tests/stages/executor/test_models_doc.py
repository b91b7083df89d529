"""docs/models.md lists exactly the architectures, properties and refusals of the tests.

`make docs` writes it anew.
"""

from __future__ import annotations

from .models import ARCHITECTURES
from .report import (
    COLUMNS,
    DOCUMENT,
    FEATURE_HEADINGS,
    MAX_DIFFERENCE,
    MAX_RATIO,
    REFUSED_HEADINGS,
    features,
    read_table,
    refused_rows,
)
from .test_parity import RUNS


def test_measured_are_the_architectures_and_properties_of_the_tests() -> None:
    headings, rows = read_table("measured")
    assert headings == ["", *COLUMNS.values()]
    assert [row[0] for row in rows] == list(ARCHITECTURES)


def test_each_property_of_the_table_has_a_run() -> None:
    shown = {column for run in RUNS for column in run.properties()}
    shown |= {"warm" for run in RUNS if run.warm}
    assert shown == {column for column in COLUMNS if not column.startswith("bf16")}


def test_measured_figures_are_within_the_bounds_that_the_document_gives() -> None:
    headings, rows = read_table("measured")
    for row in rows:
        figures = dict(zip(headings, row, strict=True))
        for column, heading in COLUMNS.items():
            if not column.startswith("bf16"):
                assert 0 < float(figures[heading]) < MAX_DIFFERENCE, row[0]
    text = DOCUMENT.read_text()
    assert f"{MAX_DIFFERENCE:.4f}" in text
    assert f"{MAX_RATIO:g} times" in text


def test_features_are_those_of_the_models() -> None:
    headings, rows = read_table("features")
    assert headings == FEATURE_HEADINGS
    assert [tuple(row) for row in rows] == [features(name) for name in ARCHITECTURES]


def test_refused_are_the_kinds_that_the_tests_see_refused() -> None:
    headings, rows = read_table("refused")
    assert headings == REFUSED_HEADINGS
    assert [tuple(row) for row in rows] == refused_rows()
