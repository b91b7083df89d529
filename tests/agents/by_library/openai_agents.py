"""OpenAI's Agents SDK, over responses and over chats."""

from __future__ import annotations

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from files import read_file, write_file
from openai import AsyncOpenAI


async def main(url: str, prompt: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    tools = [function_tool(write_file), function_tool(read_file)]
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        agent = Agent("writer", model=kind("scripted", client), tools=tools)
        print((await Runner.run(agent, prompt)).final_output)
        streamed = Runner.run_streamed(agent, prompt)
        async for _ in streamed.stream_events():
            pass
        print(streamed.final_output)


asyncio.run(main(*sys.argv[1:3]))
