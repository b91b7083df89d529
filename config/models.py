"""Settings of a deployment's models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from .base import Section
from .engine import EngineConfig
from .errors import ConfigError

MOST_ID_LENGTH = 128


class ModelConfig(Section, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One model of a deployment that serves several.

    Attributes:
        id: Its name in requests, metrics and traces.
        path: As `engine.model_path`.
        revision: Its version, for people, in the records of models.
        aliases: Other names of the model.
        default: Whether requests that name no model get this one; otherwise the first model.
        preload: Whether it is loaded at the start, or on demand.
        pinned: Whether it stays loaded when another model needs memory.
        dtype: As `engine.dtype`, unless "auto".
        replicas: As `pipeline.replicas`, unless None.
        role: As `engine.role`, unless "all".
        adapters: As `engine.adapters`.
        settings: Other settings of this model by dotted name, as `{"engine.kv_cache_bytes":
            1073741824, "admission.max_in_flight": 64}`.
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
                    f"models: {self.id!r} sets {name!r}, which its id, path and aliases say",
                    remedy="leave it out",
                )
            if name in _SECRET:
                raise ConfigError(
                    f"models: {self.id!r} sets {name!r}, but others can read a model's settings; "
                    "set it for the whole deployment"
                )

    def require_name(self, name: str) -> None:
        """Raise ConfigError for an invalid model name."""
        fits = 0 < len(name) <= MOST_ID_LENGTH and name.isprintable() and not set(name) & set(" {}")
        if not fits:
            raise ConfigError(
                f"models: {name!r:.80} can't name a model; take 1 to {MOST_ID_LENGTH} printable "
                "characters, without spaces and braces"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """All names in requests, the id first."""
        return (self.id, *self.aliases, *self.adapters)

    @property
    def overrides(self) -> dict[str, Any]:
        """Differences from the shared settings, by dotted name."""
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


# Settings that have fields of their own: a second value would contradict keys and the registry.
_SAID_BY_FIELDS = ("engine.model_id", "engine.model_path", "engine.model_aliases")
_SECRET = frozenset(f"{EngineConfig.SECTION}.{name}" for name in EngineConfig.SECRETS)
_SECTIONS_OF_A_MODEL = ("engine", "admission", "fairness", "pipeline")


def check_models(models: Sequence[ModelConfig]) -> None:
    """Raise ConfigError if two models share a name, or two are the default."""
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
    """Return the id of the default model; "" without models."""
    listed = list(models)
    return next((model.id for model in listed if model.default), listed[0].id if listed else "")


def with_default(models: Sequence[ModelConfig]) -> tuple[ModelConfig, ...]:
    """Return the models with exactly one marked as the default."""
    chosen = default_of(models)
    return tuple(
        msgspec.structs.replace(model, default=True) if model.id == chosen else model
        for model in models
    )
