"""Deterministic mode: its cores and its stages, arranged each way, on a model of one layer.

Of several layers, and of all architectures, stages/executor/test_deterministic.py shows it; here,
of the bundled model in bfloat16.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

from nano_inference import Completion, GenerateRequest, InferenceEngine, Pipeline
from nano_inference.bus.messages import (
    AdmittedRequest,
    NewSequence,
    Prompt,
    RequestInfo,
    SequenceSpec,
    StepPlan,
    StepResult,
)
from nano_inference.config import EngineConfig, SamplingParams, load_config
from nano_inference.stages.batching import BatchingCore
from nano_inference.stages.executor import ExecutorCore, LoadedModel, load_model

from . import short_model
from .builders import until
from .conftest import LIMIT_S
from .test_replicas import break_once, core_of, epoch_of, lanes_of

NUM_REQUESTS = 32
MOST_STEPS = 4_000
CONFIG = EngineConfig(
    model_path=str(short_model.folder()), dtype="float32", max_model_len=512, deterministic=True
)


@dataclass(frozen=True)
class Request:
    """A prompt and how it is sampled."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int


@dataclass
class Answer:
    """What a request gave; `bits` is what the tests compare."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def bits(self) -> tuple[tuple[int, ...], bytes]:
        return tuple(self.token_ids), struct.pack(f"{len(self.logprobs)}f", *self.logprobs)


@cache
def requests() -> tuple[Request, ...]:
    """Half of them behind one of two long beginnings; greedy, sampled, and limited ones."""
    rng = random.Random(11)
    beginnings = [[rng.randrange(5, 700) for _ in range(75)] for _ in range(2)]
    made = []
    for index in range(NUM_REQUESTS):
        prompt = [rng.randrange(5, 700) for _ in range(rng.choice([1, 2, 9, 30, 70]))]
        if index % 2:
            prompt = beginnings[index // 2 % 2][: rng.randrange(40, 76)] + prompt
        temperature = (0.0, 1.0, 0.8)[index % 3]
        limits: dict[str, Any] = {"top_p": 0.9, "top_k": 40} if index % 3 == 2 else {}
        sampling = SamplingParams(
            temperature=temperature, max_tokens=rng.choice([2, 8, 14]), ignore_eos=True, **limits
        )
        made.append(Request(tuple(prompt), sampling, seed=index))
    return tuple(made)


@cache
def model(dtype: str = "float32", length: int = 512) -> LoadedModel:
    path = "tiny" if dtype == "bfloat16" else CONFIG.model_path
    config = EngineConfig(model_path=path, dtype=dtype, max_model_len=length)  # type: ignore[arg-type]
    return load_model(config)


class Lane:
    """A batching core and an executor core; `run` completes requests, and the cache stays warm."""

    def __init__(self, *, dtype: str = "float32", steps_ahead: int = 1, **settings: Any) -> None:
        fields = {name: getattr(CONFIG, name) for name in CONFIG.__struct_fields__}
        config = EngineConfig(**{**fields, **settings})
        self.executor = ExecutorCore(config, model=model(dtype, config.max_model_len))
        self.batching = BatchingCore(config, self.executor.capacity(), steps_ahead=steps_ahead)
        self.started: dict[int, int] = {}
        self.cached_tokens = 0
        self.copies = 0
        self.part_rows = 0
        self._next_id = 0

    @property
    def preempted(self) -> int:
        """Sequences that had to start again."""
        return sum(self.started.values()) - len(self.started)

    def run(self, batch: Sequence[Request]) -> list[Answer]:
        answers = {self._add(request): Answer() for request in batch}
        under_way: deque[StepPlan] = deque()
        for _ in range(MOST_STEPS):
            while (plan := self.batching.plan(0)) is not None:
                self._count(plan)
                under_way.append(plan)
            if not under_way:
                self.batching.check()
                return list(answers.values())
            self._absorb(self.executor.execute(under_way.popleft()), answers)
        raise AssertionError("the lane does not come to rest")

    def _add(self, request: Request) -> int:
        self._next_id += 1
        name = f"r{self._next_id}"
        info = RequestInfo(name, name)
        spec = SequenceSpec(self._next_id, 0, seed=request.seed)
        prompt = Prompt(request.prompt)
        self.batching.add(AdmittedRequest(info, prompt, request.sampling, (spec,), "", 0))
        return self._next_id

    def _count(self, plan: StepPlan) -> None:
        for new in plan.new:
            self.started[new.seq_id] = self.started.get(new.seq_id, 0) + 1
            self.cached_tokens += new.num_cached
        self.copies += len(plan.copies)

    def _absorb(self, result: StepResult, answers: dict[int, Answer]) -> None:
        self.batching.absorb(result.summary())
        for seq_id, token, logprob in zip(
            result.seq_ids, result.token_ids, result.logprobs, strict=True
        ):
            answers[seq_id].token_ids.append(token)
            answers[seq_id].logprobs.append(logprob)


def bits(answers: Sequence[Answer]) -> list[tuple[tuple[int, ...], bytes]]:
    return [answer.bits for answer in answers]


@cache
def alone(dtype: str = "float32") -> list[tuple[tuple[int, ...], bytes]]:
    """Each request by itself, its prompt in one piece, nothing cached."""
    lane = Lane(dtype=dtype)
    answers = []
    for request in requests():
        answers += lane.run([request])
        lane.batching.cache.flush()
    assert lane.cached_tokens == 0
    return bits(answers)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "together": {},
    "one ahead": {"steps_ahead": 2, "max_batch_size": 24},
    "in chunks": {"max_tokens_per_batch": 24, "max_batch_size": 24},
    "paged, blocks of 16": {
        "cache_type": "paged",
        "max_tokens_per_batch": 100,
        "max_batch_size": 9,
    },
    "paged, blocks of 1": {"cache_type": "paged", "block_size": 1, "steps_ahead": 2},
    "radix, blocks of 1": {"block_size": 1, "max_tokens_per_batch": 64, "max_batch_size": 32},
    "radix, blocks of 48": {"block_size": 48},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_arrangements_agree_with_each_request_alone(name: str) -> None:
    lane = Lane(**ARRANGEMENTS[name])
    assert bits(lane.run(requests())) == alone()
    # A second time everything is in the cache, and the order is another.
    order = random.Random(name).sample(range(NUM_REQUESTS), NUM_REQUESTS)
    before = lane.cached_tokens
    again = lane.run([requests()[index] for index in order])
    assert bits(again) == [alone()[index] for index in order]
    assert lane.cached_tokens > before + 1_000
    assert lane.copies or lane.batching.limits.block_size == 1 or "paged" in name


@cache
def growing() -> tuple[list[Request], list[tuple[tuple[int, ...], bytes]]]:
    """Short prompts with long completions, which start together and then run out of blocks."""
    sampling = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)
    chosen = [
        Request(request.prompt[-9:], sampling, request.seed) for request in requests()[::2][:8]
    ]
    lane = Lane()
    return chosen, [answer.bits for request in chosen for answer in lane.run([request])]


@pytest.mark.slow
@pytest.mark.parametrize(("cache_type", "steps_ahead"), [("paged", 1), ("radix", 2)])
def test_preemption_changes_nothing(cache_type: str, steps_ahead: int) -> None:
    chosen, expected = growing()
    # 2 * 2 heads * 32 * 4 bytes: 512 bytes per token, hence 256 tokens in all.
    lane = Lane(
        cache_type=cache_type, steps_ahead=steps_ahead, kv_cache_bytes=512 * 256, max_model_len=256
    )
    assert lane.executor.capacity().num_blocks == 16
    assert bits(lane.run(chosen)) == expected
    assert lane.preempted


@pytest.mark.slow
def test_arrangements_agree_in_bfloat16() -> None:
    lane = Lane(dtype="bfloat16", max_tokens_per_batch=64, max_batch_size=32)
    assert bits(lane.run(requests())) == alone("bfloat16")
    assert alone("bfloat16") != alone()


@pytest.mark.slow
def test_two_threads_give_equal_bits() -> None:
    """Prompts so long that kernels share their work; other numbers of threads may round apart."""
    torch.set_num_threads(2)
    rng = random.Random(5)
    sampling = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True)
    long = [
        Request(tuple(rng.randrange(5, 700) for _ in range(length)), sampling, seed=length)
        for length in (300, 131, 450, 1)
    ]
    expected = [Lane().run([request])[0].bits for request in long]
    assert bits(Lane().run(long)) == expected
    assert bits(Lane(max_tokens_per_batch=97, max_batch_size=8).run(long[::-1])) == expected[::-1]


@pytest.mark.slow
def test_without_deterministic_mode_bits_differ() -> None:
    lane = Lane(deterministic=False, kernels="off")
    apart = [lane.run([request])[0].bits for request in requests()]
    lane.batching.cache.flush()
    together = bits(lane.run(requests()))
    assert together != apart


def test_the_engine_takes_the_setting() -> None:
    prompts = [list(request.prompt) for request in requests()[:8]]
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=8, logprobs=2, prompt_logprobs=1)
    with InferenceEngine(CONFIG) as engine:
        together = engine.generate(prompts, sampling)
        apart = [engine.generate([prompt], sampling)[0] for prompt in prompts]
    assert together == apart
    assert all(sample.top_logprobs and sample.prompt_logprobs for sample in together)


def told(completion: Completion) -> list[Any]:
    """All numbers that a client gets, by sample."""
    samples = [(s.token_ids, s.logprobs, s.top_logprobs) for s in completion.samples]
    return [samples, completion.prompt_logprobs, completion.prompt_top_logprobs]


@pytest.mark.slow
async def test_restarts_replays_and_replicas_change_nothing(
    monkeypatch: pytest.MonkeyPatch, resumed: list[NewSequence]
) -> None:
    """Both replicas work; an executor fails, all goes on elsewhere, then a batching stage fails."""
    wishes = [
        GenerateRequest(
            prompt_token_ids=request.prompt,
            sampling=SamplingParams(
                temperature=request.sampling.temperature,
                top_p=request.sampling.top_p,
                seed=request.seed,
                max_tokens=16,
                ignore_eos=True,
                logprobs=2,
                prompt_logprobs=1 if request.seed % 4 == 0 else None,
            ),
            n=1 + request.seed % 3,
        )
        for request in requests()[:8]
    ]
    engine = {name: getattr(CONFIG, name) for name in CONFIG.__struct_fields__}
    settings = {"pipeline.replicas": 1, "pipeline.restart_backoff_s": 0.01}
    settings |= {f"engine.{name}": value for name, value in engine.items()}
    async with asyncio.timeout(LIMIT_S), Pipeline(load_config(env={}, overrides=settings)) as alone:
        expected = [told(await alone.complete(wish)) for wish in wishes]
    settings["pipeline.replicas"] = 2
    config = load_config(env={}, overrides=settings)
    async with asyncio.timeout(LIMIT_S), Pipeline(config) as pipeline:
        await until(lambda: len(lanes_of(pipeline)) == 2)
        before = epoch_of(pipeline)
        break_once(monkeypatch, core_of(pipeline, "executor"), "execute", after=5)
        break_once(monkeypatch, core_of(pipeline, "batching.1"), "absorb", after=9)
        completions = await asyncio.gather(*map(pipeline.complete, wishes))
        assert epoch_of(pipeline) >= before + 2, "both have failed"
    assert [told(completion) for completion in completions] == expected
    assert len(resumed) > len(wishes), "most went on behind tokens that they had, some twice"
