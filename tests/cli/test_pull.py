"""pull: a model's folder from a folder, a URL or a hub; whole and checked, or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from rich.progress import Progress

from nano_inference.cli import pull
from nano_inference.cli.model_files import check_folder
from nano_inference.cli.pull import fetch, source_of
from nano_inference.config import ModelError
from nano_inference.text import gguf

from ..gguf_files import write_gguf
from .conftest import Ran, Run, assert_refused, listening

LIMIT_S = 120
CONFIG = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 400}
GGUF = bytes(range(256)) * 400
COMMIT = "0" * 40


class Host(ThreadingHTTPServer):
    """Serves files.

    Attributes:
        files: By path.
        most: Once, the connection is closed after this number of bytes.
        more: The second half of an answer waits for it.
        asked: The Range of each GET; "" for the whole.
        sent: Bytes of bodies.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = ""
        self.files: dict[str, bytes] = {}
        self.most: int | None = None
        self.more: threading.Event | None = None
        self.asked: list[str] = []
        self.sent = 0


class Handler(BaseHTTPRequestHandler):
    server: Host
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.server.asked.append(self.headers.get("Range", ""))
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        body = self.server.files.get(self.path.partition("?")[0])
        if body is None:
            self.send_error(404)
            return
        tag = f'"{hashlib.sha256(body).hexdigest()[:40]}"'
        begin = 0
        if self.headers.get("If-Range", tag) == tag and "Range" in self.headers:
            begin = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
            if begin >= len(body):
                self.send_error(416)
                return
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(body) - begin))
        self.send_header("ETag", tag)
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            most, self.server.most = self.server.most, None
            rest = body[begin:][:most]
            half = len(rest) // 2
            self.wfile.write(rest[:half])
            if self.server.more is not None:
                self.server.more.wait(LIMIT_S)
            self.wfile.write(rest[half:])
            self.server.sent += len(rest)
            self.close_connection = len(rest) < len(body) - begin


@pytest.fixture
def host() -> Iterator[Host]:
    server = Host()
    with listening(server) as server.url:
        yield server


def content_of(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "to"


@pytest.fixture
def pulled(run: Run, host: Host, to: Path) -> Callable[..., Ran]:
    """Pull a file of the host, by default without a checksum."""

    def pulling(name: str, *options: str, check: str = "--unverified") -> Ran:
        url = f"{host.url}/{name}"
        source = [url, check] if check.startswith("--") else [url + check]
        return run("pull", *source, *options, "--to", str(to))

    return pulling


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "from" / "mine"
    (folder / "sub").mkdir(parents=True)
    for name, content in CONFIG.items():
        (folder / name).write_bytes(content)
    (folder / "sub" / "file").write_bytes(b"x")
    return folder


def test_a_folder_is_copied_and_its_path_printed(
    run: Run, folder: Path, tmp_path: Path, to: Path
) -> None:
    ran = run("pull", str(folder), "--to", str(to))
    assert (ran.status, ran.stdout) == (0, f"{to}\n")
    assert content_of(to) == content_of(folder)
    assert "no tokenizer" in ran.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from", "to"]


def test_an_existing_folder_is_replaced_only_by_force(run: Run, folder: Path, to: Path) -> None:
    to.mkdir()
    (to / "old").touch()
    asked = ("pull", str(folder), "--to", str(to))
    assert_refused(run(*asked), "is there already")
    assert content_of(to) == {"old": b""}
    assert run(*asked, "--force").status == 0
    assert content_of(to) == content_of(folder)


@pytest.mark.parametrize("to", ["from/mine", "from/mine/sub/to", "from"])
def test_a_folder_is_not_copied_into_itself(
    run: Run, folder: Path, tmp_path: Path, to: str
) -> None:
    ran = run("pull", str(folder), "--to", str(tmp_path / to), "--force")
    assert_refused(ran, "one is within the other")
    assert content_of(tmp_path) == {
        f"from/mine/{name}": x for name, x in content_of(folder).items()
    }
    assert content_of(folder) == {**CONFIG, "sub/file": b"x"}


def test_only_a_models_folder_is_replaced(run: Run, folder: Path, tmp_path: Path) -> None:
    several, file = tmp_path / "models", tmp_path / "file"
    (several / "one").mkdir(parents=True)
    (several / "one" / "config.json").touch()
    file.write_bytes(b"x")
    for to, words in ((several, "no model's"), (file, "is no folder"), (file / "in", "written")):
        assert_refused(run("pull", str(folder), "--to", str(to), "--force"), words)
    assert content_of(several) == {"one/config.json": b""}
    assert file.read_bytes() == b"x"
    assert {path.name for path in tmp_path.iterdir()} == {"from", "models", "file"}


def test_partial_files_of_another_source_are_not_used(
    run: Run, pulled: Callable[..., Ran], host: Host, folder: Path, tmp_path: Path, to: Path
) -> None:
    host.files["/model.gguf"], host.most = bytes(50_000), 1000
    assert pulled("model.gguf").status == 2
    assert len(list(tmp_path.iterdir())) == 2, "there is a beginning of it"
    assert run("pull", str(folder), "--to", str(to)).status == 0
    assert content_of(to) == content_of(folder)
    assert {path.name for path in tmp_path.iterdir()} == {"from", "to"}


def test_a_concurrent_pull_to_the_same_folder_is_refused(
    pulled: Callable[..., Ran], host: Host, tmp_path: Path, to: Path
) -> None:
    """And disturbs nothing of the first, which brings all of it."""
    host.files["/model.gguf"], host.more = GGUF, threading.Event()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(pull.pull, f"{host.url}/model.gguf", to, None, True, False)
        while not list(tmp_path.glob(".to.partial/*/*.part")):
            assert not first.done()
        for more in ((), ("--force",)):
            assert_refused(pulled("model.gguf", *more), "another pull")
        host.more.set()
        first.result(LIMIT_S)
    assert content_of(to) == {"model.gguf": GGUF}
    assert list(tmp_path.iterdir()) == [to]
    assert_refused(pulled("model.gguf"), "is there already")
    assert list(tmp_path.iterdir()) == [to]


def test_planted_links_are_not_followed(
    pulled: Callable[..., Ran], host: Host, tmp_path: Path, to: Path
) -> None:
    """In a folder such as /tmp another user knows the names of a pull's own files."""
    other, partial = tmp_path / "of another", tmp_path / ".to.partial"
    host.files["/model.gguf"] = GGUF
    other.mkdir()
    partial.symlink_to(other)
    assert_refused(pulled("model.gguf"), f"{partial} is a link, or another user's; remove it")
    assert not list(other.iterdir())
    partial.unlink()
    assert pulled("model.gguf").status == 0


def test_no_other_user_can_plant_files_in_a_partial_pull(
    pulled: Callable[..., Ran], host: Host, tmp_path: Path
) -> None:
    host.files["/model.gguf"], host.most = GGUF, 1000
    assert pulled("model.gguf").status == 2
    assert (tmp_path / ".to.partial").stat().st_mode & 0o777 == 0o700


def test_a_pull_killed_between_both_moves_is_completed_by_the_next(
    run: Run, folder: Path, tmp_path: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pull that ends between both moves leaves the old folder aside, and the next one goes on."""
    to.mkdir()
    (to / "old").touch()
    asked, replace = ("pull", str(folder), "--to", str(to), "--force"), os.replace

    def die(source: str | Path, target: str | Path) -> None:
        if target == to:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        run(*asked)
    assert content_of(tmp_path / ".to.partial" / "old") == {"old": b""}
    assert run(*asked).status == 0
    assert content_of(to) == content_of(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from", "to"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_that_another_user_prepared_is_not_used(
    run: Run, folder: Path, tmp_path: Path, to: Path
) -> None:
    partial = tmp_path / ".to.partial"
    partial.mkdir()
    os.chown(partial, 65534, -1)
    assert_refused(run("pull", str(folder), "--to", str(to)), "another user's")
    assert not list(partial.iterdir())


def test_a_changed_file_is_copied_again(folder: Path, tmp_path: Path) -> None:
    source, partial = source_of(str(folder), None, unverified=False), tmp_path / "partial"
    with Progress(disable=True) as progress:
        fetch(source, partial, progress)
        weights, config = partial / "model.safetensors", partial / "config.json"
        before = config.stat().st_ino
        (folder / weights.name).write_bytes(bytes(weights.stat().st_size))
        fetch(source, partial, progress)
    assert not any(weights.read_bytes())
    assert config.stat().st_ino == before, "it was not copied again"


def test_an_interrupted_download_continues(
    pulled: Callable[..., Ran], host: Host, to: Path
) -> None:
    host.files["/model.gguf"], host.most = GGUF, 50_000
    checked = partial(pulled, "model.gguf", check=f"#sha256={sha256(GGUF)}")
    assert_refused(checked(), "continues where it stopped")
    assert not to.exists()
    assert checked().status == 0
    assert host.asked == ["", "bytes=50000-"]
    assert host.sent == len(GGUF), "no byte came twice"
    assert content_of(to) == {"model.gguf": GGUF}
    assert list(to.parent.iterdir()) == [to]


def test_a_file_that_has_changed_is_downloaded_again(
    pulled: Callable[..., Ran], host: Host, to: Path
) -> None:
    host.files["/model.gguf"], host.most = b"old" * 50_000, 50_000
    new = b"new" * 40_000
    checked = partial(pulled, "model.gguf", check=f"#sha256={sha256(new)}")
    assert checked().status == 2
    host.files["/model.gguf"] = new
    assert checked().status == 0
    assert content_of(to) == {"model.gguf": new}


def test_a_wrong_checksum_is_refused(pulled: Callable[..., Ran], host: Host, to: Path) -> None:
    host.files["/model.gguf"] = b"something"
    ran = pulled("model.gguf", check=f"#sha256={sha256(b'else')}")
    assert_refused(ran, "has the wrong checksum")
    assert not to.exists()
    assert pulled("model.gguf").status == 0


def test_a_partial_file_that_is_too_long_is_downloaded_again(
    pulled: Callable[..., Ran], host: Host, to: Path
) -> None:
    """The program was killed right after the last byte."""
    host.files["/m.gguf"], host.most = b"12345", 4
    assert pulled("m.gguf").status == 2
    (part,) = to.parent.rglob("*.part")
    part.write_bytes(b"12345")
    assert pulled("m.gguf").status == 2
    assert pulled("m.gguf").status == 0
    assert host.asked == ["", "bytes=5-", ""]
    assert content_of(to) == {"m.gguf": b"12345"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["./nowhere"], "no folder, no GGUF file, no http(s) URL and no name on the hub"),
        ([""], "no folder, no GGUF file, no http(s) URL"),
        (["ftp://x/y.gguf"], "no http(s) URL"),
        (["http://"], "no http(s) URL"),
        (["http://[::1/a.gguf", "--unverified"], "no http(s) URL"),
        (["http://127.0.0.1:1/..%2F..%2Fa.gguf", "--unverified"], "names no file"),
        (["org/a..b"], "can't be fetched"),
        (["http://127.0.0.1:1/"], "--unverified"),
        (["http://127.0.0.1:1/", "--unverified"], "names no file"),
        (["http://127.0.0.1:1/a.tar.gz", "--unverified"], "an archive was unpacked"),
        (["http://127.0.0.1:1/a.gguf#sha256=12"], "64 hexadecimal digits"),
        (["org/name", "--sha256", "0" * 64], "--sha256 is for URLs"),
        (
            ["http://user:secret@127.0.0.1:1/a.gguf?token=secret", "--unverified"],
            "http://127.0.0.1:1/a.gguf can't be fetched",
        ),
    ],
)
def test_bad_sources_are_refused(run: Run, to: Path, arguments: list[str], words: str) -> None:
    ran = run("pull", *arguments, "--to", str(to))
    assert_refused(ran, words)
    assert "secret" not in ran.stderr
    assert not to.exists()


def test_serve_takes_the_name_of_a_model_that_is_here(run: Run) -> None:
    assert_refused(run("serve", "org/name"), "pull org/name` first, then this name suffices")
    assert_refused(
        run("serve", "--model", ""), "--model is empty (did the command before it fail?)"
    )


def test_each_hop_is_encrypted_where_the_first_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(str(request.url))
        to = {"https://a/m.gguf": "http://b/m.gguf", "http://b/m.gguf": "https://a/x.gguf"}
        if there := to.get(str(request.url)):
            return httpx2.Response(302, headers={"Location": there})
        return httpx2.Response(200, content=b"12345")

    client = partial(httpx2.Client, transport=httpx2.MockTransport(answer))
    monkeypatch.setattr(httpx2, "Client", client)
    source = source_of("https://a/m.gguf", None, unverified=True)
    with pytest.raises(ModelError, match="leads to b, unencrypted"):
        fetch(source, tmp_path / "partial", Progress(disable=True))
    assert asked == ["https://a/m.gguf"]


@pytest.mark.slow
def test_a_name_on_a_hub(run: Run, host: Host, tmp_path: Path, to: Path) -> None:
    siblings = [{"rfilename": name} for name in (*CONFIG, "pytorch_model.bin")]
    host.files["/api/models/org/name/revision/main"] = json.dumps(
        {"id": "org/name", "sha": COMMIT, "siblings": siblings}
    ).encode()
    tree = [{"type": "file", "path": each["rfilename"], "size": 1, "oid": "0"} for each in siblings]
    host.files[f"/api/models/org/name/tree/{COMMIT}"] = json.dumps(tree).encode()
    for name, content in CONFIG.items():
        host.files[f"/org/name/resolve/{COMMIT}/{name}"] = content
    there = {"HF_ENDPOINT": host.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    other = tmp_path / "other"
    # In a process of its own: the hub's library reads the environment once, when it is imported.
    code = (
        "import sys; from nano_inference.cli.app import main\n"
        f"if status := main(['pull', 'org/name', '--to', {str(to)!r}]): sys.exit(status)\n"
        f"sys.exit(10 + main(['pull', 'org/other', '--to', {str(other)!r}]))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | there,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (12, f"{to}\n"), ran.stderr
    assert content_of(to) == CONFIG
    assert host.url in ran.stderr
    assert "HF_ENDPOINT" in ran.stderr
    assert_refused(run("pull", "org/name", "--to", str(other)))  # HF_HUB_OFFLINE is set here
    assert not other.exists()


def test_a_gguf_file_from_a_url_and_from_a_folder(
    run: Run, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Path
) -> None:
    monkeypatch.setattr(gguf, "_cache_folder", lambda: tmp_path)
    path = write_gguf(tmp_path / "small.Q4_0.gguf", "Q4_0")
    content = path.read_bytes()
    host.files["/small.Q4_0.gguf"] = content
    for source in (f"{host.url}/small.Q4_0.gguf#sha256={sha256(content)}", str(path)):
        ran = run("pull", source, "--to", str(to), "--force")
        assert (ran.status, ran.stdout, ran.stderr) == (0, f"{to}\n", "")
        assert content_of(to) == {path.name: content}
    check = check_folder(str(to))
    assert (check.state, "in Q4_0, F32" in check.found) == ("ok", True)
