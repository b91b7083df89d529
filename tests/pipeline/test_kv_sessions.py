"""Sessions through the interfaces of a client: requests, calls, and what their answers say."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference import EngineConfig, InferenceEngine, Pipeline, SamplingParams
from nano_inference.bus.public import Completion, KVSession, KVSessionResult
from nano_inference.config import RequestError

from . import short_model
from .builders import asking, end_of, error_code
from .conftest import both_buses

SHORT_MODEL = True
GREEDY = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True)
SMALL = {"max_model_len": 256, "max_batch_size": 4, "kv_cache_bytes": 400_000}
PROMPT = [40 + i % 60 for i in range(64)]
OTHERS = [[41 + (i * n) % 70 for i in range(200)] for n in range(2, 8)]


def engine(**settings: Any) -> InferenceEngine:
    folder = str(short_model.folder())
    return InferenceEngine(EngineConfig(model_path=folder, dtype="float32", **SMALL | settings))


def turn(made: InferenceEngine, prompt: list[int], **session: Any) -> list[int]:
    wish = KVSession(id="agent", **session)
    (sample,) = made.generate([prompt], GREEDY, kv_sessions=[wish])
    assert sample.kv_session is not None
    assert sample.kv_session.outcome == "accepted"
    return [*prompt, *sample.completion_tokens]


def cached(made: InferenceEngine) -> int:
    return made._batching.take_counters().cached


@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_turns_of_a_session_give_the_same_tokens_and_find_their_kv(cache_type: str) -> None:
    with engine(cache_type=cache_type) as made:
        first = turn(made, PROMPT)
        made.generate(OTHERS, GREEDY)
        cached(made)
        second = turn(made, first)
        assert cached(made) == 80
        assert made.kv_session("agent", "release").num_tokens == 96
        made.generate(OTHERS, GREEDY)
        cached(made)
        assert made.kv_session("agent", "pin").outcome == "missing"
    with engine() as made:
        (plain,) = made.generate([PROMPT], GREEDY)
        assert first == [*PROMPT, *plain.completion_tokens]
        (plain,) = made.generate([first], GREEDY)
        assert second == [*first, *plain.completion_tokens]


def test_calls_and_fields_of_the_engine_are_checked() -> None:
    with engine() as made:
        with pytest.raises(RequestError, match="pin, release, demote, prefetch") as refused:
            made.kv_session("agent", "keep")  # type: ignore[arg-type]
        assert refused.value.code == "invalid_kv_session"
        for wrong in (KVSession(id="a", after="keep"), KVSession(id=""), "a"):  # type: ignore[arg-type]
            with pytest.raises(RequestError) as refused:
                made.generate([PROMPT], GREEDY, kv_sessions=[wrong])  # type: ignore[list-item]
            assert refused.value.code == "invalid_kv_session"
        with pytest.raises(RequestError, match="one sample"):
            made.generate([PROMPT], GREEDY, 2, kv_sessions=[KVSession(id="a")])
        with pytest.raises(RequestError, match="1 prompts and 2 kv_sessions"):
            made.generate([PROMPT], GREEDY, kv_sessions=[None, None])
        assert made.kv_session("a", "pin").outcome == "missing"


def session(id: str = "agent", **fields: Any) -> dict[str, Any]:
    given = asking(prompt_token_ids=PROMPT, tokens=17, kv_session={"id": id, **fields})
    del given["prompt"]
    return given


async def answer(pipeline: Pipeline, request: dict[str, Any]) -> Completion:
    return await end_of(pipeline.submit(request))


def what(result: KVSessionResult | None) -> tuple[str, int]:
    assert result is not None
    return result.outcome, result.num_tokens


@both_buses()
async def test_the_completion_and_the_call_report_the_session(pipeline: Pipeline) -> None:
    completion = await answer(pipeline, session())
    assert what(completion.kv_session) == ("accepted", 80)
    assert what(await pipeline.client.kv_session("agent", "release")) == ("accepted", 80)
    assert what(await pipeline.client.kv_session("agent", "prefetch", ttl_s=9)) == ("accepted", 80)
    assert what(await pipeline.client.kv_session("agent", "demote")) == ("accepted", 80)
    assert what(await pipeline.client.kv_session("agent", "pin", tenant="other")) == ("missing", 0)
    assert what(await pipeline.client.kv_session("agent", "pin", ttl_s=1e9)) == ("rejected", 0)
    await pipeline.client.flush_cache()
    assert what(await pipeline.client.kv_session("agent", "prefetch")) == ("missing", 0)
    plain = await answer(pipeline, asking())
    assert plain.kv_session is None
    refused = await answer(pipeline, session("\n"))
    assert error_code(refused) == "invalid_kv_session"
