"""Checks of a model's path before anything is started, in the words in which the user gave it."""

from __future__ import annotations

from pathlib import Path

from ..config import Config, ModelError, missing_model
from .pull import MODELS

_WEIGHTS = ("*.safetensors", "*.bin")
_GGUF = b"GGUF"
"""The first bytes of a GGUF file."""


def check_model_path(config: Config, typed: str | None) -> None:
    """Check that there is something at the model's path.

    Args:
        config: Its settings name the model.
        typed: The value of --model; None if another source of settings names the model.

    Raises:
        ModelError: There is nothing.
    """
    path, model = config.engine.model_folder, config.engine.model_path
    if not path.exists():
        pulled = (MODELS / model.replace("/", "--")).expanduser()
        advice = (
            f"it was pulled to {pulled}; give that" if pulled.is_dir() else missing_model(model)
        )
        raise ModelError(f"{_named(model, typed)}: there is no such folder or file; {advice}")


def check_model_files(config: Config, typed: str | None) -> None:
    """Check that the files of the model are there, without reading them.

    Args:
        config: As `check_model_path`; several models are left to their manager.
        typed: As `check_model_path`.

    Raises:
        ModelError: There is nothing at the path, or no model.
    """
    if config.models:
        return
    check_model_path(config, typed)
    if problem := _problem_of(config.engine.model_folder):
        named = _named(config.engine.model_path, typed)
        raise ModelError(f"{named} {problem}; {missing_model('')}")


def _named(model: str, typed: str | None) -> str:
    # --set engine.model_path comes before --model.
    return f"--model {typed}" if typed == model else f"engine.model_path {model}"


def _problem_of(path: Path) -> str:
    """Why what is at a path can't be a model; "" if it may be one."""
    if path.is_file():
        with path.open("rb") as file:
            return "" if file.read(len(_GGUF)) == _GGUF else "is no GGUF file"
    if any(path.glob("*.gguf")):
        return ""
    if not (path / "config.json").is_file():
        return "is a folder without config.json and without a GGUF file"
    if not any(found for pattern in _WEIGHTS for found in path.glob(pattern)):
        return "is a folder without weights (*.safetensors)"
    return ""
