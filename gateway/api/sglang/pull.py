"""slime's `/pull_weights`: published versions of a checkpoint, applied to a local one.

A trainer publishes folders `weight_v000001` and so on under one folder. Each is a whole checkpoint,
or a delta against the version before: its index has `delta_encoding`, and its tensors are
compressed changes of bytes. Version 0 is the served model's folder. The local checkpoint is then
read by `/update_weights_from_disk`.

The folder `.weight_sync` in the local checkpoint has its version, as SGLang writes it, and files
that are not yet in place. A version is put together there and moved into place at the end; a pull
that was killed in between is continued by the next one, so no half of a version is ever taken for
one.
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from ....config import WeightsError, shown

_SYNC = ".weight_sync"
_INDEX = "model.safetensors.index.json"
_MOST_HEADER_BYTES = 100_000_000  # the limit of the format


class _Plan(msgspec.Struct):
    """The last act of a pull: files of `next` that replace those of the checkpoint.

    Attributes:
        version: The version that is in place after it.
        files: Their names.
        remove: Files that the version does not have.
    """

    version: int
    files: list[str]
    remove: list[str] = []


class _Delta(msgspec.Struct):
    """The metadata of a delta's index. Versions are decimal texts."""

    version: str
    base_version: str
    delta_encoding: str
    compression_format: str = "zstd"
    checksum_format: str = "xxh3-128"


class _Place(NamedTuple):
    """The bytes of a tensor in a file."""

    file: Path
    start: int
    size: int


def pull_weights(local: Path, base: Path, source: Path, target: int) -> int:
    """Bring a local checkpoint to a published version; return the version that it had, or -1.

    Args:
        local: Its folder: a new one, an empty one, or one that this function made.
        base: The folder of version 0.
        source: The folder of published versions.
        target: The version.

    Raises:
        WeightsError: A version is missing, damaged (`weights_delta`), or of another base
            (`weights_base`). The local checkpoint has the last version that could be applied.
    """
    if target < 0:
        raise WeightsError(f"target_version is {target}; give 0 or more")
    try:
        _check_own(local, base, source)
        with _locked(local):
            _finish(local)
            applied = _version_of(local)
            start = target
            while start > max(applied, 0) and _delta_of(source, start) is not None:
                start -= 1
            if start > applied:
                _replace(local, base if start == 0 else _folder(source, start), start)
            for version in range(max(start, applied) + 1, target + 1):
                _apply(local, source, version)
            return applied
    except OSError as error:
        name = shown(str(error.filename or local))
        raise WeightsError(
            f"{name} can't be read or written: {error.strerror}",
            remedy="make it readable and writable for the gateway's user",
        ) from None


def _check_own(local: Path, base: Path, source: Path) -> None:
    """Raises WeightsError for a folder with files that no pull has made."""
    places = {base.resolve(), source.resolve()}
    if local.resolve() in places or not local.is_absolute():
        raise WeightsError(
            f"local_checkpoint_dir {shown(str(local))} must be an absolute path of its own folder"
        )
    if not (local / _SYNC).is_dir() and local.exists() and any(local.iterdir()):
        raise WeightsError(
            f"{shown(str(local))} has files that no pull wrote, which it would replace; name a "
            "new folder, or empty this one"
        )


@contextmanager
def _locked(local: Path) -> Iterator[None]:
    """Hold the checkpoint for one pull, of any process of this machine."""
    (local / _SYNC).mkdir(parents=True, exist_ok=True)
    with (local / _SYNC / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _version_of(local: Path) -> int:
    """Return the version in place; -1 for none."""
    found = _read(local / _SYNC / "state.json", dict[str, Any])
    return -1 if found is None else int(found["version"])


def _folder(source: Path, version: int) -> Path:
    return source / f"weight_v{version:06d}"


def _delta_of(source: Path, version: int) -> _Delta | None:
    """Return the metadata of a delta; None for a whole checkpoint. Raises WeightsError."""
    folder = _folder(source, version)
    if not folder.is_dir():
        raise WeightsError(
            f"version {version} is not published: there is no {shown(str(folder))}",
            remedy="publish it first",
        )
    index = _read(folder / _INDEX, dict[str, Any]) or {}
    metadata = index.get("metadata")
    if not isinstance(metadata, dict) or "delta_encoding" not in metadata:
        return None
    try:
        return msgspec.convert(metadata, _Delta)
    except msgspec.ValidationError as error:
        raise _damaged(f"{shown(str(folder / _INDEX))}: {error}") from None


def _read(path: Path, kind: Any) -> Any:
    """Return a JSON file's content; None if there is no file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise _damaged(f"{shown(str(path))}: {error}") from None


# --- putting a version in place -------------------------------------------------------------------


def _begin(local: Path) -> Path:
    """Return an empty folder for the next version's files."""
    folder = local / _SYNC / "next"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _commit(local: Path, plan: _Plan) -> None:
    """Put the files of the next version in place; from here on the version is certain."""
    for name in plan.files:
        _sync(local / _SYNC / "next" / name)
    _write(local / _SYNC / "commit.json", msgspec.json.encode(plan))
    _finish(local)


def _finish(local: Path) -> None:
    """Do what is left of a commit, perhaps of a process that was killed."""
    sync = local / _SYNC
    plan: _Plan | None = _read(sync / "commit.json", _Plan)
    if plan is None:
        return
    for name in plan.files:
        if (sync / "next" / name).exists():
            (sync / "next" / name).replace(local / name)
    for name in plan.remove:
        (local / name).unlink(missing_ok=True)
    _sync(local)
    _write(sync / "state.json", msgspec.json.encode({"version": f"{plan.version:06d}"}))
    (sync / "commit.json").unlink()


def _write(path: Path, content: bytes) -> None:
    beside = path.with_suffix(".part")
    beside.write_bytes(content)
    _sync(beside)
    beside.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _replace(local: Path, source: Path, version: int) -> None:
    """Make the checkpoint a copy of another one."""
    folder = _begin(local)
    files = [entry for entry in os.scandir(source) if entry.is_file()]
    if not any(entry.name.endswith(".safetensors") for entry in files):
        raise WeightsError(
            f"there is no .safetensors file in {shown(str(source))}",
            remedy="write it by save_pretrained()",
        )
    for entry in files:
        shutil.copyfile(entry.path, folder / entry.name)
        if (folder / entry.name).stat().st_size != entry.stat().st_size:
            raise _damaged(f"{entry.name!a} changed while it was copied")
    names = {entry.name for entry in files}
    others = [entry.name for entry in os.scandir(local) if entry.is_file()]
    remove = [name for name in others if name not in names]
    _commit(local, _Plan(version, sorted(names), remove))


def _apply(local: Path, source: Path, version: int) -> None:
    """Apply a delta to copies of the files that it changes."""
    delta = _delta_of(source, version)
    if delta is None:  # the newest whole version was copied before
        raise _damaged(f"version {version} is a whole checkpoint now")
    if int(delta.base_version) != version - 1 or int(delta.version) != version:
        raise WeightsError(
            f"version {version} is a delta from {shown(delta.base_version)} to "
            f"{shown(delta.version)}, and {version - 1} is in place",
            code="weights_base",
            remedy=f"pull version {version - 1} first, or all weights",
        )
    if delta.compression_format != "zstd":
        raise _damaged(f"its compression_format is {shown(delta.compression_format)}, not zstd")
    change = _ENCODINGS.get(delta.delta_encoding)
    hasher = _CHECKSUMS.get(delta.checksum_format)
    if change is None or hasher is None:
        raise WeightsError(
            f"delta_encoding {shown(delta.delta_encoding)} with checksum_format "
            f"{shown(delta.checksum_format)} can't be read; publish {' or '.join(_ENCODINGS)} with "
            f"{' or '.join(_CHECKSUMS)}"
        )
    folder = _begin(local)
    places = _places(local)
    for path in sorted(_folder(source, version).glob("*.safetensors")):
        checksums = _header(path)[0].get("__metadata__", {})
        for name, changed in _places_in(path).items():
            if (own := places.get(name)) is None:
                raise WeightsError(
                    f"version {version} changes {shown(name)}, which the checkpoint does not have",
                    code="weights_base",
                )
            copy = folder / own.file.name
            if not copy.exists():
                shutil.copyfile(own.file, copy)
            with path.open("rb") as file:
                file.seek(changed.start)
                data = file.read(changed.size)
            content = np.memmap(copy, np.uint8, "r+", own.start, (own.size,))
            change(name, content, data)
            found = hasher(content)
            content.flush()
            if found != checksums.get(name):
                raise WeightsError(
                    f"{shown(name)} has another checksum after version {version}: its base is "
                    "other weights, or the delta is damaged; pull into an empty folder",
                    code="weights_base",
                )
    _commit(local, _Plan(version, sorted(path.name for path in folder.iterdir())))


# --- safetensors ----------------------------------------------------------------------------------


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a file's header, and where its data begin."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_MOST_HEADER_BYTES, path.stat().st_size - 8):
            raise _damaged(f"{shown(path.name)} is cut off or no safetensors file")
        try:
            return msgspec.json.decode(file.read(length), type=dict[str, Any]), 8 + length
        except msgspec.DecodeError as error:
            raise _damaged(f"{shown(path.name)}: {error}") from None


def _places_in(path: Path) -> dict[str, _Place]:
    header, first = _header(path)
    found, room = {}, path.stat().st_size - first
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = msgspec.convert(entry, _Entry).data_offsets
        if not 0 <= start <= end <= room:
            raise _damaged(f"{shown(path.name)} is cut off at {shown(name)}")
        found[name] = _Place(path, first + start, end - start)
    return found


class _Entry(msgspec.Struct):
    data_offsets: tuple[int, int]


def _places(folder: Path) -> dict[str, _Place]:
    found: dict[str, _Place] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= _places_in(path)
    return found


# --- encodings ------------------------------------------------------------------------------------


def _decompressed(name: str, data: bytes, most: int) -> Any:
    """Return the bytes of a frame, of which there may be so many."""
    import zstandard

    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)) as reader:
            raw = reader.read(most + 1)
    except zstandard.ZstdError as error:
        raise _damaged(f"{shown(name)} can't be decompressed ({error})") from None
    return np.frombuffer(raw, np.uint8)


def _xor(name: str, content: Any, data: bytes) -> None:
    raw = _decompressed(name, data, content.size)
    if raw.size != content.size:
        raise _damaged(f"{shown(name)} has {raw.size} bytes of changes, not {content.size}")
    content ^= raw


def _overwrite(name: str, content: Any, data: bytes) -> None:
    raw = _decompressed(name, data, 4 + 5 * content.size)
    count = int.from_bytes(raw[:4].tobytes(), "little")
    if raw.size != 4 + 5 * count:
        raise _damaged(f"{shown(name)} has {raw.size} bytes for {count} changes")
    places = raw[4 : 4 + 4 * count].copy().view("<u4").astype(np.int64)
    if count and (places[-1] >= content.size or (np.diff(places) <= 0).any()):
        raise _damaged(f"the changes of {shown(name)} are repeated or out of range")
    content[places] = raw[4 + 4 * count :]


def _damaged(why: str) -> WeightsError:
    return WeightsError(f"the published weights are damaged: {why}", code="weights_delta")


_ENCODINGS: Mapping[str, Callable[[str, Any, bytes], None]] = {"xor": _xor, "overwrite": _overwrite}
_CHECKSUMS: Mapping[str, Callable[[Any], str]] = {
    "xxh3-128": lambda content: xxhash.xxh3_128_hexdigest(content.data),
    "adler32": lambda content: f"{zlib.adler32(content.data):08x}",
}
