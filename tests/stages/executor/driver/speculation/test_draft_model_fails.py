"""A draft model that fails ends its drafts, says so once, and harms no request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nano_inference.config import ModelError

from ...models import make_model
from .test_draft_model import GREEDY, SAMPLED, DraftedLane, prompts_of

pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("no memory left"), "OutOfMemoryError('no memory left')"),
        (ModelError("no numbers"), "no numbers"),
        (IndexError(5), "IndexError(5)"),
    ],
)
@pytest.mark.parametrize("passes", [0, 1, 5])
def test_a_pass_that_fails_costs_its_drafts_alone(
    error: Exception, reason: str, passes: int
) -> None:
    """At first, in the middle of a draft, and behind some that were verified."""
    prompts, samplings = prompts_of(20, 30, 9), [GREEDY, SAMPLED, SAMPLED]
    plain = DraftedLane(make_model("llama"), make_model("llama"))
    plain.draft_model._broken = True
    wanted = plain.answer(prompts, samplings).tokens
    lane = DraftedLane(make_model("llama"), make_model("llama"))
    forward, left = lane.draft_model._forward, passes

    def failing(*arguments: Any) -> torch.Tensor:
        nonlocal left
        if not left:
            raise error
        left -= 1
        return forward(*arguments)

    lane.draft_model._forward = failing  # type: ignore[method-assign]
    assert lane.answer(prompts, samplings).tokens == wanted
    lane.core._draft_model = lane.draft_model
    assert [lane.core.take_draft_failure() for _ in range(2)] == [reason, ""]
    lane.draft_model._forward = forward  # type: ignore[method-assign]
    lane.draft_model.clear()
    right, total = lane.answer(prompts, samplings).right()
    assert right == total > 20
