"""Settings from a YAML file, the environment and the command line; later ones win.

Environment: `NANO_INFERENCE_<SECTION>__<SETTING>`, for example
`NANO_INFERENCE_ENGINE__MAX_BATCH_SIZE=64`. Values are read as YAML. With the suffix `_FILE`, as
`NANO_INFERENCE_POLICY__PASSPHRASE_FILE=/run/secrets/p`, the variable names a file with the value.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import yaml

from .errors import ConfigError
from .quoting import MOST_SHOWN
from .whole import Config

ENV_PREFIX = "NANO_INFERENCE_"

MOST_VALUE_BYTES = 1 << 16
"""Size limit of a file with one setting's value."""

API_KEY_VARIABLE = "NANO_INFERENCE_API_KEY"
"""API key that commands send to a server. It isn't a setting, but `_FILE` works for it too."""

_IN_FILE = "_file"

_MOST_LISTED = 30

_NEAR = 0.6
"""Lowest similarity of a suggested name, which is difflib's default. Below it the list of names
helps more.
"""

_OFF_OR_NAME = frozenset({"gateway.message_format", "policy.backend"})
"""Settings that are off or hold a name."""

MODELS = "models"
"""The one section that is a list; in the environment it is written as YAML."""

_MODELS_VARIABLE = ENV_PREFIX + MODELS.upper()

Tree = dict[str, Any]

_SECTIONS = {
    field.name: field.type for field in msgspec.structs.fields(Config) if field.name != MODELS
}


def load_config(
    path: Path | None = None,
    *,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Build the configuration of a process.

    Args:
        path: A YAML file with the sections of `Config`; None for defaults only.
        env: The environment; the process's own if None.
        overrides: Dotted names to values, for example `{"engine.block_size": 8}`.

    Raises:
        ConfigError: An unreadable file, an unknown section or setting (the message has the nearest
            name), a value of the wrong type or out of range, or a setting given both as a value and
            as a file in the environment.
    """
    tree: Tree = {}
    if path is not None:
        _merge_file(tree, path)
    _merge_environment(tree, os.environ if env is None else env)
    for dotted, value in (overrides or {}).items():
        _put(tree, dotted, value, source=dotted)
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        from .wrong_values import place_of, told_of, values_at

        # A text may be a secret.
        given = None if "`str" in str(error).partition(", got")[0] else tree
        values = ", ".join(map(repr, values_at(Config, place_of(error))))
        raise ConfigError(told_of(error, found=given, values=values)) from None


def as_environment(overrides: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which `load_config` finds these settings, besides the rest of `env`.

    Processes pass settings so, since other users can read a command line.
    """
    environment = {
        name: value
        for name, value in env.items()
        if not name.startswith(ENV_PREFIX) or _setting_of(name)[0] not in overrides
    }
    for dotted, value in overrides.items():
        environment[ENV_PREFIX + dotted.upper().replace(".", "__", 1)] = as_text(value)
    return environment


def as_text(value: object) -> str:
    """Return a value as one line of YAML, which `parse_value` reads."""
    plain = msgspec.to_builtins(value)
    text: str = yaml.safe_dump(plain, default_flow_style=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")


def _setting_of(name: str) -> tuple[str, bool]:
    """Return the setting that an environment variable names, and whether its value is a file's
    path."""
    dotted = name[len(ENV_PREFIX) :].lower().replace("__", ".", 1)
    without = dotted.removesuffix(_IN_FILE)
    in_file = _type_of(dotted) is None and _type_of(without) is not None
    return (without, True) if in_file else (dotted, False)


def _type_of(dotted: str) -> Any:
    """Return a setting's type; None if there is no such setting."""
    section, _, name = dotted.partition(".")
    fields = msgspec.structs.fields(_SECTIONS[section]) if section in _SECTIONS else ()
    return next((field.type for field in fields if field.name == name), None)


def _merge_environment(tree: Tree, env: Mapping[str, str]) -> None:
    named: dict[tuple[str, bool], str] = {}
    for name, text in sorted(env.items()):
        if not name.startswith(ENV_PREFIX) or name.removesuffix("_FILE") == API_KEY_VARIABLE:
            continue
        if name == _MODELS_VARIABLE:
            tree[MODELS] = _listed(parse_value(text), source=name)
            continue
        dotted, in_file = _setting_of(name)
        if other := named.get((dotted, not in_file)):
            raise ConfigError(f"{dotted} is set by both {other} and {name}; leave one away")
        named[dotted, in_file] = name
        if in_file:
            text = text_in(Path(text), source=name)
        literally = in_file and _type_of(dotted) is str
        _put(tree, dotted, text if literally else parse_value(text), source=name)


def text_in(file: Path, *, source: str) -> str:
    """Return a file's text without its last line end.

    Args:
        source: The name of the variable, for errors.

    Raises:
        ConfigError: The file can't be read, or is empty or too large.
    """
    try:
        with file.open("rb") as opened:
            found = opened.read(MOST_VALUE_BYTES + 1)
        text = found.decode()
    except OSError as error:
        raise ConfigError(
            f"{source}: can't read {file}: {error.strerror}", remedy="make it readable"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{source}: {file} is not text in UTF-8; convert it") from None
    if len(found) > MOST_VALUE_BYTES:
        raise ConfigError(
            f"{source}: {file} is larger than {MOST_VALUE_BYTES} bytes",
            remedy="keep one value in it",
        )
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise ConfigError(f"{source}: {file} is empty; write the value into it")
    return text


def parse_value(text: str) -> Any:
    """Parse a value as YAML: numbers, true, null, [lists]; anything else is a string."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _merge_file(tree: Tree, path: Path) -> None:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}; give a readable file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        why = str(error).splitlines()[0]
        if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
            why = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
        raise ConfigError(f"{path} is not valid YAML: {why}") from None
    if content is None:
        return
    if not isinstance(content, dict):
        kind = "a list" if isinstance(content, list) else "a single value"  # which may be secret
        raise ConfigError(f"{path} must hold sections such as 'engine:', not {kind}")
    for section, settings in content.items():
        if section == MODELS:
            tree[MODELS] = _listed(settings, source=f"{path}: {MODELS}")
            continue
        if not isinstance(settings, dict):
            raise ConfigError(f"{path}: section {section!r} must hold 'name: value' lines")
        for name, value in settings.items():
            _put(tree, f"{section}.{name}", value, source=f"{path}: {section}.{name}")


def _listed(value: Any, *, source: str) -> list[Any]:
    """Return a list of models. Raises ConfigError for anything else."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ConfigError(f"{source}: must be a list of models, each with an id and a path")
    return value


def _put(tree: Tree, dotted: str, value: Any, *, source: str) -> None:
    section, _, name = dotted.partition(".")
    if section == MODELS:
        raise ConfigError(
            f"{source}: models are a list, which a file or {_MODELS_VARIABLE} gives",
            remedy="write them there",
        )
    if section not in _SECTIONS:
        raise ConfigError(
            f"{source}: no section {section!r}{nearest(section, [*_SECTIONS, MODELS])}"
        )
    known = _SECTIONS[section].__struct_fields__
    if name not in known:
        raise ConfigError(f"{source}: {section} has no setting {name!r}{nearest(name, known)}")
    if get_origin(_type_of(dotted)) is tuple and isinstance(value, (str, int)):
        value = [parse_value(word) for word in str(value).split(",")]  # such as models=mine
    if dotted == "bus.lane" and type(value) is int:
        value = str(value)  # YAML reads a name that is a number as one
    if value is False and (dotted in _OFF_OR_NAME or "off" in get_args(_type_of(dotted))):
        value = "off"  # and this word as false
    tree.setdefault(section, {})[name] = value


def nearest(name: str, known: Iterable[str], *, listed: bool = True, cutoff: float = _NEAR) -> str:
    """Return the end of a sentence about an unknown name: the nearest known name, or, if `listed`
    and few, all of them.

    Empty if none are known. Only short names are compared, since that takes quadratic time. From
    `cutoff`, of at most 1, a name is near.
    """
    names = list(known)
    short = len(name) <= MOST_SHOWN
    matches = difflib.get_close_matches(name, names, n=1, cutoff=cutoff) if short else []
    if matches:
        return f"; did you mean {matches[0]!r}?"
    return f"; known: {', '.join(names)}" if listed and 0 < len(names) <= _MOST_LISTED else ""
