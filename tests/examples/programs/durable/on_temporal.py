"""Three activities of Temporal, with its server of one process."""

import asyncio
import os
from datetime import timedelta

from openai import AsyncOpenAI
from steps import LONG, PROMPTS, TOKENS, URL, WORKFLOW, crash_in_the_middle, done
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

QUEUE = "durable"


@activity.defn
async def generate(prompt: str) -> str:
    info = activity.info()
    client = AsyncOpenAI(base_url=URL, api_key="none")
    answer = await client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=TOKENS,
        extra_body=LONG,
        extra_headers={"Idempotency-Key": f"{info.workflow_id}.{info.activity_id}"},
    )
    return answer.choices[0].text


@workflow.defn
class ThreeSteps:
    @workflow.run
    async def run(self) -> list[str]:
        return [
            await workflow.execute_activity(
                # The server takes the activity for lost after this time without an answer.
                generate,
                prompt,
                start_to_close_timeout=timedelta(seconds=4),
            )
            for prompt in PROMPTS
        ]


async def main() -> None:
    client = await Client.connect(os.environ["TEMPORAL_ADDRESS"])
    crash_in_the_middle()
    async with Worker(
        client,
        task_queue=QUEUE,
        workflows=[ThreeSteps],
        activities=[generate],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        done(
            await client.execute_workflow(
                ThreeSteps.run,
                id=WORKFLOW,
                task_queue=QUEUE,
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            )
        )


asyncio.run(main())
