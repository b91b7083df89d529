"""Options that several commands share, and the settings that they add up to."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace

from ..config import (
    API_KEY_VARIABLE,
    BUNDLED_MODEL,
    DEFAULT_URL,
    MOST_SHOWN,
    Config,
    ConfigError,
    load_config,
    parse_value,
    text_in,
)
from ..telemetry import setup_logging
from .model_paths import check_model_path

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
ServerUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="A server, as http://127.0.0.1:8000, instead of a bus.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]


def _api_key(given: str | None) -> str | None:
    """The key, or what stands in the file that the environment names."""
    variable = f"{API_KEY_VARIABLE}_FILE"
    if given is None and (file := os.environ.get(variable)):
        return text_in(Path(file), source=variable)
    return given


ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        envvar=API_KEY_VARIABLE,
        callback=_api_key,
        help="The key for that server; better in the environment, where others don't see it.",
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
ReferencePath = Annotated[
    str | None,
    typer.Option(
        "--reference",
        metavar="FOLDER",
        help="A second model, which stays as it is and scores what the first one makes.",
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
ServedModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="Of several models the one with this name, as `models` prints it.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
WithParent = Annotated[
    bool,
    typer.Option(
        "--with-parent", hidden=True, help="Leave when standard input closes, as `up` wants."
    ),
]


class Options(msgspec.Struct, frozen=True):
    """What was given of the options that set settings; None is what was not.

    Attributes:
        url: Of a server, for commands that ask one; it sets nothing.
        api_key: For that server.
        bus: The bus's URL.
        model: The model's folder.
        reference: That of the reference model.
        config_file: A YAML file.
        settings: "section.setting=value" texts; they win over the other options.
        log_level: One of `Level`.
        served: The name of a model that is served; it sets nothing.
    """

    url: str | None = None
    api_key: str | None = None
    bus: str | None = None
    model: str | None = None
    reference: str | None = None
    config_file: Path | None = None
    settings: list[str] | None = None
    log_level: str | None = None
    served: str | None = None

    def config(self, **more: Any) -> Config:
        """The settings of a command: its options over the environment over the file.

        Args:
            more: What the command itself decides, by dotted name; `settings` win over it.

        Raises:
            ConfigError: As `load_config`; also for a text without "=".
            ModelError: `model` names no folder and no file, or no model.
        """
        config = load_config(self.config_file, overrides=self.overrides(**more))
        if self.model is not None:
            check_model_path(config, self.model)
        return config

    def adding(self, setting: str) -> Options:
        """The same and one more of `settings`."""
        return replace(self, settings=[*(self.settings or ()), setting])

    def client_config(self, least: str | None = "warning") -> Config:
        """As `config`, for a command that talks to a pipeline in another process.

        Without any URL it is the one where `up` starts its server. Logging is set up.

        Args:
            least: The least severity that is logged unless `log_level` asks otherwise, so that
                log lines don't mix with the answers; None leaves it to the settings.
        """
        config = replace(self, log_level=self.log_level or least).config()
        setup_logging(config.telemetry)
        if config.bus.url != "memory":
            return config
        if self.bus is not None:
            raise ConfigError("--bus memory has nobody else on it; give the URL that `up` printed")
        return replace(config, bus=replace(config.bus, url=DEFAULT_URL))

    def overrides(self, **more: Any) -> dict[str, Any]:
        """What is set, by dotted name; `more` as in `config`.

        Raises:
            ConfigError: A text of `settings` has no "=".
        """
        named = {
            "bus.url": self.bus,
            "engine.model_path": self.model,
            "engine.reference_model_path": self.reference,
            "telemetry.log_level": None if self.log_level is None else str(self.log_level),
        }
        overrides = {name: value for name, value in named.items() if value is not None}
        return overrides | more | dict(map(_setting, self.settings or ()))


def _setting(text: str) -> tuple[str, Any]:
    """The name and the value of a "section.setting=value"."""
    match = _SETTING.fullmatch(text)
    if match is None:
        # The rest is not quoted: it may be a password.
        name = re.match(r"[\w.]*", text)
        beginning = name.group()[:MOST_SHOWN] if name else ""
        raise ConfigError(
            f"--set takes section.setting=value; what begins with {beginning!r} is none"
        )
    return match["name"], parse_value(match["value"])


_ANNOTATIONS = {
    "url": ServerUrl,
    "api_key": ApiKey,
    "bus": BusUrl,
    "model": ModelPath,
    "reference": ReferencePath,
    "config_file": ConfigFile,
    "settings": Settings,
    "log_level": LogLevel,
    "served": ServedModel,
}

CLIENT_OPTIONS = ("bus", "config_file", "settings", "log_level")
"""The options of every command that talks to a running pipeline."""

ENGINE_OPTIONS = ("bus", "model", "config_file", "settings", "log_level")
"""The options of every command that runs a part of a pipeline."""


def takes_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command these fields of `Options` as options, behind its own.

    The command gets them together, as its first argument.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        _, *own = signature.parameters.values()
        shared = [option(name, _ANNOTATIONS[name]) for name in names]

        @functools.wraps(command)
        def with_options(**values: Any) -> None:
            options = Options(**{name: values.pop(name) for name in names})
            command(options, **values)

        set_parameters(with_options, [*own, *shared])
        return with_options

    return decorate


def gathers(
    annotations: Mapping[str, Any], make: Callable[..., Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command more options, behind its own, which it gets together, as its second argument.

    The first are its `Options`, whose decorator stands above this one.

    Args:
        annotations: As Typer reads them, by name; all of them may be None.
        make: Takes them by name, and gives what the command gets.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        first, _, *own = inspect.signature(command, eval_str=True).parameters.values()
        shared = [option(name, annotation) for name, annotation in annotations.items()]

        @functools.wraps(command)
        def with_gathered(options: Options, **values: Any) -> None:
            given = {name: values.pop(name) for name in annotations}
            command(options, make(**given), **values)

        set_parameters(with_gathered, [first, *own, *shared])
        return with_gathered

    return decorate


def option(name: str, annotation: Any) -> inspect.Parameter:
    """A parameter of a command that need not be given."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def set_parameters(command: Callable[..., None], parameters: list[inspect.Parameter]) -> None:
    """Has Typer take these for a command's parameters, in this order."""
    # It reads them from these two.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}


takes_client_options = takes_options(*CLIENT_OPTIONS)

takes_model_options = takes_options("served", *CLIENT_OPTIONS)
"""Of commands that talk to a running pipeline, of several models to one of them."""

takes_asking_options = takes_options("url", "api_key", *CLIENT_OPTIONS)
"""Of commands that talk to a server or to a pipeline."""

takes_looking_options = takes_options("url", "api_key", "served", *CLIENT_OPTIONS)
"""Of commands that look at a running pipeline, over its bus or at a server."""
