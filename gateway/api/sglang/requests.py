"""`/generate`: from SGLang's body, for one prompt or many, to our requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any, ClassVar

import msgspec

from ....bus.public import GenerateRequest
from ....config import Config, Constraint, Int64, RequestError, SamplingParams
from ...call import Call
from ...server.http import FieldError, convert, field_error, read_object
from ...serving.constraints import of_grammar, the_one
from ...serving.fields import EMPTY, Body, RefusedField, convert_part, read_part
from ...serving.images import ImageSource, of_base64, of_url
from ...serving.lane_state import unknown_model
from ...serving.model_names import adapter_of
from ...serving.request_ids import check_untagged, new_id
from ...serving.sampling_fields import SGLANG, read_sampling

_MODEL = "model"


async def read_sglang_object(call: Call, config: Config) -> Body:
    """Return the body of a call, without its model. SGLang serves one model, so here any call may
    have that field.

    Raises:
        RequestError: malformed, request_too_large; unknown_model.
    """
    body = await read_object(call, config.gateway.max_body_bytes)
    if model := body.pop(_MODEL, None):
        model = convert(model, str, _MODEL)
        if name := adapter_of(model, config):
            raise unknown_model(name, config.engine.model_name)
        call.named_model = model
    return body


DEFAULT_MAX_NEW_TOKENS = 128

_URLS = ("data:", "http:", "https:", "file:")
_MOST_SCHEME = 64

ROUTED_OR_LOGGED = "about how to route, log or trace a request, or the rank that runs it"
"""Why fields are neutral."""

_SAMPLING = "sampling_params"


class SGLangBody(msgspec.Struct, frozen=True):
    """`/generate`: SGLang's GenerateReqInput; a list has one per prompt."""

    NEUTRAL: ClassVar = dict.fromkeys(
        (
            "background",
            "conversation_id",
            "custom_labels",
            "data_parallel_rank",
            "external_trace_header",
            "kv_router_hint",
            "log_metrics",
            "no_logs",
            "received_time",
            "routed_dp_rank",
            "routing_key",
            "session_id",
        ),
        ROUTED_OR_LOGGED,
    ) | {"modalities": "images are taken in the order of their placeholders"}
    REFUSED: ClassVar = {
        **dict.fromkeys(
            ("audio_data", "video_data", "input_embeds"),
            RefusedField("a prompt is text or tokens, with images"),
        ),
        **dict.fromkeys(
            ("bootstrap_host", "bootstrap_port", "bootstrap_room"),
            RefusedField("nothing is handed to other servers"),
        ),
        "cache_salt": RefusedField("give `extra_key`"),
        "custom_logit_processor": RefusedField("no code of callers runs here"),
        "max_thinking_tokens": RefusedField("give `thinking_token_budget` to a chat"),
        "return_entropy": RefusedField("logprobs alone are returned"),
        "return_hidden_states": RefusedField("hidden states stay in the engine"),
        "session_params": RefusedField("a prompt is sent whole; prefixes are cached"),
    }

    rid: str | list[str] | None = None
    text: str | list[str] | None = None
    input_ids: list[Int64 | list[Int64]] | None = None
    image_data: str | Body | list[str | Body | list[str | Body] | None] | None = None
    sampling_params: Body | list[Body] | None = None
    return_logprob: bool | list[bool] = False
    logprob_start_len: Int64 | list[Int64] = -1
    top_logprobs_num: Int64 | list[Int64] = 0
    # Of one prompt, of each prompt, or of all of them.
    token_ids_logprob: list[Int64 | list[Int64] | None] | None = None
    return_text_in_logprobs: bool = False
    return_routed_experts: bool | list[bool] = False
    stream: bool = False
    priority: Int64 = 0
    extra_key: str | list[str] = ""
    # The name of an adapter, as SGLang calls it.
    lora_path: str | list[str | None] = ""
    # Not SGLang's.
    budget_ms: float | None = None


class CustomParams(msgspec.Struct, frozen=True):
    """`custom_params`: all but slime's are for custom logit processors, of which there are none.

    Attributes:
        return_top_p_token_ids: Return sampling masks, and logprobs of the support alone.
    """

    OPEN: ClassVar = True

    return_top_p_token_ids: bool = False


class SGLangSampling(msgspec.Struct, frozen=True):
    """`sampling_params` of `/generate`: SGLang's SamplingParams."""

    SAMPLING: ClassVar = SGLANG
    NEUTRAL: ClassVar = {
        "spaces_between_special_tokens": "only for slow tokenizers",
    }
    REFUSED: ClassVar = {
        "stop_regex": RefusedField("give texts in `stop`"),
        "structural_tag": RefusedField("give `json_schema`, `regex` or `ebnf`"),
    }

    n: Int64 = 1
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: Int64 = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    custom_params: CustomParams = CustomParams()


class SGLangImage(msgspec.Struct, frozen=True):
    """An image of `image_data` as an object."""

    NEUTRAL: ClassVar = dict.fromkeys(
        ("detail", "max_dynamic_patch", "modalities", "type"),
        "a model has one resolution",
    )
    REFUSED: ClassVar = dict.fromkeys(
        ("format", "image_embeds", "image_grid_thw", "pixel_values"),
        RefusedField("the server processes images itself; give a URL or a file in base64"),
    )

    url: str


class PromptCall(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt of a call.

    Attributes:
        id: Its id, as the client has it.
        request: The request to submit.
        own: The sampling parameters that concern the answer.
        scores_only: No tokens are wanted (max_new_tokens 0). The engine samples one all the same.
        logprobs: Whether logprobs are shown.
        logprob_start: The first place of the prompt's logprobs; -1 for none.
        token_texts: Whether logprobs come with the tokens' texts.
        within_support: Whether logprobs are of the support alone.
        target_ids: Token ids whose logprobs are shown at each place of the prompt's; () for none.
        images: The images of the prompt, in order.
    """

    id: str
    request: GenerateRequest
    own: SGLangSampling
    scores_only: bool
    logprobs: bool
    logprob_start: int
    token_texts: bool
    within_support: bool = False
    target_ids: tuple[int, ...] = ()
    images: list[ImageSource] = []

    @property
    def top_logprobs(self) -> int:
        """The number of likeliest tokens shown at each position."""
        sampling = self.request.sampling
        return (sampling.prompt_logprobs or 0) if self.scores_only else sampling.logprobs

    @property
    def trim_stop(self) -> bool:
        """Whether the text ends before the stop token or string."""
        return not self.own.no_stop_trim

    @property
    def interval_tokens(self) -> int:
        """Fewest tokens between two events of a stream."""
        return max(1, self.own.stream_interval)

    @property
    def plain_text(self) -> bool:
        """Whether the text is what the engine delivers."""
        return self.own.skip_special_tokens and self.trim_stop

    @property
    def needs_tokenizer(self) -> bool:
        """Whether the answer takes the tokenizer."""
        return not self.plain_text or bool(self.request.sampling.stop) or self.token_texts

    def with_targets(self, request: GenerateRequest) -> GenerateRequest:
        """Return a request whose prompt is token ids with the targets at its positions."""
        if not self.target_ids:
            return request
        number = max(len(request.prompt_token_ids or ()) - 1 - self.logprob_start, 0)
        sampling = msgspec.structs.replace(
            request.sampling, prompt_logprob_token_ids=(self.target_ids,) * number
        )
        return msgspec.structs.replace(request, sampling=sampling)

    @property
    def needs_token_ids(self) -> bool:
        """Whether the answer names the prompt's tokens, which the client has given as text."""
        return self.logprob_start >= 0 and self.request.prompt is not None


class BatchCall(msgspec.Struct, frozen=True):
    """A call with all its prompts.

    Attributes:
        prompts: Made one by one, so that other calls can be served in between; each may raise a
            RequestError.
        batch: The answer is a list.
        budget_ms: The time for all of them, from the call's arrival on.
    """

    prompts: Iterator[PromptCall]
    batch: bool
    stream: bool
    budget_ms: float | None


def read_call(body: Body, max_prompts: int) -> BatchCall:
    """Read a body.

    Args:
        max_prompts: More, each counted as often as it is sampled, are refused.

    Raises:
        RequestError: There are too many prompts, a field is of the wrong type or not supported, or
            lists differ in length.
    """
    for given in (body.get("text"), body.get("input_ids")):
        # Of numbers it is one prompt.
        if isinstance(given, list) and not (given and isinstance(given[0], int)):
            _check_number(len(given), max_prompts)
    fields = read_part(body, SGLangBody)
    prompts, batch = read_prompts(fields.text, fields.input_ids)
    count = len(prompts)
    # An empty list has none for any prompt.
    params = {} if fields.sampling_params is None else fields.sampling_params
    given = _each(params, "sampling_params", count)
    first = _read_sampling(given[0])
    one_for_all = not isinstance(fields.sampling_params, list)
    rows = zip(
        prompts,
        _request_ids(fields.rid, count, batch),
        repeat(first, count) if one_for_all else map(_read_sampling, given),
        _each(fields.return_logprob, "return_logprob", count),
        _each(fields.logprob_start_len, "logprob_start_len", count),
        _each(fields.top_logprobs_num, "top_logprobs_num", count),
        _targets(fields.token_ids_logprob, count),
        _each(fields.return_routed_experts, "return_routed_experts", count),
        _each(fields.extra_key, "extra_key", count),
        _each(fields.lora_path, "lora_path", count),
        _images(fields.image_data, count, batch),
        strict=True,
    )
    batch = batch or first[0].n > 1
    return BatchCall(
        _prompt_calls(fields, rows, max_prompts), batch, fields.stream, fields.budget_ms
    )


def _prompt_calls(
    fields: SGLangBody, rows: Iterable[tuple[Any, ...]], max_prompts: int
) -> Iterator[PromptCall]:
    samples = 0
    for row in rows:
        prompt, request_id, (own, params), logprobs, start, top, ids, *others = row
        routes, extra_key, adapter, images = others
        samples += max(1, own.n)
        _check_number(samples, max_prompts)
        start, top = (start, top) if logprobs else (-1, 0)
        scores_only = params.max_tokens == 0
        if ids and min(ids) < 0:
            raise field_error(
                "token_ids_logprob",
                "holds an id below 0",
                remedy="give ids of the model's vocabulary",
            )
        if ids and not (scores_only and start >= 0):
            raise FieldError(
                "token_ids_logprob takes return_logprob, logprob_start_len from 0 and "
                "max_new_tokens 0: ids are scored at places of the prompt, not at sampled tokens",
                param="token_ids_logprob",
                code="unsupported",
            )
        request = GenerateRequest(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else prompt,
            n=own.n,
            sampling=msgspec.structs.replace(
                params,
                max_tokens=params.max_tokens or 1,
                logprobs=0 if scores_only else top,
                prompt_logprobs=top if start >= 0 else None,
                # Targets are scored after the first place; the prompt's own tokens from it on.
                prompt_logprob_start=max(start if ids else start - 1, 0),
                return_routed_experts=routes,
            ),
            stream=fields.stream,
            priority=fields.priority,
            cache_salt=extra_key,
            model=adapter or "",
        )
        yield PromptCall(
            id=request_id,
            request=request,
            own=own,
            scores_only=scores_only,
            logprobs=logprobs,
            logprob_start=start,
            token_texts=logprobs and fields.return_text_in_logprobs,
            within_support=own.custom_params.return_top_p_token_ids,
            target_ids=tuple(ids or ()),
            images=images,
        )


def _targets(given: list[Any] | None, count: int) -> list[list[int] | None]:
    """Return the `token_ids_logprob` of each prompt; a list of ids is for all of them."""
    if not given or isinstance(given[0], int):
        given = [given] * count
    kind = list[list[Int64] | None]
    return convert_part(_each(given, "token_ids_logprob", count), kind, "token_ids_logprob")


def _check_number(prompts: int, max_prompts: int) -> None:
    if prompts > max_prompts:
        raise RequestError(
            f"the call has more than {max_prompts} prompts (gateway.max_prompts), each counted n "
            "times; send them in several calls",
            code="too_many_prompts",
        )


def _read_sampling(given: Body) -> tuple[SGLangSampling, SamplingParams]:
    own = read_part(given, SGLangSampling, _SAMPLING)
    constraint = _constraint(own)
    default = DEFAULT_MAX_NEW_TOKENS
    params = read_sampling(given, SGLANG, _SAMPLING, max_tokens=default, constraint=constraint)
    if own.custom_params.return_top_p_token_ids:
        params = msgspec.structs.replace(params, return_sampling_mask=True)
    return own, params


def read_prompts(
    text: str | list[str] | None, input_ids: list[int | list[int]] | None
) -> tuple[list[str | tuple[int, ...]], bool]:
    """Return texts or token ids, and whether they came as a list.

    Raises:
        RequestError: invalid_prompt, empty_prompt.
    """
    if (text is None) == (input_ids is None):
        raise RequestError("give exactly one of text and input_ids", code="invalid_prompt")
    given: Any = text if text is not None else input_ids
    if isinstance(given, str):
        return [given], False
    if not given:
        raise RequestError("there is no prompt in the list; give one", code="empty_prompt")
    if isinstance(given[0], int):
        return [convert_part(given, tuple[int, ...], "input_ids")], False
    if text is not None:
        return list(given), True
    return list(convert_part(given, tuple[tuple[int, ...], ...], "input_ids")), True


def _request_ids(rid: str | list[str] | None, count: int, batch: bool) -> list[str]:
    if rid is None or rid == "":
        rid = [new_id() for _ in range(count)]
    else:
        check_untagged("rid")
    if isinstance(rid, str):
        return [f"{rid}_{i}" for i in range(count)] if batch else [rid]
    if "" in rid:
        raise RequestError("rid holds an empty id; leave rid out, and each request gets one")
    if len(set(rid)) < len(rid):
        raise RequestError(
            "rid holds an id twice",
            code="duplicate_request",
            remedy="give each prompt an id of its own",
        )
    return _each(rid, "rid", count)


def _images(given: Any, count: int, batch: bool) -> list[list[ImageSource]]:
    """Return the images of each prompt. A batch has one, a list of them or null for each prompt, or
    one for all."""
    if not batch:
        return [_sources(given, "image_data")]
    rows = _each(given, "image_data", count)
    return [_sources(row, f"image_data[{place}]") for place, row in enumerate(rows)]


def _sources(given: Any, where: str) -> list[ImageSource]:
    if isinstance(given, list):
        return [_source(each, f"{where}[{place}]") for place, each in enumerate(given)]
    return [] if given is None or given in EMPTY else [_source(given, where)]


def _source(given: Any, where: str) -> ImageSource:
    """Read an image as SGLang does: a URL, or a file in base64. No files of this machine are read.

    Raises:
        FieldError: invalid_image, invalid_image_url, invalid_request.
    """
    text = read_part(given, SGLangImage, where).url if isinstance(given, dict) else given
    if not isinstance(text, str):
        raise field_error(where, ": an image is a URL, or a file in base64; send one of these")
    begins = text[:_MOST_SCHEME].lstrip().lower()
    return of_url(text, where) if begins.startswith(_URLS) else of_base64(text, where)


def _each(value: Any, name: str, count: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(
            f"{name} has {len(value)} entries for {count} prompts", remedy="give one for each"
        )
    return value


def _constraint(params: SGLangSampling) -> Constraint | None:
    schema, regex, ebnf = params.json_schema, params.regex, params.ebnf
    found = {
        f"{_SAMPLING}.json_schema": Constraint(json_schema=schema) if schema else None,
        f"{_SAMPLING}.regex": Constraint(regex=regex) if regex else None,
        # SGLang's grammars are nearly of llama.cpp's form.
        f"{_SAMPLING}.ebnf": of_grammar(ebnf) if ebnf else None,
    }
    return the_one(found)
