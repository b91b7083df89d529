"""What gpu.py runs: our batching and executor without the rest, and Transformers."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig
from workloads import Request, Workload

from nano_inference.bus.messages import Dispatch, RequestInfo, SequenceSpec
from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.batching import BatchingCore
from nano_inference.stages.executor import ExecutorCore, wrap_model
from nano_inference.stages.executor.driver.step import LaunchedStep

MAX_MODEL_LEN = 2048


@dataclass
class Outcome:
    """One run of a workload: seconds since its start, by sequence, and of decode steps."""

    seconds: float = 0.0
    first_s: dict[int, float] = field(default_factory=dict)
    last_s: dict[int, float] = field(default_factory=dict)
    arrival_s: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    steps_s: list[float] = field(default_factory=list)


class Ours:
    """Batching and executor, with one step launched ahead of the one that is read."""

    def __init__(self, module: Any, *, graphs: bool = True, max_batch_size: int = 256) -> None:
        self.config = EngineConfig(
            max_batch_size=max_batch_size,
            max_tokens_per_batch=8192,
            max_model_len=MAX_MODEL_LEN,
            cuda_graphs="auto" if graphs else "off",
        )
        started = time.perf_counter()
        self.core = ExecutorCore(self.config, model=wrap_model(module, MAX_MODEL_LEN))
        self.start_s = time.perf_counter() - started

    def run(self, requests: list[Request], workload: Workload) -> Outcome:
        self.core.reset()
        ahead = 2 if self.core.runs_ahead else 1
        batching = BatchingCore(self.config, self.core.capacity(), steps_ahead=ahead)
        waiting, launched = deque(enumerate(requests)), deque[LaunchedStep]()
        outcome, start, before = Outcome(), time.perf_counter(), 0.0
        while waiting or not batching.idle:
            now = time.perf_counter() - start
            while waiting and waiting[0][1].arrival_s <= now:
                self._add(batching, *waiting.popleft(), workload, outcome)
            while (plan := batching.plan(0)) is not None:
                launched.append(self.core.launch(plan))
            if not launched:
                if waiting:
                    time.sleep(max(waiting[0][1].arrival_s - now, 0.0))
                continue
            step = launched.popleft()
            result = self.core.finish(step)
            batching.absorb(result.summary())
            now = time.perf_counter() - start
            for seq_id, token, logprob in zip(
                result.seq_ids, result.token_ids, result.logprobs, strict=True
            ):
                outcome.first_s.setdefault(seq_id, now)
                outcome.last_s[seq_id] = now
                outcome.tokens[seq_id].append(token)
                outcome.logprobs[seq_id].append(logprob)
            if set(step.plan.num_tokens) == {1}:
                outcome.steps_s.append(now - before)
            before = now
        outcome.seconds = time.perf_counter() - start
        return outcome

    def _add(
        self,
        batching: BatchingCore,
        index: int,
        request: Request,
        workload: Workload,
        outcome: Outcome,
    ) -> None:
        ids = range(index * workload.samples, (index + 1) * workload.samples)
        name = f"r{index}"
        info = RequestInfo(name, name)
        sampling = SamplingParams(
            temperature=workload.temperature, max_tokens=request.new_tokens, ignore_eos=True
        )
        specs = tuple(SequenceSpec(each, each - ids[0], seed=each) for each in ids)
        for each in ids:
            outcome.tokens[each], outcome.logprobs[each] = [], []
            outcome.arrival_s[each] = request.arrival_s
        batching.add(Dispatch(info, tuple(request.token_ids), sampling, specs, priority=0))


def generate(
    model: Any, requests: list[Request], workload: Workload, new_tokens: int = 0
) -> list[list[int]]:
    """Transformers' `generate` on prompts of one length; the new tokens of each sequence."""
    ids = torch.tensor([request.token_ids for request in requests], device=model.device)
    count = new_tokens or requests[0].new_tokens
    sampling: dict[str, Any] = {"do_sample": False}
    if workload.temperature:
        sampling = {"do_sample": True, "temperature": workload.temperature, "top_k": 0}
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        num_return_sequences=workload.samples,
        pad_token_id=0,
        **sampling,
    )
    return output[:, ids.shape[1] :].tolist()


def generate_batch(model: Any, requests: list[Request], workload: Workload) -> None:
    """Transformers' continuous batching."""
    config = GenerationConfig(
        max_new_tokens=requests[0].new_tokens,
        do_sample=workload.temperature > 0,
        top_k=0 if workload.temperature else None,
        num_return_sequences=workload.samples,
        eos_token_id=-1,
        pad_token_id=0,
    )
    output = model.generate_batch(
        [request.token_ids for request in requests], generation_config=config
    )
    made = sum(len(each.generated_tokens) for each in output.values())
    assert made == len(requests) * workload.samples * requests[0].new_tokens, made
