"""KServe's models give the same answers as the pipeline's own interface."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from nano_inference import Pipeline
from nano_inference.gateway.api.kserve.service import InferenceService

from . import reference
from .conftest import config_maker
from .kserve import a_call, arrays, infer_request, service_of

LENGTH = 256
# Deterministic, so that the bits do not depend on the batch.
SETTINGS: dict[str, Any] = {
    "engine__deterministic": True,
    "engine__max_model_len": LENGTH,
    "engine__reference_model_path": "tiny",
}
PROMPT = "Story about Emma, a dog and"
SAMPLING = {
    "temperature": 1.3,
    "seed": 5,
    "max_tokens": 60,
    "top_p": 0.95,
    "return_sampling_mask": True,
}

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


async def test_token_ids_output_has_logprobs_and_versions(
    pipeline: Pipeline, service: InferenceService
) -> None:
    """Rows are as long as the longest sample."""
    wanted = await pipeline.complete({"prompt": PROMPT, "n": 3, "sampling": SAMPLING})
    assert wanted.status == "done", wanted.error
    request = infer_request(
        "tiny.tokens", input_ids=prompt_ids(), sampling_parameters=SAMPLING | {"n": 3}
    )
    found = arrays(await service.infer_once(a_call(), request))
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
        assert sample.support_logprobs is not None
        supports = np.array(sample.support_logprobs, np.float32)
        np.testing.assert_array_equal(found["support_logprobs"][index, :length], supports)
        sizes = found["sampling_mask_sizes"][index, :length].tolist()
        ids = found["sampling_mask"][index, : sum(sizes)].astype("<i4").tobytes()
        assert ids == b"".join(sample.sampling_masks or ())
        assert sizes == [len(mask) // 4 for mask in sample.sampling_masks or ()]
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
    found = arrays(await service.infer_once(a_call(), request))
    assert found["logprobs"].tolist() == list(wanted.logprobs)
    assert wanted.ref_logprobs is not None
    assert found["ref_logprobs"].tolist() == list(wanted.ref_logprobs)
    assert found["weight_version"].tolist() == [wanted.weight_version] == [1]
