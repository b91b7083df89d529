"""The settings of who may do what."""

from __future__ import annotations

from ipaddress import ip_address
from typing import ClassVar, Literal
from urllib.parse import urlsplit

import msgspec

from .base import Section


class PolicyConfig(Section, frozen=True, forbid_unknown_fields=True):
    """Keys, limits, guardrails and audit of the gateway; docs/policy.md.

    Attributes:
        backend: Where keys, limits and guardrails are kept. "off": there are none, and whoever
            reaches the gateway may do everything; "bus": on the bus, shared by all gateways;
            "file": in an encrypted file; another name: what a package has registered under it.
        file: The path of that file.
        passphrase: From which its key is made.
        refresh_s: So often a gateway looks whether somebody has changed something.
        limits_when_bus_fails: What becomes of requests of limited keys while limits can't be
            counted: "closed" refuses them, "open" lets them pass.
        guardrail_max_match: Most characters that a pattern of the block list may match; of an
            answer that is streamed so many are held back.
        opa_url: Where an Open Policy Agent is asked about each prompt; "" for nowhere.
        opa_timeout_s: How long it may take; a request that it does not answer is refused.
        audit_file: Where each call and each change has its line; "" for nowhere.
        audit_key: The key under which prompts and answers are hashed there; a file needs one.
        audit_text: Whether prompts and answers themselves stand there.
        audit_max_bytes: A larger file is put aside, under its name with a number.
        audit_files: So many of those are kept.
        audit_when_full: What happens when a line can't be written: "serve" goes on and counts it,
            "refuse" refuses requests until it can.
        oidc_issuer: The issuer whose tokens (JWT) are taken besides keys; "" for none. An https
            address, but for this machine's own.
        oidc_audience: Whom they must be for.
        oidc_jwks_url: Where its keys are; "" asks the issuer's discovery document.
        oidc_leeway_s: How far its clock may be off.
        oidc_refresh_s: Its keys are fetched again for an unknown one at most so often.
        oidc_tenant_claim: Which claim names the tenant.
        oidc_scopes_claim: Which claim has the scopes: a list, or words with spaces between.
        oidc_scopes: What scopes there mean here, by their names there; those without an entry that
            are named like ours are these.
    """

    SECTION: ClassVar[str] = "policy"
    # A URL may have a user and a password in it.
    SECRETS: ClassVar[frozenset[str]] = frozenset(
        ("passphrase", "audit_key", "opa_url", "oidc_jwks_url")
    )

    backend: str = "off"
    file: str = ""
    passphrase: str = ""
    refresh_s: float = 0.5
    limits_when_bus_fails: Literal["closed", "open"] = "closed"
    guardrail_max_match: int = 256
    opa_url: str = ""
    opa_timeout_s: float = 1.0
    audit_file: str = ""
    audit_key: str = ""
    audit_text: bool = False
    audit_max_bytes: int = 100 << 20
    audit_files: int = 10
    audit_when_full: Literal["serve", "refuse"] = "serve"
    oidc_issuer: str = ""
    oidc_audience: str = ""
    oidc_jwks_url: str = ""
    oidc_leeway_s: float = 60.0
    oidc_refresh_s: float = 60.0
    oidc_tenant_claim: str = "sub"
    oidc_scopes_claim: str = "scope"
    oidc_scopes: dict[str, str] = msgspec.field(default_factory=dict)

    def check(self) -> None:
        self.require("backend", bool(self.backend), '"off", "bus", "file" or a registered name')
        if self.backend == "file":
            self.require("file", bool(self.file), 'a path, since policy.backend is "file"')
        for name in ("refresh_s", "opa_timeout_s", "oidc_refresh_s"):
            self.require(name, 0 < getattr(self, name) <= 3600, "above 0, at most 3600 (an hour)")
        self.require("oidc_leeway_s", 0 <= self.oidc_leeway_s <= 600, "from 0 to 600")
        self.require("guardrail_max_match", 1 <= self.guardrail_max_match <= 65_536, "1 to 65536")
        if self.audit_file:
            self.require("audit_key", bool(self.audit_key), "set with policy.audit_file")
        self.require("audit_max_bytes", self.audit_max_bytes >= 4096, "at least 4096")
        self.require("audit_files", 1 <= self.audit_files <= 1000, "from 1 to 1000")
        for name in ("opa_url", "oidc_issuer", "oidc_jwks_url"):
            value = getattr(self, name)
            self.require(
                name, not value or value.startswith(("http://", "https://")), "an http(s) URL"
            )
        for name in ("oidc_issuer", "oidc_jwks_url"):
            # Whoever stands in between would otherwise make the keys.
            self.require(
                name,
                not (value := getattr(self, name)) or _is_safe(value),
                "https, but for this machine's own (loopback) addresses",
            )
        if self.oidc_issuer:
            self.require("oidc_audience", bool(self.oidc_audience), "set with policy.oidc_issuer")

    @property
    def knows_callers(self) -> bool:
        """Whether a call needs a key or a token."""
        return self.backend != "off" or bool(self.oidc_issuer)


def _is_safe(url: str) -> bool:
    """Whether nobody on the way can change what is read there."""
    try:
        host = urlsplit(url).hostname or ""
        own = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        own = False
    return own or url.startswith("https://")
