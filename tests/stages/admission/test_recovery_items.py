"""What admission remembers of requests, and what it asks streaming after a failure."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nano_inference.bus import RequestEntry
from nano_inference.bus.messages import AdmittedRequest, RequestInfo, RequestOpened
from nano_inference.bus.public import GenerateRequest
from nano_inference.config import SamplingParams
from nano_inference.stages.admission.events import Accepted
from nano_inference.stages.admission.ledger import (
    RECOVER_BATCH,
    RECOVER_TOKENS,
    Unanswered,
    recovery_items,
)


def unanswered(number: int, num_tokens: int) -> Unanswered:
    entry = RequestEntry(f"1-{number}", GenerateRequest(prompt="x"))
    ids, prompt = (entry.entry_id, entry.entry_id), (5,) * num_tokens
    admitted = AdmittedRequest(RequestInfo(*ids), prompt, SamplingParams(), (), "default", 0)
    return Unanswered(entry, Accepted(RequestOpened(*ids, "m", 1, True, (), prompt), admitted))


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
    prompts = [item.opened.prompt_token_ids for item in found if item.opened is not None]
    assert [len(prompt) for prompt in prompts] == list(lengths)
