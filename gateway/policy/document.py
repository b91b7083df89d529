"""The document that a policy backend stores: keys, tenants, and guardrails."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ...config import RequestError
from ..call import MAX_TENANT_LENGTH
from ..caller import Limits, Scope

Name = Annotated[
    str, Meta(min_length=1, max_length=MAX_TENANT_LENGTH, pattern=r"^[^\x00-\x1f\x7f]+$")
]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]
BlockedText = Annotated[str, Meta(min_length=1, max_length=1024)]

MOST_KEYS = 100_000
"""API keys of one document, which every gateway holds in memory."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of the document."""


class ApiKey(_Part, frozen=True):
    """A key, of which only the digest is stored.

    Attributes:
        id: Part of the key itself; names it in logs and commands.
        name: For people.
        digest: SHA-256 of the whole key, in hexadecimal.
        tenant: The tenant of its requests.
        scopes: Permissions of its holder.
        created_ns: Wall clock.
        max_priority: The highest priority; None for `gateway.max_priority`.
        models: The models it may use; None for all.
        mcp_servers: The MCP servers whose tools it may use: names in `mcp.servers`, and hosts of
            URLs; None for all.
        limits: Limits of this key; those of its tenant apply as well.
        expires_ns: Expiry, wall clock; None for never.
    """

    id: str
    name: Name
    digest: str
    tenant: Name
    scopes: tuple[Scope, ...]
    created_ns: int
    max_priority: Priority | None = None
    models: Annotated[tuple[ModelName, ...], Meta(max_length=1000)] | None = None
    mcp_servers: Annotated[tuple[Name, ...], Meta(max_length=1000)] | None = None
    limits: Limits = Limits()
    expires_ns: int | None = None


class TenantPolicy(_Part, frozen=True):
    """Settings for all keys of a tenant together.

    Attributes:
        weight: Its weight in the fairness of every lane; None for the lane's own setting.
        max_priority: The highest priority, even if its keys allow more; None for no such limit.
    """

    limits: Limits = Limits()
    weight: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    max_priority: Priority | None = None


class Guardrails(_Part, frozen=True):
    """Rules that block prompts and answers.

    Attributes:
        literals: Texts, compared after normalisation (NFKC_Casefold).
        patterns: Regular expressions of RE2, on normalised text.
    """

    literals: Annotated[tuple[BlockedText, ...], Meta(max_length=10_000)] = ()
    patterns: Annotated[tuple[BlockedText, ...], Meta(max_length=1000)] = ()


class PolicyDocument(_Part, frozen=True):
    """The whole policy, immutable."""

    keys: dict[str, ApiKey] = {}
    tenants: dict[Name, TenantPolicy] = {}
    guardrails: Guardrails = Guardrails()

    def with_key(self, key: ApiKey) -> PolicyDocument:
        """Return the document with a key added or replaced.

        Raises:
            RequestError: too_many_keys.
        """
        keys = self.keys | {key.id: key}
        if len(keys) > MOST_KEYS:
            raise RequestError(
                f"there are {MOST_KEYS} keys, which is the most; revoke some", code="too_many_keys"
            )
        return msgspec.structs.replace(self, keys=keys)

    def without_key(self, key_id: str) -> PolicyDocument:
        """Raises RequestError `unknown_key`."""
        self.key(key_id)
        keys = {name: key for name, key in self.keys.items() if name != key_id}
        return msgspec.structs.replace(self, keys=keys)

    def key(self, key_id: str) -> ApiKey:
        """Raises RequestError `unknown_key`."""
        if (key := self.keys.get(key_id)) is None:
            raise RequestError(
                f"there is no key {key_id!r:.40}; list them to see their ids", code="unknown_key"
            )
        return key

    def with_tenant(self, tenant: str, policy: TenantPolicy) -> PolicyDocument:
        """Return the document with a tenant's settings replaced."""
        return msgspec.structs.replace(self, tenants=self.tenants | {tenant: policy})

    def without_tenant(self, tenant: str) -> PolicyDocument:
        """Raises RequestError `unknown_tenant`. Its keys stay."""
        if tenant not in self.tenants:
            raise RequestError(
                f"nothing is set for the tenant {tenant!r:.40}",
                code="unknown_tenant",
                remedy="set a limit for it first",
            )
        tenants = {name: each for name, each in self.tenants.items() if name != tenant}
        return msgspec.structs.replace(self, tenants=tenants)


def encode_document(document: PolicyDocument) -> bytes:
    """Encode a document for a backend."""
    return msgspec.json.encode(document)


def decode_document(raw: bytes) -> PolicyDocument:
    """Decode a document; b"" is an empty one.

    Raises:
        ValueError: It is malformed.
    """
    return msgspec.json.decode(raw, type=PolicyDocument) if raw else PolicyDocument()
