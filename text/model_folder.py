"""The folder in Transformers' format of a model path."""

from __future__ import annotations

from pathlib import Path

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
