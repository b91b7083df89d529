"""`nano-inference pull`: a model's folder, from a folder, a URL or a hub.

It arrives whole and checked, and an interrupted pull continues where it stopped.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

import httpx2
import typer
from msgspec.structs import replace
from rich.filesize import decimal
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

from ..config import ConfigError, EngineConfig, ModelError, shown
from ..config.temporary import own
from .connection import web_address
from .model_files import MODELS, check_folder
from .options import Options, argument, option
from .terminal import complain, said_lines, stderr, stdout

_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_TIMEOUT_S = 60.0
# Second copies of weights, in formats of other libraries or that run code when loaded.
_NOT_FROM_HUB = ["*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.py", "original/*"]


def pull(
    source: Annotated[
        str,
        argument(
            "SOURCE",
            "A folder, or a GGUF file; the http(s) URL of a GGUF file; or a name on the Hugging "
            "Face hub, as org/name or org/name@revision.",
        ),
    ],
    to: Annotated[
        Path | None, option("--to FOLDER", f"The folder; default: below {MODELS}.")
    ] = None,
    sha256: Annotated[
        str | None,
        option("--sha256 HEX", "Of a URL's file; may also follow the URL, as #sha256=HEX."),
    ] = None,
    unverified: Annotated[bool, option("--unverified", "Accept a URL without a checksum.")] = False,
    force: Annotated[bool, option("--force", "Replace an existing folder.")] = False,
) -> None:
    """Bring a model's folder here, and print its path.

        nano-inference pull Qwen/Qwen2.5-0.5B-Instruct

        nano-inference serve --model "$(nano-inference pull /mnt/models/mine)"

        nano-inference pull https://example.org/model.Q4_K_M.gguf#sha256=5f70…

    An interrupted pull continues when the command is repeated. The folder appears, or is replaced,
    once it is complete.
    """
    found = source_of(source, sha256, unverified=unverified)
    target = (to or MODELS / found.name).expanduser().resolve()
    if not target.name:
        raise ConfigError(f"--to is {target}, which can't be replaced; name a folder within it")
    try:
        _check_apart(found, target)
        with partial_folder(target, "pull") as partial:
            _check_replaced(target, force=force)
            _put(_fetched(found, partial / found.key), target, partial)
    except OSError as error:
        raise ConfigError(f"{target} can't be written: {error}; give another --to") from None
    check = check_folder(str(target))
    if check.state != "ok":
        complain(f"it may not be a model: {check.found}")
    stdout().print(str(target), soft_wrap=True)


def with_pulled(options: Options) -> Options:
    """Return the options with a model's name replaced by the folder to which it was pulled.

    On a terminal, a model on the hub is pulled first if the user agrees. Paths are unchanged, and
    names without a folder, which `Options.config` refuses.

    Raises:
        ConfigError: The name is empty.
        ModelError: It can't be fetched, or is not to be.
    """
    name = options.model
    if name == "":
        raise ConfigError(
            "--model is empty (did the command before it fail?); give a folder or a name"
        )
    if not name or EngineConfig(model_path=name).model_folder.exists():
        return options
    folder = (MODELS / name.partition("@")[0].replace("/", "--")).expanduser()
    if not folder.is_dir():
        question = f"{name} is not on this machine. Pull it from the hub?"
        on_terminal = sys.stdin.isatty() and sys.stderr.isatty()
        if not _HUB.fullmatch(name):
            return options
        if not (on_terminal and typer.confirm(question, True, err=True)):
            raise ModelError(
                f"--model {name}: it is not on this machine; run `nano-inference "
                f"pull {name}` first, then this name suffices"
            )
        pull(name)
    named = () if replace(options, model=None).config().engine.model_id else (name,)
    ids = [f"engine.model_id={json.dumps(each)}" for each in named]
    return replace(options, model=str(folder), settings=[*ids, *(options.settings or ())])


# --- the target ---------------------------------------------------------------------------------


def _check_apart(source: Source, target: Path) -> None:
    """Raises ConfigError: a folder would be copied into itself or over itself."""
    place = Path(source.place)
    if source.kind == "folder" and (target.is_relative_to(place) or place.is_relative_to(target)):
        raise ConfigError(
            f"{place} and {target} are one folder, or one is within the other",
            remedy="give another --to",
        )


def _check_replaced(target: Path, *, force: bool) -> None:
    """Raises ConfigError: the target exists and must not be replaced."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"{target} is there already, and is no folder; give another --to")
    if not force:
        raise ConfigError(f"{target} is there already; give --force to replace it, or --to")
    if not (target / "config.json").exists() and any(path.is_dir() for path in target.iterdir()):
        # Probably meant as the parent of a model's folder.
        raise ConfigError(
            f"{target} holds folders and is no model's, so it is not replaced",
            remedy="give a new folder within it as --to",
        )


def _fetched(source: Source, folder: Path) -> Path:
    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    console = stderr()
    progress = Progress(*columns, console=console, disable=not console.is_terminal)

    def state() -> str:
        if not progress.tasks:
            return f"pulling {source.name}"
        task = progress.tasks[-1]
        of = f" of {decimal(int(task.total))}" if task.total else ""
        return f"{task.description}: {decimal(int(task.completed))}{of}"

    with progress, said_lines(state, console):
        fetch(source, folder, progress)
    return folder


def _put(folder: Path, target: Path, partial: Path) -> None:
    """Move a folder to the target. The old target is removed only after that."""
    if target.exists():
        old = partial / "old"
        shutil.rmtree(old, ignore_errors=True)
        os.replace(target, old)
    os.replace(folder, target)
    for left in partial.iterdir():
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def partial_folder(target: Path, command: str) -> Iterator[Path]:
    """Lock the folder beside the target in which a command keeps partial results, and yield it.

    Raises:
        ConfigError: Another process holds the lock; or another user has prepared the folder, and
            files would be written through links.
    """
    folder = target.with_name(f".{target.name}.partial")
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    made = folder.lstat()
    if not stat.S_ISDIR(made.st_mode) or made.st_uid != os.geteuid():
        raise ConfigError(
            f"{folder} is a link, or another user's; remove it, or give another folder"
        )
    if (lock := own(folder)) is None:
        raise ConfigError(f"another {command} to {target} is in progress; wait for its end")
    try:
        yield folder
    finally:
        with suppress(OSError):  # it holds the beginning of a model
            folder.rmdir()
        os.close(lock)


# --- the source ---------------------------------------------------------------------------------


class Source(NamedTuple):
    """The place from which a model is loaded.

    Attributes:
        kind: Kind of the place.
        place: A path, a URL, or a name on the hub.
        name: Name of its folder here.
        check: SHA-256 of a URL's content, in hexadecimal; "" for none.
        revision: On the hub; "" for the newest.
    """

    kind: Literal["folder", "url", "hub"]
    place: str
    name: str
    check: str = ""
    revision: str = ""

    @property
    def shown(self) -> str:
        """The place in messages, without parts of a URL that may be secrets."""
        if self.kind != "url":
            return self.place
        parts = urlsplit(self.place)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    @property
    def key(self) -> str:
        """Distinguishes partial downloads of different sources."""
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:12]


def source_of(text: str, sha256: str | None, *, unverified: bool) -> Source:
    """Return the source of a SOURCE argument.

    Raises:
        ConfigError: It is none, or lacks a checksum.
    """
    if "://" in text:
        return _url(text, sha256, unverified=unverified)
    if sha256 is not None:
        raise ConfigError("--sha256 is for URLs; leave it out")
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
            "(org/name); give one of these"
        )
    return Source("hub", named[1], named[1].replace("/", "--"), revision=named[2] or "")


def _url(text: str, sha256: str | None, *, unverified: bool) -> Source:
    url, _, fragment = text.partition("#")
    if (parts := web_address(url)) is None:
        raise ConfigError(f"{shown(text)} is no http(s) URL; begin it with https://")
    check = sha256 or fragment.removeprefix("sha256=")
    if check and not _SHA256.fullmatch(check):
        raise ConfigError(f"the SHA-256 is {shown(check)}; it has 64 hexadecimal digits")
    if not check and not unverified:
        raise ConfigError(
            "without a checksum the file can't be verified; give it with --sha256, or give "
            "--unverified"
        )
    file = unquote(parts.path.rpartition("/")[2])
    if not re.fullmatch(r"\w[\w.-]*\.gguf", file):
        raise ConfigError(
            f"{shown(text)} names no file that is a model; give the URL of a GGUF file, or a "
            "folder into which an archive was unpacked"
        )
    return Source("url", url, file.removesuffix(".gguf"), check.lower())


def fetch(source: Source, folder: Path, progress: Progress) -> None:
    """Bring a model's files into a folder, continuing an earlier attempt there.

    Raises:
        ModelError: They can't be fetched, or have the wrong checksum.
    """
    try:
        folder.mkdir(exist_ok=True)
        match source.kind:
            case "folder":
                _copy(Path(source.place), folder, progress)
            case "url":
                _get(source, folder, progress)
            case "hub":
                _get_from_hub(source, folder)
    except OSError as error:
        raise ModelError(
            f"{source.shown} can't be put into {folder.parent}: {error}", remedy="give another --to"
        ) from None


def _copy(place: Path, folder: Path, progress: Progress) -> None:
    """Copy a folder, or a file as if it were alone in its folder.

    Files that are the same were copied by an earlier attempt.
    """
    files = [place] if place.is_file() else [f for f in place.rglob("*") if f.is_file()]
    task = progress.add_task("copying", total=sum(file.stat().st_size for file in files))

    def copy(source: str, target: str) -> None:
        if not (os.path.isfile(target) and filecmp.cmp(source, target)):
            shutil.copy2(source, f"{target}.part")
            os.replace(f"{target}.part", target)
        progress.advance(task, os.path.getsize(target))

    if place.is_file():
        copy(str(place), str(folder / place.name))
    else:
        shutil.copytree(place, folder, copy_function=copy, dirs_exist_ok=True)


def _get(source: Source, folder: Path, progress: Progress) -> None:
    file = folder / f"{source.name}.gguf"
    try:
        _download(source, file, progress)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        why = str(error) or type(error).__name__
        raise ModelError(
            f"{source.shown} can't be fetched: {why}; the same command continues where it stopped"
        ) from None
    if source.check:
        with progress.open(file, "rb", description="checking") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()  # type: ignore[arg-type]
        if found != source.check:
            file.unlink()
            wrong = f"its SHA-256 is {found}, not {source.check}"
            raise ModelError(f"{source.shown} has the wrong checksum: {wrong}")


def _download(source: Source, file: Path, progress: Progress) -> None:
    """Download a file, continuing an earlier attempt if the server still has the same file."""
    if file.exists():
        return
    url = source.place
    part, tag_file = file.with_name(f"{file.name}.part"), file.with_name(f"{file.name}.tag")
    tag = tag_file.read_text() if tag_file.exists() else ""
    had = part.stat().st_size if part.exists() and tag else 0
    headers = {"Accept-Encoding": "identity"}
    if had:
        headers |= {"Range": f"bytes={had}-", "If-Range": tag}
    task = progress.add_task("downloading", total=None)

    def check_hop(request: httpx2.Request) -> None:
        if urlsplit(url).scheme == "https" and request.url.scheme != "https":
            raise ModelError(
                f"{source.shown} leads to {request.url.host}, unencrypted",
                remedy="give its address with https://",
            )

    hooks: dict[str, list[Callable[..., None]]] = {"request": [check_hop]}
    with (
        httpx2.Client(timeout=_TIMEOUT_S, follow_redirects=True, event_hooks=hooks) as client,
        client.stream("GET", url, headers=headers) as response,
    ):
        if had and response.status_code == httpx2.codes.RANGE_NOT_SATISFIABLE:
            # As after a pull that was killed right after the last byte. The next one starts over.
            tag_file.unlink()
            raise httpx2.RemoteProtocolError("the partial file here is no beginning of it")
        continued = response.status_code == httpx2.codes.PARTIAL_CONTENT
        if not continued:
            if not response.is_success:
                raise ModelError(
                    f"{source.shown} answers with status {response.status_code}",
                    remedy="open it in a browser to see why, or give another URL",
                )
            had = 0
            part.unlink(missing_ok=True)
            tag_file.write_text(_tag(response))
        length = response.headers.get("content-length")
        total = had + int(length) if length is not None else None
        progress.update(task, total=total, completed=had)
        if (needed := int(length or 0)) > (free := shutil.disk_usage(part.parent).free):
            raise ModelError(
                f"{source.shown} has {needed} bytes, and {free} are free in {part.parent}",
                remedy="make room, or give another --to",
            )
        with part.open("ab" if continued else "wb") as out:
            for piece in response.iter_raw():
                out.write(piece)
                progress.advance(task, len(piece))
    if total is not None and part.stat().st_size != total:
        raise httpx2.RemoteProtocolError(f"{part.stat().st_size} of {total} bytes came")
    part.rename(file)
    tag_file.unlink(missing_ok=True)


def _tag(response: httpx2.Response) -> str:
    """Return the file's strong ETag, else its time of change."""
    tag = str(response.headers.get("etag", ""))
    weak = not tag or tag.startswith("W/")
    return str(response.headers.get("last-modified", "")) if weak else tag


def _get_from_hub(source: Source, folder: Path) -> None:
    """Download from a hub by its library, which resumes, and draws progress bars."""
    from huggingface_hub import constants, errors, snapshot_download

    failures = (errors.HFValidationError, errors.EntryNotFoundError, errors.OfflineModeIsEnabled)
    revision = source.revision or None
    try:
        snapshot_download(
            source.place, revision=revision, local_dir=folder, ignore_patterns=_NOT_FROM_HUB
        )
    except (*failures, httpx2.HTTPError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, httpx2.TransportError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            raise ModelError(
                f"{source.place} can't be fetched from {constants.ENDPOINT}: no network? "
                f"{cause!s:.300}; check the connection, or set HF_ENDPOINT for another hub"
            ) from None
        raise ModelError(
            f"{source.place} can't be fetched from {constants.ENDPOINT}: {first_line:.300}; "
            "set HF_ENDPOINT for another hub, or HF_TOKEN for a key"
        ) from None
    shutil.rmtree(folder / ".cache", ignore_errors=True)
