"""The executor against hand-made plans."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest
import torch

from nano_inference.bus.control import Cancel
from nano_inference.bus.pooling import Pooling
from nano_inference.bus.steps import StepResult
from nano_inference.config import EngineConfig, ModelError, SamplingParams
from nano_inference.stages.executor import ExecutorCore, LoadedModel, wrap_model

from .models import VOCAB, make_model
from .plans import GREEDY, INFO, PROMPT, SAMPLED, Generation, Planner, new_sequence, step_plan

CONFIG = EngineConfig(block_size=4, kv_cache_bytes=1 << 20, max_batch_size=4)


@pytest.fixture
def core(model: LoadedModel) -> ExecutorCore:
    return ExecutorCore(CONFIG, model=model)


def generate(core: ExecutorCore, *generations: Generation, **options: Any) -> Planner:
    planner = Planner(core, **options)
    planner.run(generations)
    return planner


def alone(model: LoadedModel, sampling: SamplingParams, seed: int = 0) -> Generation:
    """Complete PROMPT on a core of its own, without chunks."""
    generation = Generation(1, PROMPT, sampling, seed=seed)
    generate(ExecutorCore(CONFIG, model=model), generation, chunk=64)
    return generation


def row(result: StepResult) -> tuple[int, float, str]:
    (token,), (logprob,), (reason,) = result.token_ids, result.logprobs, result.finish_reasons
    return token, logprob, reason


# --- results of a sequence --------------------------------------------------------------------


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_shared_prefills_sample_from_the_logits_of_the_row_before(
    model: LoadedModel, runs_ahead: bool
) -> None:
    """Each by its own parameters; the other rows of the step are as they were."""
    prompt = [*PROMPT, 61, 7]
    params = {
        1: SAMPLED,
        2: SAMPLED,
        3: GREEDY,
        4: msgspec.structs.replace(GREEDY, repetition_penalty=1.7, logprobs=2),
        5: SAMPLED,
    }
    core = ExecutorCore(CONFIG, model=model, runs_ahead=runs_ahead)
    core.execute(step_plan(new=(new_sequence(5, prompt[:6], range(16, 20), SAMPLED),), rows={5: 5}))
    leader = new_sequence(1, prompt, range(5), params[1], seed=1)
    tables = {2: (0, 1, 5, 6, 7), 3: (0, 1, 8, 9, 10), 4: (0, 1, 11, 12, 13)}
    forks = [
        new_sequence(each, prompt, table, params[each], num_cached=11, seed=each)
        for each, table in tables.items()
    ]
    plan = step_plan(new=(leader, *forks), rows={1: 11, 2: 0, 3: 0, 4: 0, 5: 1})
    made: dict[int, list[tuple[int, float]]] = {each: [] for each in params}
    parts: dict[str, Any] = {"copies": ((2, 5), (2, 8), (2, 11))}
    for _ in range(8):
        result = core.execute(plan)
        for place, seq_id in enumerate(result.seq_ids):
            made[seq_id].append((result.token_ids[place], result.logprobs[place]))
        plan = step_plan(rows=dict.fromkeys(params, 1), **parts)
        parts = {}
    for seq_id, sampling in params.items():
        tokens = prompt if seq_id < 5 else prompt[:6]
        alone = Generation(1, tokens, sampling, seed=seq_id if seq_id < 5 else 0)
        generate(ExecutorCore(CONFIG, model=model), alone, chunk=64)
        assert [token for token, _ in made[seq_id]] == alone.token_ids
        logprobs = [logprob for _, logprob in made[seq_id]]
        assert logprobs == pytest.approx(alone.logprobs, abs=1e-5)


# --- how it ends ------------------------------------------------------------------------------


def test_a_stop_token_ends_it_and_is_reported(model: LoadedModel) -> None:
    runs = {seed: alone(model, SAMPLED, seed) for seed in range(9)}
    seed, free = next((s, g) for s, g in runs.items() if g.token_ids[3] not in g.token_ids[:3])
    stop = free.token_ids[3]
    sampling = SamplingParams(temperature=1.0, max_tokens=4, stop_token_ids=frozenset({stop}))
    stopped = alone(model, sampling, seed)
    assert stopped.token_ids == free.token_ids[:4]
    assert stopped.reason == "stop", "it goes before the limit reached at the same token"
    assert free.reason == "length"


def test_rows_of_finished_sequences_are_dropped(core: ExecutorCore) -> None:
    once = SamplingParams(temperature=0.0, max_tokens=1)
    new = (new_sequence(1, PROMPT, range(5), once), new_sequence(2, PROMPT, range(5, 10), GREEDY))
    result = core.execute(step_plan(1, new=new, rows={1: 9, 2: 9}))
    assert result.finish_reasons == ("length", "")
    both = core.execute(step_plan(2, rows={1: 1, 2: 1}))
    assert both.seq_ids == (2,)
    only = core.execute(step_plan(3, rows={1: 1}))
    assert only.seq_ids == only.token_ids == only.logprobs == only.finish_reasons == ()
    last = core.execute(step_plan(4, finished=(1,), rows={2: 1}))
    assert last.seq_ids == (2,)


def test_the_models_length_ends_it(model: LoadedModel) -> None:
    core = ExecutorCore(CONFIG, model=model)
    generation = Generation(1, PROMPT * 7, SamplingParams(temperature=0.0, max_tokens=1000))
    generate(core, generation)
    assert len(generation.token_ids) == 64 - 63
    assert generation.reason == "length"


# --- the rest of a result ---------------------------------------------------------------------


def test_a_result_has_the_ids_of_its_plan(model: LoadedModel) -> None:
    clock = count(100)
    core = ExecutorCore(CONFIG, model=model, now_ns=lambda: next(clock))
    ended = (Cancel("r", "1-0", "cancelled", "cancelled", "bye"),)
    result = core.execute(step_plan(7, ended=ended))
    assert (result.step_id, result.ended, result.seq_ids) == (7, ended, ())
    assert (result.start_ns, result.end_ns, result.weight_version) == (100, 101, 0)
    new = (new_sequence(3, PROMPT, range(5), GREEDY),)
    started = core.execute(step_plan(8, new=new, rows={3: 9})).started
    assert [(s.seq_id, s.sample_index, s.num_cached) for s in started] == [(3, 0, 0)]
    assert (started[0].entry_id, started[0].executed_ns) == (INFO.entry_id, 102)


def test_results_keep_the_order_of_the_plan(core: ExecutorCore) -> None:
    lengths = {5: 3, 2: 9, 9: 1, 1: 6}
    new = tuple(
        new_sequence(seq_id, PROMPT[:length], range(8 * i, 8 * i + 4), GREEDY)
        for i, (seq_id, length) in enumerate(lengths.items())
    )
    result = core.execute(step_plan(new=new, rows=lengths))
    assert result.seq_ids == (5, 2, 9, 1)
    for new_one, token in zip(new, result.token_ids, strict=True):
        core.reset()
        single = core.execute(
            step_plan(new=(new_one,), rows={new_one.seq_id: len(new_one.token_ids)})
        )
        assert single.token_ids == (token,)


def test_capacity(core: ExecutorCore) -> None:
    capacity = core.capacity()
    per_block = 3 * 4 * 2 * (16 + 16) * 4
    assert capacity.num_blocks == min((1 << 20) // per_block, 4 * 16)
    assert (capacity.block_size, capacity.max_model_len) == (4, 64)
    assert (capacity.vocab_size, capacity.device) == (VOCAB, "cpu")
    assert capacity.max_batch_size == core.max_batch_size


def test_reset_forgets_the_sequences(core: ExecutorCore) -> None:
    new = (new_sequence(1, PROMPT, range(5), GREEDY),)
    first = row(core.execute(step_plan(new=new, rows={1: 9})))
    core.reset()
    with pytest.raises(ValueError, match="unknown"):
        core.execute(step_plan(rows={1: 1}))
    cached = (new_sequence(1, PROMPT, range(5), GREEDY, num_cached=8),)
    assert row(core.execute(step_plan(new=cached, rows={1: 1})))[0] == first[0], "the KV stays"


def test_more_sequences_than_rows(model: LoadedModel) -> None:
    """Those that ended wait to be forgotten, so there can be more than run."""
    core = ExecutorCore(CONFIG, model=model)
    once = SamplingParams(temperature=0.0, max_tokens=1)
    for seq_id in range(70):
        new = (new_sequence(seq_id, PROMPT, range(3), once),)
        result = core.execute(step_plan(new=new, rows={seq_id: 9}))
        assert result.finish_reasons == ("length",)
    assert core.execute(step_plan(rows=dict.fromkeys(range(70), 1))).seq_ids == ()


# --- contradictions ---------------------------------------------------------------------------


def test_plans_that_contradict_the_state_are_refused(core: ExecutorCore) -> None:
    with pytest.raises(ValueError, match="7, which is unknown"):
        core.execute(step_plan(rows={7: 1}))
    with pytest.raises(ValueError, match="7, which is unknown"):
        core.execute(step_plan(grown=((7, (1,)),)))
    new = (new_sequence(1, PROMPT, (0, 1), GREEDY),)
    with pytest.raises(ValueError, match="9 tokens of sequence 1"):
        core.execute(step_plan(new=new, rows={1: 9}))
    with pytest.raises(ValueError, match="already here"):
        core.execute(step_plan(new=new))
    with pytest.raises(ValueError, match="10 tokens of sequence 1"):
        core.execute(step_plan(grown=((1, (2, 3)),), rows={1: 10}))
    with pytest.raises(ValueError, match="0 tokens of sequence 1"):
        core.execute(step_plan(rows={1: 0}))
    with pytest.raises(ValueError, match="longest sequence"):
        core.execute(step_plan(grown=((1, tuple(range(17))),)))
    for bad in (
        new_sequence(2, PROMPT, (4, 5, 6), GREEDY, num_cached=10),
        new_sequence(3, PROMPT * 8, range(18), GREEDY),
        new_sequence(4, (), (), GREEDY),
    ):
        with pytest.raises(ValueError, match="of them cached; it needs one"):
            core.execute(step_plan(new=(bad,)))


@pytest.mark.parametrize(
    "rows",
    [{2: 0}, {2: 0, 1: 9}, {1: 8, 2: 0}, {1: 9, 3: 0}, {1: 9, 4: 0}, {5: 9, 2: 0}, {1: 9, 2: 1}],
    ids=[
        "alone",
        "before",
        "not-at-its-end",
        "shorter",
        "nothing-cached",
        "of-a-vector",
        "computes",
    ],
)
def test_a_shared_prefill_without_a_sampling_row_is_refused(
    core: ExecutorCore, rows: dict[int, int]
) -> None:
    pooled = msgspec.structs.replace(
        new_sequence(5, PROMPT, (9, 10, 11), GREEDY),
        info=msgspec.structs.replace(INFO, pooling=Pooling("last", normalize=False, dimensions=0)),
    )
    new = (
        new_sequence(1, PROMPT, (0, 1, 2), GREEDY),
        new_sequence(2, PROMPT, (0, 1, 3), GREEDY, num_cached=9),
        new_sequence(3, PROMPT[:8], (0, 1), GREEDY, num_cached=8),
        new_sequence(4, PROMPT, (6, 7, 8), GREEDY),
        pooled,
    )
    with pytest.raises(ValueError, match=r"of sequence [2-4], which has"):
        core.execute(step_plan(new=new, rows=rows))


def test_a_broken_model_is_an_error_and_no_token() -> None:
    module = make_model("qwen2")
    with torch.no_grad():
        module.model.norm.weight.fill_(float("nan"))
    core = ExecutorCore(CONFIG, model=wrap_model(module, 64))
    with pytest.raises(ModelError, match="not finite"):
        core.execute(step_plan(new=(new_sequence(1, PROMPT, range(5), GREEDY),), rows={1: 9}))


def test_a_cache_too_small_for_one_sequence_is_refused(model: LoadedModel) -> None:
    config = EngineConfig(block_size=4, kv_cache_bytes=20_000)
    with pytest.raises(ModelError, match=r"kv_cache_bytes.*max_model_len to at most 24"):
        ExecutorCore(config, model=model)
