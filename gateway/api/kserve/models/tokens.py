"""`M.tokens`: token ids for token ids; `M.score`: logprobs of given tokens."""

from __future__ import annotations

from collections.abc import Sequence

from .....kserve.tensors import ModelSpec, TensorSpec
from .....pipeline.scoring import params_to_score, scored_completion, token_ids_to_score
from ....server.http import EngineError
from ....serving.submissions import ENDED_EARLY
from ..served import Answer, ModelCall
from .backend import (
    EngineBackend,
    SampleDelta,
    finish_reasons,
    numbers,
    rows,
    token_counts,
    whole_samples,
)
from .inputs import SAMPLING, STREAM, Sampling, flag_of, read_sampling, token_ids_of

INPUT_IDS = TensorSpec("input_ids", "INT64", (-1,))
OUTPUT_IDS = "output_ids"
LOGPROBS = "logprobs"
REF_LOGPROBS = "ref_logprobs"
FINISH_REASON = "finish_reason"
WEIGHT_VERSION = "weight_version"

NO_TOKEN = -1
"""Pads the ids and weight versions of samples that are shorter than the longest."""


class TokensModel:
    """Continues token ids.

    Of several responses each has the new piece of all samples; a single one has everything, and the
    reference model's logprobs if there is one. Outputs of two dimensions are `[samples, longest]`;
    `num_output_tokens` gives the length of each row.
    """

    def __init__(self, backend: EngineBackend) -> None:
        self.spec = ModelSpec(
            name=f"{backend.name}.tokens",
            inputs=(INPUT_IDS, SAMPLING, STREAM),
            outputs=(
                TensorSpec(OUTPUT_IDS, "INT64", (-1, -1)),
                TensorSpec("num_output_tokens", "UINT32", (-1,)),
                TensorSpec(LOGPROBS, "FP32", (-1, -1)),
                TensorSpec(REF_LOGPROBS, "FP32", (-1, -1)),
                TensorSpec(FINISH_REASON, "BYTES", (-1,)),
                TensorSpec(WEIGHT_VERSION, "INT64", (-1, -1)),
            ),
            decoupled=True,
            allowed_as=backend.name,
        )
        self.trouble = backend.trouble
        self._backend = backend

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        backend = self._backend
        sampling = read_sampling(call.request, backend.max_samples)
        prompt = token_ids_of(call.request, INPUT_IDS.name, await backend.max_model_len())
        stream = call.many and bool(flag_of(call.request, STREAM.name))
        request = await backend.request(call, prompt, sampling, stream=stream)

        async def send(deltas: Sequence[SampleDelta]) -> None:
            versions = [each.weight_versions for each in deltas]
            made = [
                rows(OUTPUT_IDS, "INT64", [each.token_ids for each in deltas], NO_TOKEN),
                token_counts(deltas),
                rows(LOGPROBS, "FP32", [each.logprobs for each in deltas], 0),
                finish_reasons(deltas),
                rows(WEIGHT_VERSION, "INT64", versions, NO_TOKEN),
            ]
            ref = [each.ref_logprobs for each in deltas if each.ref_logprobs is not None]
            if len(ref) == len(deltas):
                made.append(rows(REF_LOGPROBS, "FP32", ref, 0))
            await answer(made)

        if stream:
            await backend.stream(call, request, send)
        else:
            await send(whole_samples(await backend.complete(call, request), request.n))


class ScoreModel:
    """Returns the logprobs of a completion's tokens behind a prompt.

    Of the sampling parameters only the temperature counts. The reference model's logprobs are
    returned if there is one.
    """

    prompt_ids = TensorSpec("prompt_ids", "INT64", (-1,))
    completion_ids = TensorSpec("completion_ids", "INT64", (-1,))

    def __init__(self, backend: EngineBackend) -> None:
        self.spec = ModelSpec(
            name=f"{backend.name}.score",
            inputs=(self.prompt_ids, self.completion_ids, SAMPLING),
            outputs=(
                TensorSpec(LOGPROBS, "FP32", (-1,)),
                TensorSpec(REF_LOGPROBS, "FP32", (-1,)),
                TensorSpec(WEIGHT_VERSION, "INT64", (1,)),
            ),
            allowed_as=backend.name,
        )
        self.trouble = backend.trouble
        self._backend = backend

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        backend = self._backend
        given = read_sampling(call.request, 1, tops=True)
        most = await backend.max_model_len()
        prompt, completion_ids = (
            token_ids_of(call.request, spec.name, most)
            for spec in (self.prompt_ids, self.completion_ids)
        )
        token_ids_to_score([prompt], [completion_ids])
        (params,) = params_to_score(given.params, 1)
        request = await backend.request(call, (*prompt, *completion_ids), Sampling(1, params))
        completion = await backend.complete(call, request)
        if completion.prompt_logprobs is None:
            raise EngineError(ENDED_EARLY.message, code=ENDED_EARLY.code)
        scored = scored_completion(completion, len(completion_ids))
        outputs = [
            numbers(LOGPROBS, "FP32", scored.logprobs),
            numbers(WEIGHT_VERSION, "INT64", [scored.weight_version]),
        ]
        if scored.ref_logprobs is not None:
            outputs.append(numbers(REF_LOGPROBS, "FP32", scored.ref_logprobs))
        await answer(outputs)
