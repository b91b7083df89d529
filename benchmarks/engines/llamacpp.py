"""llama.cpp by its batch interface, on the file that `make_gguf.py` writes beside the model."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np
import worker
from llama_cpp.llama_grammar import json_schema_to_gbnf
from worker import Request, Times, Workload, serve

MOST_TOKENS, EOS = 2048, 1
CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


@llama.llama_log_callback
def silent(level: int, text: bytes, data: object) -> None:
    """Drop llama.cpp's logs."""


class LlamaCpp(worker.Engine):
    def __init__(self, folder: Path, shape: str, threads: int) -> None:
        llama.llama_log_set(silent, ctypes.c_void_p(0))
        llama.llama_backend_init()
        kind = worker.weight_format()
        file = folder.with_name(f"{folder.name}{kind and '-'}{kind}.gguf")
        self.threads = threads
        self.model = llama.llama_model_load_from_file(
            str(file).encode(), llama.llama_model_default_params()
        )
        if not self.model:
            raise SystemExit(f"can't load {file}; make it with benchmarks/engines/make_gguf.py")
        self.vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.batch = llama.llama_batch_init(MOST_TOKENS, 0, 1)
        self.random = np.random.default_rng(0)
        self.version = f"llama.cpp (llama-cpp-python {llama.__version__}) {kind or 'bf16'}"

    def can(self, workload: Workload) -> bool:
        return not workload.rate and not workload.common and not workload.text

    def run(self, workload: Workload, requests: list[Request]) -> Times:
        samples, new_tokens = workload.samples, requests[0].new_tokens
        count = len(requests) * samples
        length = len(requests[0].token_ids)
        context = self._context(count, (length + new_tokens) * count)
        memory = llama.llama_get_memory(context)
        marks = worker.Marks(workload, requests)
        grammars = [self._grammar(request) for request in requests for _ in range(samples)]
        rows = [
            (token, position, prompt * samples, position == length - 1)
            for prompt, request in enumerate(requests)
            for position, token in enumerate(request.token_ids)
        ]
        logits = self._decode(context, rows)
        for row in range(count):
            first = row // samples * samples
            if row != first:
                llama.llama_memory_seq_cp(memory, first, row, -1, -1)
        outputs = [
            [self._choose(workload, logits[row // samples], grammars[row])] for row in range(count)
        ]
        marks.add(count)
        for step in range(new_tokens - 1):
            going = [row for row in range(count) if outputs[row][-1] != EOS or not grammars[row]]
            if not going:
                break
            logits = self._decode(
                context, [(outputs[row][-1], length + step, row, True) for row in going]
            )
            for row, own in zip(going, logits, strict=True):
                outputs[row].append(self._choose(workload, own, grammars[row]))
            marks.add(count)
        for grammar in filter(None, grammars):
            llama.llama_sampler_free(grammar)
        llama.llama_free(context)
        return marks.times(outputs)

    def _context(self, sequences: int, tokens: int) -> object:
        settings = llama.llama_context_default_params()
        settings.n_ctx = tokens + 64 * sequences
        settings.n_batch, settings.n_ubatch = MOST_TOKENS, 512
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = self.threads
        settings.kv_unified = sequences > 1
        return llama.llama_init_from_model(self.model, settings)

    def _decode(self, context: object, rows: list[tuple[int, int, int, bool]]) -> list[np.ndarray]:
        """Compute tokens; return the logits of those for which they are wanted."""
        found = []
        for start in range(0, len(rows), MOST_TOKENS):
            part, batch = rows[start : start + MOST_TOKENS], self.batch
            batch.n_tokens = len(part)
            for place, (token, position, sequence, wanted) in enumerate(part):
                batch.token[place], batch.pos[place] = token, position
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
                batch.logits[place] = wanted
            if llama.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            llama.llama_synchronize(context)
            for place, (*_, wanted) in enumerate(part):
                if wanted:
                    logits = llama.llama_get_logits_ith(context, place)
                    found.append(np.ctypeslib.as_array(logits, shape=(self.vocab,)).copy())
        return found

    def _grammar(self, request: Request) -> Any:
        if not request.constraint:
            return None
        text = request.constraint.get("gbnf") or json_schema_to_gbnf(
            json.dumps(request.constraint["json_schema"])
        )
        vocab = llama.llama_model_get_vocab(self.model)
        return llama.llama_sampler_init_grammar(vocab, text.encode(), b"root")

    def _choose(self, workload: Workload, logits: np.ndarray, grammar: Any) -> int:
        """Return the next token, sampled by inverse transform.

        As llama.cpp's own programs, consult a grammar for all tokens only if the model's choice
        does not fit.
        """
        if workload.temperature:
            running = np.exp((logits - logits.max()) / workload.temperature).cumsum()
            return int(np.searchsorted(running, self.random.random() * running[-1]))
        token = int(logits.argmax())
        if grammar:
            allowed = self._under(grammar, np.array([token]), logits)
            if not np.isfinite(allowed[0]):
                token = int(self._under(grammar, np.arange(self.vocab), logits).argmax())
            llama.llama_sampler_accept(grammar, token)
        return token

    def _under(self, grammar: Any, tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """Return the tokens' logits, with minus infinity for those that the grammar forbids."""
        candidates = np.zeros(len(tokens), CANDIDATE)
        candidates["id"], candidates["logit"] = tokens, logits[tokens]
        data = candidates.ctypes.data_as(llama.llama_token_data_p)
        array = llama.llama_token_data_array(data, len(tokens), -1, False)
        llama.llama_sampler_apply(grammar, ctypes.byref(array))
        return candidates["logit"]


if __name__ == "__main__":
    serve(LlamaCpp)
