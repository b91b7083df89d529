"""`nano-inference fairness`: read and change the settings of the fairness stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import anyio
import msgspec
import typer

from ..config import BusError, ConfigError, FairnessConfig, nearest, parse_value
from ..pipeline.client import BusClient
from .connection import of_lane, operate
from .options import AsJson, Lane, Options, argument, group, takes_model_options
from .terminal import harmless, print_json, print_table

app = group("""Read the settings of the fairness stage, and change them while it runs.

        nano-inference fairness show

        nano-inference fairness set enable_preemption=true max_timeslice_tokens=64

        nano-inference fairness set tenant_weights.gold=3

        nano-inference fairness shares

    See docs/fairness.md. A change lasts until the stage's process restarts.
    """)

NO_EXCHANGE = (
    "no lane tells what it has served; turn it on with `nano-inference fairness set "
    "exchange_interval_s=0.5`"
)

CONFIRM_S = 15.0
"""Time limit for a lane to report a change; it reports every second."""

ByLane = dict[str, FairnessConfig]


@app.command()
@takes_model_options
def show(options: Options, as_json: AsJson = False, lane: Lane = None) -> None:
    """Print the settings in force.

    nano-inference fairness show
    """
    _print(operate(options, lambda client: _in_force(client, lane)), as_json)


@app.command("set")
@takes_model_options
def set_(
    options: Options,
    changes: Annotated[list[str], argument("NAME=VALUE...", "Settings, with YAML values.")],
    as_json: AsJson = False,
    lane: Lane = None,
) -> None:
    """Change settings at once, also for current requests; if one is refused, nothing changes.

    nano-inference fairness set aging_s=5 tenant_weights.gold=3
    """
    _print(operate(options, lambda client: _change(client, changes, lane)), as_json)


@app.command()
@takes_model_options
def shares(options: Options, as_json: AsJson = False) -> None:
    """Print what each lane has served to each tenant, with fairness.exchange_interval_s.

    nano-inference fairness shares
    """
    tables = operate(options, lambda client: client.tenant_service())
    if as_json:
        print_json(tables)
        return
    if not tables:
        typer.echo(NO_EXCHANGE)
        return
    served = {
        table.lane: {(priority, tenant): cost for priority, tenant, cost in table.served}
        for table in tables
    }
    totals: Counter[tuple[int, str]] = Counter()
    for entries in served.values():
        totals.update(entries)
    of_class: Counter[int] = Counter()
    for (priority, _), cost in totals.items():
        of_class[priority] += cost
    rows = [
        (
            str(priority),
            harmless(tenant),
            *(f"{entries.get((priority, tenant), 0):,.0f}" for entries in served.values()),
            f"{cost:,.0f}",
            f"{cost / of_class[priority]:.1%}" if of_class[priority] else "",
        )
        for (priority, tenant), cost in sorted(
            totals.items(), key=lambda item: (-item[0][0], -item[1], item[0][1])
        )
    ]
    lanes = [f"lane {harmless(lane)}" for lane in served]
    print_table(("priority", "tenant", *lanes, "all", "share"), rows, fold=lanes)


def changed(config: FairnessConfig, changes: Iterable[str]) -> FairnessConfig:
    """Return settings with "name=value" changes; `tenant_weights.<tenant>` changes one weight.

    Raises:
        ConfigError: A change has another form, names no setting, or is out of range.
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


async def _change(client: BusClient, changes: list[str], lane: str | None) -> ByLane:
    # All are checked before any is sent.
    before = await _in_force(client, lane)
    wanted = {name: changed(config, changes) for name, config in before.items()}
    for name, after in wanted.items():
        await client.update_fairness(after, name.rpartition(":")[2])
    late = list(wanted)
    with anyio.move_on_after(CONFIRM_S):
        while late:
            await anyio.sleep(0.2)
            settings = await client.deployment.fairness()
            late = [name for name, after in wanted.items() if settings.get(name) != after]
    if late:
        raise BusError(
            f"lane {', '.join(late)} did not confirm the change; see `nano-inference fairness show`"
        )
    return wanted


async def _in_force(client: BusClient, lane: str | None) -> ByLane:
    return of_lane(await client.deployment.fairness(), lane)


def _print(settings: ByLane, as_json: bool) -> None:
    if as_json:
        print_json(settings)
        return
    lanes = [f"lane {harmless(lane)}" for lane in settings]
    rows = [
        (name, *(harmless(_shown(getattr(config, name))) for config in settings.values()))
        for name in FairnessConfig.__struct_fields__
    ]
    print_table(("setting", *lanes), rows, fold=lanes)


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {each:g}" for key, each in value.items()) or "(none)"
    return str(value).lower() if isinstance(value, bool) else str(value)
