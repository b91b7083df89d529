"""The table of sampling parameters is what their bodies hold, and what interfaces repeat."""

from __future__ import annotations

from nano_inference.gateway.api.openai import fields as openai
from nano_inference.gateway.serving.sampling_fields import CALL, FIELDS, SamplingBody


def test_the_body_holds_the_parameters_that_are_honoured() -> None:
    honoured = {each.name for each in FIELDS if each.becomes == "honoured"}
    assert set(SamplingBody.__struct_fields__) == honoured


def test_no_parameter_stands_there_twice() -> None:
    assert len({each.name for each in FIELDS}) == len(FIELDS)


def test_openai_s_table_has_all_of_them_and_no_others() -> None:
    """What it says of one may be about its other calls as well."""
    rows = {each.name: each for each in openai.FIELDS if CALL in each.calls}
    assert {name: (each.becomes, each.nothing) for name, each in rows.items()} == {
        each.name: (each.becomes, each.nothing) for each in FIELDS
    }
