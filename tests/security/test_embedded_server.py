"""`up`'s embedded server serves the user who started it, and no other user of the machine."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from nano_inference.bus import open_bus
from nano_inference.cli.running import Running, registered
from nano_inference.cli.up import embedded_server
from nano_inference.config import BusConfig, BusError, redact
from nano_inference.store.process_state import identity_of
from nano_inference.store.redis import embedded
from nano_inference.store.redis.embedded import kept_password, read_password

from ..cli.conftest import Run, assert_refused
from ..cli.conftest import run as run
from ..cli.servers import free_port

NOBODY = 65534


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def server(port: int) -> Iterator[str]:
    with embedded_server(port) as url:
        yield url


def ask(port: int, *commands: bytes) -> list[bytes]:
    """Send commands on a plain connection; return the first line of each reply."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        lines = connection.makefile("rb")
        replies = []
        for command in commands:
            connection.sendall(command + b"\r\n")
            replies.append(lines.readline())
    return replies


async def ping(port: int, url: str = "") -> None:
    """Connect as a program does that knows the port only, or a URL."""
    async with aclosing(open_bus(BusConfig(url=url or f"redis://127.0.0.1:{port}"))) as bus:
        await bus.ping()


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_every_command_needs_the_password(server: str, port: int) -> None:
    commands = (b"PING", b"XLEN nano:requests", b"GET nano:policy", b"CONFIG GET requirepass")
    assert all(reply.startswith(b"-NOAUTH") for reply in ask(port, *commands))
    assert ask(port, b"AUTH " + read_password(port).encode(), b"PING") == [b"+OK\r\n", b"+PONG\r\n"]


async def test_programs_of_the_same_user_need_only_the_port(server: str, port: int) -> None:
    await ping(port)


def test_commands_of_the_same_user_need_no_flag(
    server: str, port: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("options", "connection"):
        url = f"redis://127.0.0.1:{port}"
        monkeypatch.setattr(f"nano_inference.cli.{module}.DEFAULT_URL", url)
    ran = run("status", "--json")
    assert "no stage is running" in ran.stdout, ran
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert_refused(run("status"), f"Redis at redis://127.0.0.1:{port} requires a password; add it")


def test_a_command_waits_for_the_password_while_up_starts(
    server: str, port: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, password = f"redis://127.0.0.1:{port}", read_password(port)
    monkeypatch.setattr("nano_inference.cli.connection.STARTING_S", 60.0)
    passwords = iter(["", "", password])
    monkeypatch.setattr(embedded, "read_password", lambda port: next(passwords, password))
    with registered(Running(command="up", bus=bus, prefix=BusConfig().prefix)):
        assert "has been starting for" in run("status").stdout
    assert next(passwords, None) is None


def test_a_second_up_names_the_first_one(server: str, port: int) -> None:
    other = Running(
        command="up",
        bus=f"redis://127.0.0.1:{port}",
        models=("tiny",),
        pid=os.getppid(),
        process=identity_of(os.getppid()),
    )
    said = rf"your `up` \(process {other.pid}\) serves tiny on port {port}"
    with registered(other), pytest.raises(BusError, match=said), embedded_server(port):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_read_no_file_with_the_password(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        shared = Path(name)
        shared.chmod(0o755)  # as a home folder may be
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setenv("XDG_CACHE_HOME", name)
        with embedded_server(port):
            password = read_password(port).encode()
            holders = [each for each in files_in(shared) if password in each.read_bytes()]
            assert len(holders) == 2, "ours, and the server's own settings"
            child = os.fork()
            if not child:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                found = sum(os.access(path, os.R_OK) for path in holders)
                os._exit(found if os.access(shared, os.R_OK | os.X_OK) else 9)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_only_a_file_that_no_other_user_can_write_or_read_counts(port: int) -> None:
    with kept_password(port, "s3cret") as path:
        assert path is not None
        assert path.stat().st_mode & 0o777 == 0o600
        assert read_password(port) == "s3cret"
        for mode in (0o640, 0o602):
            path.chmod(mode)
            assert read_password(port) == ""
        path.chmod(0o600)
        os.chown(path, NOBODY, -1) if os.geteuid() == 0 else None
        assert read_password(port) == ("" if os.geteuid() == 0 else "s3cret")
        path.unlink()
        other = path.with_name("other")
        other.touch(0o600)
        other.write_text("s3cret")
        path.symlink_to(other)
        assert read_password(port) == "", "a link that another program has made"


async def test_a_connected_program_finds_the_next_server(port: int, cache: Path) -> None:
    """An `up` that is started again has another password."""
    bus = open_bus(BusConfig(url=f"redis://127.0.0.1:{port}"))
    passwords = set()
    for _ in range(2):
        with embedded_server(port):
            await bus.ping()
            passwords.add(read_password(port))
        with pytest.raises(BusError, match="can't reach"):
            await bus.ping()
        assert files_in(cache) == [], "the password ends with its server"
    await bus.aclose()
    assert len(passwords) == 2


async def test_servers_on_several_ports_have_passwords_of_their_own(server: str, port: int) -> None:
    second = free_port()
    with embedded_server(second):
        assert read_password(port) != read_password(second)
        await ping(port)
        await ping(second)
    await ping(port)


async def test_a_password_left_by_a_killed_up_is_replaced(port: int, cache: Path) -> None:
    with kept_password(port, "of its predecessor") as path:
        with embedded_server(port):
            await ping(port)
        assert path is not None
        assert not path.exists()


async def test_without_a_cache_folder_the_server_still_runs(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with embedded_server(port) as url:
        await ping(port, url)
    assert "set XDG_CACHE_HOME" in capsys.readouterr().err


def test_the_url_is_shown_without_the_password(server: str, port: int) -> None:
    assert redact(server) == f"redis://127.0.0.1:{port}"
    assert read_password(port) not in repr(BusConfig(url=server))
