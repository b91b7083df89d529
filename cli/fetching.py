"""Brings files here: whole, checked, and from where it stopped the last time."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx2
from rich.progress import Progress, TaskID

from ..config import ConfigError, ModelError, shown
from .unpacking import unpack

_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
_PIECE = 1 << 20
_TIMEOUT_S = 60.0
# Beside the files that were saved twice, as other libraries read them, or run code when loaded.
_NOT_FROM_HUB = ["*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.py", "original/*"]


class Source(NamedTuple):
    """Where a model is.

    Attributes:
        place: A path, a URL, or a name on the hub.
        name: What its folder is called here.
        check: The SHA-256 of what a URL gives, in hexadecimal; "" for none.
        revision: On the hub; "" for the newest.
    """

    kind: Literal["folder", "url", "hub"]
    place: str
    name: str
    check: str = ""
    revision: str = ""

    @property
    def shown(self) -> str:
        """The place as messages have it: without a URL's password, and what else may be one."""
        if self.kind != "url":
            return self.place
        parts = urlsplit(self.place)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    @property
    def key(self) -> str:
        """Tells sources apart: what is left of one is no part of another."""
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:12]


def source_of(text: str, sha256: str | None, *, unverified: bool) -> Source:
    """What a user calls a model's place.

    Raises:
        ConfigError: It is none, or lacks a checksum that can be checked.
    """
    if "://" in text:
        return _url(text, sha256, unverified=unverified)
    if sha256 is not None:
        raise ConfigError("--sha256 is for what a URL gives")
    folder = Path(text).expanduser()
    if text and folder.is_dir():
        found = folder.resolve()
        return Source("folder", str(found), found.name or "root")
    if folder.suffix == ".gguf" and folder.is_file():
        return Source("folder", str(folder.resolve()), folder.stem)
    named = _HUB.fullmatch(text)
    if named is None or folder.is_absolute() or text.startswith("."):
        raise ConfigError(
            f"{shown(text)} is no folder, no GGUF file, no http(s) URL and no name on the hub "
            "(org/name)"
        )
    return Source("hub", named[1], named[1].replace("/", "--"), revision=named[2] or "")


def fetch(source: Source, partial: Path, progress: Progress) -> Path:
    """Brings a model's folder into `partial`; what an earlier try has left there is kept.

    Returns:
        Where it is, `partial` or a folder within.

    Raises:
        ModelError: It can't be had, or is not what it has to be.
    """
    try:
        match source.kind:
            case "folder":
                return _copied(Path(source.place), partial, progress)
            case "url":
                return _downloaded(source, partial, progress)
            case "hub":
                return _from_hub(source, partial)
    except OSError as error:
        raise ModelError(f"{source.shown} can't be put into {partial.parent}: {error}") from None


def _url(text: str, sha256: str | None, *, unverified: bool) -> Source:
    url, _, fragment = text.partition("#")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{shown(text)} is no http(s) URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"{shown(text)} is no http(s) URL")
    check = sha256 or fragment.removeprefix("sha256=")
    if check and not _SHA256.fullmatch(check):
        raise ConfigError(f"the SHA-256 is {shown(check)}; it has 64 hexadecimal digits")
    if not check and not unverified:
        raise ConfigError(
            "nobody could tell whether the file is what it should be; give its checksum with "
            "--sha256, or say --unverified"
        )
    file = unquote(parts.path.rpartition("/")[2])
    suffix = _archive_suffix(file)
    name = file.removesuffix(suffix) if suffix else Path(file).stem
    if not (re.fullmatch(r"\w[\w.-]*", file) and name):
        raise ConfigError(f"{shown(text)} names no file; give the URL of an archive or a file")
    return Source("url", url, name, check.lower())


def _archive_suffix(file: str) -> str:
    return max((each for each in _ARCHIVES if file.lower().endswith(each)), key=len, default="")


# --- a folder -----------------------------------------------------------------------------------


def _copied(folder: Path, partial: Path, progress: Progress) -> Path:
    """Files that are there already, as large and as old as these, were copied before. A file is
    copied as if it were alone in its folder."""
    found = [folder] if folder.is_file() else sorted(folder.rglob("*"))
    folder = folder.parent if folder.is_file() else folder
    files = {path: path.stat() for path in found if path.is_file()}
    task = progress.add_task("copying", total=sum(status.st_size for status in files.values()))
    for path, status in files.items():
        place = partial / path.relative_to(folder)
        if not (place.is_file() and _size_and_age(place.stat()) == _size_and_age(status)):
            place.parent.mkdir(parents=True, exist_ok=True)
            part = place.with_name(f"{place.name}.part")
            shutil.copyfile(path, part)
            os.utime(part, ns=(status.st_atime_ns, status.st_mtime_ns))
            part.rename(place)
        progress.advance(task, status.st_size)
    partial.mkdir(parents=True, exist_ok=True)
    return partial


def _size_and_age(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


# --- a URL --------------------------------------------------------------------------------------


def _downloaded(source: Source, partial: Path, progress: Progress) -> Path:
    partial.mkdir(parents=True, exist_ok=True)
    file_name = unquote(urlsplit(source.place).path.rpartition("/")[2])
    file = partial / file_name
    try:
        _download(source, file, progress)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        why = str(error) or type(error).__name__
        raise ModelError(
            f"{source.shown} was not had: {why}; the same command goes on where it stopped"
        ) from None
    if source.check and (found := _sha256(file, progress)) != source.check:
        file.unlink()
        raise ModelError(
            f"{source.shown} is not what it should be: its SHA-256 is {found}, and not "
            f"{source.check}"
        )
    # No file of a URL is called so.
    folder = partial / ".unpacked"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if not _archive_suffix(file_name):
        file.rename(folder / file_name)
        return folder
    try:
        unpack(file, folder)
    except ModelError:
        shutil.rmtree(folder)
        raise
    inside = list(folder.iterdir())
    # Most archives hold a folder and nothing beside it.
    return inside[0] if len(inside) == 1 and inside[0].is_dir() else folder


def _download(source: Source, file: Path, progress: Progress) -> None:
    """What is there of the file stays, if the server still has the same one."""
    if file.exists():
        return
    url = source.place
    part, tag_file = file.with_name(f"{file.name}.part"), file.with_name(f"{file.name}.tag")
    tag = tag_file.read_text() if tag_file.exists() else ""
    had = part.stat().st_size if part.exists() and tag else 0
    headers = {"Accept-Encoding": "identity"}
    if had:
        headers |= {"Range": f"bytes={had}-", "If-Range": tag}
    timeout = httpx2.Timeout(_TIMEOUT_S)
    task = progress.add_task("downloading", total=None)

    def check_hop(request: httpx2.Request) -> None:
        if urlsplit(url).scheme == "https" and request.url.scheme != "https":
            raise ModelError(f"{source.shown} leads to {request.url.host}, unencrypted")

    hooks: dict[str, list[Callable[..., None]]] = {"request": [check_hop]}
    with (
        httpx2.Client(timeout=timeout, follow_redirects=True, event_hooks=hooks) as client,
        client.stream("GET", url, headers=headers) as response,
    ):
        if had and response.status_code == httpx2.codes.RANGE_NOT_SATISFIABLE:
            # As where all of it came, and nobody was left to say so. The next try has it anew.
            tag_file.unlink()
            raise httpx2.RemoteProtocolError("what is here is no beginning of it")
        goes_on = response.status_code == httpx2.codes.PARTIAL_CONTENT
        if not goes_on:
            if not response.is_success:
                raise ModelError(f"{source.shown} answers with status {response.status_code}")
            had = 0
            part.unlink(missing_ok=True)
            tag_file.write_text(_tag(response))
        length = response.headers.get("content-length")
        total = had + int(length) if length is not None else None
        progress.update(task, total=total, completed=had)
        _check_room(source, 0 if total is None else total - had, part.parent)
        with part.open("ab" if goes_on else "wb") as out:
            for piece in response.iter_raw():
                out.write(piece)
                progress.advance(task, len(piece))
    if total is not None and part.stat().st_size != total:
        raise httpx2.RemoteProtocolError(f"{part.stat().st_size} of {total} bytes came")
    part.rename(file)
    tag_file.unlink(missing_ok=True)


def _check_room(source: Source, size: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ModelError(f"{source.shown} has {size} bytes, and {free} are free in {folder}")


def _tag(response: httpx2.Response) -> str:
    """What tells whether a file is still the same: only strong tags do, or when it was changed."""
    tag: str = response.headers.get("etag", "")
    if tag and not tag.startswith("W/"):
        return tag
    return str(response.headers.get("last-modified", ""))


def _sha256(file: Path, progress: Progress) -> str:
    task: TaskID = progress.add_task("checking", total=file.stat().st_size)
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE):
            digest.update(piece)
            progress.advance(task, len(piece))
    return digest.hexdigest()


# --- a hub --------------------------------------------------------------------------------------


def _from_hub(source: Source, partial: Path) -> Path:
    """Its own library knows how to go on, and draws its own bars."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        snapshot_download(
            source.place,
            revision=source.revision or None,
            local_dir=partial,
            ignore_patterns=_NOT_FROM_HUB,
        )
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        httpx2.HTTPError,
    ) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{source.place} can't be had from {constants.ENDPOINT}: {first_line:.300}; another "
            "hub is named by HF_ENDPOINT, and a key for it by HF_TOKEN"
        ) from None
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    return partial
