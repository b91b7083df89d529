"""`nano-inference admin`: keys, tenants and guardrails of the gateway's policy."""

from __future__ import annotations

import getpass
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer
import yaml

from ..config import ConfigError, PolicyConfig, parse_value
from ..gateway.caller import SCOPES
from .clients import ServerClient
from .connection import connected, run_with, running_server, server_of
from .options import AsJson, Options, argument, group, option, takes, takes_server_options
from .requests import given
from .terminal import date, failures_exit, harmless, one_line, print_json, print_table, read_input

if TYPE_CHECKING:
    from ..gateway.policy.administration import Administration, Changed

Admin = Callable[..., Awaitable[Any]]
"""Calls a method of `Administration` by its name."""

T = TypeVar("T")


@group
def app() -> None:
    """Administer the gateway's policy: keys, tenants, guardrails.

    Without --url it changes the backend that `policy.backend` names, and needs no key:

        export NANO_INFERENCE_POLICY__BACKEND=bus

        nano-inference admin keys create root --scope admin

    With --url it calls a gateway, with a key of the scope "admin":

        nano-inference admin keys list --url https://inference.example.org --api-key ...

    docs/policy.md describes keys, scopes and limits.
    """


@group
def keys() -> None:
    """Keys: callers and their permissions."""


@group
def tenants() -> None:
    """Limits and weights of all keys of a tenant together."""


@group
def guardrails() -> None:
    """Texts that prompts and answers must not contain."""


app.add_typer(keys, name="keys")
app.add_typer(tenants, name="tenants")
app.add_typer(guardrails, name="guardrails")

KeyId = Annotated[str, argument("ID", "As `admin keys list` shows it.")]
TenantName = Annotated[str, argument("TENANT", "The tenant's name.")]


_LIMIT = "A number, or 'none'."
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


class Changes(msgspec.Struct, frozen=True):
    """Options of keys and tenants; None if not given. The text "none" removes a value."""

    scope: Annotated[
        list[str] | None, option("--scope SCOPE", f"{', '.join(SCOPES)}. Repeatable.")
    ] = None
    tenant: Annotated[str | None, option("--tenant", "Default: the key's name.")] = None
    weight: Annotated[str | None, option("--weight W", "Its share beside other tenants.")] = None
    max_priority: Annotated[str | None, option("--max-priority N", "The highest, or 'none'.")] = (
        None
    )
    allow_model: Annotated[
        list[str] | None, option("--allow-model NAME", "Only these; 'none' for all. Repeatable.")
    ] = None
    allow_mcp_server: Annotated[
        list[str] | None,
        option("--allow-mcp-server NAME", "Only these, by name or host; 'none' for all."),
    ] = None
    requests_per_minute: Annotated[str | None, option("--requests-per-minute N", _LIMIT)] = None
    tokens_per_minute: Annotated[str | None, option("--tokens-per-minute N", _LIMIT)] = None
    max_in_flight: Annotated[str | None, option("--max-in-flight N", _LIMIT)] = None
    expires_in: Annotated[str | None, option("--expires-in TIME", "As 30d, 12h, or 'none'.")] = None

    def limits(self) -> dict[str, Any]:
        """Return the given limits. Raises ConfigError: one is no number."""
        return self._numbers("requests_per_minute", "tokens_per_minute", "max_in_flight")

    def fields(self) -> dict[str, Any]:
        """Return the other given fields. Raises ConfigError: one is malformed."""
        fields: dict[str, Any] = given({"scopes": self.scope, "tenant": self.tenant})
        allowed = {"models": self.allow_model, "mcp_servers": self.allow_mcp_server}
        for name, names in given(allowed).items():
            fields[name] = None if names == ["none"] else names
        if self.expires_in is not None:
            none = self.expires_in == "none"
            fields["expires_in_s"] = None if none else _seconds(self.expires_in)
        return fields | self._numbers("weight", "max_priority")

    def over(self, before: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Return the fields, and if a limit is given all limits, with those of `before`.

        Raises:
            ConfigError: Nothing is given, or a value is malformed.
        """
        fields, limits = self.fields() | given(more), self.limits()
        if limits:
            fields["limits"] = before.get("limits", {}) | limits
        if not fields:
            raise ConfigError("nothing is given that should be different; see --help")
        return fields

    def _numbers(self, *names: str) -> dict[str, Any]:
        texts = given({name: getattr(self, name) for name in names})
        return {name: None if text == "none" else _number(text) for name, text in texts.items()}


_LIMITS = ("max_priority", "requests_per_minute", "tokens_per_minute", "max_in_flight")
_takes_key_options = takes(
    Changes, "scope", "tenant", "allow_model", "allow_mcp_server", *_LIMITS, "expires_in"
)


# --- keys ---------------------------------------------------------------------------------------


@keys.command("list")
@takes_server_options
def list_keys(options: Options, as_json: AsJson = False) -> None:
    """Print all keys, oldest first.

    nano-inference admin keys list
    """
    found = _run(options, lambda admin: admin("keys"))
    if as_json:
        print_json(*found)
        return
    rows = [
        (
            key["id"],
            *map(one_line, (key["name"], key["tenant"], " ".join(key["scopes"]))),
            "expired" if key["expired"] else _date(key["expires_ns"]),
            _limits_text(key["limits"]),
        )
        for key in found
    ]
    names = ("id", "name", "tenant", "scopes", "expires", "limits")
    empty = "no keys; make one with `nano-inference admin keys create NAME`"
    print_table(names, rows, empty, fold=names)


@keys.command("create")
@takes_server_options
@_takes_key_options
def create_key(
    options: Options,
    changes: Changes,
    name: Annotated[str, argument("NAME", "A name of your choice.")],
    as_json: AsJson = False,
) -> None:
    """Create a key, and print it; it can't be printed again.

    nano-inference admin keys create ci --scope generate --requests-per-minute 60 --expires-in 90d
    """
    body = {"name": name, "limits": changes.limits(), **changes.fields()}
    key = _run(options, lambda admin: admin("create_key", body))
    if as_json:
        print_json(key)
        return
    # The key alone, so that it can be written to a file.
    sys.stderr.write(f"key {key['id']} of {key['tenant']!r}: {', '.join(key['scopes'])}\n")
    typer.echo(key["key"])


@keys.command("change")
@takes_server_options
@_takes_key_options
def change_key(
    options: Options,
    changes: Changes,
    key_id: KeyId,
    name: Annotated[str | None, option("--name", "A name of your choice.")] = None,
) -> None:
    """Change the given properties of a key.

    nano-inference admin keys change 0d5c9f1e22ab --requests-per-minute none
    """
    changes.over({}, name=name)  # refuses an empty change without a connection

    async def change(admin: Admin) -> None:
        before: dict[str, Any] = next(
            (key for key in await admin("keys") if key["id"] == key_id), {}
        )
        await admin("change_key", key_id, changes.over(before, name=name))

    _run(options, change)


@keys.command("revoke")
@takes_server_options
def revoke_key(
    options: Options, key_ids: Annotated[list[str], argument("ID...", "As `list` shows them.")]
) -> None:
    """Revoke keys, within a second at all gateways.

    nano-inference admin keys revoke 0d5c9f1e22ab
    """

    async def revoke(admin: Admin) -> None:
        for key_id in key_ids:
            await admin("revoke_key", key_id)

    _run(options, revoke)


# --- tenants and guardrails ---------------------------------------------------------------------


@tenants.command("list")
@takes_server_options
def list_tenants(options: Options, as_json: AsJson = False) -> None:
    """Print the settings of tenants.

    nano-inference admin tenants list
    """
    found = _run(options, lambda admin: admin("tenants"))
    if as_json:
        print_json(found)
        return
    rows = []
    for name, each in found.items():
        numbers = (each["weight"], each["max_priority"])
        shown = ("-" if number is None else str(number) for number in numbers)
        rows.append((one_line(name), *shown, _limits_text(each["limits"])))
    names = ("tenant", "weight", "priority", "limits")
    print_table(names, rows, "nothing is set for any tenant", fold=names)


@tenants.command("set")
@takes_server_options
@takes(Changes, "weight", *_LIMITS)
def set_tenant(options: Options, changes: Changes, tenant: TenantName) -> None:
    """Change the given settings of a tenant.

    nano-inference admin tenants set gold --weight 3 --tokens-per-minute 100000
    """
    changes.over({})  # refuses an empty change without a connection

    async def change(admin: Admin) -> None:
        before = (await admin("tenants")).get(tenant, {})
        await admin("set_tenant", tenant, before | changes.over(before))

    _run(options, change)


@tenants.command("remove")
@takes_server_options
def remove_tenant(options: Options, tenant: TenantName) -> None:
    """Remove the settings of a tenant; its keys stay.

    nano-inference admin tenants remove gold
    """
    _run(options, lambda admin: admin("remove_tenant", tenant))


@guardrails.command("show")
@takes_server_options
def show_guardrails(options: Options) -> None:
    """Print the forbidden texts, as JSON.

    nano-inference admin guardrails show
    """
    found = _run(options, lambda admin: admin("guardrails"))
    typer.echo(harmless(msgspec.json.format(msgspec.json.encode(found)).decode()))


@guardrails.command("set")
@takes_server_options
def set_guardrails(
    options: Options,
    file: Annotated[Path, argument(None, "YAML or JSON, as `show` prints it; - reads stdin.")],
) -> None:
    """Replace the forbidden texts by those of a file.

    echo '{literals: [foo], patterns: ["b[a4]r"]}' | nano-inference admin guardrails set -
    """
    body = _read_object(file)
    _run(options, lambda admin: admin("set_guardrails", body))


# --- shared -------------------------------------------------------------------------------------


def _run(options: Options, work: Callable[[Admin], Awaitable[T]]) -> T:
    with failures_exit():
        return run_with(_administration(options), work)


@asynccontextmanager
async def _administration(options: Options) -> AsyncIterator[Admin]:
    """Connect to the server of --url, or to the backend that `policy.backend` names; without both
    to the newest server that runs here.

    Raises:
        NanoInferenceError: It can't be reached, or there is none.
    """
    config = options.client_config()
    found = server_of(options) if options.url is not None else None
    if found is None and config.policy.backend == "off":
        found = running_server(options)
    if found is not None:
        async with ServerClient(found) as server:
            yield server.administer
        return
    # These imports take time.
    from ..gateway.policy.administration import Administration
    from ..gateway.policy.backend import open_backend
    from ..gateway.policy.store import PolicyStore

    if config.policy.backend == "off":
        raise ConfigError(
            "policy.backend is 'off', so there are no keys; set it to 'bus' or 'file', here and "
            "for the gateway, or name a server with --url"
        )
    with _audited(config.policy) as changed:
        if config.policy.backend == "bus":
            async with connected(config) as client:
                backend = open_backend(config.policy, client.bus.store.policy)
                administration = Administration(PolicyStore(backend), changed)
                yield partial(_call, administration)
            return
        store = PolicyStore(open_backend(config.policy, None))
        try:
            yield partial(_call, Administration(store, changed))
        finally:
            await store.aclose()


async def _call(administration: Administration, name: str, *arguments: Any) -> Any:
    return await getattr(administration, name)(*arguments)


@contextmanager
def _audited(config: PolicyConfig) -> Iterator[Changed]:
    """Open the audit log, if any, for changes by the command line."""
    if not config.audit_file:
        yield lambda what, of, now: None
        return
    from ..gateway.policy.audit import AuditLog

    log = AuditLog(config)
    log.open()
    by = {"by": "command line", "user": getpass.getuser()}
    try:
        yield lambda what, of, now: log.write(what, by | {"changed": of, "now": now})
    finally:
        log.close()


def _number(text: str) -> float:
    value = parse_value(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{text!r:.80} is no number; give one, or 'none'")
    return value


def _seconds(text: str) -> float:
    if (found := _TIME.fullmatch(text)) is None:
        raise ConfigError(
            f"{text!r:.80} is no time; give one such as 30d, 12h, 15m, 90s, or 'none'"
        )
    return float(found[1]) * _UNITS[found[2]]


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(read_input(file))
    except yaml.YAMLError:
        raise ConfigError(
            f"{file} is neither YAML nor JSON in UTF-8", remedy="write it as one of the two"
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold 'literals' and 'patterns', each a list")
    return value


def _date(expires_ns: int | None) -> str:
    return "never" if expires_ns is None else date(expires_ns, seconds=False)


def _limits_text(limits: dict[str, Any]) -> str:
    units = {
        "requests_per_minute": "req/min",
        "tokens_per_minute": "tok/min",
        "max_in_flight": "in flight",
    }
    given = [f"{value} {units[name]}" for name, value in limits.items() if value is not None]
    return ", ".join(given) or "-"
