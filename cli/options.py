"""Options that several commands share, and the settings that they result in."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import typer
from msgspec.structs import replace

from ..config import (
    API_KEY_VARIABLE,
    BUNDLED_MODEL,
    BUNDLED_VISION_MODEL,
    DEFAULT_URL,
    MOST_SHOWN,
    Config,
    ConfigError,
    load_config,
    parse_value,
    text_in,
)
from ..telemetry import setup_logging
from .help import group as group
from .model_files import check_model_path

Command = Callable[..., None]

_SETTING = re.compile(r"\s*(?P<name>\w+\.\w+)\s*=(?P<value>.*)", re.DOTALL)


def option(usage: str, help: str, **more: Any) -> Any:
    """Return a Typer option. `usage` has its names and its value: "--temperature -t NUMBER"."""
    words = usage.split()
    names = [word for word in words if word.startswith("-")]
    return typer.Option(*names, help=help, metavar=" ".join(words[len(names) :]) or None, **more)


def argument(metavar: str, help: str) -> Any:
    """Return a Typer argument."""
    return typer.Argument(metavar=metavar, help=help)


_setting = functools.partial(option, rich_help_panel="Settings")


def _api_key(given: str | None) -> str | None:
    """Return the key, or the content of the file that the environment names."""
    variable = f"{API_KEY_VARIABLE}_FILE"
    if given is None and (file := os.environ.get(variable)):
        return text_in(Path(file), source=variable)
    return given


Lane = Annotated[str | None, option("--lane NAME", "Only this lane; default: all.")]
AsJson = Annotated[bool, option("--json", "Print JSON.")]
AskedModel = Annotated[
    str | None, _setting("--model NAME", "The model, as `models` prints it; default: the first.")
]
WithParent = Annotated[bool, option("--with-parent", "Exit with standard input.", hidden=True)]
Standby = Annotated[bool, option("--standby", "Load, and wait for the parent.", hidden=True)]

Restarted = Annotated[str, option("--restarted JSON", "Restarts of the process.", hidden=True)]


class Options(msgspec.Struct, frozen=True):
    """Options of many commands; None if not given. Only the first three set no setting."""

    url: Annotated[
        str | None,
        _setting("--url URL", "A server, as http://127.0.0.1:8000; default: what runs here."),
    ] = None
    api_key: Annotated[
        str | None,
        _setting(
            "--api-key KEY",
            "The key for that server; safer in the environment, hidden from other users.",
            envvar=API_KEY_VARIABLE,
            callback=_api_key,
        ),
    ] = None
    served: Annotated[
        str | None, _setting("--model NAME", "One of several, as `models` prints it.")
    ] = None
    bus: Annotated[
        str | None, _setting("--bus URL", "Redis or Valkey: redis://host:port, rediss://, unix://.")
    ] = None
    model: Annotated[
        str | None,
        _setting(
            "--model FOLDER",
            f"In Transformers' format; or {BUNDLED_MODEL}, {BUNDLED_VISION_MODEL}: bundled models.",
        ),
    ] = None
    reference: Annotated[
        str | None,
        _setting(
            "--reference FOLDER", "Scores what the model generates; or unquantized (settings.md)."
        ),
    ] = None
    config_file: Annotated[Path | None, _setting("--config FILE", "YAML with settings.")] = None
    settings: Annotated[
        list[str] | None,
        _setting("--set NAME=VALUE", "A setting, as engine.max_batch_size=64. Repeatable."),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        _setting(
            "--log-level", "Least level; default: warning, of servers info.", case_sensitive=False
        ),
    ] = None

    def config(self, **more: Any) -> Config:
        """Return the settings: options over the environment over the file.

        Args:
            more: The command's own values, by dotted name; `settings` take precedence.

        Raises:
            ConfigError: As `load_config`; also for a text without "=".
            ModelError: `model` names no folder and no file, or no model.
        """
        config = load_config(self.config_file, overrides=self.overrides(**more))
        if self.model is not None:
            check_model_path(config, self.model)
        return config

    def client_config(self, least: str | None = "warning") -> Config:
        """Return the settings of a command that talks to a pipeline in another process.

        Without a URL the bus is the one where `up` starts its server. Logging is set up.

        Args:
            least: The least level without `log_level`, so that log lines don't mix with answers;
                None for the level of the settings.
        """
        config = replace(self, log_level=self.log_level or least).config()
        setup_logging(config.telemetry)
        if config.bus.url != "memory":
            return config
        if self.bus is not None:
            raise ConfigError(
                "--bus memory reaches no other process; give the URL that `up` printed"
            )
        return replace(config, bus=replace(config.bus, url=DEFAULT_URL))

    def overrides(self, **more: Any) -> dict[str, Any]:
        """Return the settings that options set, by dotted name; `more` as in `config`.

        Raises:
            ConfigError: A text of `settings` has no "=".
        """
        named = {
            "bus.url": self.bus,
            "engine.model_path": self.model,
            "engine.reference_model_path": self.reference,
            "telemetry.log_level": self.log_level,
        }
        overrides = {name: value for name, value in named.items() if value is not None}
        return overrides | more | dict(map(_parsed, self.settings or ()))


def _parsed(text: str) -> tuple[str, Any]:
    """Return the name and the value of a "section.setting=value"."""
    match = _SETTING.fullmatch(text)
    if match is None:
        # The rest is not quoted: it may be a password.
        name = re.match(r"[\w.]*", text)
        beginning = name.group()[:MOST_SHOWN] if name else ""
        if "=" not in text:
            raise ConfigError(f"--set takes section.setting=value; {beginning!r} has no '='")
        raise ConfigError(f"--set takes section.setting=value, not a text with {beginning!r} first")
    return match["name"], parse_value(match["value"])


def takes(make: Callable[..., Any], *names: str) -> Callable[[Command], Command]:
    """Give a command further options, after its own.

    Args:
        make: Takes the options as keywords. The command gets its result, as the parameter that is
            annotated with its type.
        names: The options, by name, out of those of `make`; all if empty.
    """
    hints = get_type_hints(make, include_extras=True)
    kind = hints.pop("return", make)
    names = names or tuple(hints)

    def decorate(command: Command) -> Command:
        parameters = inspect.signature(command, eval_str=True).parameters
        (holder,) = (each.name for each in parameters.values() if each.annotation is kind)
        own = [each for each in parameters.values() if each.name != holder]
        keyword = inspect.Parameter.KEYWORD_ONLY
        more = [
            inspect.Parameter(name, keyword, default=None, annotation=hints[name]) for name in names
        ]

        @functools.wraps(command)
        def with_options(**values: Any) -> None:
            command(**{holder: make(**{name: values.pop(name) for name in names})}, **values)

        # Typer reads the parameters from these two attributes.
        with_options.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
        with_options.__annotations__ = {each.name: each.annotation for each in [*own, *more]}
        return with_options

    return decorate


_CLIENT = ("bus", "config_file", "settings", "log_level")

takes_client_options = takes(Options, *_CLIENT)
"""For commands that talk to a running pipeline."""

takes_server_options = takes(Options, "url", "api_key", *_CLIENT)
"""For commands that talk to a server or to a pipeline."""

takes_status_options = takes(Options, "url", "api_key", "served", *_CLIENT)
"""The same, for one of several models."""

takes_gateway_options = takes(Options, "bus", "model", *_CLIENT[1:])

takes_engine_options = takes(Options, "reference", "bus", "model", *_CLIENT[1:])
"""For commands that run stages."""
