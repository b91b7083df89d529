"""The folder in Transformers' format of a model path, and its JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..config import ModelError


def gguf_file_of(path: Path) -> Path | None:
    """Return the GGUF file of a model path: the path itself, or the only GGUF file of a folder
    without config.json. Return None for a folder in Transformers' format.

    Raises:
        ModelError: There are several.
    """
    if path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:3])
        raise ModelError(
            f"{path} holds {len(files)} GGUF files ({names}, …); name one, as {files[0]}"
        )
    return files[0] if files else None


def folder_of(path: Path) -> Path:
    """Return the folder in Transformers' format for a model path, which is converted if it is a
    GGUF file.

    Raises:
        ModelError: The file can't be read or served, or packages are missing.
    """
    file = gguf_file_of(path)
    if file is None:
        return path
    from .gguf import made_of

    return made_of(file.resolve())


def read_json(path: Path, missing: Any) -> Any:
    """Return a JSON file's content, or `missing` if there is no file. Raises ModelError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return missing
    except (OSError, ValueError) as error:
        raise ModelError(f"can't read {path}: {error}; make it readable for this user") from error


def embeds_only(folder: Path) -> bool:
    """Return whether a model has no output layer that generates.

    True of base models, masked language models, and models with bidirectional attention.

    Raises:
        ModelError: config.json can't be read.
    """
    config = read_json(folder_of(folder) / "config.json", None)
    if not isinstance(config, dict):
        return False
    # "vision" is attention among the tokens of an image, in a model that generates.
    if config.get("is_causal") is False or config.get("use_bidirectional_attention") in (
        True,
        "all",
    ):
        return True
    if config.get("is_decoder"):
        return False
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    has_heads = name.endswith(("HeadModel", "HeadsModel"))
    return name.endswith(("ForMaskedLM", "ForPreTraining")) or (
        name.endswith("Model") and not has_heads
    )
