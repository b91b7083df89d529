"""The cost of one step, in counts that are the same on every machine.

Seconds would tell more and say nothing on a busy machine. Bytecode instructions of our own Python
code, torch's operations and calls of kernels are what we write, and what a careless change adds to.
Who makes the hot path shorter lowers the bounds.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.bus.control import ReplicaCapacity
from nano_inference.bus.messages import AdmittedRequest, Prompt, RequestInfo, SequenceSpec
from nano_inference.bus.public import GenerateRequest
from nano_inference.bus.steps import StepPlan, StepResult
from nano_inference.config import load_config
from nano_inference.pipeline import pipeline as pipeline_module
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.stages.batching import BatchingCore
from nano_inference.stages.executor import fingerprint
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.executor.runner.kernels import cpu
from nano_inference.stages.executor.runner.kernels.compile import KernelsUnavailable
from nano_inference.stages.executor.runner.model import wrap_model

from ..instructions import counted, instructions
from ..soaking import in_soak
from ..stages.executor.models import make_model
from ..stages.executor.plans import new_sequence, step_plan
from ..stages.executor.refusals import needs_kernels
from .builders import asking

STEPS = 16
"""One for each place in a block, so that a block's cost is shared among its tokens."""

INSTRUCTIONS_PER_SEQUENCE = 320
INSTRUCTIONS_PER_STEP = 4_500
BATCHING_PER_SEQUENCE = 200
BATCHING_256_OVER_16 = 14
ADMISSION_PER_REQUEST = 2_400
TEXT_OF_A_TOKEN, STREAMING_A_TOKEN = 180, 530
"""In the pipeline, from the step's result to the client: at the end alone, and as it comes."""
KERNELS_PER_LAYER, KERNELS_PER_STEP = 9, 4
OPERATIONS_PER_LAYER, OPERATIONS_PER_STEP = 60, 50


def decode_steps(number: int) -> Counter[str]:
    """Return instructions per step of so many decoding sequences."""
    with InferenceEngine(EngineConfig(max_batch_size=64)) as engine:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        for sequence in range(number):
            engine.add_request([300 + sequence, 40, 41, 42], params)
        for _ in range(4):
            engine.step()
        counts = instructions(lambda: [engine.step() for _ in range(STEPS)])
    return Counter({name: count // STEPS for name, count in counts.items()})


def test_instructions_per_sequence_and_step() -> None:
    needs_kernels(torch.float32)
    few, many = decode_steps(4), decode_steps(60)
    growth = {name: (many[name] - few[name]) / 56 for name in many}
    per_sequence = sum(growth.values())
    fixed = sum(few.values()) - 4 * per_sequence
    found = sorted(growth.items(), key=lambda item: -item[1])[:6]
    assert 100 < per_sequence < INSTRUCTIONS_PER_SEQUENCE, found
    assert 1_000 < fixed < INSTRUCTIONS_PER_STEP, few.most_common(6)
    batching = sum(value for name, value in growth.items() if "/batching/" in name)
    assert 20 < batching < BATCHING_PER_SEQUENCE, found


def batching_steps(number: int, cache_type: Literal["paged", "radix"]) -> float:
    """Return batching's part of `decode_steps`; in each step another sixteenth fills a block."""
    config = EngineConfig(
        max_tokens_per_batch=2 * STEPS * number, block_size=STEPS, cache_type=cache_type
    )
    capacity = ReplicaCapacity(8 * number, STEPS, 4096, 50, "none", max_batch_size=number)
    core = BatchingCore(config, capacity)
    for seq_id in range(number):
        prompt = Prompt((seq_id,) * (1 + seq_id % STEPS))
        info = RequestInfo(f"r{seq_id}", "e")
        specs = (SequenceSpec(seq_id, 0, 0),)
        core.add(AdmittedRequest(info, prompt, SamplingParams(), specs, "", 0))
    plans: deque[StepPlan] = deque()

    def step() -> None:
        while (plan := core.plan(0)) is not None:
            plans.append(plan)
        core.absorb(sampled(plans.popleft()).summary())
        core.take_report()

    for _ in range(4):
        step()
    counts = instructions(lambda: [step() for _ in range(STEPS)])
    assert {len(plan.seq_ids) for plan in plans} == {number}, "all decode in every step"
    return counts.total() / STEPS


def sampled(plan: StepPlan) -> StepResult:
    """A result in which every row samples and goes on."""
    rows = len(plan.seq_ids)
    tokens, logprobs, reasons = range(rows), (0.0,) * rows, ("",) * rows
    return StepResult(plan.step_id, (), plan.seq_ids, tuple(tokens), logprobs, reasons, (), 0, 0, 0)


@pytest.mark.parametrize("cache_type", [in_soak("paged"), "radix"])
def test_batching_hardly_grows_with_the_batch(cache_type: Literal["paged", "radix"]) -> None:
    few, many = batching_steps(16, cache_type), batching_steps(256, cache_type)
    assert few > 100
    assert many < BATCHING_256_OVER_16 * few
    assert (many - few) / 240 < BATCHING_PER_SEQUENCE


async def admit(pipeline: Pipeline, requests: int) -> int:
    """Instructions of admission for so many requests at once, from the queue to the last word."""
    asked = [asking(f"{number} and", 4) for number in range(requests)]
    with counted() as counts:
        done = await asyncio.gather(*map(pipeline.complete, asked))
    assert {completion.status for completion in done} == {"done"}
    return sum(number for name, number in counts.items() if name.startswith("/stages/admission/"))


async def test_admission_of_a_request() -> None:
    async with Pipeline(load_config(env={}, overrides={"engine.dtype": "float32"})) as pipeline:
        await admit(pipeline, 2)
        few, many = await admit(pipeline, 8), await admit(pipeline, 40)
    assert 1_000 < (many - few) / 32 < ADMISSION_PER_REQUEST


async def deliver(pipeline: Pipeline, tokens: int, *, stream: bool) -> int:
    """Instructions between a step's result and the client, for eight requests of so many tokens."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)

    async def one(number: int) -> int:
        prompt = f"{number} and"
        request = GenerateRequest(prompt=prompt, sampling=sampling, stream=stream)
        outputs = [output async for output in pipeline.client.submit(request)]
        return len(outputs)

    with counted() as counts:
        lengths = await asyncio.gather(*map(one, range(8)))
    assert set(lengths) == {tokens + 1 if stream else 1}
    in_memory = "/bus/memory/results.py", "/bus/memory/broadcast.py"
    ours = "/stages/streaming/", "/stages/detokenizer.py", *in_memory, "/pipeline/"
    return sum(number for name, number in counts.items() if name.startswith(ours))


@pytest.mark.parametrize(
    ("stream", "most"), [(False, TEXT_OF_A_TOKEN), (True, STREAMING_A_TOKEN)], ids=["end", "stream"]
)
async def test_a_token_on_its_way_to_the_client(
    stream: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Reports are made once a second, so on a busy machine more often in as many steps.
    monkeypatch.setattr(pipeline_module, "BEAT_S", 3600.0)
    async with Pipeline(load_config(env={}, overrides={"engine.dtype": "float32"})) as pipeline:
        await deliver(pipeline, 4, stream=stream)
        short, long = [await deliver(pipeline, tokens, stream=stream) for tokens in (8, 40)]
    assert 50 < (long - short) / (8 * 32) < most


class CountedLibrary:
    """The kernels, counted."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.calls: Counter[str] = Counter()
        self._libraries = (cpu.library(dtype), cpu.sampling_library())

    def __getattr__(self, name: str) -> Callable[..., object]:
        where = self._libraries[not hasattr(self._libraries[0], name)]
        function = getattr(where, name)

        def call(*args: Any) -> object:
            self.calls[name] += 1
            return function(*args)

        return call


class CountedOperations(TorchDispatchMode):
    """Torch's operations, counted."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def count_in_step(
    library: CountedLibrary,
    layers: int,
    prompts: int,
    decodes: int,
    attention: Literal["auto", "gather"] = "auto",
) -> tuple[Counter[str], int]:
    """Calls of kernels, and operations, in a step of so many rows of two tokens and of one."""
    model = make_model("qwen2", head_dim=32, num_hidden_layers=layers, layer_types=None)
    loaded = wrap_model(model.to(library.dtype), 256)
    core = ExecutorCore(EngineConfig(max_model_len=256, attention=attention), model=loaded)
    sampling = SamplingParams(temperature=0, max_tokens=9)
    new = tuple(new_sequence(i, [5 + i, 6, 7], [i], sampling) for i in range(prompts + decodes))
    first = {i: 1 if i < prompts else 3 for i in range(prompts + decodes)}
    core.execute(step_plan(1, new=new, rows=first))
    library.calls.clear()
    with CountedOperations() as operations:
        core.execute(step_plan(2, rows={i: 2 if i < prompts else 1 for i in first}))
    return library.calls.copy(), operations.number


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CountedLibrary:
    try:
        counted = CountedLibrary(request.param)
    except KernelsUnavailable as error:
        pytest.skip(f"no kernels on this machine: {error}")
    monkeypatch.setattr(cpu, "library", lambda dtype: counted)
    monkeypatch.setattr(cpu, "sampling_library", lambda: counted)
    monkeypatch.setattr(fingerprint, "code_of", lambda model: "counted")
    return counted


@pytest.mark.parametrize("rows", [in_soak(1), 3, in_soak(40)])
def test_a_decode_step_runs_all_layers_in_one_call(rows: int, library: CountedLibrary) -> None:
    (few, operations), more = (count_in_step(library, layers, 0, rows) for layers in (2, 6))
    assert few["decoder_layers"] == 1
    assert few.total() <= KERNELS_PER_STEP
    assert 0 < operations <= OPERATIONS_PER_STEP
    assert more == (few, operations)


def test_a_step_with_a_prompt_runs_all_layers_in_one_call(library: CountedLibrary) -> None:
    (few, operations), more = (count_in_step(library, layers, 1, 3) for layers in (2, 6))
    assert few["decoder_layers"] == 1
    assert 0 < operations <= OPERATIONS_PER_STEP
    assert more == (few, operations)


def test_kernels_and_operations_per_layer_of_a_model_that_gathers(library: CountedLibrary) -> None:
    (few, at_two), (more, at_six) = (
        count_in_step(library, layers, 1, 3, "gather") for layers in (2, 6)
    )
    assert few["decoder_layers"] == 0
    assert 5 <= (more.total() - few.total()) / 4 <= KERNELS_PER_LAYER
    assert 0 < (at_six - at_two) / 4 <= OPERATIONS_PER_LAYER


def test_a_step_of_single_tokens_runs_no_python_for_each_layer(library: CountedLibrary) -> None:
    counts = []
    for layers in (2, 6):
        model = make_model("qwen2", head_dim=32, num_hidden_layers=layers, layer_types=None)
        loaded = wrap_model(model.to(library.dtype), 256)
        core = ExecutorCore(EngineConfig(max_model_len=256), model=loaded)
        sampling = SamplingParams(temperature=0, max_tokens=9)
        core.execute(step_plan(1, new=(new_sequence(0, [5, 6], [0], sampling),), rows={0: 2}))
        counts.append(instructions(lambda core=core: core.execute(step_plan(2, rows={0: 1}))))
    assert counts[0].total() > 1_000
    assert counts[1] == counts[0], "looking for the weights included"
