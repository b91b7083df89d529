"""Options that several commands share, and the settings that they add up to."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ..config import (
    BUNDLED_MODEL,
    DEFAULT_URL,
    MOST_SHOWN,
    Config,
    ConfigError,
    ModelError,
    load_config,
    parse_value,
)
from ..telemetry import setup_logging

_PANEL = "Settings"

_SETTING = re.compile(r"\s*(?P<name>\w+\.\w+)\s*=(?P<value>.*)", re.DOTALL)


class Level(StrEnum):
    """Severities of log lines."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="YAML file with settings, by section.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
BusUrl = Annotated[
    str | None,
    typer.Option(
        "--bus",
        metavar="URL",
        help="Redis or Valkey: redis://host:port, rediss://, unix://.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
ModelPath = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="FOLDER",
        help=f"Model folder in Transformers' format; {BUNDLED_MODEL!r} is the bundled model.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any setting, as engine.max_batch_size=64. Repeatable.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
LogLevel = Annotated[
    Level | None,
    typer.Option(
        "--log-level",
        help="Least severity that is printed.",
        rich_help_panel=_PANEL,
        case_sensitive=False,
        show_default=False,
    ),
]
Lane = Annotated[
    str | None,
    typer.Option(
        "--lane", metavar="NAME", help="Only this lane; all when not given.", show_default=False
    ),
]
WithParent = Annotated[
    bool,
    typer.Option(
        "--with-parent", hidden=True, help="Leave when standard input closes, as `up` wants."
    ),
]


def build_config(
    config_file: Path | None,
    bus: str | None,
    model: str | None,
    settings: list[str] | None,
    log_level: str | None,
    **more: Any,
) -> Config:
    """The settings of a command: its options over the environment over the file.

    Args:
        config_file: A YAML file, or None.
        bus: The bus's URL, or None.
        model: The model's folder, or None.
        settings: "section.setting=value" texts; they win over the other options.
        log_level: One of `Level`, or None.
        more: What the command itself decides, by dotted name.

    Raises:
        ConfigError: As `load_config`; also for a text without "=".
        ModelError: `model` names no folder.
    """
    overrides = overrides_of(bus, model, settings, log_level, **more)
    config = load_config(config_file, overrides=overrides)
    if model is not None and not config.engine.model_folder.is_dir():
        raise ModelError(
            f"there is no model folder {config.engine.model_folder}; give one in Transformers' "
            f"format (nothing is downloaded), or {BUNDLED_MODEL!r} for the bundled model"
        )
    return config


def overrides_of(
    bus: str | None,
    model: str | None,
    settings: list[str] | None,
    log_level: str | None,
    **more: Any,
) -> dict[str, Any]:
    """What the options of a command set, by dotted name; see `build_config`."""
    named = {"bus.url": bus, "engine.model_path": model}
    overrides: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if log_level is not None:
        overrides["telemetry.log_level"] = str(log_level)
    overrides |= more
    for text in settings or ():
        found = _SETTING.fullmatch(text)
        if found is None:
            # The rest is not quoted: it may be a password.
            name = re.match(r"[\w.]*", text)
            beginning = name.group()[:MOST_SHOWN] if name else ""
            raise ConfigError(
                f"--set takes section.setting=value; what begins with {beginning!r} is none"
            )
        overrides[found["name"]] = parse_value(found["value"])
    return overrides


def client_config(
    config_file: Path | None,
    bus: str | None,
    settings: list[str] | None,
    log_level: str | None = None,
    model: str | None = None,
    *,
    quiet: bool = True,
) -> Config:
    """As `build_config`, for a command that talks to a pipeline in another process.

    Without any URL it is the one where `up` starts its server. Logging is set up; if `quiet`,
    warnings are the least severity that is logged unless `log_level` asks otherwise, so that they
    don't mix with the answers.
    """
    if quiet:
        log_level = log_level or "warning"
    config = build_config(config_file, bus, model, settings, log_level)
    setup_logging(config.telemetry)
    if config.bus.url != "memory":
        return config
    if bus is not None:
        raise ConfigError("--bus memory has nobody else on it; give the URL that `up` printed")
    address = msgspec.structs.replace(config.bus, url=DEFAULT_URL)
    return msgspec.structs.replace(config, bus=address)
