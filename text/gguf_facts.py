"""Facts of a GGUF file, kept in the folder that it was converted to."""

from __future__ import annotations

from pathlib import Path

import msgspec

LINK = "model.gguf"
"""The folder's link to the GGUF file."""

FACTS = "gguf.json"
"""The folder's file with `GgufFacts`."""

FLOATS = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types of tensors that are not quantized, with their dtypes."""


class GgufFacts(msgspec.Struct, frozen=True):
    """Facts of the file that a folder was made from.

    Attributes:
        file: Its path.
        size_bytes: Its size.
        types: Number of tensors of each type, by GGUF's names.
        num_parameters: Elements of all tensors.
        unread: Position-encoding keys of the file that Transformers ignores.
    """

    file: str
    size_bytes: int
    types: dict[str, int]
    num_parameters: int
    unread: tuple[str, ...] = ()

    @property
    def quantized(self) -> tuple[str, ...]:
        """The types that aren't floats."""
        return tuple(name for name in self.types if name not in FLOATS)


def facts_of(folder: Path) -> GgufFacts | None:
    """Return the facts of a folder that a GGUF file was converted to; None for other folders."""
    if not (folder / FACTS).is_file():
        return None
    return msgspec.json.decode((folder / FACTS).read_bytes(), type=GgufFacts)
