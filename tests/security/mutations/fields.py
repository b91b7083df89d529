"""What the interfaces promise of their fields: values that are taken, and those that are refused.

Written down once more, apart from the gateway's own tables, so that the two can disagree.
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
MESSAGES: tuple[Any, ...] = (
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
    [{"role": "user", "content": "a", "colour": "red"}],
    [{"role": "user", "content": "a", "\x00": [1]}],
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
        shape: Of its errors.
        within: Names the object of which are `sampling`; else they are of the body itself.
        sampling: Fields that are mutated, too.
        unsupported: Fields that are refused unless they ask for nothing.
        harmless: Fields that change nothing.
        needed: By name, what a body without that field is answered with.
        last: As `Wanted.last`, of its streams.
        method: By which it is called; `others` are those of other endpoints at its path.
        headers: What each call of it brings beside those of its body.
        status: Of its answers.
    """

    path: str
    body: dict[str, Any]
    fields: tuple[Field, ...]
    shape: Shape = "openai"
    within: str = ""
    sampling: tuple[Field, ...] = ()
    unsupported: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()
    needed: tuple[tuple[str, str], ...] = ()
    last: str = "data: [DONE]"
    method: bytes = b"POST"
    others: tuple[bytes, ...] = ()
    headers: Headers = ()
    status: int = 200

    def head(self, headers: Headers) -> bytes:
        """That of a call, with these headers beside its own."""
        return head(self.method, self.path.encode(), (*self.headers, *headers))

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
STOP_IDS = Field(
    "stop_token_ids",
    ([1], [5, 767]),
    ([], None),
    IDS,
    ([-1], [10**6], [2**63 - 1]),
    refused("invalid_stop_token_ids"),
)
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
SAMPLERS = (
    *(TEMPERATURE, TOP_P, TOP_K, MIN_P, SEED, *PENALTIES, STOP, STOP_IDS, BIAS, MIN_TOKENS),
    *(IGNORE_EOS, integer("max_draft_tokens", (0, 3, 2**62), (None,), (-1, -(2**63)))),
)

MANY = refused("invalid_n") | refused("too_many_prompts")
N = Field("n", (2, 3), (1, None), INT, (0, -1, 257, 10_000, 2**62), MANY, "n")
PRIORITY = integer("priority", (5, 1000), (0, None), (-1, -1001, 1001, 2**62))
BUDGET = Field("budget_ms", (), (60_000, 1e5, None), NUMBER, (1e300,), refused("invalid_budget"))
SALT = Field("cache_salt", ("s", "é" * 256), ("", None), TEXT, ("s" * 257,))
SALT = SALT._replace(refusals=refused("invalid_cache_salt"))
COMMON = (PRIORITY, BUDGET, SALT)
LENGTH = integer("max_tokens", (1, 3, 10**6, 2**62, None), (4,), (-1, -(2**63)), "length")
LOGPROBS = integer("logprobs", (1, 20), (0, None), (-1, 21, 2**62))
STREAM = flag("stream", "stream")
OPTIONS = Field(
    "stream_options",
    (),
    (None,),
    (1, "a", [], {"include_usage": "a"}, {}, {"include_usage": True}),
    ({"x": 1},),
    refused("unsupported"),
    group="stream",
)
KWARGS = Field(
    "chat_template_kwargs",
    (),
    ({}, None),
    OBJECT,
    ({"a": 1}, {"tokenize": True}, {"": 1}, {"messages'": DEEP}),
    refused("unsupported"),
)
PARTS = [{"role": "user", "content": [{"type": "text", "text": "98 + 25 ="}]}]
TALK = [*HELLO, {"role": "assistant", "content": "é\U0001f600"}, {"role": "user", "content": "b"}]
TALKS = Field("messages", (TALK,), (PARTS,), MESSAGES, UNKNOWN_PARTS, refused("unsupported"))
