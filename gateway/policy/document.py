"""What a policy backend stores: keys, tenants, and what is blocked."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ...config import RequestError

Scope = Literal["read", "generate", "weights", "admin"]
"""What a caller may do: "read", ask what there is and how it is; "generate", have tokens made;
"weights", change the weights, the cache and the pace that all share; "admin", change who may do
what."""

SCOPES: tuple[Scope, ...] = ("read", "generate", "weights", "admin")

Needed = Scope | Literal["nothing"]
"""What an endpoint asks for; "nothing" of those that answer anybody, such as probes."""


def may(scopes: Collection[Scope], needed: Needed) -> bool:
    """Whether a caller with some scopes may call what needs one. Each of them includes "read"."""
    return needed == "nothing" or needed in scopes or (needed == "read" and bool(scopes))


MAX_TENANT_LENGTH = 128
"""Characters of a tenant's name; admission takes no more."""

Count = Annotated[int, Meta(ge=1, le=2**53)]
Name = Annotated[
    str, Meta(min_length=1, max_length=MAX_TENANT_LENGTH, pattern=r"^[^\x00-\x1f\x7f]+$")
]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]
BlockedText = Annotated[str, Meta(min_length=1, max_length=1024)]

MOST_KEYS = 100_000
"""API keys of one document, which every gateway has in memory."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How much somebody may use; None where there is no limit.

    Attributes:
        requests_per_minute: Calls that have tokens made, in any 60 seconds.
        tokens_per_minute: Tokens of their prompts and completions.
        max_in_flight: Calls at the same time.
    """

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_in_flight: Count | None = None


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key, of which only the digest is known.

    Attributes:
        id: Its name in the key itself, in logs and in commands.
        name: What people call it.
        digest: SHA-256 of the whole key, in hexadecimal.
        tenant: Whose requests are made with it.
        scopes: What it may be used for.
        created_ns: Wall clock.
        max_priority: Requests that ask for more are refused; None for `gateway.max_priority`.
        models: The models that it may use; None for all.
        limits: Of this key alone; those of its tenant hold as well.
        expires_ns: When it ends, wall clock; None for never.
    """

    id: str
    name: Name
    digest: str
    tenant: Name
    scopes: tuple[Scope, ...]
    created_ns: int
    max_priority: Priority | None = None
    models: Annotated[tuple[ModelName, ...], Meta(max_length=1000)] | None = None
    limits: Limits = Limits()
    expires_ns: int | None = None


class TenantPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What holds for all keys of a tenant together.

    Attributes:
        weight: Its share beside other tenants, in the fairness of every lane; None leaves it as the
            lane was configured.
        max_priority: Requests that ask for more are refused, whatever its keys may; None for no
            such limit.
    """

    limits: Limits = Limits()
    weight: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    max_priority: Priority | None = None


class Guardrails(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What may stand in no prompt and in no answer.

    Attributes:
        literals: Texts, compared without regard to case and to Unicode's compatible forms.
        patterns: The same as regular expressions of RE2.
    """

    literals: Annotated[tuple[BlockedText, ...], Meta(max_length=10_000)] = ()
    patterns: Annotated[tuple[BlockedText, ...], Meta(max_length=1000)] = ()


class PolicyDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All of it. A change makes a new one."""

    keys: dict[str, ApiKey] = {}
    tenants: dict[Name, TenantPolicy] = {}
    guardrails: Guardrails = Guardrails()

    def with_key(self, key: ApiKey) -> PolicyDocument:
        """With a key, in the place of the one of the same id.

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
        """With what holds for a tenant, in the place of what did."""
        return msgspec.structs.replace(self, tenants=self.tenants | {tenant: policy})

    def without_tenant(self, tenant: str) -> PolicyDocument:
        """Raises RequestError `unknown_tenant`. Its keys stay."""
        if tenant not in self.tenants:
            raise RequestError(
                f"nothing is set for the tenant {tenant!r:.40}", code="unknown_tenant"
            )
        tenants = {name: each for name, each in self.tenants.items() if name != tenant}
        return msgspec.structs.replace(self, tenants=tenants)


def encode_document(document: PolicyDocument) -> bytes:
    """As backends keep it."""
    return msgspec.json.encode(document)


def decode_document(raw: bytes) -> PolicyDocument:
    """What `encode_document` made; nothing is an empty one.

    Raises:
        ValueError: It is none.
    """
    return msgspec.json.decode(raw, type=PolicyDocument) if raw else PolicyDocument()
