"""Deltas in the open format of `fireworks-delta-compression`: arc_v1, arc_v2 and arc_v3.

A safetensors file with a compressed change of each tensor of a checkpoint, and in its metadata the
Adler-32 of each result. It names no base version, so its reader does. The package does the work.
arc_v3 has Python pickles in it; here only those that can make nothing but numbers, texts, bytes and
containers of them are given to the package.
"""

from __future__ import annotations

import bz2
import pickle
import pickletools
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .....bus.weights import ArcFormat
from .....config import WeightsError, shown
from .checks import check_stored
from .delta import WeightDelta, damaged, other_base
from .files import write_tensors
from .transports.folder import metadata_of, read_folder
from .transports.layout import as_bytes

_PLAIN = (
    "PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE "
    "BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 "
    "SHORT_BINBYTES BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND "
    "APPENDS EMPTY_DICT SETITEM SETITEMS"
)
_PLAIN_OPERATIONS = frozenset(_PLAIN.split())
"""Operations of a pickle that call nothing and import nothing."""

_MORE_BYTES = 1 << 20
"""Bytes of a payload beside its indices and values, which take up to 16 bytes for an element."""


def read_arc(
    path: str | Path, old: Mapping[str, Tensor], *, base_version: int, format: ArcFormat = "arc_v3"
) -> WeightDelta:
    """Return the delta in a file of the package.

    Args:
        path: The file.
        old: The weights that it changes.
        base_version: Their version at the engine.
        format: The file's format, which it doesn't name.

    Raises:
        WeightsError: The file is damaged, or of other weights, or the package is missing.
    """
    new = changed_by_arc(str(path), format, old.get)
    return WeightDelta.between(old, new, base_version=base_version)


def write_arc(
    path: str | Path,
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    *,
    format: ArcFormat = "arc_v3",
) -> None:
    """Write the changes from `old` to `new` as a file of the package.

    Raises:
        WeightsError: The tensors don't match, or the package is missing.
    """
    package = _package()
    check_stored(old)
    check_stored(new)
    if old.keys() != new.keys():
        raise WeightsError(
            "old and new weights have different names", remedy="give two versions of one model"
        )
    try:
        pairs = {
            name: package.delta_compress(
                src=tensor.detach(), dst=new[name].detach(), compression_format=format
            )
            for name, tensor in old.items()
        }
    except ValueError as error:
        raise WeightsError(
            f"the weights don't match: {error}", remedy="give two versions of one model"
        ) from None
    checksums = {name: checksum for name, (_, checksum) in pairs.items()}
    write_tensors(Path(path), {name: data for name, (data, _) in pairs.items()}, checksums)


def changed_by_arc(
    path: str, format: ArcFormat, base_of: Callable[[str], Tensor | None]
) -> dict[str, Tensor]:
    """Return the new tensors of a file, each as a whole.

    Args:
        path: The file.
        format: Its format.
        base_of: Returns the tensor that is changed; None if there is none.

    Raises:
        WeightsError: As `read_arc`.
    """
    package = _package()
    checksums = metadata_of(Path(path))
    found: dict[str, Tensor] = {}
    for name, data in read_folder(path).items():
        if (base := base_of(name)) is None or name not in checksums:
            raise other_base(f"{shown(name)} is not among them, or has no checksum")
        _check(name, as_bytes(data).numpy().tobytes(), base, format)
        try:
            found[name] = package.delta_decompress(
                src=base.detach().cpu().contiguous(),
                compressed_diff=data,
                checksum=checksums[name],
                compression_format=format,
            )
        except Exception as error:  # noqa: BLE001  (the package names no errors of its own)
            raise other_base(
                f"{shown(name)} can't be changed ({type(error).__name__}: {shown(str(error))})"
            ) from None
    return found


def _package() -> Any:
    try:
        import fireworks_delta_compression
    except ImportError:
        raise WeightsError(
            "deltas in arc formats need a package; install it with "
            "`pip install 'nano-inference[arc]'`",
            code="unsupported",
        ) from None
    return fireworks_delta_compression


def _check(name: str, data: bytes, base: Tensor, format: ArcFormat) -> None:
    """Check a compressed change before the package expands it.

    Raises:
        WeightsError: `weights_delta`: it is larger than it can be, or a pickle that could run code.
    """
    if format == "arc_v3" and data.startswith(_envelope_prefix()):
        envelope = _plain_pickle(name, data[len(_envelope_prefix()) :])
        most = 16 * base.numel() + _MORE_BYTES
        codec, packed = envelope.get("codec"), envelope.get("data")
        if not isinstance(packed, bytes):
            raise damaged(f"{shown(name)} has no payload")
        _plain_pickle(name, _expanded(name, packed, most, bzip=codec == "bz2"))
    elif format == "arc_v3":
        from safetensors.torch import load

        try:
            tensors = load(data)
        except Exception as error:  # noqa: BLE001  (safetensors' errors have no common class)
            raise damaged(f"{shown(name)} can't be read ({shown(str(error))})") from None
        for tensor in tensors.values():
            _expanded(name, as_bytes(tensor).numpy().tobytes(), base.nbytes)
    elif base.numel():
        _expanded(name, data, base.nbytes)


def _envelope_prefix() -> bytes:
    from fireworks_delta_compression.backends import arc3

    prefix: bytes = arc3._ARC3_ENVELOPE_PREFIX
    return prefix


def _expanded(name: str, data: bytes, most: int, *, bzip: bool = False) -> bytes:
    """Return the content of compressed data, of at most so many bytes."""
    import zstandard

    try:
        if bzip:
            found = bz2.BZ2Decompressor().decompress(data, most + 1)
        elif data[:4] == zstandard.FRAME_HEADER:
            if zstandard.frame_content_size(data) > most:
                raise damaged(f"{shown(name)} is larger than its tensor")
            found = zstandard.ZstdDecompressor().decompress(data, max_output_size=most + 1)
        else:
            found = zlib.decompressobj().decompress(data, most + 1)
    except (OSError, zstandard.ZstdError, zlib.error) as error:
        raise damaged(f"{shown(name)} can't be expanded ({error})") from None
    if len(found) > most:
        raise damaged(f"{shown(name)} is larger than its tensor")
    return found


def _plain_pickle(name: str, data: bytes) -> dict[str, Any]:
    try:
        operations = {operation.name for operation, _, _ in pickletools.genops(data)}
    except ValueError as error:
        raise damaged(f"{shown(name)} is no pickle ({shown(str(error))})") from None
    if wrong := operations - _PLAIN_OPERATIONS:
        raise damaged(f"{shown(name)} has a pickle that could run code ({min(wrong)})")
    try:
        found = pickle.loads(data)
    except Exception as error:  # noqa: BLE001  (pickle's errors have no common class)
        raise damaged(f"{shown(name)} is no pickle ({shown(str(error))})") from None
    if not isinstance(found, dict):
        raise damaged(f"{shown(name)} has no payload")
    return found
