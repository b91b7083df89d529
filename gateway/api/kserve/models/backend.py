"""Common parts of the engine's models: inputs, the engine, its samples, and tensors of those."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import Any, ClassVar

import msgspec
import numpy as np

from .....bus.public import (
    Completion,
    CompletionChunk,
    FinishReason,
    GenerateRequest,
    ImageInput,
    TokenLogprob,
    token_columns,
)
from .....config import (
    MAX_INT64,
    RequestError,
    SamplingParams,
    field_name,
    prompt_too_long,
    shown,
)
from .....kserve.parameters import KEY_PARAM
from .....kserve.tensors import (
    DTYPES,
    Datatype,
    InferRequest,
    ModelSpec,
    NamedTensor,
    TensorError,
    TensorSpec,
    text_tensor,
)
from .....text.forgiving_base64 import decode_base64
from ....server.http import FieldError, convert, decode_object, field_error
from ....serving.embedding import Prompt
from ....serving.images import ImageSource
from ....serving.prepared import check_request
from ....serving.request_ids import new_id
from ....serving.samples import Piece, UnsentPieces, all_samples, rest_of, stream_unsent
from ....serving.sampling_fields import VLLM, SamplingBody, read_sampling_params
from ....serving.services import Services
from ..served import ModelCall

# --- inputs ---------------------------------------------------------------------------------------

SAMPLING = TensorSpec("sampling_parameters", "BYTES", (1,), optional=True)
"""The input of sampling parameters as JSON; without it the request's own parameters are used."""

STREAM = TensorSpec("stream", "BOOL", (1,), optional=True)

IMAGES = TensorSpec("image", "BYTES", (-1,), optional=True)
"""The prompt's images, named as in Triton's vLLM backend."""

DEFAULT_MAX_TOKENS = 16
"""vLLM's."""

_NOT_SAMPLING = {
    *("timeout_ns", "timeout", "priority", "cache_salt", "binary_data_output"),
    KEY_PARAM,
}

# Parameters of the protocol between Triton's clients and servers.
_TRITON_PREFIX = "triton_"

# The only supported value, and what another one would change.
_FIXED_FOR_TEXT = {
    "skip_special_tokens": (True, "they are left out of the text"),
    "include_stop_str_in_output": (False, "the text ends before it"),
    "detokenize": (True, "the answer is a text"),
}


Samples = tuple[int, SamplingParams]
"""The number of samples of a prompt, and their parameters."""


def read_sampling(
    request: InferRequest,
    max_samples: int,
    *,
    text: bool = False,
    tops: bool = False,
    masks: bool = False,
    experts: bool = False,
) -> Samples:
    """Return a request's number of samples and sampling parameters, which have vLLM's names.

    Args:
        max_samples: The most samples.
        text: The response is a text.
        tops: The response can hold the likeliest tokens.
        masks: The response can hold sampling masks.
        experts: The response can hold routed experts.

    Raises:
        RequestError: A parameter is unknown, not supported here, or has the wrong type.
    """
    where = sampling_place(request)
    given = {name: _parsed(name, value, where) for name, value in sampling_body(request).items()}
    if text:
        for name, (only, why) in _FIXED_FOR_TEXT.items():
            if given.pop(name, None) not in (None, only):
                raise unsupported(f"{where}.{name}", why)
    fields, params = read_sampling_params(given, where, DEFAULT_MAX_TOKENS)
    if params.prompt_logprobs is not None:
        raise unsupported(
            f"{where}.prompt_logprobs", "the model for scores returns the logprobs of given tokens"
        )
    if params.prompt_logprob_token_ids is not None:
        raise unsupported(
            f"{where}.prompt_logprob_token_ids", "give them to the model for scores as target_ids"
        )
    if params.return_routed_experts and not experts:
        raise unsupported(f"{where}.return_routed_experts", "the model for tokens returns them")
    if params.logprobs and not tops:
        raise unsupported(
            f"{where}.logprobs", "only the logprobs of the sampled tokens are returned"
        )
    if params.return_sampling_mask and not masks:
        raise unsupported(f"{where}.return_sampling_mask", "the model for tokens returns masks")
    if fields.n > max_samples:
        raise RequestError(
            f"the request asks for more than {max_samples} samples (gateway.max_prompts); send "
            "several",
            code="too_many_prompts",
        )
    return fields.n, params


def unsupported(param: str, why: str) -> FieldError:
    """Return the error of a parameter that is not supported here."""
    return field_error(param, f"is not supported here: {why}; leave it out", code="unsupported")


def sampling_place(request: InferRequest) -> str:
    """Return where a request has its sampling parameters, for errors."""
    return "parameters" if request.input(SAMPLING.name) is None else SAMPLING.name


def sampling_body(request: InferRequest) -> dict[str, Any]:
    """Return the sampling parameters as given.

    Raises:
        TensorError: They are no JSON object.
        FieldError: Some are beside the input that holds them.
    """
    parameters = {
        name: value
        for name, value in request.parameters.items()
        if name not in _NOT_SAMPLING and not name.startswith(_TRITON_PREFIX)
    }
    text = text_of(request, SAMPLING.name)
    if text is None:
        return parameters
    for name, value in parameters.items():
        if value:
            param = f"parameters.{field_name(name)}"
            raise field_error(
                param,
                f"is ignored beside the input {SAMPLING.name}; put it in there, or leave it out",
                code="unsupported",
            )
    try:
        return decode_object(text.encode())
    except RequestError as error:
        raise TensorError(f"{SAMPLING.name} can't be read: {error.message}") from None


def inherited_parameters(request: InferRequest) -> dict[str, Any]:
    """Return the parameters that also hold for requests made of this one.

    Its time limit isn't among them: the call itself has the deadline.
    """
    names = ("priority", "cache_salt")
    return {name: request.parameters[name] for name in names if name in request.parameters}


def priority_of(request: InferRequest) -> int:
    """Return the engine's priority: higher is earlier, where Triton's and vLLM's lower is."""
    given = convert(request.parameters.get("priority", 0), int, "priority")
    return max(-MAX_INT64, min(-given, MAX_INT64))


def cache_salt_of(request: InferRequest) -> str:
    """Return the cache salt. Raises RequestError if it is no text."""
    return convert(request.parameters.get("cache_salt", ""), str, "cache_salt")


def _file_of(data: bytes) -> bytes:
    """Return an image's file, which may be in base64: no image begins as base64 does."""
    try:
        return decode_base64(data)
    except ValueError:
        return data


def texts_of(request: InferRequest, name: str) -> list[str] | None:
    """Return the texts of a BYTES input; None if it was not given.

    Raises:
        TensorError: One is not UTF-8.
    """
    data = request.input(name)
    try:
        return None if data is None else [bytes(text).decode() for text in data]
    except UnicodeDecodeError as error:
        raise TensorError(f"{name} is no text in UTF-8: {error.reason}") from None


def text_of(request: InferRequest, name: str) -> str | None:
    """Return the one text of a BYTES input. As `texts_of`."""
    found = texts_of(request, name)
    return None if found is None else found[0]


def flag_of(request: InferRequest, name: str) -> bool | None:
    """Return the one element of a BOOL input; None if it was not given."""
    data = request.input(name)
    return None if data is None else bool(data[0])


def token_ids_of(request: InferRequest, name: str, most: int) -> tuple[int, ...]:
    """Return the token ids of a given input.

    Args:
        most: The most token ids.

    Raises:
        RequestError: empty_prompt, prompt_too_long.
    """
    data = request.input(name)
    assert data is not None, "the service checks required inputs"
    if not data.size:
        raise RequestError(f"{name} is empty; give at least one token", code="empty_prompt")
    if data.size > most:
        raise prompt_too_long(most, f"{name} has {data.size}", "shorten it")
    return tuple(data.tolist())


def _parsed(name: str, value: Any, where: str) -> Any:
    """Return a value; numbers and booleans may be written as text, as vLLM's clients send them."""
    known = name in VLLM or name in SamplingBody.__struct_fields__
    if not isinstance(value, str) or name == "stop" or not known:
        return value
    try:
        found = msgspec.json.decode(value.strip().lower().encode())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, bool | int | float):
        param = f"{where}.{field_name(name)}"
        raise field_error(param, f"is {shown(value)}; it must be a number, or true or false")
    return found


# --- samples --------------------------------------------------------------------------------------


class SampleDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The next piece of a sample: `[k]` tokens, and the text that is certain by now.

    Attributes:
        weight_versions: `[k]`, of the weights that made each token.
        tops: `[k]`, the likeliest tokens at each place; empty if not requested.
        finish_reason: None while the sample goes on.
        ref_logprobs: `[k]`, by the reference model; None without one, or not yet.
        columns: Its token columns, `[k]` each.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    weight_versions: tuple[int, ...] = ()
    tops: tuple[tuple[TokenLogprob, ...], ...] = ()
    finish_reason: FinishReason | None = None
    ref_logprobs: tuple[float, ...] | None = None
    columns: dict[str, tuple[Any, ...]] = {}


def whole_samples(completion: Completion, n: int) -> list[SampleDelta]:
    """Return the samples of a completed request. One that never began has no tokens."""
    return [
        _joined([*rest_of(sample)], sample.finish_reason, sample.ref_logprobs)
        for sample in all_samples(completion, n)
    ]


TakeDeltas = Callable[[Sequence[SampleDelta]], Awaitable[None]]


# --- the engine -----------------------------------------------------------------------------------


class EngineModel:
    """A model of the engine.

    Attributes:
        spec: Its interface, made of the class's attributes.
        suffix: End of its name, after the name of the engine's model.
        inputs, outputs, decoupled: As of `ModelSpec`.
    """

    suffix: ClassVar[str] = ""
    inputs: ClassVar[tuple[TensorSpec, ...]]
    outputs: ClassVar[tuple[TensorSpec, ...]]
    decoupled: ClassVar[bool] = False

    def __init__(self, services: Services) -> None:
        name = services.config.engine.model_name
        self.spec = ModelSpec(
            name=f"{name}{self.suffix}",
            inputs=self.inputs,
            outputs=self.outputs,
            decoupled=self.decoupled,
            allowed_as=name,
        )
        self._services = services
        self._max_samples = services.config.gateway.max_prompts

    async def trouble(self) -> str:
        return await self._services.readiness.trouble()

    async def _images(self, call: ModelCall) -> tuple[ImageInput, ...]:
        """Return the images of a call: files, or these in base64 as Triton's vLLM backend has them.

        Raises:
            RequestError: images_not_supported, too_many_images, invalid_image, image_too_large.
        """
        data = call.request.input(IMAGES.name)
        if data is None or not data.size:
            return ()
        sources = [
            ImageSource(f"{IMAGES.name}[{place}]", _file_of(bytes(each)))
            for place, each in enumerate(data)
        ]
        services = self._services
        services.images.check(sources, await services.tokenizer.required())
        return await services.images.load(sources, call.call.tenant)

    async def _request(
        self,
        call: ModelCall,
        prompt: Prompt,
        sampling: Samples,
        *,
        stream: bool = False,
        images: tuple[ImageInput, ...] = (),
    ) -> GenerateRequest:
        """Return the engine request of a call.

        Raises:
            RequestError: A parameter has the wrong type, or the request is too large.
        """
        request = GenerateRequest(
            request_id=new_id("kserve-"),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else prompt,
            n=sampling[0],
            sampling=sampling[1],
            stream=stream,
            priority=priority_of(call.request),
            tenant=call.call.tenant,
            cache_salt=cache_salt_of(call.request),
            images=images,
        )
        self._services.submissions.check_priority(call.call.caller, request.priority)
        return await check_request(self._services, request)

    async def _complete(
        self, call: ModelCall, request: GenerateRequest, before: str = ""
    ) -> Completion:
        """Run a request, and return its completion.

        Args:
            before: The part of the prompt that the response shows before each sample.

        Raises:
            NanoInferenceError: The engine failed it.
        """
        services = self._services
        begun = await services.keyed.begin(call.call, call.key, [request])
        async with begun.attach() as attachment:
            (completion,) = await services.submissions.run(
                call.call,
                begun.requests,
                attachment=attachment,
                before=lambda index: before,
            )
        _record_compute(call, completion)
        return completion

    async def _stream(self, call: ModelCall, request: GenerateRequest, take: TakeDeltas) -> None:
        """Run a request, and pass on its samples as fast as they are taken.

        Raises:
            NanoInferenceError: The engine failed it. Everything before was passed on.
        """

        async def send(pieces: Sequence[Piece]) -> None:
            await take([_joined(each.take(), each.finish_reason) for each in pieces])

        services, unsent = self._services, UnsentPieces(request.n, send)
        begun = await services.keyed.begin(call.call, call.key, [request])
        (request,) = begun.requests
        async with begun.attach() as attachment:
            completion = await stream_unsent(
                services.submissions, call.call, request, unsent, attachment
            )
        _record_compute(call, completion)


def _record_compute(call: ModelCall, completion: Completion) -> None:
    # Both times are of the executor's clock.
    timings = completion.timings
    if (executor := timings.of("executor")) is not None:
        call.computed(timings.finished_ns - executor.start_ns)


def _joined(
    chunks: Sequence[CompletionChunk],
    finish_reason: FinishReason | None,
    ref_logprobs: tuple[float, ...] | None = None,
) -> SampleDelta:
    columns: dict[str, tuple[Any, ...]] = {}
    for chunk in chunks:
        for name, values in token_columns(chunk).items():
            columns[name] = columns.get(name, ()) + values
    return SampleDelta(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(chain.from_iterable(chunk.token_ids for chunk in chunks)),
        logprobs=tuple(chain.from_iterable(chunk.logprobs for chunk in chunks)),
        weight_versions=tuple(chunk.weight_version for chunk in chunks for _ in chunk.token_ids),
        tops=tuple(chain.from_iterable(chunk.top_logprobs or () for chunk in chunks)),
        finish_reason=finish_reason,
        ref_logprobs=ref_logprobs,
        columns=columns,
    )


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
