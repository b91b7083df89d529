"""What a request's tensors and parameters say, as Python has it."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from .....config import RequestError, SamplingParams, field_name, shown
from .....kserve.deadlines import TIMEOUT_NS_PARAM, TRITON_TIMEOUT_PARAM
from .....kserve.tensors import InferRequest, TensorError
from .....text.tokenizer import prompt_too_long
from ....server.http import FieldError, convert, decode_object
from ....serving.sampling_fields import VLLM, SamplingBody, read_sampling_params

SAMPLING = "sampling_parameters"
"""The input that has them as JSON; without it the request's own parameters are taken for them."""

PARAMETERS = "parameters"

DEFAULT_MAX_TOKENS = 16
"""vLLM's."""

PRIORITY_PARAM = "priority"
CACHE_SALT_PARAM = "cache_salt"

_OTHERS = frozenset(
    {TIMEOUT_NS_PARAM, TRITON_TIMEOUT_PARAM, PRIORITY_PARAM, CACHE_SALT_PARAM, "binary_data_output"}
)
"""Parameters of a request that say nothing of how to sample."""

_OF_TRITON = "triton_"
"""With what those begin that Triton's clients and servers tell each other."""

# What the text would be if another value were taken than the first.
_OF_TEXTS = {
    "skip_special_tokens": (True, "they are left out of the text"),
    "include_stop_str_in_output": (False, "the text ends before it"),
    "detokenize": (True, "the answer is a text"),
}

_MAX_INT64 = 2**63 - 1


class Sampling(NamedTuple):
    """How to sample.

    Attributes:
        n: Samples of the prompt.
        params: For each of them.
    """

    n: int
    params: SamplingParams


def read_sampling(request: InferRequest, max_samples: int, *, text: bool = False) -> Sampling:
    """How a request wants to be sampled, by vLLM's names.

    Args:
        max_samples: More are refused.
        text: Whether the answer is a text.

    Raises:
        RequestError: A parameter is not known, not supported here, or of the wrong type.
    """
    where = sampling_place(request)
    given = _read_texts(sampling_body(request), where)
    if text:
        for name, (only, why) in _OF_TEXTS.items():
            if given.pop(name, None) not in (None, only):
                raise FieldError(
                    f"{where}.{name} is not supported here: {why}; leave it out",
                    param=f"{where}.{name}",
                    code="unsupported",
                )
    fields, params = read_sampling_params(given, where, DEFAULT_MAX_TOKENS)
    if params.prompt_logprobs is not None:
        raise FieldError(
            f"{where}.prompt_logprobs is not supported here: the model for scores tells the "
            "logprobs of tokens that are given; leave it out",
            param=f"{where}.prompt_logprobs",
            code="unsupported",
        )
    if fields.n > max_samples:
        raise RequestError(
            f"the request asks for more than {max_samples} samples (gateway.max_prompts); send "
            "several",
            code="too_many_prompts",
        )
    return Sampling(fields.n, params)


def sampling_place(request: InferRequest) -> str:
    """Where a request has its sampling parameters: the name that errors give their place."""
    return PARAMETERS if request.input(SAMPLING) is None else SAMPLING


def sampling_body(request: InferRequest) -> dict[str, Any]:
    """The sampling parameters as they were given.

    Raises:
        TensorError: They are no JSON object.
        FieldError: There are some beside the input that has them.
    """
    parameters = {
        name: value
        for name, value in request.parameters.items()
        if name not in _OTHERS and not name.startswith(_OF_TRITON)
    }
    text = text_of(request, SAMPLING)
    if text is None:
        return parameters
    for name, value in parameters.items():
        if value:
            param = f"parameters.{field_name(name)}"
            raise FieldError(
                f"{param} counts for nothing beside the input {SAMPLING}; put it in there, or "
                "leave it out",
                param=param,
                code="unsupported",
            )
    try:
        return decode_object(text.encode())
    except RequestError as error:
        raise TensorError(f"{SAMPLING} can't be read: {error.message}") from None


def passed_on(request: InferRequest) -> dict[str, Any]:
    """The parameters of a request that hold for others that are made of it.

    Its time is not one of them: the call has what is left of that.
    """
    passed = (PRIORITY_PARAM, CACHE_SALT_PARAM)
    return {name: request.parameters[name] for name in passed if name in request.parameters}


def priority_of(request: InferRequest) -> int:
    """Triton's lower ones are earlier, as vLLM's; here it is the other way round."""
    given = request.parameters.get(PRIORITY_PARAM, 0)
    return max(-_MAX_INT64, min(-convert(given, int, PRIORITY_PARAM), _MAX_INT64))


def cache_salt_of(request: InferRequest) -> str:
    """Raises RequestError when it is no text."""
    return convert(request.parameters.get(CACHE_SALT_PARAM, ""), str, CACHE_SALT_PARAM)


def text_of(request: InferRequest, name: str) -> str | None:
    """The one text of an input; None when it was not given.

    Raises:
        TensorError: It is not UTF-8.
    """
    data = request.input(name)
    if data is None:
        return None
    try:
        return bytes(data[0]).decode()
    except UnicodeDecodeError as error:
        raise TensorError(f"{name} is no text in UTF-8: {error.reason}") from None


def flag_of(request: InferRequest, name: str) -> bool | None:
    """The one element of an input of BOOL; None when it was not given."""
    data = request.input(name)
    return None if data is None else bool(data[0])


def token_ids_of(request: InferRequest, name: str, most: int) -> tuple[int, ...]:
    """The token ids of an input that the model needs.

    Args:
        most: More are refused before anything is made of them.

    Raises:
        RequestError: empty_prompt, prompt_too_long.
    """
    data = request.input(name)
    assert data is not None, "the service asks for what is not optional"
    if not data.size:
        raise RequestError(f"{name} is empty; give at least one token", code="empty_prompt")
    if data.size > most:
        raise prompt_too_long(most, f"{name} has {data.size}", "shorten it")
    return tuple(data.tolist())


def _read_texts(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Numbers and truth values that are written as texts, as vLLM's clients send them."""
    return {
        name: _read(name, value, where) if isinstance(value, str) and name != "stop" else value
        for name, value in given.items()
    }


def _read(name: str, text: str, where: str) -> Any:
    if name not in VLLM and name not in SamplingBody.__struct_fields__:
        return text
    try:
        found = msgspec.json.decode(text.strip().lower().encode())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, bool | int | float):
        raise FieldError(
            f"{where}.{field_name(name)} is {shown(text)}; it must be a number, or true or false",
            param=f"{where}.{name}",
        )
    return found
