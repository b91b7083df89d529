"""Requests of `/admin`: who may call it, and what it takes. Whatever is refused changes nothing."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

from nano_inference.gateway.policy.document import ApiKey, Guardrails, PolicyDocument, TenantPolicy

from .bodies import encoded, fields_changed, names_twice, refusal, usual
from .cases import WIRE, Family
from .interfaces import INT, NUMBER, TEXT, Field, Interface, Interfaces, refused
from .wire import Case, Wanted, head

INVALID = refused("invalid_request")
BAD_LIST = refused("invalid_guardrails")
OF_A_KEY = "abcdef012345"


def _text(key_id: str) -> str:
    return f"ni-{key_id}-{hashlib.sha256(key_id.encode()).hexdigest()[:43]}"


def _key(key_id: str, scope: Any = "generate") -> ApiKey:
    digest = hashlib.sha256(_text(key_id).encode()).hexdigest()
    return ApiKey(key_id, key_id, digest, "t", (scope,), 1)


ADMIN, GENERATE = (f"{number:012x}" for number in range(2))
DOCUMENT = PolicyDocument(
    keys={ADMIN: _key(ADMIN, "admin"), **{each: _key(each) for each in (GENERATE, OF_A_KEY)}},
    tenants={"u": TenantPolicy(weight=3.0)},
    guardrails=Guardrails(literals=("forbidden",)),
)
"""What holds before each of them."""


def bearer(key_id: str) -> tuple[bytes, bytes]:
    return b"Authorization", b"Bearer " + _text(key_id).encode()


BY_ADMIN = (bearer(ADMIN),)
NAMES: tuple[Any, ...] = ("", "n" * 129, "a\nb", "\x00", "\u202e", "\x7f", "a\u200bb")
GOOD_NAMES = ("b", "é" * 128, "a b", "\U0001f600", "admin", "__class__")
COUNTS: tuple[Any, ...] = (0, -1, 1.5, "5", 2**53 + 1, 10**30, True, [], {})
NO_LIMITS = (
    *({"requests_per_minute": count} for count in COUNTS),
    *({"tokens_per_minute": count} for count in COUNTS[:4]),
    *({"requests": 1}, {"": {}}, {"max_in_flight": 1, "colour": None}, {"limits": {}}),
)
NAME = Field("name", GOOD_NAMES, (), (*TEXT, None), NAMES)
SCOPES = Field(
    "scopes",
    (["read"], ["admin", "generate"], ["weights", "weights"]),
    (["generate"],),
    ("generate", 1, True, {}, None, [1], [None], [["generate"]]),
    ([], ["everything"], ["Generate"], ["generate", ""], ["generate "], ["\x00"]),
)
TENANT = Field("tenant", GOOD_NAMES, (), TEXT, NAMES)
PRIORITY = Field("max_priority", (5, 0, -5, 2**31 - 1), (None,), INT, (2**31, -(2**31) - 1, 2**62))
MODELS = Field(
    "models",
    (["tiny"], ["a", "b"], []),
    (None,),
    ("tiny", 1, True, {}, [1], [None], [["tiny"]]),
    ([""], ["m" * 257], ["m"] * 1001),
)
LIMITS = Field(
    "limits",
    ({"requests_per_minute": 5}, {"max_in_flight": 2**53}, {"tokens_per_minute": 1}),
    ({}, {"tokens_per_minute": None}),
    (1, "a", [], [1], True, None),
    NO_LIMITS,
)
ENDS = Field(
    "expires_in_s", (1, 3600, 1e9), (None,), NUMBER, (0, -1, -1e300, 1e300, 3_162_240_001, 2**63)
)
WEIGHT = Field("weight", (1, 1e-9, 1e9, None), (2.5,), NUMBER, (0, -1, 1.1e9, 1e300, -1e-300))
LITERALS = Field(
    "literals",
    (["x"], ["é", "ẞ"], [], ["forbidden"] * 10_000),
    (["secret"],),
    ("secret", 1, True, {}, None, [1], [None], [["secret"]]),
    ([""], ["a" * 1025], ["a"] * 10_001),
)
PATTERNS = LITERALS._replace(
    name="patterns",
    moves=([r"\bword\b"], [r"x{3}", "é"], [], [r"forbidden.*word"] * 20),
    same=(["a+b"],),
    outside=([""], ["a" * 1025], ["a"] * 1001),
)
NO_LITERALS = Field("literals", (), (), (), (["\u200b"], ["\u00ad"], ["x", "\u2060"]), BAD_LIST)
NO_PATTERNS = Field(
    *("patterns", (), (), ()),
    (
        *([each] for each in ("(", "[a", "a*", "(?=a)", r"(a)\1", "ß", r"\C", "a{9999}", "|a")),
        *(["\\"], ["x", "(?<!a)b"], ["((a{500}){500}){500}"], ["(?P<n>"], [r"\p{Xx}"]),
    ),
    BAD_LIST,
)

MAKE = Interface(
    "/admin/keys",
    {"name": "a"},
    (NAME, SCOPES, TENANT._replace(same=(None,)), PRIORITY, MODELS, LIMITS, ENDS),
    needed=(("name", "invalid_request"),),
    others=(b"GET", b"HEAD"),
    headers=BY_ADMIN,
    status=201,
)
CHANGE = Interface(
    f"/admin/keys/{OF_A_KEY}",
    {"name": "a"},
    (
        *(NAME, SCOPES, TENANT._replace(same=("t",), wrong=(*TEXT, None)), PRIORITY, MODELS),
        *(LIMITS, ENDS),
    ),
    method=b"PATCH",
    others=(b"GET", b"HEAD", b"DELETE", b"PATCH"),
    headers=BY_ADMIN,
)
TENANTS = Interface(
    "/admin/tenants/t",
    {"weight": 2.5},
    (WEIGHT, PRIORITY, LIMITS),
    method=b"PUT",
    others=(b"DELETE", b"PUT"),
    headers=BY_ADMIN,
)
GUARDRAILS = Interface(
    "/admin/guardrails",
    {"literals": ["secret"], "patterns": ["a+b"]},
    (LITERALS, PATTERNS, NO_LITERALS, NO_PATTERNS),
    method=b"PUT",
    others=(b"GET", b"HEAD", b"PUT"),
    headers=BY_ADMIN,
)
ADMIN_INTERFACES: Interfaces = (MAKE, CHANGE, TENANTS, GUARDRAILS)


def other_names(rng: random.Random, interfaces: Interfaces) -> Case:
    """Fields that there are not, be they null, or that are missing."""
    interface = rng.choice(interfaces)
    body = json.loads(usual(interface))
    if interface.needed and rng.random() < 0.3:
        del body[interface.needed[0][0]]
    else:
        own = ("digest", "id", "created_ns", "expires_ns", "key", "scope", "max_tokens")
        name = rng.choice((*own, "", "\x00", "é" * 9, "x" * 5000, "__class__", "name "))
        body[name] = rng.choice((None, 1, "a", [None], {"": {}}, "0" * 64))
    raw = interface.call(encoded(body, rng))
    return Case("names", interface.path, (raw,), (refusal(interface, INVALID),))


PLACES: tuple[tuple[bytes, bytes, int, str], ...] = (
    (b"GET", b"/admin/keys/none", 404, "unknown_key"),
    (b"GET", b"/admin/keys/%00", 404, "unknown_key"),
    (b"GET", b"/admin/keys/%ff%fe", 404, "unknown_key"),
    (b"GET", b"/admin/keys/" + b"x" * 9000, 404, "unknown_key"),
    (b"GET", b"/admin/keys/" + OF_A_KEY.upper().encode(), 404, "unknown_key"),
    (b"GET", b"/admin/keys/%e2%80%ae", 404, "unknown_key"),
    (b"DELETE", b"/admin/keys/" + OF_A_KEY[:-1].encode(), 404, "unknown_key"),
    (b"DELETE", b"/admin/keys/__class__", 404, "unknown_key"),
    (b"DELETE", b"/admin/tenants/t", 404, "unknown_tenant"),
    (b"DELETE", b"/admin/tenants/u/", 404, "unknown_tenant"),
    (b"DELETE", b"/admin/tenants/", 404, "unknown_tenant"),
    (b"DELETE", b"/admin/tenants/%75%00", 404, "unknown_tenant"),
    (b"PUT", b"/admin/tenants/", 400, "invalid_request"),
    (b"PUT", b"/admin/tenants/" + b"t" * 129, 400, "invalid_request"),
    (b"PUT", b"/admin/tenants/a%00", 400, "invalid_request"),
    (b"PUT", b"/admin/tenants/a%0d%0ab", 404, "not_found"),
    (b"PUT", b"/admin/tenants/%e2%80%ae", 400, "invalid_request"),
    (b"GET", b"/admin", 404, "not_found"),
    (b"GET", b"/ADMIN/keys", 404, "not_found"),
    (b"GET", b"//admin/keys", 404, "not_found"),
    (b"GET", b"/v1/../admin/keys", 404, "not_found"),
    (b"GET", b"/admin/keys;a=b", 404, "not_found"),
    (b"GET", b"/admin/keys/x/y", 404, "not_found"),
    (b"GET", b"/admin/guardrails/x", 404, "not_found"),
    (b"PUT", b"/admin/keys", 405, "method_not_allowed"),
    (b"POST", b"/admin/keys/" + OF_A_KEY.encode(), 405, "method_not_allowed"),
    (b"DELETE", b"/admin/guardrails", 405, "method_not_allowed"),
    (b"GET", b"/admin/tenants/t", 405, "method_not_allowed"),
)


def places(rng: random.Random, interfaces: Interfaces) -> Case:
    """What is not there, or is called otherwise."""
    method, target, status, code = rng.choice(PLACES)
    if method in (b"PUT", b"POST"):
        raw = TENANTS._replace(method=method).call(b"{}")
        raw = raw.replace(TENANTS.path.encode(), target, 1)
    else:
        raw = head(method, target, BY_ADMIN)
    return Case("place", "", (raw,), (Wanted(refused(code, status)),))


def any_text(rng: random.Random, interfaces: Interfaces) -> Case:
    """A block list of whatever characters there are: it can be read or it can't, and says so."""
    letters = rng.choice(("ab()[]{}*+?|\\^$.-,:<>=!P09 ", "aßẞİ\u0130\u200b\ufb01ﷺ\u0301(|", ""))
    anything = [chr(rng.randrange(1, 0xD800)) for _ in range(40)]
    texts = [
        "".join(rng.choices(letters or anything, k=rng.randrange(1, 30)))
        for _ in range(rng.randrange(1, 4))
    ]
    body = {rng.choice(("literals", "patterns")): texts}
    wanted = Wanted(BAD_LIST, status=200, either=True)
    raw = GUARDRAILS.call(encoded(body, rng))
    return Case("text", GUARDRAILS.path, (raw,), (wanted,))


ADMINISTRATION = Family(
    ADMIN_INTERFACES,
    (
        *WIRE,
        (300, fields_changed),
        (80, other_names),
        (30, names_twice),
        (80, places),
        (60, any_text),
    ),
)
"""Of a gateway that knows its callers by the keys of `DOCUMENT`."""
