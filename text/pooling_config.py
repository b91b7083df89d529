"""Embedding settings of a model's folder.

Folders of sentence-transformers list their modules in modules.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, get_args

from ..config import ModelError, PoolingKind
from .model_folder import folder_of, read_json

_MODULES = "modules.json"

_KINDS: dict[str, PoolingKind] = {
    **{kind: kind for kind in get_args(PoolingKind)},
    **{"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"},
}
"""Names in a pooling module's config.json: of `pooling_mode`, or after it in a true key."""


class OwnPooling(NamedTuple):
    """The model's own pooling; `kind` is None if unspecified."""

    kind: PoolingKind | None = None
    normalize: bool = True


def own_pooling(folder: Path) -> OwnPooling:
    """Return the pooling of a sentence-transformers folder.

    Raises:
        ModelError: A file can't be read, or the vectors need an unsupported module.
    """
    folder = folder_of(folder)
    modules = read_json(folder / _MODULES, None)
    if modules is None:
        return OwnPooling()
    kind: PoolingKind | None = None
    normalize = False
    for module in modules if isinstance(modules, list) else [None]:
        path, name = _module(folder, module)
        if name == "Pooling":
            kind = _kind_of(path / "config.json")
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise ModelError(
                f"{folder / _MODULES} has a module {name!r}, which is not applied here, and "
                "without which vectors would be wrong; choose another model"
            )
    return OwnPooling(kind, normalize)


def _module(folder: Path, module: Any) -> tuple[Path, str]:
    """Return a module's folder, and the last part of its type."""
    if not isinstance(module, dict) or not isinstance(module.get("type"), str):
        raise ModelError(f"{folder / _MODULES} must be a list of modules, each with a type")
    path = (folder / str(module.get("path", ""))).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ModelError(f"{folder / _MODULES} names {path}, which is elsewhere; copy it there")
    return path, module["type"].rpartition(".")[2]


def _kind_of(path: Path) -> PoolingKind:
    config = read_json(path, None)
    if not isinstance(config, dict):
        raise ModelError(f"{path} is missing, or holds no JSON object; copy the folder again")
    if not config.get("include_prompt", True):
        raise ModelError(f"{path} leaves prompts out of the mean; choose another model")
    mode = config.get("pooling_mode")
    if mode is None:
        modes = [key for key, value in config.items() if key.startswith("pooling_") and value]
        mode = modes[0] if len(modes) == 1 else modes
    kind = _KINDS.get(str(mode).removeprefix("pooling_mode_"))
    if kind is None:
        raise ModelError(f"{path} pools by {mode}; there are {', '.join(get_args(PoolingKind))}")
    return kind
