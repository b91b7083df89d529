"""The table of all decoder-only kinds in docs/models.md says what happens."""

from __future__ import annotations

import pytest

from ...soaking import in_soak
from .survey import trial, written_results
from .survey_models import names

EVERY_DAY = {
    "afmoe": "equal",  # the mask by keyword
    "video_llama_3": "refused",  # logits of all tokens
    "gemma4_text, shared KV": "equal",  # heads of several widths
    "idefics2": "equal",  # text of a model whose images are not supported
    "llama4_text, shorter than a chunk": "equal",  # a temperature by position
    "minimax_m3_vl_text, sparse attention": "equal",  # an indexer of blocks
}


def test_each_kind_of_transformers_is_in_the_table() -> None:
    assert sorted(written_results()) == names()
    assert "different" not in written_results().values()


@pytest.mark.parametrize("name", [n if n in EVERY_DAY else in_soak(n) for n in names()])
def test_a_kind_does_what_the_table_says(name: str) -> None:
    result = trial(name).result
    assert result == written_results()[name]
    assert result == EVERY_DAY.get(name, result)
