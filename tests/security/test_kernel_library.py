"""The library of kernels is loaded only if it is ours and whole, and nothing is left behind."""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nano_inference.stages.executor.runner.kernels import compile as compiling

COMPILER = shutil.which("cc") or shutil.which("gcc")

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no C compiler"),
    pytest.mark.skipif(os.uname().sysname != "Linux", reason="kernels are for Linux"),
]

SOURCE = "int answer(void) { return 42; }\n"

LIBRARIES = [
    name
    for name, value in vars(compiling).items()
    if isinstance(value, compiling.Library) and value.processor
]


class Machine:
    """One where kernels are of the smallest kind, with folders of its own.

    Attributes:
        cache: The user's cache folder.
        temporary: Where temporary files go.
        compiled: How often the compiler was run.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache = folder / "cache"
        self.temporary = folder / "temporary"
        self.working = folder / "working"
        for each in (self.cache, self.temporary, self.working):
            each.mkdir()
        self.compiled = 0
        source = folder / "cpu.c"
        source.write_text(SOURCE)
        (folder / "vectors.h").write_text("")
        monkeypatch.setattr(compiling, "SOURCES", folder)
        monkeypatch.setattr(compiling, "_FLAGS", "-fPIC")
        monkeypatch.setattr(compiling, "processor_flags", lambda: "flags : avx512f avx512_bf16")
        monkeypatch.setattr(compiling, "_openmp_of_torch", lambda: "-lm")
        monkeypatch.setattr(compiling.platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))
        monkeypatch.setenv("XDG_CACHE_HOME", str(self.cache))
        monkeypatch.chdir(self.working)
        compile_once = compiling._compile

        def count(*arguments: object) -> object:
            self.compiled += 1
            return compile_once(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(compiling, "_compile", count)

    def load(self) -> int:
        """Starts once; says how often the compiler was needed."""
        before = self.compiled
        assert compiling.load_library(compiling.BFLOAT16).answer() == 42
        assert list(self.temporary.iterdir()) == [], "nothing is left"
        assert list(self.working.iterdir()) == [], "nor where the process runs"
        return self.compiled - before

    @property
    def folder(self) -> Path:
        return self.cache / "nano-inference"

    @property
    def library(self) -> Path:
        (found,) = self.folder.iterdir()
        return found


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_the_library_is_compiled_once(machine: Machine) -> None:
    old_umask = os.umask(0o002)
    try:
        assert [machine.load() for _ in range(3)] == [1, 0, 0]
    finally:
        os.umask(old_umask)
    assert machine.library.stat().st_mode & 0o777 == 0o600


def test_processes_that_start_together_compile_once(machine: Machine) -> None:
    with ThreadPoolExecutor(4) as pool:
        loaded = pool.map(compiling.load_library, 4 * [compiling.BFLOAT16])
        assert [each.answer() for each in loaded] == 4 * [42]
    assert machine.compiled == 1


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "zeros": lambda content: bytes(len(content)),
    "empty": lambda content: b"",
    "short": lambda content: b"\x7fELF",
    "a flipped bit": lambda content: content[:999] + bytes([content[999] ^ 1]) + content[1000:],
    "as it was kept before it had a digest": lambda content: content[:-32],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_compiled_again(machine: Machine, damage: str) -> None:
    machine.load()
    machine.library.write_bytes(DAMAGES[damage](machine.library.read_bytes()))
    assert [machine.load(), machine.load()] == [1, 0]


def test_one_in_use_is_not_written_over(machine: Machine) -> None:
    machine.load()
    with machine.library.open("r+b") as used:
        used.write(b"damaged")
        used.flush()
        machine.load()
        used.seek(0)
        assert used.read(7) == b"damaged"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_to_is_not_used(machine: Machine, mode: int) -> None:
    machine.load()
    os.chmod(machine.folder, mode)
    before = machine.library.stat()
    assert [machine.load(), machine.load()] == [1, 1]
    assert machine.library.stat() == before, "nor written to"


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_library_that_others_may_write_to_is_not_loaded(machine: Machine, mode: int) -> None:
    machine.load()
    machine.library.chmod(mode)
    assert [machine.load(), machine.load()] == [1, 0]


def test_a_link_to_a_library_is_not_loaded(machine: Machine, tmp_path: Path) -> None:
    machine.load()
    name = machine.library
    shutil.move(name, tmp_path / "elsewhere")
    name.symlink_to(tmp_path / "elsewhere")
    assert [machine.load(), machine.load()] == [1, 0]
    assert not machine.library.is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("whole_folder", [False, True])
def test_a_library_of_another_user_is_not_loaded(machine: Machine, whole_folder: bool) -> None:
    machine.load()
    os.chown(machine.folder if whole_folder else machine.library, 12345, -1)
    assert [machine.load(), machine.load()] == ([1, 1] if whole_folder else [1, 0])


def test_a_relative_cache_folder_is_ignored(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert [machine.load(), machine.load()] == [1, 0]
    assert (tmp_path / "home" / ".cache" / "nano-inference").is_dir()


@pytest.mark.parametrize("home", [None, "", "~", "relative"])
def test_without_a_home_nothing_is_kept(
    machine: Machine, home: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    if home is None:
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", home)
    assert [machine.load(), machine.load()] == [1, 1]


def test_a_cache_folder_that_can_not_be_made_is_done_without(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [machine.load(), machine.load()] == [1, 1]


def test_a_library_is_not_taken_for_one_that_had_its_file_number(machine: Machine) -> None:
    assert machine.load() == 1
    (compiling.SOURCES / "cpu.c").write_text(SOURCE.replace("42", "43"))
    assert compiling.load_library(compiling.BFLOAT16).answer() == 43


def test_each_dtype_has_a_library_of_its_own(machine: Machine) -> None:
    source = """
    #ifdef BFLOAT16
    int answer(void) { return 42; }
    #else
    int answer(void) { return 43; }
    #endif
    """
    (compiling.SOURCES / "cpu.c").write_text(source)
    assert machine.load() == 1
    for _ in range(2):
        assert compiling.load_library(compiling.FLOAT32).answer() == 43
    assert (machine.load(), machine.compiled) == (0, 2)


def test_one_that_is_there_needs_no_compiler_that_works(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.load()
    monkeypatch.setattr(compiling, "_run", None)
    assert machine.load() == 0


def test_another_compiler_makes_one_of_its_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also one that has replaced it at its path."""
    for comment, path in (("", "cc"), ("another", "cc"), ("another", "gcc")):
        compiler = tmp_path / path
        compiler.write_text(f'#!/bin/sh\n#{comment}\nexec {COMPILER} "$@"\n')
        compiler.chmod(0o700)
        monkeypatch.setenv("CC", str(compiler))
        assert [machine.load(), machine.load()] == [1, 0]


def test_a_library_is_compiled_again_when_an_included_file_changes(machine: Machine) -> None:
    machine.load()
    (compiling.SOURCES / "vectors.h").write_text("// changed\n")
    assert [machine.load(), machine.load()] == [1, 0]


@pytest.mark.parametrize(
    ("flags", "without"),
    [
        ("avx512f avx512_bf16 avx2 fma", ["TILES"]),
        ("avx512f avx2 fma", ["TILES", "BFLOAT16"]),
        ("avx2 fma", ["TILES", "BFLOAT16", "FLOAT32", "SAMPLING"]),
        ("avx2", LIBRARIES),
        ("fma", LIBRARIES),
    ],
)
def test_each_library_requires_the_instructions_that_it_uses(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, flags: str, without: list[str]
) -> None:
    for name in ("sampling.c", "layout.c"):
        (compiling.SOURCES / name).write_text(SOURCE)
    monkeypatch.setattr(compiling, "processor_flags", lambda: f"flags : {flags}")
    for name in LIBRARIES:
        if name in without:
            with pytest.raises(compiling.KernelsUnavailable, match=r"the processor has no A[MV]X"):
                compiling.load_library(getattr(compiling, name))
        else:
            assert compiling.load_library(getattr(compiling, name)).answer() == 42
