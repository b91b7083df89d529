"""KServe's models give the same answers as the pipeline's own interface."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from nano_inference import Completion, Pipeline
from nano_inference.config import RequestError
from nano_inference.gateway.api.kserve.service import InferenceService

from . import reference
from .conftest import config_maker
from .kserve import arrays, as_lists, infer_request, origin, service_of, stream

LENGTH = 256
# Deterministic, so that the bits do not depend on the batch.
SETTINGS: dict[str, Any] = {
    "engine__deterministic": True,
    "engine__max_model_len": LENGTH,
    "engine__reference_model_path": "tiny",
}
PROMPT = "Story about Emma, a dog and"
# By the names of vLLM, and in ours.
SAMPLED = {"temperature": 1.3, "seed": 5, "max_tokens": 12, "n": 3}
SAMPLING = {"temperature": 1.3, "seed": 5, "max_tokens": 12}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline(request: pytest.FixtureRequest) -> AsyncIterator[Pipeline]:
    """One whose weights have changed since its reference model was loaded."""
    request.param = "memory"
    async with Pipeline(config_maker(request)(**SETTINGS)) as running:
        weights = {name: each * 1.02 for name, each in reference.model().state_dict().items()}
        assert await running.client.update_weights(weights) == 1
        yield running


@pytest.fixture
def service(pipeline: Pipeline) -> InferenceService:
    return service_of(pipeline.client, pipeline.config)


def prompt_ids() -> list[int]:
    found: list[int] = reference.tokenizer().encode(PROMPT)
    return found


async def direct(pipeline: Pipeline, **fields: Any) -> Completion:
    body = {"prompt": PROMPT, "n": 3, "stream": False, "sampling": SAMPLING} | fields
    completion = await pipeline.complete(body)
    assert completion.status == "done", completion.error
    return completion


async def test_kserve_texts_equal_the_pipeline_s(
    pipeline: Pipeline, service: InferenceService
) -> None:
    wanted = await direct(pipeline)
    request = infer_request(
        "tiny",
        text_input=PROMPT,
        sampling_parameters=SAMPLED,
        return_finish_reason=True,
        return_cumulative_logprob=True,
        return_logprobs=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    response = await service.infer_once(origin(), request)
    assert (response.id, response.model_name) == ("mine", "tiny")
    found = as_lists(response)
    assert found["text_output"] == [PROMPT + each.text for each in wanted.samples]
    assert found["finish_reason"] == [each.finish_reason for each in wanted.samples]
    assert found["num_input_tokens"] == [len(prompt_ids())]
    assert found["num_output_tokens"] == [len(each.token_ids) for each in wanted.samples]
    sums = [sum(each.logprobs) for each in wanted.samples]
    assert found["cumulative_logprob"] == pytest.approx(sums)
    for text, sample in zip(found["logprobs"], wanted.samples, strict=True):
        places = json.loads(text)
        assert [list(place) for place in places] == [[str(each)] for each in sample.token_ids]
        flat = [entry["logprob"] for place in places for entry in place.values()]
        assert flat == list(sample.logprobs)


async def test_token_ids_output_has_logprobs_and_versions(
    pipeline: Pipeline, service: InferenceService
) -> None:
    """Rows are as long as the longest sample."""
    wanted = await direct(pipeline, sampling={**SAMPLING, "max_tokens": 60})
    request = infer_request(
        "tiny.tokens", input_ids=prompt_ids(), sampling_parameters=SAMPLED | {"max_tokens": 60}
    )
    found = arrays(await service.infer_once(origin(), request))
    lengths = [len(each.token_ids) for each in wanted.samples]
    assert len(set(lengths)) > 1, "some are padded"
    assert found["num_output_tokens"].tolist() == lengths
    assert found["output_ids"].shape == (3, max(lengths))
    for index, (sample, length) in enumerate(zip(wanted.samples, lengths, strict=True)):
        assert tuple(found["output_ids"][index, :length]) == sample.token_ids
        for name, values in (("logprobs", sample.logprobs), ("ref_logprobs", sample.ref_logprobs)):
            assert values is not None
            expected = np.array(values, np.float32)
            np.testing.assert_array_equal(found[name][index, :length], expected)
            assert not found[name][index, length:].any()
        assert set(found["weight_version"][index, :length]) == {1}
        assert set(found["output_ids"][index, length:]) <= {-1}
        assert set(found["weight_version"][index, length:]) <= {-1}
    assert not np.array_equal(found["logprobs"], found["ref_logprobs"])


async def test_kserve_scores_equal_the_pipeline_s(
    pipeline: Pipeline, service: InferenceService
) -> None:
    completion_ids = [21, 22, 40]
    (wanted,) = await pipeline.score([prompt_ids()], [completion_ids])
    request = infer_request("tiny.score", prompt_ids=prompt_ids(), completion_ids=completion_ids)
    found = arrays(await service.infer_once(origin(), request))
    assert found["logprobs"].tolist() == list(wanted.logprobs)
    assert wanted.ref_logprobs is not None
    assert found["ref_logprobs"].tolist() == list(wanted.ref_logprobs)
    assert found["weight_version"].tolist() == [wanted.weight_version] == [1]


async def test_best_of_returns_the_reference_model_s_likeliest(
    pipeline: Pipeline, service: InferenceService
) -> None:
    sampled = (await direct(pipeline)).samples
    token_ids = [each.token_ids for each in sampled]
    scored = await pipeline.score([prompt_ids()] * 3, token_ids)
    means = [np.float32(np.mean(np.float32(each.ref_logprobs))) for each in scored]
    sampling = {name: value for name, value in SAMPLED.items() if name != "n"}
    request = infer_request(
        "tiny.best_of", input_ids=prompt_ids(), best_of=3, sampling_parameters=sampling
    )
    found = arrays(await service.infer_once(origin(), request))
    assert found["scores"].tolist() == means
    best = int(np.argmax(means))
    assert tuple(found["output_ids"]) == token_ids[best]
    assert tuple(found["logprobs"]) == sampled[best].logprobs
    assert found["score"] == max(means)
    assert len(set(means)) == 3


async def test_streams_equal_the_answers(pipeline: Pipeline, service: InferenceService) -> None:
    wanted = await direct(pipeline)
    asked_texts = infer_request(
        "tiny",
        text_input=PROMPT,
        stream=True,
        sampling_parameters=SAMPLED,
        outputs=["text_output", "finish_reason", "num_input_tokens", "num_output_tokens"],
    )
    asked_tokens = infer_request(
        "tiny.tokens", input_ids=prompt_ids(), stream=True, sampling_parameters=SAMPLED
    )
    texts = [as_lists(each) for each in await stream(service, asked_texts)]
    tokens = [as_lists(each) for each in await stream(service, asked_tokens)]
    assert len(texts) > 1
    assert len(tokens) > 1
    for index, sample in enumerate(wanted.samples):
        assert "".join(each["text_output"][index] for each in texts) == sample.text
        reasons = [each["finish_reason"][index] for each in texts]
        ended = reasons.index(sample.finish_reason)
        assert set(reasons[:ended]) <= {"None"}
        assert set(reasons[ended:]) == {sample.finish_reason}
        assert sum(each["num_output_tokens"][index] for each in texts) == len(sample.token_ids)
        parts = [each["output_ids"][index][: each["num_output_tokens"][index]] for each in tokens]
        assert tuple(chain.from_iterable(parts)) == sample.token_ids
    assert all(each["num_input_tokens"] == [len(prompt_ids())] for each in texts)


async def test_statistics_and_times_are_counted(service: InferenceService) -> None:
    request = infer_request("tiny", text_input=PROMPT)
    with pytest.raises(RequestError):
        await service.infer_once(origin(), infer_request("tiny", text_input=""))
    await service.infer_once(origin(), request)
    found = service.statistics.model("tiny").stats
    assert (found["success"]["count"], found["fail"]["count"]) == (1, 1)
    assert 0 < found["compute_infer"]["ns"] < found["success"]["ns"]
    assert found["queue"]["ns"] + found["compute_infer"]["ns"] == found["success"]["ns"]
    assert await service.trouble("tiny.score") == ""
