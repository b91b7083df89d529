"""Files of tensors, written so that a reader finds a whole file or none."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
from torch import Tensor

from .....config import WeightsError
from .transports.folder import DTYPES
from .transports.layout import as_bytes, meta_of

_ALIGNMENT = 64


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> int:
    """Write a safetensors file; return its bytes. Not by the safetensors library, which holds the
    GIL meanwhile, so that the process's other stages would wait.

    Raises:
        WeightsError: It can't be written.
    """
    names = {name: short for short, name in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        meta = meta_of(name, tensor)
        start, end = end, end + tensor.nbytes
        places = {"shape": meta.shape, "data_offsets": (start, end)}
        header[name] = {"dtype": names[meta.dtype], **places}
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    parts: Iterator[Iterable[bytes | memoryview]] = iter(
        [(len(text).to_bytes(8, "little"), text), map(_content, tensors.values())]
    )
    with replacing(path) as file:
        for each in parts:
            for content in each:
                _write(file, memoryview(content))
    return 8 + len(text) + end


@contextmanager
def replacing(path: Path) -> Iterator[int]:
    """Open a file that appears under its name, in place of an earlier one, once it is on the disk.

    Raises:
        WeightsError: It can't be written; then the earlier one is there.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            yield file
            os.fsync(file)
        finally:
            os.close(file)
        beside.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise WeightsError(
            f"{str(path)!a} can't be written: {error.strerror}", remedy="name another folder"
        ) from None
    finally:
        beside.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names of a folder's files durable. Raises OSError."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _content(tensor: Tensor) -> memoryview:
    return memoryview(as_bytes(tensor).cpu().numpy().data).cast("B")


def _write(file: int, content: memoryview) -> None:
    while content:
        content = content[os.write(file, content) :]
