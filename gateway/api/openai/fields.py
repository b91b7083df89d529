"""What becomes of each field of a call: one table, which the documents repeat."""

from __future__ import annotations

from typing import Literal, TypeVar

from ...serving.fields import EMPTY, Body, Field, read_known_fields
from ...serving.sampling_fields import FIELDS as SAMPLING_FIELDS

T = TypeVar("T")

CallName = Literal[
    "completions",
    "chat",
    "responses",
    "generate",
    "sampling_params",
    "tokenize",
    "detokenize",
    "embeddings",
    "score",
    "rerank",
]
"""`sampling_params` are a field of `generate`, with fields of its own."""


_BOTH: tuple[CallName, ...] = ("completions", "chat")
_TEXTS: tuple[CallName, ...] = (*_BOTH, "responses")
_CHOICES: tuple[CallName, ...] = (*_BOTH, "sampling_params")
_ALL: tuple[CallName, ...] = (*_TEXTS, "generate")
_CHUNKED: tuple[CallName, ...] = (*_BOTH, "generate")
_COMPLETIONS: tuple[CallName, ...] = ("completions",)
_GENERATE: tuple[CallName, ...] = ("generate",)
_CHAT: tuple[CallName, ...] = ("chat",)
_RESPONSES: tuple[CallName, ...] = ("responses",)
_TALKS: tuple[CallName, ...] = ("chat", "responses")
_EMBEDDED: tuple[CallName, ...] = ("embeddings", "score", "rerank")
_REQUESTS: tuple[CallName, ...] = (*_ALL, *_EMBEDDED)
_TEMPLATED: tuple[CallName, ...] = ("chat", "tokenize")

_SAMPLING = {field.name: field for field in SAMPLING_FIELDS}


def _sampling(name: str, *also: CallName) -> Field:
    """A parameter of sampling, which these calls have as a field of their own as well."""
    field = _SAMPLING[name]
    return field._replace(calls=(*also, *field.calls))


FIELDS = (
    Field(
        "model",
        (*_REQUESTS, "tokenize", "detokenize"),
        "honoured",
        "the served model's name, or absent; any other is 404 `model_not_found`",
    ),
    Field(
        "prompt",
        ("completions", "tokenize"),
        "honoured",
        "a text or token ids, or a list of either (`/tokenize` takes one text)",
    ),
    Field(
        "messages",
        _TEMPLATED,
        "honoured",
        "roles system, developer, user, assistant and tool; content as text, or as parts of text",
    ),
    Field(
        "max_tokens",
        _CHOICES,
        "honoured",
        "completions 16, the others as many as the model's length leaves; 0 with `echo` scores a "
        "prompt",
    ),
    Field("max_completion_tokens", _CHAT, "honoured", "the same; not both with different numbers"),
    _sampling("n", *_BOTH),
    Field("stream", _ALL, "honoured", "server-sent events"),
    Field(
        "stream_options",
        _CHUNKED,
        "honoured",
        "`include_usage`: a last chunk with usage and no choices; `continuous_usage_stats`: usage "
        "in all of them; `include_obfuscation` is harmless",
    ),
    _sampling("temperature", *_TEXTS),
    _sampling("top_p", *_TEXTS),
    _sampling("top_k", *_TEXTS),
    _sampling("min_p", *_TEXTS),
    _sampling("seed", *_TEXTS),
    _sampling("stop", *_TEXTS),
    _sampling("stop_token_ids", *_TEXTS),
    _sampling("ignore_eos", *_TEXTS),
    _sampling("min_tokens", *_TEXTS),
    _sampling("presence_penalty", *_TEXTS),
    _sampling("frequency_penalty", *_TEXTS),
    _sampling("repetition_penalty", *_TEXTS),
    _sampling("logit_bias", *_TEXTS),
    Field(
        "logprobs",
        _CHOICES,
        "honoured",
        "how many of the likeliest tokens to show at each place, up to 20; chat: true or false",
    ),
    Field(
        "top_logprobs",
        _TALKS,
        "honoured",
        "0 to 20, with `logprobs`, or with `message.output_text.logprobs` in `include`",
    ),
    _sampling("prompt_logprobs", *_BOTH),
    Field(
        "response_format",
        _BOTH,
        "honoured",
        "`text`, `json_object` (with a `schema`: JSON of that, as llama.cpp's server takes it), "
        "`json_schema` (always strict), or `grammar` with llama.cpp's form",
    ),
    _sampling("structured_outputs", *_TEXTS),
    _sampling("max_draft_tokens", *_TEXTS),
    Field("guided_json", _BOTH, "honoured", "the same, by its older names"),
    Field("guided_regex", _BOTH, "honoured", "the same"),
    Field("guided_choice", _BOTH, "honoured", "the same"),
    Field("guided_grammar", _BOTH, "honoured", "the same"),
    Field(
        "text", _RESPONSES, "honoured", "`format`: `text`, `json_object` or `json_schema`, as above"
    ),
    Field(
        "tools",
        _TEMPLATED,
        "honoured",
        "functions: `{type, function: {name, description, parameters, strict}}`; "
        "[tools.md](tools.md)",
    ),
    Field(
        "tool_choice",
        _TALKS,
        "honoured",
        "`none`, `auto`, `required`, a function, or `allowed_tools`",
    ),
    Field("parallel_tool_calls", _TALKS, "honoured", "true; false: at most one call"),
    Field(
        "reasoning_effort",
        _TEMPLATED,
        "honoured",
        "by the variables that the model's chat template has for it",
    ),
    Field("thinking_token_budget", _TALKS, "honoured", "tokens that the reasoning may have"),
    Field(
        "prediction",
        _BOTH,
        "honoured",
        "`{type: content, content}`, a text or parts of text: a draft of the answer, which changes "
        "no token of it ([speculation.md](speculation.md))",
    ),
    Field("include_reasoning", _CHAT, "honoured", "true; false leaves it out of the answer"),
    Field("separate_reasoning", _CHAT, "honoured", "true; false leaves it in the text, as written"),
    Field("echo", _COMPLETIONS, "honoured", "the prompt before the text, and before its logprobs"),
    Field("return_token_ids", _BOTH, "honoured", "`token_ids` and `prompt_token_ids`"),
    Field("return_tokens_as_token_ids", _BOTH, "honoured", "logprobs name tokens as `token_id:17`"),
    Field(
        "return_weight_versions",
        _CHUNKED,
        "honoured",
        "`weight_versions` of each choice: `[{version, start, end}]`, which tokens each made",
    ),
    Field(
        "priority",
        _REQUESTS,
        "honoured",
        "lower is earlier, as vLLM's: the engine's, negated; what `gateway.max_priority`, or the "
        "key, does not allow is 400 `invalid_priority`",
    ),
    Field(
        "budget_ms", _REQUESTS, "honoured", "how long it may take, beside the header `X-Budget-Ms`"
    ),
    Field("cache_salt", _REQUESTS, "honoured", "prefixes are shared only under the same one"),
    Field(
        "add_generation_prompt",
        _TEMPLATED,
        "honoured",
        "true, unless `continue_final_message`: begins the assistant's turn",
    ),
    Field("continue_final_message", _TEMPLATED, "honoured", "goes on within the last message"),
    Field(
        "chat_template_kwargs",
        ("chat", "responses", "tokenize"),
        "honoured",
        "variables of the model's chat template; one that it does not read is refused",
    ),
    Field(
        "input",
        _RESPONSES,
        "honoured",
        "a text, or a list of items: messages, of the roles system, developer, user and assistant, "
        "with content as text or as parts of text; `function_call`, `function_call_output` and "
        "`reasoning`",
    ),
    Field("instructions", _RESPONSES, "honoured", "a system's message before all others"),
    Field("max_output_tokens", _RESPONSES, "honoured", "as many as the model's length leaves"),
    Field(
        "include",
        _RESPONSES,
        "honoured",
        "`message.output_text.logprobs`; `reasoning.encrypted_content` is harmless; others are "
        "refused",
    ),
    Field(
        "store",
        _RESPONSES,
        "honoured",
        "true: the response is found for `bus.results_ttl_s` after its end, at any gateway",
    ),
    Field(
        "background",
        _RESPONSES,
        "honoured",
        "answers at once, and goes on without its client; takes `store`",
    ),
    Field(
        "previous_response_id",
        _RESPONSES,
        "honoured",
        "a stored response whose conversation stands before `input`, without its `instructions`",
    ),
    Field(
        "tools",
        _RESPONSES,
        "honoured",
        "functions, in the flat form `{type, name, description, parameters, strict}`",
    ),
    Field(
        "reasoning",
        _RESPONSES,
        "honoured",
        "`effort`; `summary` is harmless: the reasoning itself is told",
    ),
    Field("metadata", _RESPONSES, "honoured", "up to 16 texts by name, which the answer repeats"),
    Field("token_ids", _GENERATE, "honoured", "the prompt's tokens"),
    Field(
        "sampling_params",
        _GENERATE,
        "honoured",
        "an object of the fields that are of `sampling_params` here",
    ),
    Field(
        "request_id",
        _GENERATE,
        "honoured",
        "a name of the client's, up to 256 characters, which the answer repeats; else `id` stands "
        "there",
    ),
    Field(
        "input",
        ("embeddings",),
        "honoured",
        "a text or token ids, or a list of either, at most `gateway.max_prompts`",
    ),
    Field(
        "encoding_format",
        ("embeddings",),
        "honoured",
        "`float`, or `base64`: float32, little-endian, which openai-python asks for by itself",
    ),
    Field(
        "dimensions",
        _EMBEDDED,
        "honoured",
        "how many numbers of each vector are wanted; they are taken before it is normalised",
    ),
    Field("pooling", _EMBEDDED, "honoured", "`mean`, `last` or `cls`; else the model's own"),
    Field("normalize", _EMBEDDED, "honoured", "whether vectors get the length 1; else as its own"),
    Field("text_1", ("score",), "honoured", "one text, or as many as in `text_2`"),
    Field("text_2", ("score",), "honoured", "a text or token ids, or a list of either"),
    Field("query", ("rerank",), "honoured", "a text"),
    Field("documents", ("rerank",), "honoured", "texts, or objects `{text}`"),
    Field("top_n", ("rerank",), "honoured", "so many of the most similar; else all"),
    Field("return_documents", ("rerank",), "honoured", "true: the results repeat their texts"),
    Field("add_special_tokens", ("tokenize",), "honoured", "true, of a text"),
    Field("return_token_strs", ("tokenize",), "honoured", "`token_strs`"),
    Field("tokens", ("detokenize",), "honoured", "token ids"),
    Field(
        "user",
        (*_TEXTS, *_EMBEDDED),
        "harmless",
        "the key, or without keys the header `X-Tenant`, says whose a request is",
    ),
    Field("safety_identifier", _TEXTS, "harmless", "as `user`"),
    Field("metadata", _BOTH, "harmless", "nothing is stored"),
    Field("prompt_cache_key", _TEXTS, "harmless", "prefixes are found without it"),
    Field("prompt_cache_retention", _TEXTS, "harmless", "the cache decides"),
    _sampling("spaces_between_special_tokens", *_TEXTS),
    Field(
        "stream_options",
        _RESPONSES,
        "honoured",
        "`include_obfuscation` is harmless; the last event has the usage anyway",
    ),
    Field("prompt_cache_options", _RESPONSES, "harmless", "the cache decides"),
    Field("max_tool_calls", _RESPONSES, "harmless", "of built-in tools, and there are none"),
    _sampling("detokenize"),
    _sampling("skip_special_tokens"),
    _sampling("include_stop_str_in_output"),
    _sampling("output_kind"),
    _sampling("flat_logprobs"),
    Field("features", _GENERATE, "refused", "there are no images or sounds"),
    Field("kv_transfer_params", _GENERATE, "refused", "nothing is handed to other servers"),
    Field("ec_transfer_params", _GENERATE, "refused", "nothing is handed to other servers"),
    Field("functions", _CHAT, "refused", "answers would have to be of the old form; give `tools`"),
    Field(
        "function_call",
        _CHAT,
        "refused",
        "answers would have to be of the old form; give `tool_choice`",
        (*EMPTY, "none", "auto"),
    ),
    Field("stream_reasoning", _CHAT, "refused", "it comes as it is made", (True,)),
    Field("modalities", _CHAT, "refused", "text alone is made", (*EMPTY, ["text"])),
    Field("audio", _CHAT, "refused", "text alone is made"),
    Field("web_search_options", _CHAT, "refused", "nothing is searched"),
    Field(
        "verbosity",
        _TALKS,
        "refused",
        "the template's variables are given by name",
        (*EMPTY, "medium"),
    ),
    Field("store", _CHAT, "refused", "nothing is stored"),
    Field("background_options", _RESPONSES, "refused", "there is one speed; `priority` says more"),
    Field(
        "conversation",
        _RESPONSES,
        "refused",
        "there are no conversations by name; `previous_response_id` goes on with one",
    ),
    Field("prompt", _RESPONSES, "refused", "there are no prompts by name; send `input`"),
    Field("truncation", _RESPONSES, "refused", "prompts are taken whole", (*EMPTY, "disabled")),
    Field("context_management", _RESPONSES, "refused", "prompts are taken whole"),
    Field("moderation", _RESPONSES, "refused", "nothing is judged"),
    Field(
        "service_tier",
        _TEXTS,
        "refused",
        "there is one; `priority` says more",
        (*EMPTY, "auto", "default"),
    ),
    Field("best_of", _COMPLETIONS, "refused", "all samples are told; ask for `n`", (1,)),
    Field("suffix", _COMPLETIONS, "refused", "nothing is filled in"),
    Field("use_beam_search", _BOTH, "refused", "samples are drawn"),
    Field("length_penalty", _BOTH, "refused", "of beams", (1,)),
    Field("chat_template", _TEMPLATED, "refused", "the model's own is used"),
    Field("documents", _CHAT, "refused", "give them in `chat_template_kwargs` or in messages"),
    _sampling("truncate_prompt_tokens", *_TEXTS, *_EMBEDDED),
    Field("add_special_tokens", _EMBEDDED, "refused", "they are added", (True,)),
    Field("skip_special_tokens", _TEXTS, "refused", "they are left out of the text", (True,)),
    Field("include_stop_str_in_output", _TEXTS, "refused", "the text ends before it"),
    _sampling("allowed_token_ids", *_TEXTS),
    _sampling("bad_words", *_TEXTS),
)
"""All that are known by name. Any other is refused when it asks for something."""


def read_fields(body: Body, kind: type[T], call: CallName, where: str = "") -> T:
    """As the one that all interfaces have, by this table."""
    return read_known_fields(FIELDS, body, kind, call, where)
