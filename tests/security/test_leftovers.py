"""A killed process's files in the temporary folder and in shared memory are swept by the next
process; nothing else is.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nano_inference.config import temporary
from nano_inference.config.temporary import SHARED_MEMORY, new_name, own, sweep, temporary_folder

from ..cli.servers import free_port
from ..programs import Program

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="there is no /dev/shm")

OWNER = """
import os, sys, tempfile, torch
os.environ["TMPDIR"] = sys.argv[2]
tempfile.tempdir = None
from nano_inference.cli.up import embedded_server
from nano_inference.config.temporary import temporary_folder
from nano_inference.stages.executor.runner.weights.transports import SharedWeights
tensors = {name: torch.ones(1000) for name in "ab"}
with (
    embedded_server(int(sys.argv[1])) as url,
    temporary_folder("weights") as folder,
    SharedWeights(tensors, bucket_bytes=1) as shared,
):
    (folder / "inner").mkdir()
    (folder / "inner" / "part.safetensors").write_bytes(bytes(1000))
    print(folder, *shared.source.segments, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder, of this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def owner(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    code = tmp_path_factory.mktemp("owner") / "code.py"
    code.write_text(OWNER)
    with Program(code, str(free_port()), str(place)) as program:
        yield program


def test_files_of_a_killed_process_are_swept(place: Path, owner: Program) -> None:
    folder, *segments = owner.output.readline().split()
    left = [Path(folder), *(SHARED_MEMORY / name for name in segments)]
    servers = [each for each in place.glob("nano-inference-*") if each != Path(folder)]
    assert len(left) == 3
    assert len(servers) == 1, "the embedded server's"
    sweep()
    assert all(path.exists() for path in [*left, *servers]), "its owner lives"
    # With Python's resource tracker, which would remove the shared memory: a job's end kills all.
    owner.kill()
    assert all(path.exists() for path in [*left, *servers]), "this is what is to be swept"
    sweep()
    assert not any(path.exists() for path in [*left, *servers])


def test_nothing_is_left_in_good_order(place: Path) -> None:
    with temporary_folder("weights") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "part").write_bytes(b"1")
        sweep()
        assert (folder / "part").exists()
    assert list(place.iterdir()) == []


def test_only_our_files_are_swept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = new_name("weights")
    machine = temporary._machine()
    elsewhere = name.replace(machine, "0" * len(machine))  # another machine, or before a restart
    kept = ["nano-inference-notes", "nano-weights-abc", f"{name}.txt", f"x{name}", name.upper()]
    kept.append(elsewhere)
    for each in kept:
        (place / each).mkdir()
    target = place / "target"
    target.mkdir()
    (place / new_name("link")).symlink_to(target)
    os.mkfifo(place / new_name("pipe"))
    (place / new_name("weights")).mkdir()
    (place / new_name("weights")).touch()
    sweep()
    found = {path.name for path in place.iterdir()}
    assert {*kept, "target"} <= found
    assert [path.is_symlink() or path.is_fifo() for path in place.iterdir()].count(True) == 2
    assert len(found) == len(kept) + 3


def test_files_of_another_user_are_not_swept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / new_name("weights")).mkdir()
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    sweep()
    assert len(list(place.iterdir())) == 1
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    sweep()
    assert list(place.iterdir()) == []


def test_a_sweeper_that_is_faster_makes_the_owner_begin_anew(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come between the moment when a folder is made and when it is locked."""
    races = iter([True, True, False])
    really = temporary.own

    def own_late(path: Path) -> int | None:
        if next(races):
            sweep()
            assert not path.exists()
        return really(path)

    monkeypatch.setattr(temporary, "own", own_late)
    with temporary_folder("weights") as folder:
        sweep()
        assert folder.exists()
    assert next(races, None) is None
    assert list(place.iterdir()) == []


def test_a_sweeper_at_work_makes_the_owner_begin_anew(place: Path) -> None:
    path = place / new_name("weights")
    path.mkdir()
    file = os.open(path, os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_EX)
    assert own(path) is None
    os.close(file)


def test_without_locks_nothing_is_swept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with temporary_folder("weights") as folder:
        sweep()
        assert folder.exists()
    (place / new_name("weights")).mkdir()
    sweep()
    assert len(list(place.iterdir())) == 1
