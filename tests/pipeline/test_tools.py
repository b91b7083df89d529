"""Tools through the whole pipeline: enforced formats hold for any model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from pydantic import BaseModel

from nano_inference import Gateway, Pipeline, load_config

from ..gateway.saying import calling_model
from ..soaking import in_soak
from . import short_model
from .conftest import LIMIT_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """The URL of a model whose template has tools and reasoning, which the model never learned."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    calling_model(folder, short_model.folder(), marks=False)
    config = load_config(
        env={},
        overrides={
            "engine.model_path": str(folder),
            "engine.dtype": "float32",
            "gateway.message_format": "qwen",
        },
    )
    async with Pipeline(config) as pipeline, Gateway(pipeline.client, config) as gateway:
        yield gateway.url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0
    ) as made:
        yield made


USER: Any = {"role": "user", "content": "How is it in Oslo?"}
CHAT: Any = {"model": "tiny", "messages": [USER], "max_tokens": 300, "reasoning_effort": "none"}


# The docstrings are descriptions in the prompt, on which the sampled calls depend.
class Weather(BaseModel):
    """How it is there."""

    city: Literal["Oslo", "Bergen"]


class Clock(BaseModel):
    """How late it is there."""

    zone: Literal["north", "south"]


class Verdict(BaseModel):
    cold: bool


KINDS: dict[str, type[BaseModel]] = {"Weather": Weather, "Clock": Clock}
STRICT: Any = [openai.pydantic_function_tool(kind) for kind in KINDS.values()]
NAMED: Any = {"type": "function", "function": {"name": "Clock"}}


def checked(message: Any) -> list[str]:
    """The names of its calls, whose arguments are those of their tools."""
    for call in message.tool_calls:
        KINDS[call.function.name].model_validate_json(call.function.arguments)
    return [call.function.name for call in message.tool_calls]


@pytest.mark.parametrize("seed", [1, in_soak(2), in_soak(3)])
@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_required_call_is_made(client: AsyncOpenAI, choice: Any, seed: int) -> None:
    """The same, streamed and whole."""
    asked = CHAT | {"tools": STRICT, "tool_choice": choice, "parallel_tool_calls": False}
    asked |= {"seed": seed}
    (whole,) = (await client.chat.completions.parse(**asked)).choices
    assert whole.message.content is None
    (name,) = checked(whole.message)
    assert name in ({"Clock"} if choice is NAMED else KINDS)
    async with client.chat.completions.stream(**asked) as stream:
        (streamed,) = (await stream.get_final_completion()).choices
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    told = [
        [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        for message in (whole.message, streamed.message)
    ]
    assert told[0] == told[1]


# Of other seeds some are still writing when their tokens are used up.
@pytest.mark.parametrize("seed", [2, 4, 5, 6])
async def test_an_answer_by_its_schema_or_calls_by_theirs(client: AsyncOpenAI, seed: int) -> None:
    answer = await client.chat.completions.parse(
        **CHAT, tools=STRICT, tool_choice="auto", response_format=Verdict, seed=seed
    )
    (choice,) = answer.choices
    if choice.message.tool_calls:
        assert choice.finish_reason == "tool_calls"
        assert checked(choice.message)
    else:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Verdict)


async def test_each_choice_has_calls_of_its_own(client: AsyncOpenAI) -> None:
    asked = CHAT | {"tools": STRICT, "tool_choice": "required", "n": 3, "seed": 7}
    messages = [
        choice.message for choice in (await client.chat.completions.create(**asked)).choices
    ]
    assert all(checked(message) for message in messages)
    ids = [call.id for message in messages for call in message.tool_calls or ()]
    assert len(set(ids)) == len(ids)


async def test_a_changing_billing_line_leaves_the_prompt_cached(url: str) -> None:
    cached = []
    async with httpx.AsyncClient(base_url=url) as http:
        for number in range(2):
            line = f"x-anthropic-billing-header: cc_version=2.1; cch={number};"
            system = [{"type": "text", "text": each} for each in (line, "Be brief. " * 20)]
            body = {"system": system, "messages": [USER], "max_tokens": 2, "temperature": 0}
            answer = (await http.post("/v1/messages", json=body)).json()
            usage = answer["usage"]
            cached.append(usage["cache_read_input_tokens"])
    assert cached[0] < cached[1] >= usage["input_tokens"]
