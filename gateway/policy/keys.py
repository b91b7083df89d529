"""API keys: creation, extraction from a call, and the checks of a call's head.

A key is random, so a fast hash of it is enough: 2^256 guesses are out of reach. It begins with its
id, by which it is found; its digest is compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from typing import Any

import msgspec

from ...config import RequestError
from ..call import Call
from ..caller import AppliedLimits, Caller, Needed, may
from .document import ApiKey, PolicyDocument

_KEY = re.compile(r"ni-([0-9a-f]{12})-[A-Za-z0-9_-]{43}")
_KEY_ID = re.compile(r"[0-9a-f]{12}")
# In the bytes of a head that isn't parsed yet.
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
    """The caller is unknown. Answered with status 401."""


def new_key(**fields: Any) -> tuple[ApiKey, str]:
    """Create a key with fields of `ApiKey`. Returns what is stored of it, and the key itself."""
    key_id = secrets.token_hex(6)
    text = f"ni-{key_id}-{secrets.token_urlsafe(32)}"
    return ApiKey(id=key_id, digest=_digest(text), created_ns=time.time_ns(), **fields), text


def credential_of(call: Call) -> str:
    """Return the key or token of a call.

    Raises:
        Unauthenticated: missing_api_key; invalid_api_key, of several or of one in the address.
    """
    given = [value.strip() for name in _HEADERS for value in call.header_values(name)]
    for value in call.header_values("authorization"):
        kind, _, token = value.strip().partition(" ")
        if kind.lower() != "bearer":
            raise _invalid(
                "the Authorization header is of another kind; send 'Authorization: Bearer KEY'"
            )
        given.append(token.strip())
    if len(set(given)) > 1:
        raise _invalid("the call brings several keys that differ; send one")
    if given and given[0]:
        if len(given[0]) > MAX_CREDENTIAL_LENGTH:
            raise _invalid("the key is too long to be one")
        return given[0]
    if any(name in call.query for name in _IN_QUERY):
        raise _invalid(
            "a key in the address stands in logs, so it is not taken there (and this one should be "
            "revoked); send it as 'Authorization: Bearer KEY'"
        )
    raise Unauthenticated(
        "there is no API key; send it as 'Authorization: Bearer KEY'", code="missing_api_key"
    )


def caller_with(document: PolicyDocument, text: str, now_ns: int) -> Caller:
    """Return the caller with a key.

    Raises:
        Unauthenticated: invalid_api_key: the key is unknown, revoked or expired.
    """
    found = _KEY.fullmatch(text)
    key = document.keys.get(found[1]) if found else None
    same = hmac.compare_digest(_digest(text), key.digest if key else _NO_KEY)
    if key is None or not same or (key.expires_ns is not None and key.expires_ns <= now_ns):
        # One message for all, so that callers can't probe for ids.
        raise _invalid(
            "the API key is none of this server's, or was revoked, or has expired; ask for another"
        )
    return _caller_of(document, key)


def caller_again(document: PolicyDocument, caller: Caller, now_ns: int) -> Caller:
    """Return a caller that was authenticated earlier, with its present permissions and limits.

    Raises:
        Unauthenticated: invalid_api_key: its key was revoked, or has expired.
    """
    if not _KEY_ID.fullmatch(caller.key_id):
        # The subject of a token; a batch may run longer than a token is valid.
        return with_tenant(document, msgspec.structs.replace(caller, limits=()))
    key = document.keys.get(caller.key_id)
    if key is None or (key.expires_ns is not None and key.expires_ns <= now_ns):
        raise _invalid("the API key that this was begun with was revoked, or has expired")
    return _caller_of(document, key)


def tenant_in(document: PolicyDocument, head: bytes) -> str:
    """Return the tenant of the key id in a head; "" if it is unknown.

    The key is not verified: use the result for turns only.
    """
    found = _KEY_IN_HEAD.search(head)
    key = document.keys.get(found[1].decode()) if found else None
    return key.tenant if key else ""


def with_tenant(document: PolicyDocument, caller: Caller) -> Caller:
    """Return a caller with the limits of its tenant as well."""
    if (tenant := document.tenants.get(caller.tenant)) is None:
        return caller
    priorities = [each for each in (caller.max_priority, tenant.max_priority) if each is not None]
    return msgspec.structs.replace(
        caller,
        max_priority=min(priorities, default=None),
        limits=(*caller.limits, AppliedLimits(f"tenant:{caller.tenant}", tenant.limits)),
    )


def _caller_of(document: PolicyDocument, key: ApiKey) -> Caller:
    return with_tenant(
        document,
        Caller(
            key_id=key.id,
            name=key.name,
            tenant=key.tenant,
            scopes=frozenset(key.scopes),
            max_priority=key.max_priority,
            models=key.models,
            mcp_servers=key.mcp_servers,
            limits=(AppliedLimits(f"key:{key.id}", key.limits),),
        ),
    )


def check_scope(caller: Caller, needed: Needed) -> None:
    """Raise RequestError `insufficient_scope` if a caller lacks the scope of an endpoint."""
    if not may(caller.scopes, needed):
        has = ", ".join(sorted(caller.scopes)) or "none"
        raise RequestError(
            f"this needs a key with the scope {needed!r}, and this one's are: {has}",
            code="insufficient_scope",
        )


def _invalid(message: str) -> Unauthenticated:
    return Unauthenticated(message, code="invalid_api_key")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
