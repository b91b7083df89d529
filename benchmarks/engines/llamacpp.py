"""llama.cpp by its batch interface, on the file that `make_gguf.py` writes beside the model."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import llama_cpp as llama
import numpy as np
import worker
from worker import Request, Times, Workload, serve

MOST_SEQUENCES, MOST_TOKENS = 32, 2048


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
        return not workload.rate and not workload.common

    def run(self, workload: Workload, requests: list[Request]) -> Times:
        samples, new_tokens = workload.samples, requests[0].new_tokens
        count = len(requests) * samples
        length = len(requests[0].token_ids)
        context = self._context(count, (length + new_tokens) * count)
        memory = llama.llama_get_memory(context)
        marks = []
        start = time.perf_counter()
        rows = [
            (token, position, prompt * samples, position == length - 1)
            for prompt, request in enumerate(requests)
            for position, token in enumerate(request.token_ids)
        ]
        self._decode(context, rows)
        last = [(prompt + 1) * length - 1 for prompt in range(len(requests))]
        logits = [self._logits(context, place) for place in last]
        for row in range(count):
            first = row // samples * samples
            if row != first:
                llama.llama_memory_seq_cp(memory, first, row, -1, -1)
        tokens = [self._choose(workload, logits[row // samples]) for row in range(count)]
        marks.append(time.perf_counter())
        for step in range(new_tokens - 1):
            rows = [(token, length + step, row, True) for row, token in enumerate(tokens)]
            self._decode(context, rows)
            tokens = [self._choose(workload, self._logits(context, row)) for row in range(count)]
            marks.append(time.perf_counter())
        llama.llama_free(context)
        return Times(
            total_s=marks[-1] - start,
            prefill_s=marks[0] - start,
            steps_s=worker.rest_of(marks),
            tokens=count * new_tokens,
        )

    def _context(self, sequences: int, tokens: int) -> object:
        settings = llama.llama_context_default_params()
        settings.n_ctx = tokens + 64 * sequences
        settings.n_batch, settings.n_ubatch = MOST_TOKENS, 512
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = self.threads
        settings.kv_unified = sequences > 1
        return llama.llama_init_from_model(self.model, settings)

    def _decode(self, context: object, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self.batch
        batch.n_tokens = len(rows)
        for place, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
            batch.logits[place] = wanted
        if llama.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        llama.llama_synchronize(context)

    def _logits(self, context: object, place: int) -> np.ndarray:
        return np.ctypeslib.as_array(
            llama.llama_get_logits_ith(context, place), shape=(self.vocab,)
        ).copy()

    def _choose(self, workload: Workload, logits: np.ndarray) -> int:
        """Return the next token, sampled by inverse transform."""
        if not workload.temperature:
            return int(logits.argmax())
        running = np.exp((logits - logits.max()) / workload.temperature).cumsum()
        return int(np.searchsorted(running, self.random.random() * running[-1]))


if __name__ == "__main__":
    serve(LlamaCpp)
