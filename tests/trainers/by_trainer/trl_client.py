"""TRL's client of a vLLM server: texts, tokens and chats, the scores of a teacher, and the calls of
its weight sync, whose transfer runs on CUDA alone."""

from __future__ import annotations

import json
import math
import sys

from trl.generation.vllm_client import VLLMClient

url, run, folder = sys.argv[1:]
PROMPTS = [[28, 27, 267, 224, 21, 24, 268], [28, 27]]
SAMPLING = {"max_tokens": 6, "temperature": 1.0, "top_p": 0.9, "logprobs": 2, "n": 2}


def checked(answer: dict) -> None:
    assert len(answer["completion_ids"]) == 4
    rows = zip(
        answer["completion_ids"], answer["logprobs"], answer["logprob_token_ids"], strict=True
    )
    for ids, logprobs, top_ids in rows:
        assert len(ids) == len(logprobs) == len(top_ids) > 0
        for token, values, tops in zip(ids, logprobs, top_ids, strict=True):
            assert token in tops
            assert all(each is not None and math.isfinite(each) for each in values)


def main() -> None:
    client = VLLMClient(base_url=url)
    assert client.model == "tiny"
    by_tokens = client.generate(PROMPTS, **SAMPLING)
    checked(by_tokens)
    assert by_tokens["prompt_ids"] == PROMPTS
    checked(
        client.generate(["98 + 25 =", "1 + 1 ="], structured_outputs_regex="[0-9]+", **SAMPLING)
    )
    chats = [[{"role": "user", "content": each}] for each in ("98 + 25 =", "1 + 1 =")]
    checked(client.chat(chats, **SAMPLING))
    sequences = [prompt + by_tokens["completion_ids"][2 * i] for i, prompt in enumerate(PROMPTS)]
    lengths = [len(prompt) for prompt in PROMPTS]
    for top in (4, 100):
        scores = client.get_sequence_logprobs(sequences, lengths, top_logprobs=top)
        for sequence, length, row in zip(sequences, lengths, scores["logprobs"], strict=True):
            assert len(row) == len(sequence) - length
            assert all(len(each) == top and each == sorted(each, reverse=True) for each in row)
        actual = [each for row in scores["actual_logprobs"] for (each,) in row]
        assert all(each <= 0 for each in actual)
    made = {"greedy": client.generate(PROMPTS, max_tokens=6, temperature=0.0)["completion_ids"]}
    print(json.dumps(made))


main()
