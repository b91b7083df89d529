"""What becomes of each field of a call: one table, which the documents repeat."""

from __future__ import annotations

from typing import Literal, TypeVar

from ..fields import EMPTY, Body, Field, read_known_fields

T = TypeVar("T")

CallName = Literal[
    "completions", "chat", "responses", "generate", "sampling_params", "tokenize", "detokenize"
]
"""`sampling_params` are a field of `generate`, with fields of its own."""


_BOTH: tuple[CallName, ...] = ("completions", "chat")
_TEXTS: tuple[CallName, ...] = (*_BOTH, "responses")
_SAMPLED: tuple[CallName, ...] = (*_TEXTS, "sampling_params")
_CHOICES: tuple[CallName, ...] = (*_BOTH, "sampling_params")
_ALL: tuple[CallName, ...] = (*_TEXTS, "generate")
_CHUNKED: tuple[CallName, ...] = (*_BOTH, "generate")
_COMPLETIONS: tuple[CallName, ...] = ("completions",)
_GENERATE: tuple[CallName, ...] = ("generate",)
_SAMPLING_PARAMS: tuple[CallName, ...] = ("sampling_params",)
_CHAT: tuple[CallName, ...] = ("chat",)
_RESPONSES: tuple[CallName, ...] = ("responses",)
_TALKS: tuple[CallName, ...] = ("chat", "responses")
_TEMPLATED: tuple[CallName, ...] = ("chat", "tokenize")


FIELDS = (
    Field(
        "model",
        (*_ALL, "tokenize", "detokenize"),
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
    Field("n", _CHOICES, "honoured", "choices of each prompt (1)"),
    Field("stream", _ALL, "honoured", "server-sent events"),
    Field(
        "stream_options",
        _CHUNKED,
        "honoured",
        "`include_usage`: a last chunk with usage and no choices; `continuous_usage_stats`: usage "
        "in all of them; `include_obfuscation` is harmless",
    ),
    Field("temperature", _SAMPLED, "honoured", "1; 0 is greedy, and so is less than 0.000001"),
    Field("top_p", _SAMPLED, "honoured", "1 is off"),
    Field("top_k", _SAMPLED, "honoured", "0 and -1 are off"),
    Field("min_p", _SAMPLED, "honoured", "0 is off"),
    Field("seed", _SAMPLED, "honoured", "the same samples each time; signed, 64 bits"),
    Field("stop", _SAMPLED, "honoured", "a text or up to 16; the text ends before it"),
    Field("stop_token_ids", _SAMPLED, "honoured", "these tokens end it as well"),
    Field("ignore_eos", _SAMPLED, "honoured", "goes on past the model's own stop tokens"),
    Field("min_tokens", _SAMPLED, "honoured", "nothing stops it before so many"),
    Field("presence_penalty", _SAMPLED, "honoured", "-2 to 2"),
    Field("frequency_penalty", _SAMPLED, "honoured", "-2 to 2"),
    Field("repetition_penalty", _SAMPLED, "honoured", "1 is off"),
    Field("logit_bias", _SAMPLED, "honoured", "by token id, -100 to 100"),
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
    Field(
        "prompt_logprobs",
        _CHOICES,
        "honoured",
        "as vLLM's: for each token of the prompt the likeliest tokens and itself, by id; not in a "
        "stream",
    ),
    Field(
        "response_format",
        _BOTH,
        "honoured",
        "`text`, `json_object`, `json_schema` (always strict), or `grammar` with llama.cpp's form",
    ),
    Field(
        "structured_outputs",
        _SAMPLED,
        "honoured",
        "as vLLM's: one of `json`, `regex`, `choice`, `grammar` and `json_object`",
    ),
    Field("guided_json", _BOTH, "honoured", "the same, by its older names"),
    Field("guided_regex", _BOTH, "honoured", "the same"),
    Field("guided_choice", _BOTH, "honoured", "the same"),
    Field("guided_grammar", _BOTH, "honoured", "the same"),
    Field("text", _RESPONSES, "honoured", "`format`: `text`, `json_object` or `json_schema`"),
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
        _ALL,
        "honoured",
        "lower is earlier, as vLLM's: the engine's, negated, at most `gateway.max_priority`",
    ),
    Field("budget_ms", _ALL, "honoured", "how long it may take, beside the header `X-Budget-Ms`"),
    Field("cache_salt", _ALL, "honoured", "prefixes are shared only under the same one"),
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
        "a text, or a list of messages: roles system, developer, user and assistant; content as "
        "text, or as parts of text",
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
    Field("add_special_tokens", ("tokenize",), "honoured", "true, of a text"),
    Field("return_token_strs", ("tokenize",), "honoured", "`token_strs`"),
    Field("tokens", ("detokenize",), "honoured", "token ids"),
    Field(
        "user",
        _TEXTS,
        "harmless",
        "the key, or without keys the header `X-Tenant`, says whose a request is",
    ),
    Field("safety_identifier", _TEXTS, "harmless", "as `user`"),
    Field("metadata", _BOTH, "harmless", "nothing is stored"),
    Field("prompt_cache_key", _TEXTS, "harmless", "prefixes are found without it"),
    Field("prompt_cache_retention", _TEXTS, "harmless", "the cache decides"),
    Field("prediction", _CHAT, "harmless", "it could only be quicker"),
    Field("parallel_tool_calls", _TALKS, "harmless", "there are no tools"),
    Field("spaces_between_special_tokens", _SAMPLED, "harmless", "of slow tokenizers"),
    Field(
        "stream_options", _RESPONSES, "harmless", "`include_obfuscation` pads chunks; usage is told"
    ),
    Field("prompt_cache_options", _RESPONSES, "harmless", "the cache decides"),
    Field("detokenize", _SAMPLING_PARAMS, "harmless", "the answer has no text"),
    Field("skip_special_tokens", _SAMPLING_PARAMS, "harmless", "the answer has no text"),
    Field("include_stop_str_in_output", _SAMPLING_PARAMS, "harmless", "the answer has no text"),
    Field("output_kind", _SAMPLING_PARAMS, "harmless", "`stream` says it"),
    Field("flat_logprobs", _SAMPLING_PARAMS, "harmless", "of vLLM's memory"),
    Field("features", _GENERATE, "refused", "there are no images or sounds"),
    Field("kv_transfer_params", _GENERATE, "refused", "nothing is handed to other servers"),
    Field("ec_transfer_params", _GENERATE, "refused", "nothing is handed to other servers"),
    Field("tools", _TALKS, "refused", "there are no tools yet"),
    Field("tool_choice", _TALKS, "refused", "there are no tools yet", (*EMPTY, "none", "auto")),
    Field("functions", _CHAT, "refused", "there are no tools yet"),
    Field("function_call", _CHAT, "refused", "there are no tools yet", (*EMPTY, "none", "auto")),
    Field("modalities", _CHAT, "refused", "text alone is made", (*EMPTY, ["text"])),
    Field("audio", _CHAT, "refused", "text alone is made"),
    Field("web_search_options", _CHAT, "refused", "nothing is searched"),
    Field("reasoning_effort", _CHAT, "refused", "the template's variables are given by name"),
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
    Field("max_tool_calls", _RESPONSES, "refused", "there are no tools yet"),
    Field("reasoning", _RESPONSES, "refused", "the template's variables are given by name"),
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
    Field("truncate_prompt_tokens", _SAMPLED, "refused", "prompts are taken whole"),
    Field("skip_special_tokens", _TEXTS, "refused", "they are left out of the text", (True,)),
    Field("include_stop_str_in_output", _TEXTS, "refused", "the text ends before it"),
    Field("allowed_token_ids", _SAMPLED, "refused", "ask by `logit_bias`"),
    Field("bad_words", _SAMPLED, "refused", "ask by `logit_bias`"),
)
"""All that are known by name. Any other is refused when it asks for something."""


def read_fields(body: Body, kind: type[T], call: CallName, where: str = "") -> T:
    """As the one that all interfaces have, by this table."""
    return read_known_fields(FIELDS, body, kind, call, where)
