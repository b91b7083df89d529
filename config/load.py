"""Settings from a YAML file, the environment and the command line, later ones winning.

Environment: `NANO_INFERENCE_<SECTION>__<SETTING>`, for example
`NANO_INFERENCE_ENGINE__MAX_BATCH_SIZE=64`. Values are read as YAML.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from .errors import ConfigError
from .quoting import MOST_SHOWN
from .settings import Config

ENV_PREFIX = "NANO_INFERENCE_"

API_KEY_VARIABLE = "NANO_INFERENCE_API_KEY"
"""The key that commands send to a server; it is no setting."""

Tree = dict[str, dict[str, Any]]

_SECTIONS = {field.name: field.type for field in msgspec.structs.fields(Config)}


def load_config(
    path: Path | None = None,
    *,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Builds the configuration of a process.

    Args:
        path: A YAML file with the sections of `Config`; None for defaults only.
        env: The environment; the process's own when None.
        overrides: Dotted names to values, for example `{"engine.block_size": 8}`.

    Raises:
        ConfigError: A file that can't be read, an unknown section or setting (with the nearest
            known name), a value of the wrong type or out of range.
    """
    tree: Tree = {}
    if path is not None:
        _merge_file(tree, path)
    for name, value in sorted((os.environ if env is None else env).items()):
        if name.startswith(ENV_PREFIX) and name != API_KEY_VARIABLE:
            _put(tree, _dotted(name), parse_value(value), source=name)
    for dotted, value in (overrides or {}).items():
        _put(tree, dotted, value, source=dotted)
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad setting: {error}") from None


def as_environment(overrides: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, str]:
    """An environment in which `load_config` finds these settings, and all else of `env`.

    It is how one process gives another what others may not read, as they may its command line.
    """
    environment = {
        name: value
        for name, value in env.items()
        if not name.startswith(ENV_PREFIX) or _dotted(name) not in overrides
    }
    for dotted, value in overrides.items():
        text = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
        name = ENV_PREFIX + dotted.upper().replace(".", "__", 1)
        environment[name] = text.removesuffix("\n").removesuffix("\n...")
    return environment


def _dotted(name: str) -> str:
    """The setting that an environment variable is of."""
    return name[len(ENV_PREFIX) :].lower().replace("__", ".", 1)


def parse_value(text: str) -> Any:
    """A value as it is written in YAML: numbers, true, null, [lists], anything else a string."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _merge_file(tree: Tree, path: Path) -> None:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"{path} is not valid YAML: {first_line}") from None
    if content is None:
        return
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold sections such as 'engine:', not {_kind(content)}")
    for section, settings in content.items():
        if not isinstance(settings, dict):
            raise ConfigError(f"{path}: section {section!r} must hold 'name: value' lines")
        for name, value in settings.items():
            _put(tree, f"{section}.{name}", value, source=f"{path}: {section}.{name}")


def _kind(content: object) -> str:
    """What is in a file instead of settings, in a word: it may be something secret."""
    return "a list" if isinstance(content, list) else "a single value"


def _put(tree: Tree, dotted: str, value: Any, *, source: str) -> None:
    section, _, name = dotted.partition(".")
    if section not in _SECTIONS:
        raise ConfigError(f"{source}: no section {section!r}{nearest(section, _SECTIONS)}")
    known = _SECTIONS[section].__struct_fields__
    if name not in known:
        raise ConfigError(f"{source}: {section} has no setting {name!r}{nearest(name, known)}")
    if dotted == "bus.lane" and type(value) is int:
        value = str(value)  # YAML reads a name that is a number as one
    tree.setdefault(section, {})[name] = value


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known one, or all of them.

    Comparing takes time with the square of a name's length, so only short ones are compared.
    """
    short = len(name) <= MOST_SHOWN
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5) if short else []
    return f"; did you mean {matches[0]!r}?" if matches else f"; known: {', '.join(known)}"
