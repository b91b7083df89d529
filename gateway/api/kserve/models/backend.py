"""Access to the engine for its KServe models, and the samples and tensors of its results."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import anyio.lowlevel
import msgspec
import numpy as np

from .....bus.public import (
    Completion,
    CompletionChunk,
    CompletionSample,
    EmbedParams,
    FinishReason,
    GenerateRequest,
    Output,
    TokenLogprob,
)
from .....config import Config
from .....kserve.tensors import DTYPES, Datatype, NamedTensor, text_tensor
from .....pipeline.embedding import EmbeddedPrompt
from ....serving.embedding import EmbedCall, Prompt, embed_all
from ....serving.readiness import Readiness
from ....serving.samples import Unsent, complete_sample, stream_unsent
from ....serving.submissions import Submissions
from ....serving.words import LazyWords
from ..served import ModelCall
from .inputs import Sampling, cache_salt_of, priority_of


class SampleDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The next piece of a sample: `[k]` tokens, and the text that is certain by now.

    Attributes:
        weight_versions: `[k]`, of the weights that made each token.
        tops: `[k]`, the likeliest tokens at each place; empty if not requested.
        finish_reason: None while the sample goes on.
        ref_logprobs: `[k]`, by the reference model; None without one, or not yet.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    weight_versions: tuple[int, ...] = ()
    tops: tuple[tuple[TokenLogprob, ...], ...] = ()
    finish_reason: FinishReason | None = None
    ref_logprobs: tuple[float, ...] | None = None


_PER_TOKEN = ("token_ids", "logprobs", "weight_versions", "tops")


def whole_samples(completion: Completion, n: int) -> list[SampleDelta]:
    """Return the samples of a completed request. One that never began has no tokens."""
    samples = {each.sample_index: each for each in completion.samples}
    return [
        _whole(samples[index]) if index in samples else SampleDelta(finish_reason="abort")
        for index in range(n)
    ]


class UnsentDeltas(Unsent):
    """Results of a request that were not sent yet, joined to one delta for each sample."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self._waiting: list[list[SampleDelta]] = [[] for _ in range(n)]
        self._characters = [0] * n
        self._tokens = [0] * n
        self._ended: list[FinishReason | None] = [None] * n

    def put(self, output: Output) -> None:
        if isinstance(output, CompletionChunk):
            self._add(output.sample_index, _of_chunk(output))
            return
        for index, sample in enumerate(whole_samples(output, len(self._ended))):
            first = self._tokens[index]
            rest = {name: getattr(sample, name)[first:] for name in _PER_TOKEN}
            text = sample.text[self._characters[index] :]
            self._add(index, SampleDelta(text=text, finish_reason=sample.finish_reason, **rest))

    def _add(self, index: int, delta: SampleDelta) -> None:
        ends = delta.finish_reason is not None and self._ended[index] is None
        if not (delta.text or delta.token_ids or ends):
            return
        self._characters[index] += len(delta.text)
        self._tokens[index] += len(delta.token_ids)
        self._ended[index] = self._ended[index] or delta.finish_reason
        self._waiting[index].append(delta)
        self._came(len(delta.token_ids))

    async def send_all(self, take: Callable[[Sequence[SampleDelta]], Awaitable[None]]) -> None:
        """Pass on a delta of each sample until it is closed and nothing is left."""
        while any(self._waiting) or not self._closed:
            if not any(self._waiting):
                await self._change()
                continue
            deltas = [
                msgspec.structs.replace(_joined(waiting), finish_reason=ended)
                for waiting, ended in zip(self._waiting, self._ended, strict=True)
            ]
            self._waiting = [[] for _ in self._waiting]
            self._taken()
            await take(deltas)
            # The transport accepts what fits its buffers without a pause.
            await anyio.lowlevel.checkpoint()


class EngineBackend:
    """The engine, as its KServe models call it.

    Attributes:
        name: Of the engine's model.
        words: Its tokenizer.
        max_samples: Of one request.
        most_at_once: The most samples of one prompt, and the setting that limits them.
        max_model_len: Returns the most tokens of prompt and completion together.
        trouble: As `ServedModel.trouble`.
    """

    def __init__(
        self, submissions: Submissions, config: Config, words: LazyWords, readiness: Readiness
    ) -> None:
        self.name = config.engine.model_name
        self.words = words
        self.max_samples = config.gateway.max_prompts
        self.most_at_once = min(
            (config.gateway.max_prompts, "gateway.max_prompts"),
            (config.admission.max_samples, "admission.max_samples"),
        )
        self.max_model_len = submissions.length.get
        self.trouble = readiness.trouble
        self._submissions = submissions

    async def request(
        self, call: ModelCall, prompt: Prompt, sampling: Sampling, *, stream: bool = False
    ) -> GenerateRequest:
        """Return the engine request of a call.

        Raises:
            RequestError: A parameter has the wrong type, or the request is too large.
        """
        request = GenerateRequest(
            request_id=_new_id(),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else prompt,
            n=sampling.n,
            sampling=sampling.params,
            stream=stream,
            priority=priority_of(call.request),
            tenant=call.origin.tenant,
            cache_salt=cache_salt_of(call.request),
        )
        self._submissions.check_priority(call.origin.caller, request)
        self._submissions.check_size(request, await self.max_model_len())
        self._submissions.check_encoded(request)
        return request

    async def complete(
        self, call: ModelCall, request: GenerateRequest, before: str = ""
    ) -> Completion:
        """Run a request, and return its completion.

        Args:
            before: The part of the prompt that the response shows before each sample.

        Raises:
            NanoInferenceError: The engine failed it.
        """
        completion = await complete_sample(self._submissions, call.origin, request, before=before)
        _record_compute(call, completion)
        return completion

    async def stream(
        self,
        call: ModelCall,
        request: GenerateRequest,
        take: Callable[[Sequence[SampleDelta]], Awaitable[None]],
    ) -> None:
        """Run a request, and pass on its samples as fast as they are taken.

        Raises:
            NanoInferenceError: The engine failed it. Everything before was passed on.
        """
        deltas = UnsentDeltas(request.n)
        completion = await stream_unsent(
            self._submissions, call.origin, request, deltas, partial(deltas.send_all, take)
        )
        _record_compute(call, completion)

    async def embed(
        self, call: ModelCall, prompts: Sequence[Prompt], params: EmbedParams
    ) -> list[EmbeddedPrompt]:
        """Return the vectors of prompts, in order.

        Raises:
            RequestError: A parameter has the wrong type, or a prompt is refused.
            NanoInferenceError: The engine failed it.
        """
        wanted = EmbedCall(
            id=_new_id(),
            params=params,
            priority=priority_of(call.request),
            cache_salt=cache_salt_of(call.request),
        )
        return await embed_all(self._submissions, call.origin, wanted, prompts)


def _new_id() -> str:
    # Clients may use the same id for several requests.
    return f"kserve-{uuid.uuid4().hex}"


def _record_compute(call: ModelCall, completion: Completion) -> None:
    # Both times are of the executor's clock.
    timings = completion.timings
    if (executor := timings.of("executor")) is not None:
        call.computed(timings.finished_ns - executor.start_ns)


def _whole(sample: CompletionSample) -> SampleDelta:
    spans = sample.weight_versions or ((sample.weight_version, 0),)
    ends = [*(first for _, first in spans[1:]), len(sample.token_ids)]
    versions = chain.from_iterable(
        (version,) * (end - first) for (version, first), end in zip(spans, ends, strict=True)
    )
    return SampleDelta(
        text=sample.text,
        token_ids=sample.token_ids,
        logprobs=sample.logprobs,
        weight_versions=tuple(versions),
        tops=sample.top_logprobs or (),
        finish_reason=sample.finish_reason,
        ref_logprobs=sample.ref_logprobs,
    )


def _of_chunk(chunk: CompletionChunk) -> SampleDelta:
    return SampleDelta(
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=chunk.logprobs,
        weight_versions=(chunk.weight_version,) * len(chunk.token_ids),
        tops=chunk.top_logprobs or (),
        finish_reason=chunk.finish_reason,
    )


def _joined(deltas: Sequence[SampleDelta]) -> SampleDelta:
    if len(deltas) == 1:
        return deltas[0]
    joined: dict[str, Any] = {
        name: tuple(chain.from_iterable(getattr(delta, name) for delta in deltas))
        for name in _PER_TOKEN
    }
    return SampleDelta(text="".join(delta.text for delta in deltas), **joined)


# --- tensors --------------------------------------------------------------------------------------


def texts(name: str, found: Sequence[str]) -> NamedTensor:
    """Return texts as BYTES `[len(found)]`."""
    # The tokenizer makes broken Unicode of broken bytes.
    return text_tensor(name, *(text.encode(errors="replace") for text in found))


def numbers(name: str, datatype: Datatype, found: Sequence[float]) -> NamedTensor:
    """Return numbers as `[len(found)]`."""
    return NamedTensor(name, np.array(found, DTYPES[datatype]))


def rows(
    name: str, datatype: Datatype, found: Sequence[Sequence[float]], padding: float
) -> NamedTensor:
    """Return a row for each sample, padded at its end: `[len(found), longest]`."""
    data = np.full((len(found), max(map(len, found))), padding, DTYPES[datatype])
    for row, values in zip(data, found, strict=True):
        row[: len(values)] = values
    return NamedTensor(name, data)


def finish_reasons(deltas: Sequence[SampleDelta]) -> NamedTensor:
    """Return BYTES `[samples]`; "None" for one that goes on, as vLLM's backend of Triton has it."""
    return texts("finish_reason", [str(delta.finish_reason) for delta in deltas])


def token_counts(deltas: Sequence[SampleDelta]) -> NamedTensor:
    """Return the tokens of each delta: UINT32 `[samples]`."""
    return numbers("num_output_tokens", "UINT32", [len(delta.token_ids) for delta in deltas])
