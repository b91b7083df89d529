"""The endpoints that requests are made for, and what they promise of their fields.

Values that are taken and values that are refused are written down once more, apart from the
gateway's own tables, so that the two can disagree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .wire import JSON, Headers, Refusals, Shape, head

DEEP: Any = [[[[[["a"]]]]]]
BOOL: tuple[Any, ...] = (0, 1, "true", [], {}, 1.5)
INT: tuple[Any, ...] = (1.5, 1.0, "1", [], {}, True, [1], 2**63, -(2**63) - 1, 10**30)
NUMBER: tuple[Any, ...] = ("1", "NaN", [], {}, True, [0.5])
TEXT: tuple[Any, ...] = (1, 0, 1.5, True, [], {}, ["a"], {"a": "b"})
TEXTS: tuple[Any, ...] = (1, True, {}, [1], [["a"]], [None], ["a", 2])
IDS: tuple[Any, ...] = (1, "1", {}, ["a"], [1.5], [[1]], [None], [2**63], [True])
OBJECT: tuple[Any, ...] = (1, "a", [], [1], True)
HELLO = [{"role": "user", "content": "98 + 25 ="}]
BAD_TALKS: tuple[Any, ...] = (
    *(1, "a", {}, True, [1], ["a"], [None], [[]], [{}], [{"role": "user"}], [{"content": "a"}]),
    *([{"role": role, "content": "a"}] for role in ("robot", "", 1, [], "USER", "r" * 1000)),
    *([{"role": "user", "content": content}] for content in (1, True, {}, [1], ["a"], DEEP)),
    *([{"role": "user", "content": [{"type": "text", "text": text}]}] for text in (1, [], {})),
    [{"role": "user", "content": [{"type": "text"}]}],
)
UNKNOWN_PARTS: tuple[Any, ...] = (
    *(
        [{"role": "user", "content": [{"type": kind, "text": "a"}]}]
        for kind in ("image_url", "audio", "", 1, None, [], {})
    ),
    [{"role": "user", "content": [{}]}],
)


class Field(NamedTuple):
    """One of a call.

    Attributes:
        moves: Values that are taken, and change what is asked of the engine.
        same: Values that are taken, and change nothing of it.
        wrong: Values of another type.
        outside: Values that can't be obeyed.
        refusals: What `outside` is answered with; `wrong` is 400, `invalid_request`.
        group: Fields of one group act on one another; only one of them is changed at a time.
    """

    name: str
    moves: tuple[Any, ...]
    same: tuple[Any, ...]
    wrong: tuple[Any, ...]
    outside: tuple[Any, ...] = ()
    refusals: Refusals = frozenset()
    group: str = ""


class Interface(NamedTuple):
    """An endpoint.

    Attributes:
        body: One that is taken.
        fields: Those that are mutated.
        shape: Shape of its errors.
        within: Names the object of which are `sampling`; else they are of the body itself.
        sampling: Fields that are mutated, too.
        unsupported: Fields that are refused unless they ask for nothing.
        neutral: Fields that change nothing.
        needed: By name, what a body without that field is answered with.
        last: As `Wanted.last`, of its streams.
        method: By which it is called; `others` are those of other endpoints at its path.
        status: Status of its answers.
        streams: Whether its answers are streams, unless a body asks for none.
    """

    path: str
    body: dict[str, Any]
    fields: tuple[Field, ...]
    shape: Shape = "openai"
    within: str = ""
    sampling: tuple[Field, ...] = ()
    unsupported: tuple[str, ...] = ()
    neutral: tuple[str, ...] = ()
    needed: tuple[tuple[str, str], ...] = ()
    last: str = "data: [DONE]"
    method: bytes = b"POST"
    others: tuple[bytes, ...] = ()
    status: int = 200
    streams: bool = False

    def head(self, headers: Headers) -> bytes:
        """That of a call, with these headers."""
        return head(self.method, self.path.encode(), headers)

    def call(self, body: bytes, headers: Headers = ()) -> bytes:
        """One with a body of JSON, as nearly all clients send it."""
        return self.head((JSON, (b"Content-Length", b"%d" % len(body)), *headers)) + body


Interfaces = tuple[Interface, ...]


def refused(code: str, status: int = 400) -> Refusals:
    return frozenset({(status, code)})


def number(
    name: str, moves: tuple[Any, ...], same: tuple[Any, ...], outside: tuple[Any, ...]
) -> Field:
    return Field(name, moves, same, NUMBER, outside, refused(f"invalid_{name}"))


def integer(
    name: str,
    moves: tuple[Any, ...],
    same: tuple[Any, ...],
    outside: tuple[Any, ...] = (),
    group: str = "",
) -> Field:
    return Field(name, moves, same, INT, outside, refused(f"invalid_{name}"), group)


def flag(name: str, group: str = "") -> Field:
    """One that changes the answer, and nothing that is asked of the engine."""
    return Field(name, (), (True, False, None), BOOL, group=group)


MODEL = Field("model", (), ("tiny", "", None), TEXT, ("other", "x" * 900, "\x00"))
OPENAI_MODEL = MODEL._replace(refusals=refused("model_not_found", 404))
TEMPERATURE = number("temperature", (0.5, 1, 1e4, 1e-4, None), (0, 1e-7), (-1, -1e300, 1e5, 1e-5))
TOP_P = number("top_p", (0.5, 1e-9), (1, None), (0, -0.5, 1.5, 1e300))
TOP_K = integer("top_k", (2, 5), (-1, 0, 2**40, None), (-2, -(2**63)))
MIN_P = number("min_p", (0.5, 1), (0, None), (-0.1, 1.1))
SEED = integer("seed", (0, -5, 2**63 - 1, -(2**63)), (None,))
PENALTIES = (
    number("presence_penalty", (1, -2, 2), (0, None), (2.5, -3)),
    number("frequency_penalty", (0.5, -2), (0, None), (2.01, -1e9)),
    number("repetition_penalty", (0.5, 2), (1, None), (0, -1, 11)),
)
STOP_OUTSIDE: tuple[Any, ...] = ([str(i) for i in range(17)], "s" * 1025, ["é" * 600])
STOP = Field(
    "stop", ("x", ["a", "b"]), ("", [], None), TEXTS, STOP_OUTSIDE, refused("invalid_stop")
)
STOP_IDS = Field("stop_token_ids", ([1], [5, 767]), ([], None), IDS, ([-1], [10**6], [2**63 - 1]))
STOP_IDS = STOP_IDS._replace(refusals=refused("invalid_stop_token_ids"))
BIAS = Field(
    "logit_bias",
    ({"5": 1.5}, {"0": -100}),
    ({}, None),
    (1, "a", [], {"a": 1}, {"5": "x"}, {"5.5": 1}, {"": 1}, {str(10**30): 1}, {"5": [1]}),
    ({"5": 101}, {"-1": 1}, {"999999": 1}, {str(i): 1 for i in range(1025)}),
    refused("invalid_logit_bias"),
)
MIN_TOKENS = integer("min_tokens", (1, 4), (0, None), (-1, 99), "length")
IGNORE_EOS = Field("ignore_eos", (True,), (False, None), BOOL)
RESPONSE_CACHE = Field("response_cache", (False,), (True, None), BOOL)
SAMPLERS = (
    *(TEMPERATURE, TOP_P, TOP_K, MIN_P, SEED, *PENALTIES, STOP, STOP_IDS, BIAS, MIN_TOKENS),
    *(IGNORE_EOS, RESPONSE_CACHE),
    integer("max_draft_tokens", (0, 3, 2**62), (None,), (-1, -(2**63))),
)

MANY = refused("invalid_n") | refused("too_many_prompts")
N = Field("n", (2, 3), (1, None), INT, (0, -1, 257, 10_000, 2**62), MANY, "n")
PRIORITY = integer("priority", (5, 1000), (0, None), (-1, -1001, 1001, 2**62))
BUDGET = Field("budget_ms", (), (60_000, 1e5, None), NUMBER, (1e300,), refused("invalid_budget"))
SALT = Field("cache_salt", ("s", "é" * 256), ("", None), TEXT, ("s" * 257,))
SALT = SALT._replace(refusals=refused("invalid_cache_salt"))
COMMON = (PRIORITY, BUDGET, SALT)
LENGTH = integer("max_tokens", (1, 3, 10**6, 2**62, None), (4,), (-1, -(2**63)), "length")
LOGPROBS = integer("logprobs", (1, 100), (0, None), (-1, 101, 2**62))
STREAM = flag("stream", "stream")
OPTIONS = Field(
    *("stream_options", (), (None, {}, {"include_usage": True}, {"include_obfuscation": 1})),
    (1, "a", [], {"include_usage": "a"}),
    *(({"x": 1},), refused("unsupported"), "stream"),
)
KWARGS = Field(
    *("chat_template_kwargs", (), ({}, {"a": 1}, None), OBJECT),
    ({"tokenize": True}, {"": 1}, {"messages'": DEEP}),
    refused("unsupported"),
)
TEMPLATE = Field(
    "chat_template", (), ("", None), TEXT, ("{{ 1 }}", "\x00", "{%"), refused("unsupported")
)
PARTS: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "98 + 25 ="}]}]
TALK = [*HELLO, {"role": "assistant", "content": "é\U0001f600"}, {"role": "user", "content": "b"}]
# Unknown fields within messages are neutral.
MARKED: tuple[Any, ...] = (
    [HELLO[0] | {"colour": "red", "\x00": [1], "é\n": DEEP}],
    [PARTS[0] | {"content": [PARTS[0]["content"][0] | {"": {}, "__class__": True}]}],
)
TALKS = Field(
    "messages", (TALK,), (PARTS, *MARKED), BAD_TALKS, UNKNOWN_PARTS, refused("unsupported")
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
    {"type": "content", "content": "a", "\x00": [1]},
)
IDS_OUTSIDE: tuple[Any, ...] = ([-1], [1, 10**6], [2**63 - 1], [768])
TOOLS = ("tools", "response_format", "functions", "structured_outputs", "audio")

PROMPT = Field(
    *("prompt", ("é\U0001f600\x00", [1, 2], [[3]], ["a"]), (["98 + 25 ="],)),
    (1, True, {}, {"a": 1}, [1.5], [None], [{"a": 1}], [[1.5]], ["a", 1], [1, "a"], [[["a"]]]),
    *(("", [], [[]], [""], None), EMPTY, "prompt"),
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
    neutral=("user", "metadata", "prompt_cache_key", "safety_identifier"),
    needed=(("prompt", "empty_prompt"),),
)
CHAT = Interface(
    "/v1/chat/completions",
    {"messages": HELLO, "max_tokens": 4} | GREEDY,
    (
        *(OPENAI_MODEL, TALKS, LENGTH, N, STREAM, OPTIONS, KWARGS, TEMPLATE, *COMMON, *SAMPLERS),
        *(flag("return_token_ids"), flag("logprobs", "top"), flag("return_weight_versions")),
        Field("top_logprobs", (), (0, None), (*INT, 1, 5), group="top"),
        Field("max_completion_tokens", (), (4, 5, None), INT, group="length"),
        Field("messages", (), (), ([],), group="messages"),
        Field("tools", (), ([], None), (1, "a", {}, True, [1], ["a"]), BAD_TOOLS, NO_TOOL),
        Field("tool_choice", (), ("none", "auto", None), (1, True, [], "", {}, "a"), BAD_CHOICES),
        Field("parallel_tool_calls", (), (True, False, None), BOOL),
        Field("include_reasoning", (), (True, False, None), BOOL),
        Field("separate_reasoning", (), (True, False, None), BOOL),
        Field("reasoning_effort", (), ("none", "low", None), (1, True, [], "", "x")),
        Field("thinking_token_budget", (), (None,), (*INT, -1), (0, 5), NONE),
        Field("prediction", PREDICTED, (None,), NO_PREDICTION, UNKNOWN_IN_PREDICTION, NONE),
    ),
    unsupported=("functions", "audio", "documents", "extra_body", "moderation"),
    neutral=(
        *("user", "metadata", "prompt_cache_key", "client_metadata", "service_tier", "store"),
        *("verbosity", "web_search_options"),
    ),
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
    neutral=("user", "prompt_cache_key", "parallel_tool_calls"),
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
        *(*SAMPLERS[:4], *SAMPLERS[5:11], IGNORE_EOS, RESPONSE_CACHE, N),
        SEED._replace(name="sampling_seed"),
        LENGTH._replace(name="max_new_tokens", refusals=refused("invalid_max_tokens")),
        MIN_TOKENS._replace(name="min_new_tokens", outside=(-1, 999)),
    ),
    unsupported=("lora_path", "image_data", "session_params", "return_hidden_states"),
    neutral=("background", "log_metrics", "routing_key", "custom_labels"),
    needed=(("text", "invalid_prompt"),),
)
SEQUENCES = Field("stop_sequences", (["x"], ["a", "b"]), ([], [""], None), (*TEXTS, "", "x"))
SEQUENCES = SEQUENCES._replace(outside=(STOP_OUTSIDE[0], ["s" * 1025]), refusals=STOP.refusals)
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
    unsupported=("tools", "compaction", "thread", "thinking", "output_format"),
    neutral=("metadata", "cache_control", "mcp_servers", "container", "speed"),
    needed=(("messages", "invalid_request"), ("max_tokens", "invalid_request")),
    last="event: message_stop",
)
COUNT = Interface(
    "/v1/messages/count_tokens",
    {"messages": HELLO},
    (MODEL._replace(refusals=refused("unknown_model", 404)), TALKS, KWARGS),
    shape="anthropic",
    unsupported=("tools", "max_tokens", "colour"),
    neutral=("cache_control", "mcp_servers", "compaction"),
    needed=(("messages", "invalid_request"),),
)
TOKENIZE = Interface(
    "/tokenize",
    {"prompt": "98 + 25 ="},
    (
        *(OPENAI_MODEL, TEMPLATE),
        Field("prompt", ("", "é\U0001f600"), (), TEXT, (LONG,), TOO_LONG, "prompt"),
        Field("messages", (), (None,), (HELLO, [], 1), group="prompt"),
        flag("add_special_tokens"),
        Field("return_token_strs", (True,), (False, None), BOOL),
    ),
    unsupported=("truncate_prompt_tokens", "colour"),
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
NO_TALKS: tuple[Any, ...] = (
    *(1, "a", {}, True, [1], ["a"], [None], [[]], [{}], [{"content": "a"}]),
    *([{"role": role, "content": "a"}] for role in ("robot", "", 1, [], "r" * 1000)),
    *([{"role": "user", "content": content}] for content in (1, True, {}, [1], ["a"], DEEP)),
)
OLLAMA_MODEL = MODEL._replace(refusals=refused("unknown_model", 404))
OLLAMA_MODEL = OLLAMA_MODEL._replace(same=("tiny", "tiny:latest", "", None))
OLLAMA_FIELDS = (
    *(OLLAMA_MODEL, STREAM, *COMMON, flag("logprobs", "top")),
    Field("top_logprobs", (), (0, None), (*INT, 1, 5), group="top"),
    Field("format", ("json", {"type": "object"}), ("", None), (1, True, [], "yaml")),
    Field("think", (), (None,), (0, 1, "x", "", [], {})),
    Field("keep_alive", (), ("5m", "-1s", 0, -1, 300, "0", None), ([], {}, True, "5x", "", "1")),
    Field("options", (), (), OBJECT, group="within"),
)
OLLAMA_OPTIONS = (
    *(TEMPERATURE, MIN_P, STOP, *PENALTIES[:2]),
    PENALTIES[2]._replace(name="repeat_penalty"),
    TOP_P._replace(moves=(0.5, 1e-9, 1), same=(0.9, None)),
    TOP_K._replace(moves=(2, 5, -1, 0, 2**40), same=(40, None)),
    SEED._replace(moves=SEED.moves[2:], same=(-1, None)),
    LENGTH._replace(
        name="num_predict",
        moves=(1, 3, 10**6, 2**62, -1, -2, None),
        outside=(0, -3, -(2**63)),
        refusals=refused("invalid_max_tokens"),
    ),
    Field("num_ctx", (), (1, 4096, 10**30, "a", None), ()),
    Field("mirostat", (), (0, None), (), (1, 2, "a"), refused("unsupported")),
    Field("tfs_z", (), (0, 1, 1.0, None), (), (0.5, "a"), refused("unsupported")),
)
OLLAMA_CHAT = Interface(
    "/api/chat",
    {"messages": HELLO, "options": {"num_predict": 4} | GREEDY},
    (
        *OLLAMA_FIELDS,
        Field("messages", (TALK,), ([{"role": "USER", "content": "98 + 25 ="}],), NO_TALKS),
        Field("tools", (), ([], None), (1, "a", {}, True, [1], ["a"]), BAD_TOOLS[:5], NO_TOOL),
    ),
    shape="ollama",
    within="options",
    sampling=OLLAMA_OPTIONS,
    unsupported=("template", "raw", "prompt", "shift", "response_format", "_debug_render_only"),
    neutral=("truncate",),
    last="done",
    streams=True,
)
OLLAMA_GENERATE = OLLAMA_CHAT._replace(
    path="/api/generate",
    body={"prompt": "98 + 25 =", "options": {"num_predict": 4} | GREEDY},
    fields=(
        *OLLAMA_FIELDS,
        Field("prompt", ("é\U0001f600\x00", "b"), (), (1, True, {}, ["a"], [1]), group="prompt"),
        Field("prompt", (), (), (), (LONG,), refused("prompt_too_long"), "prompt"),
        Field("system", ("be short",), ("", None), TEXT),
        Field("context", ([5, 6],), ([], None), IDS, ([10**6],), refused("invalid_token_ids")),
        Field("images", (), ([], None), (1, "a", {}, [1])),
    ),
    unsupported=("template", "suffix", "messages", "tools", "width"),
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
    *(KSERVE, INDEX, OLLAMA_CHAT, OLLAMA_GENERATE),
)
