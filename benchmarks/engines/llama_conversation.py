"""A conversation held by llama.cpp in one context, for `recurrent_turns.py`.

    python llama_conversation.py GGUF TURNS PROMPT COMPLETION

Prints the numbers of tokens that it evaluates for prompts. Its own Python needs llama-cpp-python.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import islice

from llama_cpp import Llama


def main() -> None:
    turns, num_prompt, num_completion = map(int, sys.argv[2:])
    model = Llama(sys.argv[1], n_ctx=8192, n_batch=512, n_threads=1, verbose=False)
    evaluated: list[int] = []
    evaluate = model.eval

    def counted(tokens: list[int]) -> None:
        evaluated.append(len(tokens))
        evaluate(tokens)

    model.eval = counted

    def answer(prompt: list[int]) -> tuple[int, list[int]]:
        """Return the tokens evaluated before the first new one, and the new ones."""
        evaluated.clear()
        found = list(islice(model.generate(prompt, temp=0.0, top_k=1), num_completion))
        return evaluated[0], found

    text: list[int] = []
    counts: list[int] = []
    num_tokens = 0
    began = time.process_time()
    for turn in range(turns):
        text += [2 + (turn * 131 + index * 7) % 4_000 for index in range(num_prompt)]
        num_tokens += len(text)
        last = text
        count, found = answer(text)
        counts.append(count)
        text = [*text, *found]
    counts.append(answer([*last[:-10], *range(3_000, 3_010)])[0])
    numbers = {"tokens": num_tokens, "computed": sum(counts[:-1]), "second": counts[1]}
    numbers |= {"last": counts[-2], "edited": counts[-1], "snapshots": 0}
    print(json.dumps({**numbers, "seconds": time.process_time() - began}))


if __name__ == "__main__":
    main()
