"""An agent of pydantic-ai on DBOS: each request to its model is a step."""

import asyncio

from dbos import DBOS, SetWorkflowID
from httpx2 import Request
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from pydantic_ai import Agent
from pydantic_ai.durable_exec.dbos import DBOSAgent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from steps import LONG, PROMPTS, STATE, TOKENS, URL, WORKFLOW, crash_in_the_middle, done


async def keyed(request: Request) -> None:
    request.headers["Idempotency-Key"] = f"{DBOS.workflow_id}.{DBOS.step_id}"


http_client = DefaultAsyncHttpxClient(event_hooks={"request": [keyed]})
client = AsyncOpenAI(base_url=URL, api_key="none", http_client=http_client)
DBOS(config={"name": "agent", "system_database_url": f"sqlite:///{STATE}/agent.sqlite"})
model = OpenAIChatModel("tiny", provider=OpenAIProvider(openai_client=client))
agent = DBOSAgent(
    Agent(model, name="adder", model_settings={"max_tokens": TOKENS, "extra_body": LONG})
)


@DBOS.workflow()
async def workflow() -> list[str]:
    return [(await agent.run(prompt)).output for prompt in PROMPTS]


async def main() -> None:
    DBOS.launch()
    crash_in_the_middle()
    with SetWorkflowID(WORKFLOW):
        handle = await DBOS.start_workflow_async(workflow)
    done(await handle.get_result())


asyncio.run(main())
