"""The models of a deployment: what each is called, where it is, and what is set for it alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from .base import Section
from .errors import ConfigError

MOST_ID_LENGTH = 128


class ModelConfig(Section, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One model of a deployment that serves several.

    Attributes:
        id: What requests give in `model`, and what metrics and traces call it.
        path: As `engine.model_path`.
        revision: Which version of it this is, for people, in the records of models.
        aliases: Other names for it.
        default: Whether requests that name no model are for it; the first model where none says so.
        preload: Whether it is loaded when the deployment starts; else it is loaded when asked for.
        pinned: Whether it stays, whoever else needs the memory.
        dtype: As `engine.dtype`, unless it is "auto".
        replicas: As `pipeline.replicas`; None for what that says.
        role: As `engine.role`, unless it is "all".
        adapters: As `engine.adapters`.
        settings: Other settings for this model alone, by dotted name, as
            `{"engine.kv_cache_bytes": 1073741824, "admission.max_in_flight": 64}`.
    """

    SECTION: ClassVar[str] = "models"

    id: str
    path: str
    revision: str = ""
    aliases: tuple[str, ...] = ()
    default: bool = False
    preload: bool = True
    pinned: bool = False
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    replicas: int | None = None
    role: Literal["all", "generate", "embed"] = "all"
    adapters: dict[str, str] = {}  # noqa: RUF012
    settings: dict[str, Any] = {}  # noqa: RUF012

    def check(self) -> None:
        for name in (self.id, *self.aliases, *self.adapters):
            self.require_name(name)
        fits = bool(self.path) and "\0" not in self.path
        self.require("path", fits, "a folder, or 'tiny'")
        for name in self.settings:
            if name.partition(".")[0] not in _SECTIONS_OF_A_MODEL:
                raise ConfigError(
                    f"models: {self.id!r} sets {name!r:.80}; a model may set what is in "
                    f"{', '.join(_SECTIONS_OF_A_MODEL)}, and all else is the deployment's"
                )
            if name in _SAID_BY_FIELDS:
                raise ConfigError(
                    f"models: {self.id!r} sets {name!r}, which its id, path and aliases say"
                )

    def require_name(self, name: str) -> None:
        """Raises ConfigError for what can't name a model."""
        fits = 0 < len(name) <= MOST_ID_LENGTH and name.isprintable() and not set(name) & set(" {}")
        if not fits:
            raise ConfigError(
                f"models: {name!r:.80} can't name a model; take 1 to {MOST_ID_LENGTH} printable "
                "characters, without spaces and braces"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which requests may ask for it, its id first."""
        return (self.id, *self.aliases, *self.adapters)

    @property
    def overrides(self) -> dict[str, Any]:
        """What differs from the settings that all models share, by dotted name."""
        own: dict[str, Any] = {
            "engine.model_path": self.path,
            "engine.model_id": self.id,
            "engine.model_aliases": list(self.aliases),
            "bus.model": self.id,
        }
        if self.dtype != "auto":
            own["engine.dtype"] = self.dtype
        if self.role != "all":
            own["engine.role"] = self.role
        if self.replicas is not None:
            own["pipeline.replicas"] = self.replicas
        if self.adapters:
            own["engine.adapters"] = dict(self.adapters)
        return own | self.settings


# Another name here than those that keys and the registry have would be somebody else's.
_SAID_BY_FIELDS = ("engine.model_id", "engine.model_path", "engine.model_aliases")
_SECTIONS_OF_A_MODEL = ("engine", "admission", "fairness", "pipeline")


def check_models(models: Sequence[ModelConfig]) -> None:
    """Raises ConfigError when two models have one name, or two are the default."""
    seen: dict[str, str] = {}
    for model in models:
        for name in model.names:
            if name in seen:
                raise ConfigError(
                    f"models: {name!r} names both {seen[name]!r} and {model.id!r}; give each name "
                    "to one model"
                )
            seen[name] = model.id
    defaults = [model.id for model in models if model.default]
    if len(defaults) > 1:
        raise ConfigError(f"models: {', '.join(defaults)} are all the default; say so of one")


def default_of(models: Iterable[ModelConfig]) -> str:
    """The id of the model that requests are for which name none; "" when there are no models."""
    listed = list(models)
    return next((model.id for model in listed if model.default), listed[0].id if listed else "")


def with_default(models: Sequence[ModelConfig]) -> tuple[ModelConfig, ...]:
    """The same models, of which one says that it is the default."""
    chosen = default_of(models)
    return tuple(
        msgspec.structs.replace(model, default=True) if model.id == chosen else model
        for model in models
    )
