"""Values of a request's tensors and parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from .....config import MAX_INT64, RequestError, SamplingParams, field_name, shown
from .....kserve.http_codec import BINARY_DATA_OUTPUT_PARAM
from .....kserve.parameters import TIMEOUT_NS_PARAM, TRITON_TIMEOUT_PARAM
from .....kserve.tensors import InferRequest, TensorError, TensorSpec
from .....text.tokenizer import prompt_too_long
from ....server.http import FieldError, convert, decode_object
from ....serving.sampling_fields import VLLM, SamplingBody, read_sampling_params

SAMPLING = TensorSpec("sampling_parameters", "BYTES", (1,), optional=True)
"""The input of sampling parameters as JSON; without it the request's own parameters are used."""

STREAM = TensorSpec("stream", "BOOL", (1,), optional=True)

DEFAULT_MAX_TOKENS = 16
"""vLLM's."""

PRIORITY_PARAM = "priority"
CACHE_SALT_PARAM = "cache_salt"

_NOT_SAMPLING = frozenset(
    {
        TIMEOUT_NS_PARAM,
        TRITON_TIMEOUT_PARAM,
        PRIORITY_PARAM,
        CACHE_SALT_PARAM,
        BINARY_DATA_OUTPUT_PARAM,
    }
)

# Parameters of the protocol between Triton's clients and servers.
_TRITON_PREFIX = "triton_"

# The only supported value, and what another one would change.
_FIXED_FOR_TEXT = {
    "skip_special_tokens": (True, "they are left out of the text"),
    "include_stop_str_in_output": (False, "the text ends before it"),
    "detokenize": (True, "the answer is a text"),
}


class Sampling(NamedTuple):
    """The number of samples, and the sampling parameters of each."""

    n: int
    params: SamplingParams


def read_sampling(
    request: InferRequest, max_samples: int, *, text: bool = False, tops: bool = False
) -> Sampling:
    """Return a request's sampling parameters, which have vLLM's names.

    Args:
        max_samples: The most samples.
        text: The response is a text.
        tops: The response can hold the likeliest tokens.

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
    if params.logprobs and not tops:
        raise unsupported(
            f"{where}.logprobs", "only the logprobs of the sampled tokens are returned"
        )
    if fields.n > max_samples:
        raise RequestError(
            f"the request asks for more than {max_samples} samples (gateway.max_prompts); send "
            "several",
            code="too_many_prompts",
        )
    return Sampling(fields.n, params)


def unsupported(param: str, why: str) -> FieldError:
    """Return the error of a parameter that is not supported here."""
    return FieldError(
        f"{param} is not supported here: {why}; leave it out", param=param, code="unsupported"
    )


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
            raise FieldError(
                f"{param} is ignored beside the input {SAMPLING.name}; put it in there, or leave "
                "it out",
                param=param,
                code="unsupported",
            )
    try:
        return decode_object(text.encode())
    except RequestError as error:
        raise TensorError(f"{SAMPLING.name} can't be read: {error.message}") from None


def inherited_parameters(request: InferRequest) -> dict[str, Any]:
    """Return the parameters that also hold for requests made of this one.

    Its time limit isn't among them: the call's origin has the deadline.
    """
    names = (PRIORITY_PARAM, CACHE_SALT_PARAM)
    return {name: request.parameters[name] for name in names if name in request.parameters}


def priority_of(request: InferRequest) -> int:
    """Return the engine's priority: higher is earlier, where Triton's and vLLM's lower is."""
    given = request.parameters.get(PRIORITY_PARAM, 0)
    return max(-MAX_INT64, min(-convert(given, int, PRIORITY_PARAM), MAX_INT64))


def cache_salt_of(request: InferRequest) -> str:
    """Return the cache salt. Raises RequestError if it is no text."""
    return convert(request.parameters.get(CACHE_SALT_PARAM, ""), str, CACHE_SALT_PARAM)


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
    """A value; numbers and booleans may be written as text, as vLLM's clients send them."""
    known = name in VLLM or name in SamplingBody.__struct_fields__
    if not isinstance(value, str) or name == "stop" or not known:
        return value
    try:
        found = msgspec.json.decode(value.strip().lower().encode())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, bool | int | float):
        param = f"{where}.{field_name(name)}"
        raise FieldError(
            f"{param} is {shown(value)}; it must be a number, or true or false", param=param
        )
    return found
