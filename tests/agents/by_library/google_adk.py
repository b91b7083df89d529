"""An agent of Google's Agent Development Kit, by LiteLLM."""

from __future__ import annotations

import asyncio
import sys

from files import read_file, write_file
from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types


async def main(url: str, prompt: str) -> None:
    model = LiteLlm(model="openai/scripted", api_base=f"{url}/v1", api_key="none")
    agent = LlmAgent(name="writer", model=model, tools=[write_file, read_file])
    runner = InMemoryRunner(agent=agent, app_name="here")
    session = await runner.session_service.create_session(app_name="here", user_id="someone")
    wish = types.Content(role="user", parts=[types.Part(text=prompt)])
    async for event in runner.run_async(user_id="someone", session_id=session.id, new_message=wish):
        for part in (event.content and event.content.parts) or ():
            if part.text:
                print(part.text)


asyncio.run(main(*sys.argv[1:3]))
