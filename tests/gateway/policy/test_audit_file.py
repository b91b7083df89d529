"""The file of the audit log: lines in order, whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nano_inference.config import ConfigError, PolicyConfig
from nano_inference.gateway.policy.audit import MOST_WAITING, AuditFile, AuditLog, text_hash
from nano_inference.gateway.policy.keys import new_key

LIMIT_S = 20
FULL = Path("/dev/full")


def lines_of(*paths: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def numbered(begin: int, end: int) -> list[bytes]:
    return [f'{{"n":{number}}}\n'.encode() for number in range(begin, end)]


def write_all(file: AuditFile, lines: Sequence[bytes]) -> None:
    while lines:
        lines = lines[file.append(lines) :]


def log_at(path: Path, **settings: Any) -> AuditLog:
    lost = settings.pop("lost", [])
    log = AuditLog(PolicyConfig(audit_file=str(path), audit_key="k", **settings), lost.append)
    log.open()
    return log


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    file = AuditFile(tmp_path / "audit", 4096, 3)
    write_all(file, numbered(0, 1))
    assert stat.S_IMODE((tmp_path / "audit").stat().st_mode) == 0o600


def test_large_files_are_rotated_and_the_oldest_is_deleted(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    line = len(numbered(10, 11)[0])
    write_all(AuditFile(path, 10 * line, 2), numbered(10, 45))
    files = [tmp_path / "audit.2", tmp_path / "audit.1", path]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert [len(each.read_bytes()) // line for each in files] == [10, 10, 5]
    assert [each["n"] for each in lines_of(*files)] == list(range(20, 45))


def test_a_line_larger_than_a_file_has_one_of_its_own(tmp_path: Path) -> None:
    long = b'{"n":"' + b"x" * 5000 + b'"}\n'
    write_all(AuditFile(tmp_path / "audit", 4096, 3), [*numbered(0, 1), long, *numbered(1, 2)])
    assert (tmp_path / "audit.1").read_bytes() == long
    assert lines_of(tmp_path / "audit.2", tmp_path / "audit") == [{"n": 0}, {"n": 1}]


def test_several_writers_lose_nothing(tmp_path: Path) -> None:
    path, each = tmp_path / "audit", 300
    writers = [
        threading.Thread(
            target=lambda first: [
                write_all(AuditFile(path, 4096, 100), numbered(n, n + 1))
                for n in range(first, first + each)
            ],
            args=(number * each,),
        )
        for number in range(3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(LIMIT_S)
    files = list(tmp_path.iterdir())
    assert len(files) > 1
    assert sorted(line["n"] for line in lines_of(*files)) == list(range(3 * each))


def test_an_external_rotation_gets_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    file = AuditFile(path, 4096, 3)
    write_all(file, numbered(0, 1))
    path.rename(tmp_path / "elsewhere")
    write_all(file, numbered(1, 2))
    assert lines_of(path) == [{"n": 1}]


def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    file = AuditFile(path, 4096, 3)
    write_all(file, numbered(0, 3))
    size = path.stat().st_size
    with largest_file(size + 4), pytest.raises(OSError, match="large") as failed:
        file.append(numbered(3, 4))
    assert failed.value.errno == errno.EFBIG
    assert path.stat().st_size == size
    write_all(file, numbered(4, 5))
    assert [line["n"] for line in lines_of(path)] == [0, 1, 2, 4]


def test_lines_are_in_order_after_close(tmp_path: Path) -> None:
    log = log_at(tmp_path / "audit")
    for number in range(2500):
        log.write("call", {"n": number})
    log.close()
    assert [line["n"] for line in lines_of(tmp_path / "audit")] == list(range(2500))


def test_an_unusable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        log_at(tmp_path / "missing" / "audit")


def test_a_full_disk_does_not_stop_serving(tmp_path: Path) -> None:
    path, lost = tmp_path / "audit", list[int]()
    path.symlink_to(FULL)
    log = log_at(path, lost=lost)
    for number in range(5):
        log.write("call", {"n": number})
    log.close()
    assert sum(lost) == 5
    assert not log.refuses


def test_a_full_disk_refuses_calls_if_the_settings_say_so(tmp_path: Path) -> None:
    """Until there is room; then the lines from before are written."""
    path, lost = tmp_path / "audit", list[int]()
    path.symlink_to(FULL)
    log = log_at(path, audit_when_full="refuse", lost=lost)
    log.write("call", {"n": 0})
    until(lambda: log.refuses)
    log.write("call", {"n": 1})
    path.unlink()
    until(lambda: not log.refuses)
    log.close()
    assert [line["n"] for line in lines_of(path)] == [0, 1]
    assert lost == []


def test_the_queue_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While writing blocks without an error."""
    path, lost, more = tmp_path / "audit", list[int](), 10
    log = log_at(path, audit_when_full="refuse", lost=lost)
    writing, append = threading.Event(), AuditFile.append

    def noted(file: AuditFile, lines: Sequence[bytes]) -> int:
        writing.set()
        return append(file, lines)

    monkeypatch.setattr(AuditFile, "append", noted)
    with path.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        log.write("call", {"n": 0})
        # From here on the thread waits for the lock.
        assert writing.wait(LIMIT_S)
        for number in range(1, MOST_WAITING):
            log.write("call", {"n": number})
        assert not log.refuses
        for number in range(MOST_WAITING, MOST_WAITING + 1 + more):
            log.write("call", {"n": number})
        assert log.refuses
        assert sum(lost) == more
    log.close()
    assert [line["n"] for line in lines_of(path)] == list(range(MOST_WAITING + 1))


def test_a_pipe_without_a_reader_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "audit")
    with pytest.raises(ConfigError, match="audit"):
        log_at(tmp_path / "audit")


def until(holds: Any) -> None:
    """Wait until this holds, in another thread."""
    waited = threading.Event()
    for _ in range(LIMIT_S * 100):
        if holds():
            return
        waited.wait(0.01)
    raise AssertionError("it never came to that")


def test_hashes_distinguish_texts_and_depend_on_the_key() -> None:
    texts = [["a"], ["b"], ["a", "b"], ["b", "a"], ["ab"], ["a", ""], [""]]
    hashes = {text_hash(b"k", each) for each in texts}
    assert len(hashes) == len(texts)
    assert text_hash(b"k", ["a"]) == text_hash(b"k", ["a"]) != text_hash(b"l", ["a"])
    # As `printf %s a | openssl dgst -sha256 -hmac k` tells it.
    known = "78da91511e675587f5b9df78bedebaf5560da2abb88162ee875dcdf744951d9e"
    assert text_hash(b"k", ["a"]) == known
    assert text_hash(b"k", ["\ud800"])


def test_credentials_are_removed_from_every_field(tmp_path: Path) -> None:
    key, text = new_key(name="n", tenant="t", scopes=("generate",))
    token = "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJ4In0.c2ln"
    log = log_at(tmp_path / "audit", audit_text=True)
    texts = [f"my key is {text}, and {token}."]
    log.write("call", {"call_id": text, "tenant": token}, {"prompt": lambda: texts})
    log.close()
    written = (tmp_path / "audit").read_text()
    assert text[-43:] not in written
    assert token not in written
    assert "c2ln" not in written
    (line,) = lines_of(tmp_path / "audit")
    assert line["call_id"] == f"ni-{key.id}-..."
    assert line["prompt"] == [f"my key is ni-{key.id}-..., and eyJ...."]


def test_a_text_with_line_ends_of_unicode_is_in_one_line(tmp_path: Path) -> None:
    log = log_at(tmp_path / "audit", audit_text=True)
    log.write("call", {}, {"prompt": lambda: ["a\u2028b\u2029c\x85d"]})
    log.close()
    (line,) = lines_of(tmp_path / "audit")
    assert line["prompt"] == ["a\u2028b\u2029c\x85d"]
