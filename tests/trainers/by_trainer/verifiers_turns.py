"""verifiers: an environment of several turns, with its train client, interception and traces.

The harness that comes with it starts its program by uv, so this one speaks with the endpoint
itself; it is a plug-in, as each taskset and harness is.
"""

from __future__ import annotations

import asyncio
import json
import sys

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.clients import ModelContext, TrainClientConfig
from verifiers.v1.utils.loaders import load_environment

# verifiers finds a plug-in's classes by it.
__all__ = ["Sums", "Turns"]

TURNS = 3


class SumTask(vf.Task):
    """A sum, asked for again and again."""

    async def reward(self, trace: vf.Trace) -> float:
        """Return the part of turns that had an answer."""
        return trace.num_turns / TURNS


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    """Two sums."""

    def load(self):
        for number in (98, 12):
            yield SumTask(vf.TaskData(idx=number, prompt=f"{number} + 25 ="))


class Turns(vf.Harness[vf.HarnessConfig]):
    """Asks, reads the answer, and asks again."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, *_, **__):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        messages = [{"role": "user", "content": data.prompt_text}]
        for _ in range(TURNS):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
            text = answer.choices[0].message.content or ""
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "And 1 + 1?"},
            ]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def main() -> None:
    url, _, folder = sys.argv[1:]
    name = "verifiers_turns"
    env = load_environment(
        vf.SingleAgentEnvConfig(
            taskset=vf.TasksetConfig(id=name),
            agent=vf.AgentConfig(harness=vf.HarnessConfig(id=name), runtime=vf.SubprocessConfig()),
        )
    )
    client = TrainClientConfig(base_url=f"{url}/v1", renderer_model_name=folder)
    ctx = ModelContext(
        model="tiny",
        client=client,
        sampling=vf.SamplingConfig(temperature=1.0, max_tokens=8),
    )
    async with env.serving():
        for task in env.taskset:
            episode = await env.run_episode(task, ctx)
            assert episode.ok, episode.errors or [each.errors for each in episode.traces]
            (trace,) = episode.traces
            assert trace.num_turns == TURNS, trace.num_turns
            for branch in trace.branches:
                assert len(branch.token_ids) == len(branch.sampled_mask)
    print(json.dumps({"turns": TURNS}))


if __name__ == "__main__":
    asyncio.run(main())
