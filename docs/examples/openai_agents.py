"""OpenAI's Agents SDK: pip install openai-agents."""

import asyncio
import os

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

url = os.environ.get("NANO_INFERENCE_URL", "http://127.0.0.1:8000")
# They would go to OpenAI.
set_tracing_disabled(True)


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city"""
    print("asked:", city)
    return '{"sky": "sunny", "degrees": 21}'


async def main() -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        for model in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
            agent = Agent(
                name="forecaster",
                model=model(model="tiny", openai_client=client),
                model_settings=ModelSettings(temperature=0),
                tools=[get_weather],
            )
            answer = await Runner.run(agent, "What is the weather in Oslo?", max_turns=3)
            print("answer:", answer.final_output)
            stream = Runner.run_streamed(agent, "What is the weather in Paris?", max_turns=3)
            kinds = [event.type async for event in stream.stream_events()]
            print("stream:", stream.final_output, sorted(set(kinds)))


asyncio.run(main())
