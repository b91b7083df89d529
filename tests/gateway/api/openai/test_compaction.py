"""`/v1/responses/compact`: the model's summary stands for a conversation, for its tenant alone."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI

from nano_inference.config import Config

from ...fake import Client, poster
from ...saying import Model
from .test_refusals import refusal

PATH, RESPONSES = "/v1/responses/compact", "/v1/responses"
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "My name is Ada."},
    {"role": "assistant", "content": "Hello, Ada."},
    {"role": "user", "content": "Thank you."},
]

posted = poster(RESPONSES, {})


@pytest.fixture
def config(calling: Config) -> Config:
    return calling


async def test_a_compacted_conversation_is_continued_from_its_summary(
    client: AsyncOpenAI, http: Client, model: Model
) -> None:
    model.says("<think>\nShort.\n</think>\n\nThe user is Ada.")
    made = await client.responses.compact(model="tiny", input=TURNS, instructions="Be kind.")  # type: ignore[arg-type]
    assert made.object == "response.compaction"
    assert [each.type for each in made.output] == ["message", "message", "compaction"]
    assert made.usage.output_tokens > 0
    asked = model.prompt()
    assert asked.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nMy name")
    assert "<|im_start|>user\nSummarise this conversation" in asked
    assert model.requests[-1].sampling.temperature == 0
    items = [each.model_dump(exclude_unset=True, warnings=False) for each in made.output]
    model.says("You are Ada.")
    answer = await posted(http, input=[*items, {"role": "user", "content": "Who am I?"}])
    turns = (
        "user\nMy name is Ada.",
        "user\nThank you.",
        "assistant\nSummary of the conversation so far:\nThe user is Ada.",
        "user\nWho am I?",
    )
    prompt = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
    assert model.prompt() == prompt + "<|im_start|>assistant\n"
    # A compaction of one is of its summary, too.
    again = await http.post(PATH, json={"previous_response_id": answer["id"]})
    assert "The user is Ada." in model.prompt()
    foreign = await http.post(
        RESPONSES, json={"input": again.json()["output"]}, headers={"X-Tenant": "b"}
    )
    assert refusal(foreign) == ("unsupported", "input[3].encrypted_content")


async def test_no_summary_is_made_of_a_cut_or_empty_one(http: Client, model: Model) -> None:
    for text, reason in (("The user", "length"), ("<think>\nShort.\n</think>\n\n", "stop")):
        model.says(text, reason=reason)  # type: ignore[arg-type]
        assert refusal(await http.post(PATH, json={"input": TURNS}))[0] == "compaction_failed"
    assert refusal(await http.post(PATH, json={"input": []})) == ("invalid_request", "input")
    assert refusal(await http.post(PATH, json={"input": "a", "tools": [{}]}))[1] == "tools"
