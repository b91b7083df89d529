"""`nano-inference fairness`: by which settings requests are put in order, and to change them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import anyio
import msgspec
import typer
from rich.table import Table

from ..config import BusError, Config, ConfigError, FairnessConfig, nearest, parse_value
from ..pipeline.client import BusClient
from .connection import connected_to
from .options import Lane, Options, takes_model_options
from .terminal import harmless, stdout

app = typer.Typer(
    help="""Look at the settings of the fairness stage, and change them while it runs.

        nano-inference fairness show

        nano-inference fairness set enable_preemption=true max_timeslice_tokens=64

        nano-inference fairness set tenant_weights.gold=3

    docs/fairness.md says what each does. A change holds until the stage's process is started anew.
    """,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON: settings by lane.")]
Changes = Annotated[
    list[str], typer.Argument(metavar="NAME=VALUE...", help="Settings; values are read as YAML.")
]

CONFIRM_S = 15.0
"""How long to wait for a lane to say that it has taken a change; it says so every second."""


@app.command()
@takes_model_options
def show(
    options: Options,
    as_json: AsJson = False,
    lane: Lane = None,
) -> None:
    """Show the settings in force.

    nano-inference fairness show
    """
    config, model = options.client_config(), options.served

    async def look() -> dict[str, FairnessConfig]:
        async with connected_to(config, model) as client:
            return await _in_force(client, lane)

    _print(asyncio.run(look()), as_json)


@app.command("set")
@takes_model_options
def set_(
    options: Options,
    changes: Changes,
    as_json: AsJson = False,
    lane: Lane = None,
) -> None:
    """Change settings at once, for what waits and runs too; nothing changes if one is refused.

    nano-inference fairness set aging_s=5 tenant_weights.gold=3
    """
    config = options.client_config()
    _print(asyncio.run(_change(config, options.served, changes, lane)), as_json)


def changed(config: FairnessConfig, changes: Iterable[str]) -> FairnessConfig:
    """Settings with "name=value" changes; `tenant_weights.<tenant>` changes one weight.

    Raises:
        ConfigError: A change is of no such form, names no setting, or is out of range.
    """
    known = FairnessConfig.__struct_fields__
    tree: dict[str, Any] = msgspec.structs.asdict(config)
    for text in changes:
        name, equals, value = text.partition("=")
        name, dot, key = name.strip().partition(".")
        if not equals:
            raise ConfigError(f"a change is name=value, not {text!r:.80}")
        if name not in known:
            raise ConfigError(f"fairness has no setting {name!r:.80}{nearest(name, known)}")
        if not dot:
            tree[name] = parse_value(value)
        elif name == "tenant_weights" and key:
            weights = tree[name] if isinstance(tree[name], Mapping) else {}
            tree[name] = {**weights, key: parse_value(value)}
        else:
            raise ConfigError(f"fairness.{name} has no parts; give {name}=value")
    try:
        return msgspec.convert(tree, FairnessConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad setting: {error}") from None


async def _change(
    config: Config, model: str | None, changes: list[str], lane: str | None
) -> dict[str, FairnessConfig]:
    async with connected_to(config, model) as client:
        # All are checked before any is sent.
        wanted = {
            name: changed(before, changes)
            for name, before in (await _in_force(client, lane)).items()
        }
        for name, after in wanted.items():
            await client.update_fairness(after, name.rpartition(":")[2])
        give_up_at = time.monotonic() + CONFIRM_S
        while True:
            settings = await client.fairness()
            late = [name for name, after in wanted.items() if settings.get(name) != after]
            if not late:
                return wanted
            if time.monotonic() > give_up_at:
                raise BusError(f"lane {', '.join(late)} did not confirm the change; look again")
            await anyio.sleep(0.2)


async def _in_force(client: BusClient, lane: str | None) -> dict[str, FairnessConfig]:
    settings = await client.fairness()
    if lane is not None:
        settings = {
            name: config for name, config in settings.items() if name.rpartition(":")[2] == lane
        }
    if not settings:
        which = "of a pipeline" if lane is None else f"of lane {lane}"
        raise BusError(f"no fairness stage {which} has been heard of; see `nano-inference status`")
    return settings


def _print(settings: dict[str, FairnessConfig], as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(settings).decode())
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    for lane in settings:
        table.add_column(f"lane {harmless(lane)}", overflow="fold")
    for name in FairnessConfig.__struct_fields__:
        values = (getattr(config, name) for config in settings.values())
        table.add_row(name, *(harmless(_shown(value)) for value in values))
    stdout().print(table)


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {each:g}" for key, each in value.items()) or "(none)"
    return str(value).lower() if isinstance(value, bool) else str(value)
