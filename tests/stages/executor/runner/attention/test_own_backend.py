"""A new attention back end is one class with the contract's two methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore, KVCache, Rows
from nano_inference.stages.executor.runner.attention.backend import QKV, AttentionBackend
from nano_inference.stages.executor.runner.attention_options import AttentionOptions
from nano_inference.stages.executor.runner.model import wrap_model

from ...models import make_model
from ...plans import Generation, Planner


class ToyStep(NamedTuple):
    """The slots of each token, and of all tokens that it sees."""

    slots: Tensor
    seen: list[Tensor]


class ToyBackend:
    """Attends token by token, with a loop in Python."""

    name: ClassVar[str] = "toy"

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.steps = 0

    def prepare(self, rows: Rows, slots: Tensor, tables: Tensor, contexts: Tensor) -> ToyStep:
        self.steps += 1
        return ToyStep(slots, list(self._seen(rows, tables)))

    def _seen(self, rows: Rows, tables: Tensor) -> Iterator[Tensor]:
        for row, (start, count) in enumerate(zip(rows.starts, rows.num_tokens, strict=True)):
            for position in range(int(start), int(start + count)):
                before = torch.arange(position + 1)
                block = tables[row][before // self._block_size]
                yield block * self._block_size + before % self._block_size

    def forward(
        self, batch: ToyStep, cache: KVCache, layer: int, qkv: QKV, options: AttentionOptions
    ) -> Tensor:
        cache.store(layer, qkv.keys, qkv.values, batch.slots)
        heads, outputs = qkv.keys.shape[1], []
        for query, seen in zip(qkv.queries, batch.seen, strict=True):
            index = (seen[:, None] * heads + torch.arange(heads)).view(-1)
            keys, values = (part.view(len(seen), heads, -1) for part in cache.gather(layer, index))
            grouped = query.view(heads, -1, query.shape[-1])
            scores = torch.einsum("hgd,thd->hgt", grouped, keys) * options.scale
            output = torch.einsum("hgt,thd->hgd", scores.softmax(-1), values)
            outputs.append(output.reshape(query.shape[0], -1))
        return torch.stack(outputs)


def test_a_toy_back_end_runs_steps_with_the_same_tokens() -> None:
    config = EngineConfig(kv_cache_bytes=1 << 22, max_batch_size=4, dtype="float32", block_size=4)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [3, 2, 1]]
    found = []
    toy = ToyBackend(config.block_size)
    backends: list[AttentionBackend[ToyStep] | None] = [None, toy]
    for backend in backends:
        core = ExecutorCore(config, model=wrap_model(make_model("qwen2"), 64), backend=backend)
        greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        generations = [Generation(i, prompt, greedy) for i, prompt in enumerate(prompts)]
        Planner(core, chunk=4).run(generations)
        found.append([generation.token_ids for generation in generations])
        core.close()
    assert found[0] == found[1]
    assert all(len(tokens) == 6 for tokens in found[1])
    assert toy.steps >= 7, "prompts in parts, then five steps of one token"
