"""API keys: how they are made, where a call has one, and whose it is.

A key is random, so a fast hash of it is enough: nobody can try out 2^256 of them. It begins with
its id, by which it is found; what is compared in constant time is the digest.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
from starlette.requests import Request

from ...bus.public import GenerateRequest
from ...config import RequestError
from ..serving.origin import Origin
from .caller import AppliedLimits, Caller, check_allowed
from .chain import PolicyCall
from .document import ApiKey, PolicyDocument, may

_PREFIX = "ni"
_KEY = re.compile(r"ni-([0-9a-f]{12})-[A-Za-z0-9_-]{43}")
# Where a head has one, in bytes that nobody has looked at yet.
_KEY_IN_HEAD = re.compile(
    rb"\r\n(?:authorization:[ \t]*bearer[ \t]+|(?:x-)?api-key:[ \t]*)ni-([0-9a-f]{12})-",
    re.IGNORECASE,
)
_NO_KEY = hashlib.sha256(b"").hexdigest()

MAX_CREDENTIAL_LENGTH = 16_384
"""Characters of a key or a token."""

_HEADERS = ("api-key", "x-api-key")
_IN_QUERY = ("api-key", "api_key", "key", "access_token")


class Unauthenticated(RequestError):
    """Nobody knows who calls. Answered with status 401."""


def new_key(key: ApiKey) -> tuple[ApiKey, str]:
    """A key made: what is kept of it, and the key itself, which nobody can show again."""
    key_id = secrets.token_hex(6)
    text = f"{_PREFIX}-{key_id}-{secrets.token_urlsafe(32)}"
    digest, created_ns = _digest(text), time.time_ns()
    return msgspec.structs.replace(key, id=key_id, digest=digest, created_ns=created_ns), text


def credential_of(request: Request) -> str:
    """The key or token that a call brings.

    Raises:
        Unauthenticated: missing_api_key; invalid_api_key, when it brings several or has it where
            logs would show it.
    """
    headers = request.headers
    given = [value.strip() for name in _HEADERS for value in headers.getlist(name)]
    for value in headers.getlist("authorization"):
        kind, _, token = value.strip().partition(" ")
        if kind.lower() != "bearer":
            raise Unauthenticated(
                "the Authorization header is of another kind; send 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )
        given.append(token.strip())
    if len(set(given)) > 1:
        raise Unauthenticated(
            "the call brings several keys that differ; send one", code="invalid_api_key"
        )
    if given and given[0]:
        if len(given[0]) > MAX_CREDENTIAL_LENGTH:
            raise Unauthenticated("the key is too long to be one", code="invalid_api_key")
        return given[0]
    if any(name in request.query_params for name in _IN_QUERY):
        raise Unauthenticated(
            "a key in the address stands in logs, so it is not taken there (and this one should be "
            "revoked); send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
        )
    raise Unauthenticated(
        "there is no API key; send it as 'Authorization: Bearer KEY'", code="missing_api_key"
    )


def caller_with(document: PolicyDocument, text: str, now_ns: int) -> Caller:
    """Whose a key is.

    Raises:
        Unauthenticated: invalid_api_key: there is none like it, not any more, or not now.
    """
    found = _KEY.fullmatch(text)
    key = document.keys.get(found[1]) if found else None
    same = hmac.compare_digest(_digest(text), key.digest if key else _NO_KEY)
    if key is None or not same or (key.expires_ns is not None and key.expires_ns <= now_ns):
        # Not which of these, so that nobody learns which ids there are.
        raise Unauthenticated(
            "the API key is none of this server's, or was revoked, or has expired; ask for another",
            code="invalid_api_key",
        )
    return with_tenant(
        document,
        Caller(
            key_id=key.id,
            name=key.name,
            tenant=key.tenant,
            scopes=frozenset(key.scopes),
            max_priority=key.max_priority,
            models=key.models,
            limits=(AppliedLimits(f"key:{key.id}", key.limits),),
        ),
    )


def tenant_in(document: PolicyDocument, head: bytes) -> str:
    """The tenant of the key that a head seems to bring; "" when there is none of that id.

    Nothing is checked: it is good for nothing but to have clients take turns.
    """
    found = _KEY_IN_HEAD.search(head)
    key = document.keys.get(found[1].decode()) if found else None
    return key.tenant if key else ""


def with_tenant(document: PolicyDocument, caller: Caller) -> Caller:
    """A caller with what holds for his tenant as well."""
    if (tenant := document.tenants.get(caller.tenant)) is None:
        return caller
    priorities = [each for each in (caller.max_priority, tenant.max_priority) if each is not None]
    return msgspec.structs.replace(
        caller,
        max_priority=min(priorities, default=None),
        limits=(*caller.limits, AppliedLimits(f"tenant:{caller.tenant}", tenant.limits)),
    )


class Authenticate:
    """Finds out who calls."""

    def __init__(self, know: Callable[[str], Awaitable[Caller]]) -> None:
        """`know`: whose a key or token is; raises Unauthenticated."""
        self._know = know

    async def check(self, call: PolicyCall) -> None:
        call.caller = await self._know(credential_of(call.request))


class RequireScope:
    """Refuses who may not call this."""

    async def check(self, call: PolicyCall) -> None:
        if not may(call.caller.scopes, call.needed):
            has = ", ".join(sorted(call.caller.scopes)) or "none"
            raise RequestError(
                f"this needs a key with the scope {call.needed!r}, and this one's are: {has}",
                code="insufficient_scope",
            )


class AllowedModels:
    """Refuses models that a caller may not use, as if they were not there."""

    def __init__(self, default: str) -> None:
        """`default`: the name of the model of requests that name none."""
        self._default = default

    async def check(self, call: PolicyCall) -> None:
        if call.needed != "nothing":
            check_allowed(call.caller, self._default)

    @asynccontextmanager
    async def admit(
        self, origin: Origin, requests: Sequence[GenerateRequest]
    ) -> AsyncIterator[None]:
        for request in requests:
            check_allowed(origin.caller, request.model or self._default)
        yield


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
