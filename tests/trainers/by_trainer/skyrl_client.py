"""SkyRL's client of remote servers: generation, Tinker's samples, chats, and its control plane."""

from __future__ import annotations

import asyncio
import json
import sys
import typing

import typing_extensions

# Pydantic reads no TypedDict of typing before Python 3.12, and SkyRL's types have some.
typing.TypedDict = typing_extensions.TypedDict

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    RemoteInferenceClient,
)

url, _, folder = sys.argv[1:]
PROMPTS = [[28, 27, 267, 224, 21, 24, 268], [28, 27]]
GREEDY = {"temperature": 0.0, "max_tokens": 6}


async def main() -> None:
    made = {}
    async with RemoteInferenceClient(
        proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="tiny"
    ) as client:
        batch = {
            "prompt_token_ids": PROMPTS,
            "sampling_params": GREEDY | {"logprobs": 0},
            "session_ids": ["a", "b"],
            "cache_salt": "version-0",
        }
        answer = await client.generate(batch)
        made["greedy"] = answer["response_ids"]
        for ids, logprobs in zip(answer["response_ids"], answer["response_logprobs"], strict=True):
            assert len(ids) == len(logprobs) > 0
        assert answer["stop_reasons"] == ["length"] * 2 or {*answer["stop_reasons"]} <= {
            "length",
            "stop",
        }
        assert all(isinstance(text, str) for text in answer["responses"])
        sampled = await client.sample(
            {
                "json": {
                    "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPTS[0]}]},
                    "num_samples": 2,
                    "sampling_params": {"temperature": 1.0, "max_tokens": 5, "seed": 3},
                    "session_id": "a",
                    "include_prompt_logprobs": True,
                    "topk_prompt_logprobs": 2,
                }
            }
        )
        assert [len(each["tokens"]) for each in sampled["sequences"]] == [
            len(each["logprobs"]) for each in sampled["sequences"]
        ]
        assert len(sampled["sequences"]) == 2
        assert sampled["prompt_logprobs"][0] is None
        assert all(each <= 0 for each in sampled["prompt_logprobs"][1:])
        assert [len(each) for each in sampled["topk_prompt_logprobs"][1:]] == [2] * 6
        messages = [{"role": "user", "content": "98 + 25 ="}]
        chat = await client.chat_completion(
            {"json": {"messages": messages, "session_id": "a", **GREEDY}}
        )
        assert chat["choices"][0]["message"]["content"] is not None
        rendered = await client.render_chat_completion({"json": {"messages": messages}})
        assert rendered["token_ids"]
        (text,) = await client.detokenize([PROMPTS[0]])
        (tokens,) = await client.tokenize([text])
        assert tokens == PROMPTS[0], (tokens, text)
        # The control plane, with weights by their path in place of NCCL's broadcast.
        assert await client.get_world_size() == (1, 1)
        await client.pause()
        await client.start_weight_update()
        await client.update_weights_nccl({"path": folder})
        await client.finish_weight_update()
        await client.resume()
        await client.reset_prefix_cache()
        await client.sleep(level=1)
        await client.wake_up()
        await client.finish_session("a")
        again = await client.generate(batch)
        assert again["response_ids"] == answer["response_ids"]
        await client.teardown()
    print(json.dumps(made))


asyncio.run(main())
