"""`M`: text for text, with the tensors that vLLM's backend of Triton has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from .....config import RequestError
from .....kserve.tensors import InferRequest, ModelSpec, NamedTensor, TensorSpec
from ....serving.embedding import Prompt
from ....serving.logprobs import TokenNames, logprobs_by_id, scored
from ....serving.words import Words
from ..served import Answer, ModelCall
from .inputs import SAMPLING, flag_of, read_sampling, text_of
from .lane import Lane
from .parts import Part, parts_of
from .tensors import counts, finish_reasons, numbers, texts

TEXT_INPUT = "text_input"
STREAM = "stream"
EXCLUDE_INPUT = "exclude_input_in_output"
TEXT_OUTPUT = "text_output"

_RETURNED = (
    "finish_reason",
    "cumulative_logprob",
    "logprobs",
    "num_input_tokens",
    "num_output_tokens",
)
"""Outputs that are made when an input asks for them, or else when they are wanted by name."""

# Logprobs that are written at once, those of the likeliest tokens included; more take a thread.
_FEW_LOGPROBS = 4096


def text_spec(name: str) -> ModelSpec:
    """What the model of this name takes and gives."""
    flags = (STREAM, EXCLUDE_INPUT, *(f"return_{each}" for each in _RETURNED))
    return ModelSpec(
        name=name,
        inputs=(
            TensorSpec(TEXT_INPUT, "BYTES", (1,)),
            TensorSpec(SAMPLING, "BYTES", (1,), optional=True),
            *(TensorSpec(flag, "BOOL", (1,), optional=True) for flag in flags),
        ),
        outputs=(
            TensorSpec(TEXT_OUTPUT, "BYTES", (-1,)),
            TensorSpec("finish_reason", "BYTES", (-1,)),
            TensorSpec("cumulative_logprob", "FP32", (-1,)),
            TensorSpec("logprobs", "BYTES", (-1,)),
            TensorSpec("num_input_tokens", "UINT32", (1,)),
            TensorSpec("num_output_tokens", "UINT32", (-1,)),
        ),
        decoupled=True,
    )


class TextModel:
    """Goes on with a text.

    With several answers each has what is new of all samples; with one it has everything.
    """

    def __init__(self, lane: Lane) -> None:
        self.spec = text_spec(lane.name)
        self.trouble = lane.trouble
        self._lane = lane

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        lane = self._lane
        sampling = read_sampling(call.request, lane.max_samples, text=True)
        wanted = _read_wanted(call.request)
        stream = call.many and wanted.stream
        prompt: Prompt = wanted.prompt
        # It is checked for its size before it costs anything.
        request = await lane.request(call, prompt, sampling, stream=stream)
        words = None
        if "logprobs" in wanted.outputs or (stream and "num_input_tokens" in wanted.outputs):
            words = await lane.words.required()
        num_input_tokens = 0
        if stream and "num_input_tokens" in wanted.outputs:
            # The engine tells it at the end, and here it stands in the first answer.
            assert words is not None
            words.check_fits(wanted.prompt, await lane.max_model_len())
            token_ids = await lane.words.token_ids(wanted.prompt)
            num_input_tokens = len(token_ids)
            request = msgspec.structs.replace(request, prompt=None, prompt_token_ids=token_ids)
        writer = _Writer(wanted, words, request.n)

        async def send(parts: Sequence[Part]) -> None:
            write = partial(writer.write, parts, num_input_tokens)
            if writer.logprobs_in(parts) > _FEW_LOGPROBS:
                await answer(await lane.words.beside(write))
            else:
                await answer(write())

        if stream:
            await lane.stream(call, request, send)
            return
        completion = await lane.complete(call, request, wanted.before)
        num_input_tokens = completion.usage.prompt_tokens
        await send(parts_of(completion, request.n))


class _Wanted(NamedTuple):
    """What the answers are to have.

    Attributes:
        prompt: The text.
        stream: Whether it is wanted as it comes.
        before: What of the prompt stands before each sample.
        outputs: Those of `_RETURNED` that are wanted.
    """

    prompt: str
    stream: bool
    before: str
    outputs: frozenset[str]


def _read_wanted(request: InferRequest) -> _Wanted:
    prompt, stream = text_of(request, TEXT_INPUT) or "", bool(flag_of(request, STREAM))
    exclude = flag_of(request, EXCLUDE_INPUT)
    if stream and exclude is False:
        raise RequestError(
            f"{EXCLUDE_INPUT} is false and {STREAM} true; the prompt stands before a text that is "
            "told whole, so leave one of them out"
        )
    named = {each.name for each in request.outputs}
    outputs = [
        name
        for name in _RETURNED
        for asked in [flag_of(request, f"return_{name}")]
        if (name in named if asked is None else asked)
    ]
    excluded = stream if exclude is None else exclude
    return _Wanted(prompt, stream, "" if excluded else prompt, frozenset(outputs))


class _Writer:
    """Writes the answers to a call."""

    def __init__(self, wanted: _Wanted, words: Words | None, n: int) -> None:
        """Args: `words` are there where logprobs are wanted."""
        self._wanted = wanted
        self._names = None
        if words is not None and "logprobs" in wanted.outputs:
            self._names = TokenNames(words, as_ids=False)
        self._cumulative = [0.0] * n

    def logprobs_in(self, parts: Sequence[Part]) -> int:
        """How many are to be written."""
        if self._names is None:
            return 0
        return sum(len(part.token_ids) + sum(map(len, part.tops)) for part in parts)

    def write(self, parts: Sequence[Part], num_input_tokens: int) -> list[NamedTensor]:
        """The outputs that are wanted, of the next part of each sample."""
        for index, part in enumerate(parts):
            self._cumulative[index] += sum(part.logprobs)
        wanted = self._wanted.outputs
        made = [texts(TEXT_OUTPUT, [self._wanted.before + part.text for part in parts])]
        if "finish_reason" in wanted:
            made.append(finish_reasons("finish_reason", parts))
        if "cumulative_logprob" in wanted:
            made.append(numbers("cumulative_logprob", "FP32", self._cumulative))
        if "logprobs" in wanted:
            made.append(texts("logprobs", list(map(self._logprobs, parts))))
        if "num_input_tokens" in wanted:
            made.append(numbers("num_input_tokens", "UINT32", [num_input_tokens]))
        if "num_output_tokens" in wanted:
            made.append(counts("num_output_tokens", parts))
        return made

    def _logprobs(self, part: Part) -> str:
        """As JSON: for each token an object of the likeliest tokens and itself, by their ids."""
        assert self._names is not None, "the tokenizer is there where they are wanted"
        tokens = scored(part.token_ids, part.logprobs, part.tops or None)
        return msgspec.json.encode(logprobs_by_id(tokens, self._names)).decode()
