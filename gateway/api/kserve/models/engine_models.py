"""Models that call the engine once: `M`, `M.tokens`, `M.score` and `M.embed`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import ClassVar

import msgspec
import numpy as np

from .....bus.public import Completion, EmbedParams, GenerateRequest, mask_ids
from .....bus.routed_experts import experts_of_sample
from .....bus.targets import target_array
from .....config import Int64, PoolingKind, RequestError
from .....kserve.tensors import NamedTensor, TensorError, TensorSpec
from .....pipeline.engine_requests import params_to_score, token_ids_to_score
from .....pipeline.scoring import scored_completion
from ....server.http import EngineError
from ....serving.embedding import EmbedCall, Prompt, embed_all
from ....serving.fields import RefusedField, read_part
from ....serving.logprobs import TokenNames, logprobs_by_id
from ....serving.message_parts import records_of
from ....serving.request_ids import new_id
from ....serving.sampling_fields import VLLM, SamplingBody
from ....serving.submissions import ENDED_EARLY
from ..served import Answer, ModelCall
from .backend import (
    IMAGES,
    SAMPLING,
    STREAM,
    EngineModel,
    SampleDelta,
    cache_salt_of,
    finish_reasons,
    flag_of,
    numbers,
    priority_of,
    read_sampling,
    rows,
    sampling_body,
    sampling_place,
    text_of,
    texts,
    texts_of,
    token_counts,
    token_ids_of,
    whole_samples,
)

INPUT_IDS = TensorSpec("input_ids", "INT64", (-1,))
OUTPUT_IDS = "output_ids"
LOGPROBS = "logprobs"
REF_LOGPROBS = "ref_logprobs"
SUPPORT_LOGPROBS = "support_logprobs"
SAMPLING_MASK, SAMPLING_MASK_SIZES = "sampling_mask", "sampling_mask_sizes"
TARGET_LOGPROBS = "target_logprobs"
ROUTED_EXPERTS = "routed_experts"
FINISH_REASON = "finish_reason"
WEIGHT_VERSION = "weight_version"

NO_TOKEN = -1
"""Pads the ids and weight versions of samples that are shorter than the longest."""

TEXT_INPUT = "text_input"
EXCLUDE_INPUT = "exclude_input_in_output"

_OPTIONAL = (
    TensorSpec("finish_reason", "BYTES", (-1,)),
    TensorSpec("cumulative_logprob", "FP32", (-1,)),
    TensorSpec("logprobs", "BYTES", (-1,)),
    TensorSpec("num_input_tokens", "UINT32", (1,)),
    TensorSpec("num_output_tokens", "UINT32", (-1,)),
)
"""Outputs that are made if an input `return_X` says so, or else if they are requested by name."""


class TextModel(EngineModel):
    """Continues a text, with the tensors of vLLM's backend of Triton.

    Of several responses each has the new piece of all samples; a single one has everything.
    """

    inputs = (
        *(TensorSpec(TEXT_INPUT, "BYTES", (1,)), IMAGES, SAMPLING, STREAM),
        TensorSpec(EXCLUDE_INPUT, "BOOL", (1,), optional=True),
        *(TensorSpec(f"return_{each.name}", "BOOL", (1,), optional=True) for each in _OPTIONAL),
    )
    outputs = (TensorSpec("text_output", "BYTES", (-1,)), *_OPTIONAL)
    decoupled = True

    async def _token_ids(self, text: str, request: GenerateRequest) -> tuple[int, ...]:
        tokenizer = self._services.tokenizer
        if not request.images:
            return await tokenizer.token_ids(text)
        return await self._services.images.expand(
            tokenizer, text, request.images, request.tenant, add_special=True
        )

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        tokenizer = self._services.tokenizer
        sampling = read_sampling(call.request, self._max_samples, text=True, tops=True)
        text = text_of(call.request, TEXT_INPUT) or ""
        stream = bool(flag_of(call.request, STREAM.name))
        exclude = flag_of(call.request, EXCLUDE_INPUT)
        if stream and exclude is False:
            raise RequestError(
                f"{EXCLUDE_INPUT} is false and {STREAM.name} true; only a whole text can begin "
                "with the prompt, so leave one of them out"
            )
        before = "" if (stream if exclude is None else exclude) else text
        named = {each.name for each in call.request.outputs}
        flags = {each.name: flag_of(call.request, f"return_{each.name}") for each in _OPTIONAL}
        wanted = {name for name, flag in flags.items() if (name in named if flag is None else flag)}
        stream = stream and call.many
        # The size is checked before anything is computed.
        images = await self._images(call)
        request = await self._request(call, text, sampling, stream=stream, images=images)
        names = None
        if LOGPROBS in wanted:
            names = TokenNames(await tokenizer.required(), as_ids=False)
        input_tokens = 0
        if stream and "num_input_tokens" in wanted:
            # The engine reports it with the end, but the first response needs it.
            (await tokenizer.required()).check_fits(text, await self._services.length.get())
            token_ids = await self._token_ids(text, request)
            input_tokens = len(token_ids)
            request = msgspec.structs.replace(request, prompt=None, prompt_token_ids=token_ids)
        cumulative = [0.0] * request.n

        def write(deltas: Sequence[SampleDelta]) -> list[NamedTensor]:
            for index, delta in enumerate(deltas):
                cumulative[index] += sum(delta.logprobs)
            made = [
                finish_reasons(deltas),
                numbers("cumulative_logprob", "FP32", cumulative),
                numbers("num_input_tokens", "UINT32", [input_tokens]),
                token_counts(deltas),
            ]
            if names is not None:
                made.append(texts(LOGPROBS, [_logprobs(delta, names) for delta in deltas]))
            output = texts("text_output", [before + delta.text for delta in deltas])
            return [output, *(each for each in made if each.name in wanted)]

        async def send(deltas: Sequence[SampleDelta]) -> None:
            tokens = sum(len(each.token_ids) + sum(map(len, each.tops)) for each in deltas)
            listed = 0 if names is None else tokens
            await answer(await tokenizer.process(listed, partial(write, deltas)))

        if stream:
            await self._stream(call, request, send)
            return
        completion = await self._complete(call, request, before)
        input_tokens = completion.usage.prompt_tokens
        await send(whole_samples(completion, request.n))


class TokensModel(EngineModel):
    """Continues token ids.

    Of several responses each has the new piece of all samples; a single one has everything, and the
    reference model's logprobs if there is one. Outputs of two dimensions are `[samples, longest]`;
    `num_output_tokens` gives the length of each row.
    """

    suffix = ".tokens"
    inputs = (INPUT_IDS, IMAGES, SAMPLING, STREAM)
    outputs = (
        TensorSpec(OUTPUT_IDS, "INT64", (-1, -1)),
        TensorSpec("num_output_tokens", "UINT32", (-1,)),
        TensorSpec(LOGPROBS, "FP32", (-1, -1)),
        TensorSpec(REF_LOGPROBS, "FP32", (-1, -1)),
        TensorSpec(SUPPORT_LOGPROBS, "FP32", (-1, -1)),
        TensorSpec(SAMPLING_MASK, "INT32", (-1, -1)),
        TensorSpec(SAMPLING_MASK_SIZES, "INT64", (-1, -1)),
        TensorSpec(FINISH_REASON, "BYTES", (-1,)),
        TensorSpec(WEIGHT_VERSION, "INT64", (-1, -1)),
        TensorSpec(ROUTED_EXPERTS, "INT32", (-1, -1, -1, -1)),
    )
    decoupled = True

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        sampling = read_sampling(call.request, self._max_samples, masks=True, experts=True)
        prompt = token_ids_of(call.request, INPUT_IDS.name, await self._services.length.get())
        stream = call.many and bool(flag_of(call.request, STREAM.name))
        images = await self._images(call)
        request = await self._request(call, prompt, sampling, stream=stream, images=images)

        async def send(deltas: Sequence[SampleDelta], experts: Sequence[NamedTensor] = ()) -> None:
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
            if sampling[1].is_limited:
                supports = [each.columns.get("support_logprobs", ()) for each in deltas]
                made.append(rows(SUPPORT_LOGPROBS, "FP32", supports, 0))
            if sampling[1].return_sampling_mask:
                made += _masks([each.columns.get("sampling_masks", ()) for each in deltas])
            await answer([*made, *experts])

        if stream:
            await self._stream(call, request, send)
        else:
            completion = await self._complete(call, request)
            await send(whole_samples(completion, request.n), _experts(completion))


def _masks(samples: Sequence[Sequence[bytes]]) -> Iterator[NamedTensor]:
    """Yield the ids of all masks of each sample, and the number of ids of each mask."""
    masks = [[mask_ids(mask) for mask in sample] for sample in samples]
    flat = [[*chain.from_iterable(sample)] for sample in masks]
    yield rows(SAMPLING_MASK, "INT32", flat, NO_TOKEN)
    yield rows(SAMPLING_MASK_SIZES, "INT64", [[*map(len, each)] for each in masks], NO_TOKEN)


class ScoreModel(EngineModel):
    """Returns the logprobs of a completion's tokens after a prompt, and of targets at their
    positions: a row of ids for each token, in which -1 asks for nothing.

    Of the sampling parameters only the temperature counts. The reference model's logprobs are
    returned if there is one.
    """

    prompt_ids = TensorSpec("prompt_ids", "INT64", (-1,))
    completion_ids = TensorSpec("completion_ids", "INT64", (-1,))
    target_ids = TensorSpec("target_ids", "INT64", (-1, -1), optional=True)
    suffix = ".score"
    inputs = (prompt_ids, completion_ids, target_ids, SAMPLING)
    outputs = (
        TensorSpec(LOGPROBS, "FP32", (-1,)),
        TensorSpec(TARGET_LOGPROBS, "FP32", (-1, -1)),
        TensorSpec(REF_LOGPROBS, "FP32", (-1,)),
        TensorSpec(WEIGHT_VERSION, "INT64", (1,)),
    )

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        _, sampling = read_sampling(call.request, 1, tops=True)
        most = await self._services.length.get()
        prompt, completion_ids = (
            token_ids_of(call.request, spec.name, most)
            for spec in (self.prompt_ids, self.completion_ids)
        )
        token_ids_to_score([prompt], [completion_ids])
        (params,) = params_to_score(sampling, [prompt])
        targets = self._targets(call, len(completion_ids))
        if targets is not None:
            params = msgspec.structs.replace(params, prompt_logprob_token_ids=targets)
        request = await self._request(call, (*prompt, *completion_ids), (1, params))
        completion = await self._complete(call, request)
        if completion.prompt_logprobs is None:
            raise EngineError(ENDED_EARLY.message, code=ENDED_EARLY.code)
        found = scored_completion(completion, len(completion_ids))
        outputs = [
            numbers(LOGPROBS, "FP32", found.logprobs),
            numbers(WEIGHT_VERSION, "INT64", [found.weight_version]),
        ]
        if (scored := completion.prompt_token_id_logprobs) is not None and targets is not None:
            outputs.append(NamedTensor(TARGET_LOGPROBS, target_array(targets, scored)))
        if found.ref_logprobs is not None:
            outputs.append(numbers(REF_LOGPROBS, "FP32", found.ref_logprobs))
        await answer(outputs)

    def _targets(self, call: ModelCall, num_tokens: int) -> tuple[tuple[int, ...], ...] | None:
        """Return the targets at each token of the completion; None if there are none."""
        if (given := call.request.input(self.target_ids.name)) is None:
            return None
        if given.shape[0] != num_tokens:
            raise TensorError(
                f"{self.target_ids.name} has {given.shape[0]} rows for {num_tokens} tokens in "
                f"{self.completion_ids.name}; give one for each"
            )
        return tuple(map(tuple, given.tolist()))


def _experts(completion: Completion) -> list[NamedTensor]:
    """Return the routed experts `[samples, longest - 1, layers, top_k]`, -1 after a sample's end;
    none if they were not requested."""
    found = [experts_of_sample(completion, each) for each in completion.samples]
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found):
        return []
    data = np.full((len(known), max(map(len, known)), *known[0].shape[1:]), -1, np.int32)
    for row, each in zip(data, known, strict=True):
        row[: len(each)] = each
    return [NamedTensor(ROUTED_EXPERTS, data)]


def _logprobs(delta: SampleDelta, names: TokenNames) -> str:
    """Return JSON: for each token an object of the likeliest tokens and itself, by their ids."""
    tokens = records_of(delta.token_ids, delta.logprobs, delta.tops or None)
    return msgspec.json.encode(logprobs_by_id(tokens, names)).decode()


# --- embeddings -----------------------------------------------------------------------------------

EMBED_TEXT = TensorSpec("text_input", "BYTES", (-1,), optional=True)
EMBED_IDS = TensorSpec("input_ids", "INT64", (-1,), optional=True)


class EmbedBody(msgspec.Struct, frozen=True):
    """Parameters of embeddings."""

    REFUSED: ClassVar = dict.fromkeys(
        (*SamplingBody.__struct_fields__, *VLLM), RefusedField("nothing is sampled")
    )

    pooling: PoolingKind | None = None
    normalize: bool | None = None
    dimensions: Int64 | None = None


class EmbedModel(EngineModel):
    """Returns the vectors `[texts, dimensions]` of texts, or of the tokens of one prompt."""

    suffix = ".embed"
    inputs = (EMBED_TEXT, EMBED_IDS, SAMPLING)
    outputs = (
        TensorSpec("embedding", "FP32", (-1, -1)),
        TensorSpec("num_input_tokens", "UINT32", (-1,)),
        TensorSpec("weight_version", "INT64", (-1,)),
    )

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        wanted = EmbedCall(
            id=new_id("kserve-"),
            params=_read_params(call),
            priority=priority_of(call.request),
            cache_salt=cache_salt_of(call.request),
        )
        prompts = await self._prompts(call)
        embedded = await embed_all(self._services, call.call, wanted, prompts)
        await answer(
            [
                rows("embedding", "FP32", [each.vector for each in embedded], 0),
                numbers("num_input_tokens", "UINT32", [each.prompt_tokens for each in embedded]),
                numbers("weight_version", "INT64", [each.weight_version for each in embedded]),
            ]
        )

    async def _prompts(self, call: ModelCall) -> list[Prompt]:
        given = call.request.input(EMBED_TEXT.name)
        if (given is None) == (call.request.input(EMBED_IDS.name) is None):
            raise TensorError(f"give one of {EMBED_TEXT.name} and {EMBED_IDS.name}")
        if given is None:
            longest = await self._services.length.get()
            return [token_ids_of(call.request, EMBED_IDS.name, longest)]
        most = self._max_samples
        if not 0 < given.size <= most:
            raise RequestError(
                f"{EMBED_TEXT.name} has {given.size} texts; give from 1 to {most} "
                "(gateway.max_prompts)",
                code="too_many_prompts" if given.size else "empty_prompt",
            )
        return [*(texts_of(call.request, EMBED_TEXT.name) or ())]


def _read_params(call: ModelCall) -> EmbedParams:
    """Return the pooling of a request's prompts.

    Raises:
        RequestError: A parameter is unknown, or has the wrong type.
    """
    found = read_part(sampling_body(call.request), EmbedBody, sampling_place(call.request))
    return EmbedParams(
        pooling=found.pooling or "", normalize=found.normalize, dimensions=found.dimensions
    )
