"""`nano-inference admin`: who may do what at the gateway."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import typer
import yaml
from rich.table import Table

from ..config import ConfigError, parse_value
from ..gateway.policy.document import SCOPES
from .administering import Administers, administering
from .asking import failures_told
from .options import Options, gathers, takes_asking_options
from .terminal import harmless, one_line, stdout

T = TypeVar("T")


def _typer(help_text: str) -> typer.Typer:
    return typer.Typer(
        help=help_text,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


app = _typer("""Say who may do what at the gateway: keys, tenants, guardrails.

    Without --url it works at the place itself where `policy.backend` keeps them, and needs no key:

        export NANO_INFERENCE_POLICY__BACKEND=bus

        nano-inference admin keys create root --scope admin

    With --url it asks a gateway, by a key with the scope "admin":

        nano-inference admin keys list --url https://inference.example.org --api-key ...

    docs/policy.md says what keys, scopes and limits do.
    """)
keys = _typer("Keys: who may call, and what for.")
tenants = _typer("What holds for all keys of a tenant together.")
guardrails = _typer("What may stand in no prompt and in no answer.")
app.add_typer(keys, name="keys")
app.add_typer(tenants, name="tenants")
app.add_typer(guardrails, name="guardrails")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
KeyId = Annotated[str, typer.Argument(metavar="ID", help="As `admin keys list` shows it.")]
TenantName = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's name.")]
Scopes = Annotated[
    list[str] | None,
    typer.Option("--scope", metavar="SCOPE", help=f"{', '.join(SCOPES)}. Repeatable."),
]
Tenant = Annotated[
    str | None, typer.Option(help="Whose requests are made with it; else the key's name.")
]
MaxPriority = Annotated[
    str | None,
    typer.Option(metavar="N", help="Higher priorities are refused; 'none' for no limit."),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-model", metavar="NAME", help="Only these models; 'none' for all. Repeatable."
    ),
]
Requests = Annotated[
    str | None, typer.Option("--requests-per-minute", metavar="N", help="'none' for no limit.")
]
Tokens = Annotated[
    str | None, typer.Option("--tokens-per-minute", metavar="N", help="'none' for no limit.")
]
InFlight = Annotated[
    str | None, typer.Option("--max-in-flight", metavar="N", help="'none' for no limit.")
]
Expires = Annotated[
    str | None, typer.Option("--expires-in", metavar="TIME", help="As 30d, 12h, 90s; or 'none'.")
]
Weight = Annotated[str | None, typer.Option(metavar="W", help="Its share beside other tenants.")]


class Changes(NamedTuple):
    """What the options of a command say is to be.

    Attributes:
        fields: Of a key or a tenant, those that were given; None for "none".
        limits: The same of limits.
    """

    fields: dict[str, Any]
    limits: dict[str, Any]

    def over(self, before: dict[str, Any]) -> dict[str, Any]:
        """The fields, with all limits where some are given: those that are not stay.

        Raises:
            ConfigError: Nothing is given.
        """
        if not (self.fields or self.limits):
            raise ConfigError("nothing is given that should be different; see --help")
        if not self.limits:
            return self.fields
        return self.fields | {"limits": before.get("limits", {}) | self.limits}


_LIMITS = {
    "requests_per_minute": Requests,
    "tokens_per_minute": Tokens,
    "max_in_flight": InFlight,
}
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


# --- keys ---------------------------------------------------------------------------------------


@keys.command("list")
@takes_asking_options
def list_keys(options: Options, as_json: AsJson = False) -> None:
    """Show all keys, oldest first.

    nano-inference admin keys list
    """
    shown = _run(options, lambda admin: admin.keys())
    if as_json:
        for key in shown:
            _print_json(key)
    elif shown:
        stdout().print(_key_table(shown))
    else:
        typer.echo("no keys; make one with `nano-inference admin keys create NAME`")


def _key_changes(
    *,
    scope: list[str] | None,
    tenant: str | None,
    max_priority: str | None,
    allow_model: list[str] | None,
    expires_in: str | None,
    **limits: str | None,
) -> Changes:
    fields: dict[str, Any] = {"scopes": scope, "tenant": tenant}
    fields = {name: value for name, value in fields.items() if value is not None}
    if allow_model is not None:
        fields["models"] = None if allow_model == ["none"] else allow_model
    if max_priority is not None:
        fields["max_priority"] = _number(max_priority)
    if expires_in is not None:
        fields["expires_in_s"] = _seconds(expires_in)
    return Changes(fields, _numbers(limits))


_takes_key_options = gathers(
    {
        "scope": Scopes,
        "tenant": Tenant,
        "max_priority": MaxPriority,
        "allow_model": Models,
        **_LIMITS,
        "expires_in": Expires,
    },
    _key_changes,
)


@keys.command("create")
@takes_asking_options
@_takes_key_options
def create_key(
    options: Options,
    changes: Changes,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What you call it.")],
    as_json: AsJson = False,
) -> None:
    """Make a key, and print it: it is shown here and never again.

    nano-inference admin keys create ci --scope generate --requests-per-minute 60 --expires-in 90d
    """
    body = {"name": name, "limits": changes.limits, **changes.fields}
    key = _run(options, lambda admin: admin.create_key(body))
    if as_json:
        _print_json(key)
        return
    # The key alone, so that it can be put into a file.
    sys.stderr.write(f"key {key['id']} of {key['tenant']!r}: {', '.join(key['scopes'])}\n")
    typer.echo(key["key"])


@keys.command("change")
@takes_asking_options
@_takes_key_options
def change_key(
    options: Options,
    changes: Changes,
    key_id: KeyId,
    name: Annotated[str | None, typer.Option(help="What you call it.")] = None,
) -> None:
    """Change what is given of a key; the rest stays.

    nano-inference admin keys change 0d5c9f1e22ab --requests-per-minute none
    """
    if name is not None:
        changes.fields["name"] = name
    changes.over({})  # before anybody is asked

    async def change(admin: Administers) -> None:
        before = next((key for key in await admin.keys() if key["id"] == key_id), {})
        await admin.change_key(key_id, changes.over(before))

    _run(options, change)


@keys.command("revoke")
@takes_asking_options
def revoke_key(
    options: Options,
    key_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="As `list` shows them.")],
) -> None:
    """Take keys no more, within a second at all gateways.

    nano-inference admin keys revoke 0d5c9f1e22ab
    """

    async def revoke(admin: Administers) -> None:
        for key_id in key_ids:
            await admin.revoke_key(key_id)

    _run(options, revoke)


# --- tenants and guardrails ---------------------------------------------------------------------


@tenants.command("list")
@takes_asking_options
def list_tenants(options: Options, as_json: AsJson = False) -> None:
    """Show what is set for tenants.

    nano-inference admin tenants list
    """
    shown = _run(options, lambda admin: admin.tenants())
    if as_json:
        _print_json(shown)
    elif shown:
        table = _table("tenant", "weight", "priority", "limits")
        for name, each in shown.items():
            weight, priority = _or_dash(each["weight"]), _or_dash(each["max_priority"])
            table.add_row(one_line(name), weight, priority, _limits_text(each["limits"]))
        stdout().print(table)
    else:
        typer.echo("nothing is set for any tenant")


def _tenant_changes(
    *, weight: str | None, max_priority: str | None, **limits: str | None
) -> Changes:
    return Changes(_numbers({"weight": weight, "max_priority": max_priority}), _numbers(limits))


@tenants.command("set")
@takes_asking_options
@gathers({"weight": Weight, "max_priority": MaxPriority, **_LIMITS}, _tenant_changes)
def set_tenant(options: Options, changes: Changes, tenant: TenantName) -> None:
    """Set what holds for a tenant; what is not given stays.

    nano-inference admin tenants set gold --weight 3 --tokens-per-minute 100000
    """
    changes.over({})  # before anybody is asked

    async def change(admin: Administers) -> None:
        before = (await admin.tenants()).get(tenant, {})
        await admin.set_tenant(tenant, before | changes.over(before))

    _run(options, change)


@tenants.command("remove")
@takes_asking_options
def remove_tenant(options: Options, tenant: TenantName) -> None:
    """Let nothing hold for a tenant; its keys stay.

    nano-inference admin tenants remove gold
    """
    _run(options, lambda admin: admin.remove_tenant(tenant))


@guardrails.command("show")
@takes_asking_options
def show_guardrails(options: Options) -> None:
    """Print what may not be said, as JSON.

    nano-inference admin guardrails show
    """
    shown = _run(options, lambda admin: admin.guardrails())
    typer.echo(harmless(msgspec.json.format(msgspec.json.encode(shown)).decode()))


@guardrails.command("set")
@takes_asking_options
def set_guardrails(
    options: Options,
    file: Annotated[Path, typer.Argument(help="YAML or JSON, as `show` prints it; - reads stdin.")],
) -> None:
    """Put what a file says in the place of what might not be said before.

    echo '{literals: [foo], patterns: ["b[a4]r"]}' | nano-inference admin guardrails set -
    """
    body = _read_object(file)
    _run(options, lambda admin: admin.set_guardrails(body))


# --- what they share ----------------------------------------------------------------------------


def _run(options: Options, act: Callable[[Administers], Awaitable[T]]) -> T:
    async def work() -> T:
        async with administering(options) as admin:
            return await act(admin)

    with failures_told():
        return asyncio.run(work())


def _numbers(given: dict[str, str | None]) -> dict[str, float | None]:
    """Those that were given; None for 'none', which takes one away."""
    return {name: _number(text) for name, text in given.items() if text is not None}


def _number(text: str | None) -> float | None:
    """A number; None for 'none'."""
    if text is None or text == "none":
        return None
    value = parse_value(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{text!r:.80} is no number; give one, or 'none'")
    return value


def _seconds(text: str | None) -> float | None:
    if text is None or text == "none":
        return None
    if (found := _TIME.fullmatch(text)) is None:
        raise ConfigError(
            f"{text!r:.80} is no time; give one such as 30d, 12h, 15m, 90s, or 'none'"
        )
    return float(found[1]) * _UNITS[found[2]]


def _read_object(file: Path) -> dict[str, Any]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        value = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError(f"{file} is neither YAML nor JSON in UTF-8") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold 'literals' and 'patterns', each a list")
    return value


def _key_table(shown: list[dict[str, Any]]) -> Table:
    table = _table("id", "name", "tenant", "scopes", "expires", "limits")
    for key in shown:
        table.add_row(
            key["id"],
            one_line(key["name"]),
            one_line(key["tenant"]),
            " ".join(key["scopes"]),
            "expired" if key["expired"] else _when(key["expires_ns"]),
            _limits_text(key["limits"]),
        )
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def _limits_text(limits: dict[str, Any]) -> str:
    words = {"requests_per_minute": "req/min", "tokens_per_minute": "tok/min"}
    words["max_in_flight"] = "in flight"
    told = [f"{value} {words[name]}" for name, value in limits.items() if value is not None]
    return ", ".join(told) or "-"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _when(stamp_ns: int | None) -> str:
    if stamp_ns is None:
        return "never"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(stamp_ns / 1e9))


def _print_json(value: object) -> None:
    typer.echo(msgspec.json.encode(value).decode())
