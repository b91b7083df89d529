"""Names of models in calls, and the names that serve them (`gateway.model_aliases`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ...config import Config, ConfigError


def alias_of(name: str, aliases: Mapping[str, str]) -> str:
    """Return the model that an alias names; "" if the name is no alias.

    An alias without `*` counts first, then that with most other characters, then that with most of
    them before its `*`.
    """
    if name in aliases:
        return aliases[name]
    found = [alias for alias in aliases if "*" in alias and _matches(alias, name)]
    best = max(found, key=lambda alias: (len(alias), alias.index("*"), alias), default="")
    return aliases.get(best, "")


def served_name(name: str, config: Config) -> str:
    """Return the name of the model or adapter that serves a name, if one does."""
    if name in own_names(config) or name in config.engine.adapters:
        return name
    return alias_of(name, config.gateway.model_aliases) or name


def adapter_of(model: str, config: Config) -> str:
    """Return the adapter that a request's model names; "" for the model itself, by any alias."""
    served = served_name(model, config)
    return "" if served in own_names(config) else served


def own_names(config: Config) -> tuple[str, ...]:
    """Return the names of the model itself; "" is one."""
    return ("", config.engine.model_name, *config.engine.model_aliases)


def check_aliases(aliases: Mapping[str, str], served: Collection[str]) -> None:
    """Check that each alias has a model. `served`: the names in the settings; none if unknown.

    Raises:
        ConfigError: It is no alias, there is no such model, or the alias is the name of one.
    """
    for alias, target in aliases.items():
        why = ""
        if not (alias and target) or alias.count("*") > 1 or "*" in target:
            why = "an alias has at most one * in it, and the name of a model none"
        elif target in aliases:
            why = "that is an alias itself; name the model that serves both"
        elif served and target not in served:
            why = f"there is no such model or adapter in the settings; name one of {_list(served)}"
        elif alias in served:
            why = "a model or adapter has that name; leave the alias out, or rename the model"
        if why:
            raise ConfigError(f"gateway.model_aliases serves {alias!r} as {target!r}, but {why}")


def _list(names: Collection[str]) -> str:
    return ", ".join(sorted(names))


def _matches(alias: str, name: str) -> bool:
    begin, _, end = alias.partition("*")
    fits = len(name) >= len(begin) + len(end)
    return fits and name.startswith(begin) and name.endswith(end)
