"""Greedy completions by vLLM, as a line of JSON. Runs in an environment that has vLLM.

Arguments: a model's folder, and a list of prompts as JSON.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    folder, prompts = sys.argv[1], json.loads(sys.argv[2])
    model = LLM(folder, dtype="bfloat16", enforce_eager=True, max_model_len=256, max_num_seqs=4)
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
    found = []
    for each in model.generate(prompts, sampling):
        (output,) = each.outputs
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        logprobs = [known[token].logprob for token, known in pairs]
        found.append({"tokens": list(output.token_ids), "logprobs": logprobs})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
