"""Three steps of a handler of Restate, which its server calls over HTTP."""

import asyncio
import os

import restate
from hypercorn.asyncio import serve
from hypercorn.config import Config
from openai import AsyncOpenAI
from steps import LONG, PROMPTS, TOKENS, URL, crash_in_the_middle

workflow = restate.Workflow("three_steps")


@workflow.main()
async def run(context: restate.WorkflowContext, given: object) -> list[str]:
    client = AsyncOpenAI(base_url=URL, api_key="none")

    async def generate(number: int) -> str:
        answer = await client.completions.create(
            model="tiny",
            prompt=PROMPTS[number],
            max_tokens=TOKENS,
            extra_body=LONG,
            extra_headers={"Idempotency-Key": f"{context.key()}.{number}"},
        )
        return answer.choices[0].text

    return [
        await context.run_typed(f"step {number}", generate, number=number)
        for number in range(len(PROMPTS))
    ]


config = Config()
config.bind = [os.environ["SERVICE_ADDRESS"]]
crash_in_the_middle()
asyncio.run(serve(restate.app([workflow]), config))
