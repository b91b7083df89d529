"""Settings of access control."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

import msgspec

from .base import TINY, Range, Section

UpToAnHour = Annotated[float, Range("above 0, at most 3600 (an hour)", TINY, 3600)]


class PolicyConfig(Section, frozen=True, forbid_unknown_fields=True):
    """Keys, limits, guardrails and audit of the gateway (docs/policy.md).

    Attributes:
        backend: Where keys, limits and guardrails are stored. "off": nowhere, and every caller may
            do everything; "bus": on the bus, shared by all gateways; "file": in an encrypted file;
            or a back end that a package has registered.
        file: Path of that file.
        passphrase: Passphrase that the file's key is derived from.
        refresh_s: Interval at which a gateway checks for changes.
        limits_when_bus_fails: Requests of limited keys while limits can't be counted: "closed"
            refuses them, "open" lets them pass.
        guardrail_max_match: Limit on the characters that a block-list pattern may match; a streamed
            answer is delayed by as many.
        opa_url: Open Policy Agent that decides on each prompt; "" for none.
        opa_timeout_s: Its time limit; without an answer a request is refused.
        audit_file: File with a line per call and change; "" for none.
        audit_key: Key of the HMAC over prompts and answers in that file; required with a file.
        audit_text: Whether the file has prompts and answers in full.
        audit_max_bytes: Size at which the file is rotated, to its name with a number.
        audit_files: Rotated files kept.
        audit_when_full: If a line can't be written: "serve" continues and counts it, "refuse"
            refuses requests meanwhile.
        oidc_issuer: Issuer whose tokens (JWT) are accepted besides keys; "" for none. An https
            address, or on this machine.
        oidc_audience: Required audience of the tokens.
        oidc_jwks_url: Address of the issuer's keys; "" uses its discovery document.
        oidc_leeway_s: Tolerated difference between clocks.
        oidc_refresh_s: Shortest interval between fetches of its keys for an unknown key id.
        oidc_tenant_claim: Claim with the tenant.
        oidc_scopes_claim: Claim with the scopes: a list, or words separated by spaces.
        oidc_scopes: Scopes here by scopes in tokens; unlisted ones with a known name map to
            themselves.
    """

    SECTION: ClassVar[str] = "policy"
    # URLs may contain a user and password.
    SECRETS: ClassVar[frozenset[str]] = frozenset(
        ("passphrase", "audit_key", "opa_url", "oidc_jwks_url")
    )

    backend: str = "off"
    file: str = ""
    passphrase: str = ""
    refresh_s: UpToAnHour = 0.5
    limits_when_bus_fails: Literal["closed", "open"] = "closed"
    guardrail_max_match: Annotated[int, Range("1 to 65536", 1, 65_536)] = 256
    opa_url: str = ""
    opa_timeout_s: UpToAnHour = 1.0
    audit_file: str = ""
    audit_key: str = ""
    audit_text: bool = False
    audit_max_bytes: Annotated[int, Range("at least 4096", 4096)] = 100 << 20
    audit_files: Annotated[int, Range("from 1 to 1000", 1, 1000)] = 10
    audit_when_full: Literal["serve", "refuse"] = "serve"
    oidc_issuer: str = ""
    oidc_audience: str = ""
    oidc_jwks_url: str = ""
    oidc_leeway_s: Annotated[float, Range("from 0 to 600", 0, 600)] = 60.0
    oidc_refresh_s: UpToAnHour = 60.0
    oidc_tenant_claim: str = "sub"
    oidc_scopes_claim: str = "scope"
    oidc_scopes: dict[str, str] = msgspec.field(default_factory=dict)

    def check(self) -> None:
        self.require("backend", bool(self.backend), '"off", "bus", "file" or a registered name')
        if self.backend == "file":
            self.require("file", bool(self.file), 'a path, since policy.backend is "file"')
        if self.audit_file:
            self.require("audit_key", bool(self.audit_key), "set with policy.audit_file")
        for name in ("opa_url", "oidc_issuer", "oidc_jwks_url"):
            if not (url := getattr(self, name)):
                continue
            self.require(name, url.startswith(("http://", "https://")), "an http(s) URL")
            # Otherwise an attacker on the network could replace the keys.
            safe = name == "opa_url" or _is_safe(url)
            self.require(name, safe, "https, but for this machine's own (loopback) addresses")
        if self.oidc_issuer:
            self.require("oidc_audience", bool(self.oidc_audience), "set with policy.oidc_issuer")

    @property
    def knows_callers(self) -> bool:
        """Whether calls require a key or token."""
        return self.backend != "off" or bool(self.oidc_issuer)


def _is_safe(url: str) -> bool:
    """Return whether content read from the URL can't be changed on the way."""
    try:
        host = urlsplit(url).hostname or ""
        own = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        own = False
    return own or url.startswith("https://")
