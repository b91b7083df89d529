"""xgrammar's compile times and masks, for constraints.py.

    python xgrammar_masks.py FOLDER VOCABULARY

Prints by kind of constraint the milliseconds of CPU time to compile it, and those of the mask
before each byte of a text. Its own Python needs xgrammar and transformers, as vLLM's has them.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import xgrammar
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent.parent))

from workloads import constraint_of, masked_texts


def main() -> None:
    folder, size = sys.argv[1], int(sys.argv[2])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json", eos_token="<|endoftext|>"
    )
    vocabulary = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1)
    bits = xgrammar.allocate_token_bitmask(1, size)
    found = {}
    for kind, text in masked_texts().items():
        constraint = constraint_of(kind, 30, 0)
        start = time.process_time()
        if "json_schema" in constraint:
            grammar = compiler.compile_json_schema(json.dumps(constraint["json_schema"]))
        else:
            regex = constraint.get("regex") or "|".join(constraint["choice"])
            grammar = compiler.compile_regex(regex)
        compiled_ms = (time.process_time() - start) * 1e3
        matcher, masks_ms = xgrammar.GrammarMatcher(grammar), []
        for token in tokenizer.convert_tokens_to_ids(list(text)):
            start = time.process_time()
            matcher.fill_next_token_bitmask(bits)
            masks_ms.append((time.process_time() - start) * 1e3)
            assert matcher.accept_token(token), f"{kind}: token {token} of {text!r}"
        found[kind] = {"compile_ms": compiled_ms, "masks_ms": masks_ms}
    print(json.dumps({"xgrammar": version("xgrammar"), "kinds": found}))


if __name__ == "__main__":
    main()
