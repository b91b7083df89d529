"""What comes out of a model's archive: plain files and folders alone, within its bounds."""

from __future__ import annotations

import gzip
import io
import stat
import tarfile
import unicodedata
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from nano_inference.cli import unpacking
from nano_inference.cli.unpacking import MOST_DEPTH, MOST_NAME_BYTES, MOST_PATH_BYTES, unpack
from nano_inference.config import ModelError

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "place" / "folder"
    folder.mkdir(parents=True)
    return folder


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0
) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname, found.size = kind, link, size
    return found


def write_tar(path: Path, entries: Iterable[tarfile.TarInfo]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for each in entries:
            tar.addfile(each, io.BytesIO(bytes(each.size)) if each.isreg() else None)
    return path


def write_zip(path: Path, names: Iterable[str], mode: int = 0) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as opened:
        for name in names:
            found = zipfile.ZipInfo(name)
            found.external_attr = mode << 16
            opened.writestr(found, b"x")
    return path


def escape(outside: str) -> list[tarfile.TarInfo]:
    """CVE-2025-4517: a path of links so long that `os.path.realpath` stops resolving it."""
    long, path, entries = "d" * 247, "", []
    for letter in "abcdefghijklmnop":
        entries += [
            entry(path + long, tarfile.DIRTYPE),
            entry(path + letter, tarfile.SYMTYPE, long),
        ]
        path += f"{long}/"
    link = "/".join("abcdefghijklmnop") + "/" + "l" * 254
    return [
        *entries,
        entry(link, tarfile.SYMTYPE, "../" * 16),
        entry("escape", tarfile.SYMTYPE, f"{link}/../{outside}"),
        entry("hard", tarfile.LNKTYPE, "escape"),
        entry("hard", size=3),
    ]


NO_FILES = [
    pytest.param([entry("a", kind, "b")], "no plain file and no folder", id=name)
    for name, kind in (
        ("symbolic link", tarfile.SYMTYPE),
        ("hard link", tarfile.LNKTYPE),
        ("device", tarfile.CHRTYPE),
        ("pipe", tarfile.FIFOTYPE),
    )
]
BAD_NAMES = [
    pytest.param([entry(name)], words, id=id)
    for name, words, id in (
        (".", "has no name", "the folder itself"),
        ("/etc/x", "outside of its folder", "absolute"),
        ("a/../../x", "outside of its folder", "upwards"),
        ("..\\x", "outside of its folder", "upwards on Windows"),
        ("c:x", "outside of its folder", "a drive"),
        ("a\nb", "characters that can't be shown", "control characters"),
        ("x" * (MOST_NAME_BYTES + 1), f"over {MOST_NAME_BYTES} bytes", "long name"),
        ("é" * 200, f"over {MOST_NAME_BYTES} bytes", "long name in UTF-8"),
        ("/".join(["x" * 200] * 6), f"over {MOST_PATH_BYTES} bytes", "long path"),
        ("/".join("x" * (MOST_DEPTH + 1)), f"over {MOST_DEPTH} folders", "deep"),
    )
]
TWICE = [
    pytest.param([entry("m/a"), *others], "is there twice", id=id)
    for others, id in (
        ([entry("m/a")], "same name"),
        ([entry("./m//a")], "same path"),
        ([entry("m/A")], "other case"),
        ([entry("M/b")], "folder in other case"),
        ([entry("m/a/b")], "file as a folder"),
        ([entry("m/a", tarfile.DIRTYPE)], "file and folder"),
        ([entry("m", size=1)], "folder and file"),
        ([entry("m/é"), entry(unicodedata.normalize("NFD", "m/é"))], "other normalisation"),
    )
]


@pytest.mark.parametrize(("entries", "words"), [*NO_FILES, *BAD_NAMES, *TWICE])
def test_a_hostile_member_is_refused(
    folder: Path, tmp_path: Path, entries: list[tarfile.TarInfo], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        unpack(write_tar(tmp_path / "a.tar.gz", entries), folder)
    assert list(folder.parent.iterdir()) == [folder]


def test_links_through_long_names_write_nothing_outside(folder: Path, tmp_path: Path) -> None:
    outside = folder.parent / "outside"
    outside.write_text("mine")
    with pytest.raises(ModelError, match="no plain file"):
        unpack(write_tar(tmp_path / "a.tar.gz", escape("outside")), folder)
    assert outside.read_text() == "mine"


@pytest.mark.parametrize(
    ("names", "mode", "words"),
    [
        (["link"], stat.S_IFLNK | 0o777, "no plain file"),
        (["../x"], 0, "outside of its folder"),
        (["a/b", "A/B"], 0, "is there twice"),
    ],
)
def test_zips_have_the_same_checks(
    folder: Path, tmp_path: Path, names: list[str], mode: int, words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        unpack(write_zip(tmp_path / "a.zip", names, mode), folder)


def test_folders_may_be_named_again(folder: Path, tmp_path: Path) -> None:
    entries = [entry(name, tarfile.DIRTYPE) for name in (".", "m", "m/", "m/n")]
    entries += [entry("./m/n/config.json", size=5), entry("m/n", tarfile.DIRTYPE)]
    unpack(write_tar(tmp_path / "a.tar", entries), folder)
    assert (folder / "m/n/config.json").read_bytes() == bytes(5)


def test_too_many_files_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "MOST_MEMBERS", 10)
    entries = [entry(str(number)) for number in range(11)]
    with pytest.raises(ModelError, match="more than 10 files"):
        unpack(write_tar(tmp_path / "a.tar.gz", entries), folder)


@pytest.mark.parametrize("kind", ["zip", "tar", "behind a tar", "header"])
def test_a_bomb_is_not_unpacked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(unpacking, "_SLACK_BYTES", MIB)
    monkeypatch.setattr(unpacking, "_MOST_HEADER_BYTES", MIB)
    words, path = "times its own size", tmp_path / ("a.zip" if kind == "zip" else "a.tar.gz")
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as opened:
            opened.writestr("model.safetensors", bytes(8 * MIB))
    elif kind == "tar":
        write_tar(path, [entry("model.safetensors", size=8 * MIB)])
    elif kind == "behind a tar":
        write_tar(path, [entry("config.json", size=5)])
        path.write_bytes(path.read_bytes() + gzip.compress(bytes(8 * MIB)))
    else:
        words = "headers have more than"
        write_tar(path, [entry("x" * 8 * MIB)])
    with pytest.raises(ModelError, match=words):
        unpack(path, folder)
    written = sum(each.stat().st_size for each in folder.rglob("*"))
    assert written <= 5, "none of it was written"


def test_an_archive_that_does_not_fit_is_kept(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        tar.fileobj.write(entry("model.safetensors", size=1 << 60).tobuf())  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="are free"):
        unpack(path, folder)
    assert path.exists()
