"""llama.cpp's server as xllamacpp packages it; for kv_conversations.py."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import xllamacpp
from turns import Turn, serve


def start(options: dict[str, Any]) -> tuple[str, Callable[[list[int], int], Turn]]:
    settings = xllamacpp.CommonParams()
    settings.model.path = options["folder"] + ".gguf"
    # Each slot keeps the KV of one conversation.
    settings.n_parallel = options["device_tokens"] // options["longest"]
    settings.n_ctx = settings.n_parallel * options["longest"]
    settings.cache_ram_mib = options["cache_ram_mib"]
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = options["threads"]
    settings.verbosity = 0
    server = xllamacpp.Server(settings)
    # The server closes idle connections, sometimes while the next request is sent.
    limits = httpx.Limits(max_keepalive_connections=0)
    client = httpx.Client(timeout=120, limits=limits)

    def complete(prompt: list[int], tokens: int) -> Turn:
        body = {
            "prompt": prompt,
            "n_predict": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": True,
            "return_tokens": True,
            "stream": True,
        }
        began, first_s, made = time.perf_counter(), 0.0, list[int]()
        # It ends when nothing refers to it any more.
        url = f"{server.listening_address}/completion"
        with client.stream("POST", url, json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    first_s = first_s or time.perf_counter() - began
                    event = json.loads(line.removeprefix("data: "))
                    made += event["tokens"] if not event["stop"] else []
        return Turn(first_s, time.perf_counter() - began, made)

    return f"llama-server (xllamacpp {xllamacpp.__version__})", complete


if __name__ == "__main__":
    serve(start)
