"""The endpoints that requests are made for."""

from __future__ import annotations

from typing import Any

from .fields import (
    BOOL,
    COMMON,
    DEEP,
    HELLO,
    IDS,
    IGNORE_EOS,
    INT,
    KWARGS,
    LENGTH,
    LOGPROBS,
    MANY,
    MIN_TOKENS,
    MODEL,
    OBJECT,
    OPENAI_MODEL,
    OPTIONS,
    SAMPLERS,
    SEED,
    STOP,
    STREAM,
    TALKS,
    TEMPERATURE,
    TEXT,
    TEXTS,
    TOP_K,
    TOP_P,
    Field,
    Interface,
    N,
    flag,
    integer,
    refused,
)

GREEDY: dict[str, Any] = {"temperature": 0}
LONG = "x" * 900_000
EMPTY = refused("empty_prompt") | refused("invalid_prompt")
TOO_LONG = refused("context_length_exceeded")
PREDICTED: tuple[Any, ...] = (
    {"type": "content", "content": "123"},
    {"type": "content", "content": [{"type": "text", "text": "é\U0001f600"}]},
)
NO_PREDICTION: tuple[Any, ...] = (
    *(1, True, "a", [], {}, {"type": "content"}, {"content": "a"}, {"type": "x", "content": "a"}),
    *({"type": "content", "content": 1}, {"type": "content", "content": ["a"]}),
    {"type": "content", "content": [{"type": "image_url", "text": "a"}]},
)
UNKNOWN_IN_PREDICTION: tuple[Any, ...] = (
    {"type": "content", "content": "a", "more": 1},
    {"type": "content", "content": [{"type": "text", "text": "a", "more": 1}]},
)
IDS_OUTSIDE: tuple[Any, ...] = ([-1], [1, 10**6], [2**63 - 1], [768])
TOOLS = ("tools", "response_format", "functions", "structured_outputs", "audio")

PROMPT = Field(
    "prompt",
    ("é\U0001f600\x00", [1, 2], [[3]], ["a"]),
    (["98 + 25 ="],),
    (1, True, {}, {"a": 1}, [1.5], [None], [{"a": 1}], [[1.5]], ["a", 1], [1, "a"], [[["a"]]]),
    ("", [], [[]], [""], None),
    EMPTY,
    "prompt",
)
PROMPT_IDS = PROMPT._replace(
    moves=(), same=(), wrong=(), outside=IDS_OUTSIDE, refusals=refused("invalid_token_ids")
)
PROMPT_LONG = PROMPT_IDS._replace(outside=(LONG, [1] * 9000, [1] * 2048), refusals=TOO_LONG)

NONE = refused("unsupported")
NO_TOOL = NONE | refused("invalid_request")
BAD_TOOLS: tuple[Any, ...] = (
    [{}],
    [{"type": "web_search"}],
    [{"type": "function"}],
    [{"type": "function", "function": {"name": "\x00"}}],
    [{"type": "function", "function": {"name": "f", "parameters": DEEP}}],
    [{"type": "function", "function": {"name": "f"}}],
    [{"type": "function", "function": {"name": "f"}}] * 2,
)
BAD_CHOICES: tuple[Any, ...] = (
    "required",
    {"type": "function", "function": {"name": "f"}},
    {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}},
)

COMPLETIONS = Interface(
    "/v1/completions",
    {"prompt": "98 + 25 =", "max_tokens": 4} | GREEDY,
    (
        *(OPENAI_MODEL, PROMPT, PROMPT_IDS, PROMPT_LONG, LENGTH, N, LOGPROBS, STREAM, OPTIONS),
        *(*COMMON, *SAMPLERS, flag("return_token_ids", "prompt"), flag("echo", "length")),
        *(flag("return_tokens_as_token_ids"), flag("return_weight_versions")),
        Field("prediction", PREDICTED, (None,), NO_PREDICTION, UNKNOWN_IN_PREDICTION, NONE),
    ),
    unsupported=(*TOOLS[1:2], "suffix", "best_of", "guided_json", "use_beam_search"),
    harmless=("user", "metadata", "prompt_cache_key", "safety_identifier"),
    needed=(("prompt", "empty_prompt"),),
)
CHAT = Interface(
    "/v1/chat/completions",
    {"messages": HELLO, "max_tokens": 4} | GREEDY,
    (
        *(OPENAI_MODEL, TALKS, LENGTH, N, STREAM, OPTIONS, KWARGS, *COMMON, *SAMPLERS),
        *(flag("return_token_ids"), flag("logprobs", "top"), flag("return_weight_versions")),
        Field("top_logprobs", (), (0, None), (*INT, 1, 5), group="top"),
        Field("max_completion_tokens", (), (4, None), (*INT, 5), group="length"),
        Field("messages", (), (), ([],), group="messages"),
        Field("tools", (), ([], None), (1, "a", {}, True, [1], ["a"]), BAD_TOOLS, NO_TOOL),
        Field("tool_choice", (), ("none", "auto", None), (1, True, [], "", {}, "a"), BAD_CHOICES),
        Field("parallel_tool_calls", (), (True, False, None), BOOL),
        Field("include_reasoning", (), (True, False, None), BOOL),
        Field("separate_reasoning", (), (True, False, None), BOOL),
        Field("reasoning_effort", (), ("none", None), (1, True, [], "", "x"), ("low",), NONE),
        Field("thinking_token_budget", (), (None,), (*INT, -1), (0, 5), NONE),
        Field("prediction", PREDICTED, (None,), NO_PREDICTION, UNKNOWN_IN_PREDICTION, NONE),
    ),
    unsupported=("functions", "audio", "store", "documents", "web_search_options"),
    harmless=("user", "metadata", "prompt_cache_key"),
    needed=(("messages", "invalid_request"),),
)
NO_RESPONSE = refused("previous_response_not_found")
RESPONSES = Interface(
    "/v1/responses",
    {"input": "98 + 25 =", "max_output_tokens": 4} | GREEDY,
    (
        *(OPENAI_MODEL, STREAM, KWARGS, *COMMON, *SAMPLERS),
        Field("input", ("b",), (HELLO,), (1, True, {}, [1], ["a"], "", [], None), group="input"),
        TALKS._replace(name="input", moves=(), same=(), group="input"),
        Field("instructions", ("be short",), ("", None), TEXT),
        LENGTH._replace(
            name="max_output_tokens",
            outside=(0, -1),
            refusals=refused("invalid_max_tokens") | refused("invalid_max_output_tokens"),
        ),
        Field("store", (), (True, False, None), BOOL),
        Field("background", (), (False, None), BOOL),
        Field("previous_response_id", (), ("", None), TEXT, ("b", "resp_0", "\x00"), NO_RESPONSE),
        Field("metadata", (), ({"a": "b"}, {}, None), (1, [], "a", {"a": 1}, {"a": [[]]})),
        Field("metadata", (), (), ({str(i): "a" for i in range(17)},), group="many"),
        Field("include", (), ([], None), (1, "a", {}, [1], [[]])),
        Field("include", (), (), (), (["a"], ["\x00" * 99]), refused("unsupported")),
        Field("top_logprobs", (), (0, None), (*INT, 1, 5)),
    ),
    unsupported=(*TOOLS[:1], "conversation", "prompt", "truncation"),
    harmless=("user", "prompt_cache_key", "parallel_tool_calls"),
    needed=(("input", "invalid_request"),),
    last="event: response.incomplete",
)
TOKENS = Interface(
    "/inference/v1/generate",
    {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4} | GREEDY},
    (
        *(OPENAI_MODEL, STREAM, OPTIONS, *COMMON, flag("return_weight_versions")),
        Field(
            "token_ids", ([1], [767, 0]), (), (*IDS, "a"), IDS_OUTSIDE, refused("invalid_token_ids")
        ),
        Field("token_ids", (), (), (), ([], None), EMPTY),
        Field("token_ids", (), (), (), ([1] * 9000, [1] * 2048), TOO_LONG),
        Field("request_id", (), ("mine", "", None), (*TEXT, "r" * 257)),
        Field("sampling_params", (), (), OBJECT, group="within"),
    ),
    within="sampling_params",
    sampling=(*SAMPLERS, LENGTH._replace(outside=(0, -1)), N, LOGPROBS),
    unsupported=("features", "kv_transfer_params", "prompt", "messages"),
    needed=(("token_ids", "empty_prompt"),),
)
SGLANG = Interface(
    "/generate",
    {"text": "98 + 25 =", "sampling_params": {"max_new_tokens": 4} | GREEDY},
    (
        STREAM,
        *(integer("priority", (-5, -1000), (0, None), (1, 1001, -1001)), COMMON[1]),
        Field("text", ("b", ["c"]), (["98 + 25 ="],), (1, True, {}, [1], [None], [[]])),
        Field("text", (), (), (), ("", [], [""], None, LONG), EMPTY | refused("prompt_too_long")),
        Field("rid", (), ("", None), (1, True, {}, [1], ["a", "b"])),
        Field("return_logprob", (), (True, False, None, [True]), (*BOOL[:3], [1], [True, True])),
        Field("top_logprobs_num", (), (0, None, 1), (1.5, "1", {}, True, [1, 2])),
        Field("logprob_start_len", (), (-1, None), (1.5, "1", {}, True, [1, 2])),
        Field("sampling_params", (), (), (1, "a", [1], [], True), group="within"),
    ),
    within="sampling_params",
    sampling=(
        *(*SAMPLERS[:4], *SAMPLERS[5:11], IGNORE_EOS, N),
        SEED._replace(name="sampling_seed"),
        LENGTH._replace(name="max_new_tokens", refusals=refused("invalid_max_tokens")),
        MIN_TOKENS._replace(name="min_new_tokens", outside=(-1, 999)),
    ),
    unsupported=("lora_path", "image_data", "session_params", "return_hidden_states"),
    harmless=("background", "log_metrics", "routing_key", "custom_labels"),
    needed=(("text", "invalid_prompt"),),
)
SEQUENCES = STOP._replace(
    name="stop_sequences",
    moves=(["x"], ["a", "b"]),
    same=([], [""], None),
    wrong=(*TEXTS, "", "x"),
    outside=([str(i) for i in range(17)], ["s" * 1025]),
)
MESSAGES = Interface(
    "/v1/messages",
    {"messages": HELLO, "max_tokens": 4} | GREEDY,
    (
        *(MODEL._replace(refusals=refused("unknown_model", 404)), TALKS, STREAM, KWARGS, *COMMON),
        *(TEMPERATURE, TOP_P, TOP_K, SEED, SEQUENCES),
        LENGTH._replace(moves=(1, 3, 10**6), outside=(0, -1)),
        Field("max_tokens", (), (), (None,), group="length"),
        Field(
            "system", ("be short",), ("", [], None), (1, True, {}, [1], [[]], [{"type": "text"}])
        ),
        Field("messages", (), (), ([],), group="messages"),
    ),
    shape="anthropic",
    unsupported=("tools", "mcp_servers", "container", "thinking", "output_format"),
    harmless=("metadata", "cache_control"),
    needed=(("messages", "invalid_request"), ("max_tokens", "invalid_request")),
    last="event: message_stop",
)
COUNT = Interface(
    "/v1/messages/count_tokens",
    {"messages": HELLO},
    (MODEL._replace(refusals=refused("unknown_model", 404)), TALKS, KWARGS),
    shape="anthropic",
    unsupported=("tools", "mcp_servers", "max_tokens", "colour"),
    harmless=("cache_control",),
    needed=(("messages", "invalid_request"),),
)
TOKENIZE = Interface(
    "/tokenize",
    {"prompt": "98 + 25 ="},
    (
        OPENAI_MODEL,
        Field("prompt", ("", "é\U0001f600"), (), TEXT, (LONG,), TOO_LONG, "prompt"),
        Field("messages", (), (None,), (HELLO, [], 1), group="prompt"),
        flag("add_special_tokens"),
        Field("return_token_strs", (True,), (False, None), BOOL),
    ),
    unsupported=("truncate_prompt_tokens", "chat_template", "colour"),
    needed=(("prompt", "invalid_request"),),
)
DETOKENIZE = Interface(
    "/detokenize",
    {"tokens": [5, 6]},
    (
        OPENAI_MODEL,
        Field("tokens", ([], [7]), (), (*IDS, None), IDS_OUTSIDE, refused("invalid_token_ids")),
    ),
    unsupported=("colour", "prompt"),
    needed=(("tokens", "invalid_request"),),
)
NO_TENSOR = refused("invalid_tensor")
NO_PARAMETER: tuple[Any, ...] = ([], {}, [1], {"a": 1}, None, 2**64)
KSERVE = Interface(
    "/v2/models/tiny/generate",
    {"text_input": "98 + 25 =", "max_tokens": 4} | GREEDY,
    (
        Field(
            "text_input", ("b", ["é\U0001f600\x00"], {}), (["98 + 25 ="],), (), ("", [""]), EMPTY
        ),
        Field("text_input", (), (), (), (1, True, [], [1], ["a", "b"], None), NO_TENSOR),
        Field("text_input", (), (), (), (LONG,), TOO_LONG | refused("prompt_too_long")),
        Field("stream", (), (False,), (), (2, "true", [], {}, None, [True, False]), NO_TENSOR),
        Field("max_tokens", (1, "3"), ("4",), (*NO_PARAMETER, 4.0)),
        Field("max_tokens", (), (), (), (0, -1, -(2**63)), refused("invalid_max_tokens")),
        Field("temperature", (0.5, "1"), (0.0, "0"), NO_PARAMETER),
        Field("temperature", (), (), (), (-1, -1e300, 1e5), refused("invalid_temperature")),
        Field("top_k", (2, "5"), (-1, 0), NO_PARAMETER, (-2, -(2**63)), refused("invalid_top_k")),
        Field("seed", (0, -5, 2**63 - 1), (), NO_PARAMETER),
        Field("n", (2, 3), (1,), NO_PARAMETER, (0, -1, 257, 2**62), MANY, "n"),
        Field("id", (), ("", "mine"), (1, True, [], {}, None)),
        Field("exclude_input_in_output", (), (True, False), (), (7, "a", {}, None), NO_TENSOR),
    ),
    shape="kserve",
    needed=(("text_input", "invalid_tensor"),),
    others=(b"GET", b"HEAD"),
)
INDEX = Interface(
    "/v2/repository/index",
    {"ready": True},
    (Field("ready", (), (True, False), (0, 1, "true", [], {}, 1.5)),),
    shape="kserve",
)

INTERFACES = (
    *(COMPLETIONS, CHAT, RESPONSES, TOKENS, SGLANG, MESSAGES, COUNT, TOKENIZE, DETOKENIZE),
    *(KSERVE, INDEX),
)
