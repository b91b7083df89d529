"""Tools and thinking as Anthropic's library knows them: said in blocks, and handed back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nano_inference.config import Config

from ...fake import FakeEngine
from ...saying import calling_model, words_of
from .calling import TIME, WEATHER, call, says

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

USER: dict[str, Any] = {"role": "user", "content": "What is it like in Bern?"}
BERN = call("weather", '{"city": "Bern", "days": 2}')
THOUGHT = "<think>\nBern, then.\n</think>\n\n"
ALL = f"{THOUGHT}Let me see.\n{BERN}\n{call('time', '{}')}"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return calling_model(tmp_path / "tiny")


def asked(**more: Any) -> Any:
    return {"model": "tiny", "max_tokens": 90, "messages": [USER], "tools": [WEATHER, TIME]} | more


def prompt_of(engine: FakeEngine, config: Config) -> str:
    """The last one."""
    token_ids = engine.requests[-1].prompt_token_ids or ()
    return words_of(config).text(token_ids, skip_special=False)


async def test_a_message_has_blocks_in_its_order(
    client: AsyncAnthropic, engine: FakeEngine, config: Config
) -> None:
    engine.outputs = says(ALL)
    message = await client.messages.create(**asked())
    thinking, text, weather, time = message.content
    assert (thinking.type, text.type) == ("thinking", "text")
    assert thinking.thinking.strip() == "Bern, then."
    # LiteLLM drops thinking without one.
    assert thinking.signature
    assert text.text == "Let me see."
    assert weather.type == time.type == "tool_use"
    assert (weather.name, weather.input) == ("weather", {"city": "Bern", "days": 2})
    assert (time.name, time.input) == ("time", {})
    assert weather.id != time.id
    assert message.stop_reason == "tool_use"
    thought = message.usage.output_tokens_details.thinking_tokens
    assert 0 < thought < message.usage.output_tokens
    assert '"name": "weather"' in prompt_of(engine, config)
    assert engine.requests[0].sampling.constraint is None


@pytest.mark.parametrize("size", [0, 2, 50])
async def test_a_stream_is_put_together(
    client: AsyncAnthropic, engine: FakeEngine, size: int
) -> None:
    engine.outputs = says(ALL, ALL, sizes=[size])
    whole = await client.messages.create(**asked())
    events = []
    async with client.messages.stream(**asked()) as stream:
        async for event in stream:
            events.append(event)
        message = await stream.get_final_message()
    found, wanted = message.to_dict(), whole.to_dict()
    # Made of the message's own id.
    ids = [block.pop("id", "") for each in (found, wanted) for block in each["content"]]  # type: ignore[attr-defined]
    assert len({each for each in ids if each}) == 4
    for each in (found, wanted):
        del each["id"]
    # The library's own.
    del found["stop_details"]
    assert found == wanted
    inputs = [event.snapshot for event in events if event.type == "input_json"]
    assert inputs == [{"city": "Bern", "days": 2}, {}]
    assert any(event.type == "signature" for event in events)


async def test_an_empty_message_has_an_empty_text(
    client: AsyncAnthropic, engine: FakeEngine
) -> None:
    engine.outputs = says("", "")
    async with client.messages.stream(**asked()) as stream:
        message = await stream.get_final_message()
    for each in (message, await client.messages.create(**asked())):
        (block,) = each.content
        assert (block.type, block.text) == ("text", "")  # type: ignore[union-attr]
        assert each.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("fields", "end", "reason", "kinds"),
    [
        # Nobody has told the model of tools.
        ({"tools": []}, "stop", "end_turn", ["text"]),
        ({"tool_choice": {"type": "none"}}, "stop", "end_turn", ["text"]),
        ({"max_tokens": 5}, "length", "max_tokens", ["tool_use"]),
        ({}, "abort", "pause_turn", ["tool_use"]),
        ({}, "stop", "tool_use", ["tool_use"]),
    ],
)
async def test_the_stop_reason_of_calls(
    client: AsyncAnthropic,
    engine: FakeEngine,
    config: Config,
    fields: dict[str, Any],
    end: Any,
    reason: str,
    kinds: list[str],
) -> None:
    engine.outputs = says(BERN, end=end)
    message = await client.messages.create(**asked(**fields))
    assert [block.type for block in message.content] == kinds
    assert message.stop_reason == reason
    if kinds == ["text"]:
        assert message.content[0].text == BERN  # type: ignore[union-attr]
        assert "weather" not in prompt_of(engine, config)


async def test_a_stop_sequence_after_a_call_is_reported(
    client: AsyncAnthropic, engine: FakeEngine
) -> None:
    engine.outputs = says(f"{BERN} and then", end="length")
    message = await client.messages.create(**asked(stop_sequences=["and"]))
    assert message.content[0].type == "tool_use"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "and")


# --- what is handed back ----------------------------------------------------------------------


async def test_a_loop_of_calls_and_results(
    client: AsyncAnthropic, engine: FakeEngine, config: Config
) -> None:
    engine.outputs = says(ALL, "Fine.")
    message = await client.messages.create(**asked())
    calls = [block for block in message.content if block.type == "tool_use"]
    results = [
        {"type": "text", "text": "Well?"},
        {"type": "tool_result", "tool_use_id": calls[1].id, "content": "noon", "is_error": True},
        {
            "type": "tool_result",
            "tool_use_id": calls[0].id,
            "content": [{"type": "text", "text": "warm"}, {"type": "text", "text": "and dry"}],
        },
    ]
    history = [
        USER,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    answer = await client.messages.create(**asked(messages=history))
    assert [block.type for block in answer.content] == ["text"]
    prompt = prompt_of(engine, config)
    said = prompt[prompt.index("What is it like") :]
    assert said == (
        "What is it like in Bern?<|im_end|>\n"
        f"<|im_start|>assistant\n{THOUGHT}Let me see.\n{BERN}\n{call('time', '{}')}<|im_end|>\n"
        "<|im_start|>tool\nError: noon(time)<|im_end|>\n"
        "<|im_start|>tool\nwarm\nand dry(weather)<|im_end|>\n"
        "<|im_start|>user\nWell?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_the_library_runs_the_tools(
    client: AsyncAnthropic, engine: FakeEngine, config: Config
) -> None:
    from anthropic import beta_async_tool

    asked_for = []

    @beta_async_tool
    async def weather(city: str, days: int = 1) -> str:
        """Return the weather of a city."""
        asked_for.append((city, days))
        return "warm"

    engine.outputs = says(BERN, "It is warm.")
    runner = client.beta.messages.tool_runner(
        model="tiny",
        max_tokens=90,
        messages=[USER],
        tools=[weather],  # type: ignore[typeddict-item]
    )
    message = await runner.until_done()
    assert asked_for == [("Bern", 2)]
    assert message.content[0].text == "It is warm."  # type: ignore[union-attr]
    assert "<|im_start|>tool\nwarm(weather)<|im_end|>" in prompt_of(engine, config)


# --- what is asked of the model ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any"}, ["weather", "time"]),
        ({"type": "tool", "name": "time"}, ["time"]),
        ({"type": "any", "disable_parallel_tool_use": True}, ["weather", "time"]),
    ],
)
async def test_a_call_that_has_to_be_is_a_constraint(
    client: AsyncAnthropic, engine: FakeEngine, choice: Any, names: list[str]
) -> None:
    engine.outputs = says(call(names[0], '{"city": "x"}'))
    await client.messages.create(**asked(tool_choice=choice))
    constraint = engine.requests[0].sampling.constraint
    heads = [name for name in ("weather", "time") if f'{name}\\",' in constraint.lark]
    assert heads == names
    assert ("further_call" in constraint.lark) == (choice == {"type": "any"})


async def test_an_answer_beside_calls_is_one_constraint(
    client: AsyncAnthropic, engine: FakeEngine
) -> None:
    engine.outputs = says("5")
    schema = {"type": "json_schema", "schema": {"type": "integer"}}
    await client.messages.create(**asked(output_config={"format": schema}))
    constraint = engine.requests[0].sampling.constraint
    assert "integer" in constraint.lark
    assert "first_call" in constraint.lark


@pytest.mark.parametrize(
    ("thinking", "opened"),
    [
        ({"type": "enabled", "budget_tokens": 30}, True),
        ({"type": "adaptive"}, True),
        ({"type": "disabled"}, False),
        (None, False),
    ],
)
async def test_thinking_is_the_template_s(
    client: AsyncAnthropic, engine: FakeEngine, config: Config, thinking: Any, opened: bool
) -> None:
    engine.outputs = says("Bern, then.\n</think>\n\nFine." if opened else "Fine.")
    fields = {} if thinking is None else {"thinking": thinking}
    message = await client.messages.create(**asked(**fields))
    assert [block.type for block in message.content] == ["thinking"] * opened + ["text"]
    assert prompt_of(engine, config).endswith("<think>\n") == opened
    count = {"model": "tiny", "messages": [USER], "tools": [WEATHER, TIME]} | fields
    counted = await client.messages.count_tokens(**count)
    assert counted.input_tokens == len(engine.requests[0].prompt_token_ids or ())
    constraint = engine.requests[0].sampling.constraint
    budget = constraint is not None and "max_tokens=30" in (constraint.lark or "")
    assert budget == ("budget_tokens" in (thinking or {}))


async def test_thinking_may_be_left_out(client: AsyncAnthropic, engine: FakeEngine) -> None:
    engine.outputs = says("Bern, then.\n</think>\n\nFine.")
    fields = asked(thinking={"type": "adaptive", "display": "omitted"})
    thinking, text = (await client.messages.create(**fields)).content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "", "Fine.")


async def test_effort_is_the_template_s(
    client: AsyncAnthropic, engine: FakeEngine, config: Config
) -> None:
    template = "<think>{{ reasoning_effort }} {{ messages[0].thinking }}"
    (config.engine.model_folder / "chat_template.jinja").write_text(template)
    fields = asked(tools=[], output_config={"effort": "low"})
    engine.outputs = says("Fine.")
    await client.messages.create(**fields)
    assert prompt_of(engine, config) == "<think>low "
    counted = await client.messages.count_tokens(
        model="tiny", messages=[USER], output_config={"effort": "low"}
    )
    assert counted.input_tokens == len(engine.requests[0].prompt_token_ids or ())
