"""`M`: text for text, with the tensors of vLLM's backend of Triton."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from .....config import RequestError
from .....kserve.tensors import InferRequest, ModelSpec, NamedTensor, TensorSpec
from ....serving.logprobs import TokenNames, logprobs_by_id, scored
from ..served import Answer, ModelCall
from .backend import (
    EngineBackend,
    SampleDelta,
    finish_reasons,
    numbers,
    texts,
    token_counts,
    whole_samples,
)
from .inputs import SAMPLING, STREAM, flag_of, read_sampling, text_of

TEXT_INPUT = "text_input"
EXCLUDE_INPUT = "exclude_input_in_output"

_OPTIONAL_OUTPUTS = (
    TensorSpec("finish_reason", "BYTES", (-1,)),
    TensorSpec("cumulative_logprob", "FP32", (-1,)),
    TensorSpec("logprobs", "BYTES", (-1,)),
    TensorSpec("num_input_tokens", "UINT32", (1,)),
    TensorSpec("num_output_tokens", "UINT32", (-1,)),
)
"""Outputs that are made if an input `return_X` says so, or else if they are requested by name."""

# Up to this many logprobs, the likeliest tokens' included, are written at once; more take a thread.
_FEW_LOGPROBS = 4096


class TextModel:
    """Continues a text.

    Of several responses each has the new piece of all samples; a single one has everything.
    """

    def __init__(self, backend: EngineBackend) -> None:
        flags = (EXCLUDE_INPUT, *(f"return_{each.name}" for each in _OPTIONAL_OUTPUTS))
        self.spec = ModelSpec(
            name=backend.name,
            inputs=(
                TensorSpec(TEXT_INPUT, "BYTES", (1,)),
                SAMPLING,
                STREAM,
                *(TensorSpec(flag, "BOOL", (1,), optional=True) for flag in flags),
            ),
            outputs=(TensorSpec("text_output", "BYTES", (-1,)), *_OPTIONAL_OUTPUTS),
            decoupled=True,
        )
        self.trouble = backend.trouble
        self._backend = backend

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        backend, words = self._backend, self._backend.words
        sampling = read_sampling(call.request, backend.max_samples, text=True, tops=True)
        text = text_of(call.request, TEXT_INPUT) or ""
        stream = bool(flag_of(call.request, STREAM.name))
        exclude = flag_of(call.request, EXCLUDE_INPUT)
        if stream and exclude is False:
            raise RequestError(
                f"{EXCLUDE_INPUT} is false and {STREAM.name} true; only a whole text can begin "
                "with the prompt, so leave one of them out"
            )
        before = "" if (stream if exclude is None else exclude) else text
        outputs = _optional_outputs(call.request)
        stream = stream and call.many
        # The size is checked before anything is computed.
        request = await backend.request(call, text, sampling, stream=stream)
        names = None
        if "logprobs" in outputs:
            names = TokenNames(await words.required(), as_ids=False)
        input_tokens = 0
        if stream and "num_input_tokens" in outputs:
            # The engine reports it with the end, but the first response needs it.
            (await words.required()).check_fits(text, await backend.max_model_len())
            token_ids = await words.token_ids(text)
            input_tokens = len(token_ids)
            request = msgspec.structs.replace(request, prompt=None, prompt_token_ids=token_ids)
        writer = _Writer(before, outputs, names, request.n)

        async def send(deltas: Sequence[SampleDelta]) -> None:
            write = partial(writer.write, deltas, input_tokens)
            tokens = sum(len(each.token_ids) + sum(map(len, each.tops)) for each in deltas)
            if names is not None and tokens > _FEW_LOGPROBS:
                await answer(await words.beside(write))
            else:
                await answer(write())

        if stream:
            await backend.stream(call, request, send)
            return
        completion = await backend.complete(call, request, before)
        input_tokens = completion.usage.prompt_tokens
        await send(whole_samples(completion, request.n))


def _optional_outputs(request: InferRequest) -> frozenset[str]:
    """Which of the optional outputs are to be made."""
    requested = {each.name for each in request.outputs}
    flags = {each.name: flag_of(request, f"return_{each.name}") for each in _OPTIONAL_OUTPUTS}
    return frozenset(
        name for name, flag in flags.items() if (name in requested if flag is None else flag)
    )


class _Writer:
    """Makes the outputs of a call's responses."""

    def __init__(
        self, before: str, outputs: frozenset[str], names: TokenNames | None, n: int
    ) -> None:
        """Args: the text before each sample, the optional outputs to make, the names of tokens in
        logprobs, and the number of samples."""
        self._before = before
        self._outputs = outputs
        self._names = names
        self._cumulative = [0.0] * n

    def write(self, deltas: Sequence[SampleDelta], input_tokens: int) -> list[NamedTensor]:
        """Return the outputs for the next delta of each sample."""
        for index, delta in enumerate(deltas):
            self._cumulative[index] += sum(delta.logprobs)
        made = [
            texts("text_output", [self._before + delta.text for delta in deltas]),
            finish_reasons(deltas),
            numbers("cumulative_logprob", "FP32", self._cumulative),
            numbers("num_input_tokens", "UINT32", [input_tokens]),
            token_counts(deltas),
        ]
        if self._names is not None:
            made.append(texts("logprobs", [_logprobs(delta, self._names) for delta in deltas]))
        return [made[0], *(each for each in made[1:] if each.name in self._outputs)]


def _logprobs(delta: SampleDelta, names: TokenNames) -> str:
    """As JSON: for each token an object of the likeliest tokens and itself, by their ids."""
    tokens = scored(delta.token_ids, delta.logprobs, delta.tops or None)
    return msgspec.json.encode(logprobs_by_id(tokens, names)).decode()
