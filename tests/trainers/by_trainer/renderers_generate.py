"""renderers: two turns, of which the second goes on from the tokens of the first."""

from __future__ import annotations

import asyncio
import json
import sys

from openai import AsyncOpenAI
from renderers import create_renderer
from renderers.base import load_tokenizer
from renderers.client import OverlongPromptError, generate

url, _, folder = sys.argv[1:]


async def main() -> None:
    renderer = create_renderer(load_tokenizer(folder))
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = (await client.models.list()).data[0].id
    messages = [{"role": "user", "content": "98 + 25 ="}]
    made = []
    for turn in range(2):
        answer = await generate(
            client=client,
            renderer=renderer,
            messages=messages,
            model=model,
            sampling_params={"temperature": 1.0, "max_tokens": 8, "seed": turn},
            cache_salt="step-1",
            priority=turn,
            extra_headers={"X-Session-ID": "rollout-1"},
        )
        made.append(answer)
        assert len(answer["completion_ids"]) == len(answer["completion_logprobs"]) > 0
        assert all(each <= 0 for each in answer["completion_logprobs"])
        assert answer["finish_reason"] in ("stop", "length", "tool_calls")
        messages += [
            {"role": "assistant", "content": answer["content"] or ""},
            {"role": "user", "content": "And 1 + 1?"},
        ]
    # The context's length, which the client finds in the list of models.
    long = [{"role": "user", "content": "1 " * 100_000}]
    try:
        await generate(client=client, renderer=renderer, messages=long, model=model)
    except OverlongPromptError as error:
        assert error.max_prompt_len > 0
    else:
        raise AssertionError("the client doesn't know the model's length")
    print(json.dumps({"completions": [each["completion_ids"] for each in made]}))


asyncio.run(main())
