"""Arguments of Python callers, and the requests and samples of `InferenceEngine`.

A decoder checks structs from the bus, but not a caller's arguments: a float would be cut to a token
id, and a text would count as a list of texts of one letter.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from ..bus.public import (
    Completion,
    CompletionSample,
    EmbedParams,
    GenerateRequest,
    KVSession,
    OnVersionLag,
)
from ..config import RequestError, SamplingParams, shown
from ..stages.admission.arrivals import Accepted
from .rollouts import SHARED_FIELDS, Prompt, RequestId, TrainingSample

if TYPE_CHECKING:
    from ..bus.targets import Logprobs
    from .chat_renderer import ChatPrompt

_T = TypeVar("_T")

_BYTES = bytes | bytearray | memoryview

_OTHER_PROMPTS = {
    "role": "render messages by ChatRenderer(model).render(messages), and pass that",
    "prompt_token_ids": "pass the list of its prompt_token_ids",
    "prompt": "pass the text of its prompt",
}
"""Keys of what other engines take as prompts, each with what to pass."""


class ArgumentError(RequestError, ValueError):
    """An unusable argument of a call. Also a ValueError, Python's own class for one."""


def check_prompts(prompts: Any, name: str = "prompts", code: str = "invalid_prompt") -> list[Any]:
    """Return the prompts of a call as a list; the prompts themselves are not checked.

    Args:
        prompts: The argument: any iterable, array or tensor.
        name: The argument's name, for the message.
        code: The error's code.

    Raises:
        ArgumentError: The argument is a single text, or can't be iterated in order.
    """
    values = _without_arrays(prompts)
    if isinstance(values, str):
        raise ArgumentError(
            f"{name} is {shown(values)}, a text and no list; pass a list, such as "
            f"[{shown(values[:20])}]",
            code=code,
        )
    if isinstance(values, _BYTES | Mapping | Set) or not isinstance(values, Iterable):
        raise ArgumentError(
            f"{name} is {_a(prompts)}; pass a list of texts, or of lists of token ids", code=code
        )
    return list(values)


def prompt_of(prompt: Any) -> str | tuple[int, ...]:
    """Return a prompt in the form of requests.

    Raises:
        ArgumentError: invalid_prompt: neither text nor token ids. invalid_token_ids: an element is
            not an integer.
    """
    if isinstance(prompt, str):
        return prompt
    if chat_of(prompt) is not None:
        return tuple(prompt.token_ids)
    rule, code = "a prompt is text or token ids", "invalid_prompt"
    first = prompt[0] if isinstance(prompt, list | tuple) and prompt else prompt
    for key, remedy in _OTHER_PROMPTS.items() if isinstance(first, Mapping) else ():
        if key in first:
            raise ArgumentError(f"{rule}, not {shown(prompt)}", code=code, remedy=remedy)
    return token_ids_of(prompt, rule, code)


def chat_of(prompt: Any) -> ChatPrompt | None:
    """Return the prompt if a ChatRenderer made it."""
    # Its module takes a second to load, and is loaded where there is such a prompt.
    return prompt if type(prompt).__name__ == "ChatPrompt" else None


def prompt_fields(prompt: str | tuple[int, ...]) -> dict[str, Any]:
    """Return the fields of a request that hold its prompt."""
    is_text = isinstance(prompt, str)
    return {"prompt": prompt if is_text else None, "prompt_token_ids": None if is_text else prompt}


def token_ids_of(
    given: Any, rule: str, code: str, ids_code: str = "invalid_token_ids"
) -> tuple[int, ...]:
    """Return the token ids of a list, a numpy array or a tensor of one dimension.

    Args:
        given: The argument.
        rule: A clause for the message that describes a valid argument.
        code: The error's code if `given` is not a sequence.
        ids_code: The error's code if an element is not an integer.

    Raises:
        ArgumentError: `given` is not a sequence of integers.
    """
    if isinstance(given, _BYTES):
        raise ArgumentError(f"{rule}, not {_a(given)}; decode it to text", code=code)
    values = _without_arrays(given)
    if isinstance(values, str | Mapping | Set) or not isinstance(values, Iterable):
        raise ArgumentError(f"{rule}, not {_a(given)}; pass one", code=code)
    ids = tuple(values)
    if set(map(type, ids)) <= {int}:
        return ids
    return tuple(_token_id(value, position, rule, ids_code) for position, value in enumerate(ids))


def progress_bar(title: str, total: int) -> AbstractContextManager[Any]:
    """Return a bar of tqdm on standard error, as the result of a `with`; None without a title."""
    if not title:
        return nullcontext()
    from tqdm.auto import tqdm

    bar: AbstractContextManager[Any] = tqdm(desc=title, total=total, unit=" prompts")
    return bar


def whole_number(value: Any, name: str, code: str) -> int:
    """Return a Python or numpy integer as a Python one.

    Raises:
        ArgumentError: The value is not an integer, or is a truth value.
    """
    number = _integer(value)
    if number is None:
        raise ArgumentError(f"{name} is {shown(value)}; it must be an integer", code=code)
    return number


def params_of_all(
    params: SamplingParams | Sequence[SamplingParams] | None, number: int
) -> list[SamplingParams]:
    """Return the parameters of each of `number` prompts.

    Raises:
        ArgumentError: `params` is neither one for all prompts nor a list with one for each.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * number
    if isinstance(params, str | _BYTES | Mapping | Set) or not isinstance(params, Iterable):
        raise ArgumentError(
            f"sampling_params is {_a(params)}; pass one SamplingParams for all prompts, or a list "
            "with one for each"
        )
    return same_number(list(params), number, "sampling_params")


def same_number(values: list[_T], number: int, name: str) -> list[_T]:
    """Return the values. Raises ArgumentError unless there is one for each prompt."""
    if len(values) != number:
        raise ArgumentError(f"{number} prompts and {len(values)} {name}; give one for each prompt")
    return values


def predictions_of_all(predictions: Any, number: int) -> list[Prompt | None]:
    """Return the prediction of each of `number` prompts, None for a prompt without one.

    Raises:
        ArgumentError: `predictions` is not a list with one for each prompt.
    """
    if predictions is None:
        return [None] * number
    values = check_prompts(predictions, "predictions", "invalid_prediction")
    return same_number(values, number, "predictions")


def sessions_of_all(sessions: Any, number: int) -> list[KVSession | None]:
    """Return the session of each of `number` prompts, None for a prompt without one.

    Raises:
        ArgumentError: `sessions` is not a list with one for each prompt.
    """
    if sessions is None:
        return [None] * number
    if isinstance(sessions, KVSession) or not isinstance(sessions, Iterable):
        raise ArgumentError(
            f"kv_sessions is {_a(sessions)}; pass a list with a KVSession or None for each prompt",
            code="invalid_kv_session",
        )
    return same_number(list(sessions), number, "kv_sessions")


def _token_id(value: Any, position: int, rule: str, code: str) -> int:
    number = _integer(value)
    if number is None:
        raise ArgumentError(
            f"{rule}, which are integers, not {shown(value)} (at place {position})",
            code=code,
            remedy="pass integers",
        )
    return number


def _integer(value: Any) -> int | None:
    """Return the value as an integer, or None. Unlike in Python, a bool is no integer."""
    value = _without_arrays(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return operator.index(value)


def _without_arrays(value: Any) -> Any:
    """Convert an array, tensor or scalar of numpy or torch to Python's lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _a(value: object) -> str:
    """Return the type of a value, for a message."""
    return f"of type {type(value).__name__}"


Params = TypeVar("Params", SamplingParams, EmbedParams, KVSession)

Finished = tuple[TrainingSample, SamplingParams]
"""A sample and the parameters of its request."""


class Unfinished(NamedTuple):
    """An unfinished request; its samples carry `request_id`."""

    accepted: Accepted
    params: SamplingParams
    request_id: RequestId | None
    chat: ChatPrompt | None = None


class UnfinishedRequests(dict[str, Unfinished]):
    """Unfinished requests by the engine's own names, and the names by the callers' ids.

    Names count up, and seeds are made of names: callers' ids have no influence on sampling.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[RequestId, str] = {}
        self._last = 0

    def new_name(self) -> str:
        """Return a name that is not in use as an id, so that it can serve as one."""
        self._last += 1
        while (name := f"engine-{self._last}") in self._names:
            self._last += 1
        return name

    def name_of(self, request_id: RequestId) -> str | None:
        """Return the name of an unfinished request."""
        return self._names.get(request_id)

    def check_id(self, request_id: RequestId) -> None:
        """Raise RequestError for an id of another type, or of an unfinished request."""
        # bool is a subclass of int.
        if isinstance(request_id, bool) or not isinstance(request_id, str | int):
            raise RequestError(
                f"a request_id is text or an integer, not {type(request_id).__name__}",
                code="invalid_request_id",
                remedy="pass one of them, or None",
            )
        if request_id in self._names:
            raise RequestError(
                f"request {shown(request_id)} is not finished; choose another request_id, or none",
                code="duplicate_request",
            )

    def add(self, name: str, request: Unfinished) -> None:
        """Add an admitted request."""
        self[name] = request
        if request.request_id is not None:
            self._names[request.request_id] = name

    def finish(self, name: str) -> Unfinished:
        """Remove a finished request; its id is free again."""
        request = self.pop(name)
        if request.request_id is not None:
            del self._names[request.request_id]
        return request


def make_request(
    prompt: Prompt | ChatPrompt,
    params: SamplingParams | None = None,
    num_samples: int = 1,
    embed: EmbedParams | None = None,
    adapter: str = "",
    prediction: Prompt | None = None,
    kv_session: KVSession | None = None,
    max_version_lag: int | None = None,
    on_version_lag: OnVersionLag = "flag",
) -> GenerateRequest:
    """Return the request for samples of a prompt, or with `embed` for its vector.

    Raises:
        RequestError: An argument is of the wrong type.
    """
    fields = prompt_fields(prompt_of(prompt))
    if not isinstance(adapter, str):
        raise ArgumentError(
            f"adapter is {shown(adapter)}; it must be the id of a loaded adapter, or ''",
            code="unknown_model",
        )
    try:
        sampling = _checked(params or SamplingParams(), SamplingParams)
        embed = None if embed is None else _checked(embed, EmbedParams)
    except (msgspec.ValidationError, TypeError) as error:
        from ..config.wrong_values import told_of

        name = "sampling_params" if embed is None else "parameters"
        raise RequestError(told_of(error, name)) from None
    try:
        kv_session = None if kv_session is None else _checked(kv_session, KVSession)
    except (msgspec.ValidationError, TypeError) as error:
        from ..config.wrong_values import told_of

        message = told_of(error, "kv_session")
        raise ArgumentError(message, code="invalid_kv_session") from None
    if prediction is not None and not isinstance(prediction, str):
        rule, code = "a prediction is text or token ids", "invalid_prediction"
        prediction = token_ids_of(prediction, rule, code, code)
    return GenerateRequest(
        **fields,
        sampling=sampling,
        n=whole_number(num_samples, "the number of samples", "invalid_n"),
        stream=False,
        model=adapter,
        embed=embed,
        prediction=prediction,
        kv_session=kv_session,
        max_version_lag=None
        if max_version_lag is None
        else whole_number(max_version_lag, "max_version_lag", "invalid_version_lag"),
        on_version_lag=on_version_lag,
    )


def make_requests(
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams] | None,
    num_samples: int,
    adapter: str,
    predictions: Any,
    sessions: Any,
) -> list[GenerateRequest]:
    """Return the requests of a call of `InferenceEngine.generate`.

    Raises:
        RequestError: An argument is of the wrong type, or not one for each prompt.
    """
    prompts = check_prompts(prompts)
    number = len(prompts)
    of_all = params_of_all(params, number), predictions_of_all(predictions, number)
    return [
        make_request(
            prompt, own, num_samples, adapter=adapter, prediction=prediction, kv_session=session
        )
        for prompt, own, prediction, session in zip(
            prompts, *of_all, sessions_of_all(sessions, number), strict=True
        )
    ]


def _checked(params: Params, kind: type[Params]) -> Params:
    """Check the types of fields, which a struct's constructor does not."""
    # Without builtin_types bytes would become base64 text.
    plain = msgspec.to_builtins(params, builtin_types=(bytes, bytearray, memoryview))
    return msgspec.convert(plain, kind)


def make_sample(
    request: Unfinished,
    completion: Completion,
    sample: CompletionSample,
    quantization: str,
    model_path: str,
) -> TrainingSample:
    """Return one sample of a finished request, by weights with codes of the named form."""
    experts = None
    if sample.routed_experts is not None:
        from ..bus.routed_experts import experts_of_sample

        experts = experts_of_sample(completion, sample)
    recipe = completion.recipe
    if recipe is not None and len(recipe.seeds) > 1:
        recipe = msgspec.structs.replace(recipe, seeds=(recipe.seeds[sample.sample_index],))
    return TrainingSample(
        prompt_tokens=request.accepted.admitted.prompt.token_ids,
        completion_tokens=sample.token_ids,
        prompt_logprobs=completion.prompt_logprobs,
        prompt_top_logprobs=completion.prompt_top_logprobs,
        prompt_token_ranks=completion.prompt_token_ranks,
        prompt_token_id_logprobs=_targets(request.accepted.admitted.sampling, completion),
        routed_experts=experts,
        request_id=request.request_id,
        kv_session=completion.kv_session,
        recipe=recipe,
        quantization=quantization,
        from_response_cache=completion.usage.cached_completion_tokens > 0,
        time=completion.usage.time,
        billed_ns=completion.usage.billed_ns,
        model_path=model_path,
        chat=request.chat,
        **{name: getattr(sample, name) for name in SHARED_FIELDS},
    )


def _targets(sampling: SamplingParams, completion: Completion) -> Logprobs | None:
    wanted, found = sampling.prompt_logprob_token_ids, completion.prompt_token_id_logprobs
    if wanted is None or found is None:
        return None
    from ..bus.targets import target_array

    return target_array(wanted, found)


def params_to_score(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    prompts: Sequence[Sequence[int]],
) -> list[SamplingParams]:
    """Return the sampling parameters of requests that score a completion after each prompt.

    Each request has prompt and completion together as its prompt, and wants the completion's
    logprobs; KV of the prompt may be cached. It must sample one token, which is not used.

    Raises:
        RequestError: The numbers of parameters and prompts differ, or one is not SamplingParams.
    """
    params = params_of_all(sampling_params, len(prompts))
    if wrong := [each for each in params if not isinstance(each, SamplingParams)]:
        raise ArgumentError(f"sampling_params holds {shown(wrong[0])}; give SamplingParams")
    return [
        SamplingParams(
            max_tokens=1,
            ignore_eos=True,
            temperature=each.temperature,
            prompt_logprobs=0,
            prompt_logprob_start=max(len(prompt) - 1, 0),
            prompt_sampling_masks=each.prompt_sampling_masks,
        )
        for each, prompt in zip(params, prompts, strict=True)
    ]


def params_of_targets(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    prompts: Sequence[Sequence[int]],
    targets: Sequence[Sequence[Sequence[int]]],
) -> list[SamplingParams]:
    """Return the sampling parameters of requests for the logprobs of targets at the last positions
    of prompts.

    Raises:
        RequestError: The numbers of parameters, prompts and targets differ, a parameter is not
            SamplingParams, or a prompt has more targets than positions after its first.
    """
    if len(targets) != len(prompts):
        raise ArgumentError(
            f"targets has {len(targets)} entries for {len(prompts)} prompts",
            remedy="give one for each prompt",
        )
    rows = [[*map(_without_arrays, _without_arrays(each))] for each in targets]
    starts = [[0] * (len(each) - len(own)) for each, own in zip(prompts, rows, strict=True)]
    if not all(starts):
        raise ArgumentError(
            f"targets has {len(rows[starts.index([])])} lists for a prompt of "
            f"{len(prompts[starts.index([])])} tokens; the first token has no logprob, and each "
            "other one at most one list"
        )
    return [
        msgspec.structs.replace(params, prompt_logprobs=None, prompt_logprob_token_ids=own)
        for params, own in zip(params_to_score(sampling_params, starts), rows, strict=True)
    ]


def token_ids_to_score(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the token ids of prompts and of their completions.

    Raises:
        RequestError: A prompt or completion is not a list of token ids, a completion is empty, or
            the numbers of prompts and completions differ.
    """
    what, code = "is token ids where a completion is scored", "invalid_prompt"
    of_prompts = [token_ids_of(each, f"a prompt {what}", code) for each in check_prompts(prompts)]
    of_completions = [
        token_ids_of(each, f"a completion {what}", code)
        for each in check_prompts(completions, "completions")
    ]
    if len(of_prompts) != len(of_completions) or not all(of_completions):
        raise ArgumentError(
            f"{len(of_prompts)} prompts and {len(of_completions)} completions, of which "
            f"{of_completions.count(())} are empty; give one completion for each prompt, with at "
            "least one token"
        )
    return of_prompts, of_completions
