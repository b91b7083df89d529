"""What admission remembers of requests, and what it asks streaming after a failure."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nano_inference.bus import RequestEntry
from nano_inference.bus.messages import AdmittedRequest, RequestInfo
from nano_inference.bus.public import GenerateRequest
from nano_inference.config import SamplingParams
from nano_inference.stages.admission.ledger import (
    RECOVER_BATCH,
    RECOVER_TOKENS,
    Unanswered,
    recovery_items,
)


def unanswered(number: int, num_tokens: int, temperature: float | None = 1.0) -> Unanswered:
    entry = RequestEntry(f"1-{number}", GenerateRequest(prompt="x"))
    info = RequestInfo(
        *(entry.entry_id, entry.entry_id, "m", 1, True, (), num_tokens, "", "", 0),
        ref_temperature=temperature,
    )
    request = AdmittedRequest(info, (5,) * num_tokens, SamplingParams(), (), "default", 0)
    return Unanswered(entry, request)


@pytest.mark.parametrize(
    ("lengths", "messages"),
    [
        ([1] * (2 * RECOVER_BATCH + 1), [RECOVER_BATCH, RECOVER_BATCH, 1]),
        ([RECOVER_TOKENS // 2] * 3, [2, 1]),
        ([1, RECOVER_TOKENS + 1, 1], [1, 1, 1]),
        ([], []),
    ],
)
def test_streaming_is_asked_in_messages_that_a_link_carries(
    lengths: Sequence[int], messages: Sequence[int]
) -> None:
    items = [unanswered(number, length) for number, length in enumerate(lengths)]
    asked = list(recovery_items(items))
    assert [len(each) for each in asked] == messages
    found = [item for each in asked for item in each]
    assert [item.entry_id for item in found] == [item.entry_id for item in items]
    assert [len(item.prompt_token_ids) for item in found] == list(lengths)


def test_a_prompt_is_told_only_where_a_reference_model_may_need_it() -> None:
    (item,) = next(recovery_items([unanswered(1, 9, temperature=None)]))
    assert item.prompt_token_ids == ()
