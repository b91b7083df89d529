"""The register of running servers, and what commands without an address use of it."""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from nano_inference.cli import connection
from nano_inference.cli.connection import ServerAddress, Target, target_begun, target_of
from nano_inference.cli.options import Options
from nano_inference.cli.running import Running, found, record, registered
from nano_inference.config import Config, ConfigError, load_config

from .conftest import Run

BUS = "redis://127.0.0.1:6399"


@pytest.fixture(autouse=True)
def runtime(run: Run, tmp_path: Path) -> Path:
    """The folder of the register; logging is as before at the end."""
    return tmp_path / "nano-inference" / "running"


def at(url: str) -> ServerAddress:
    return ServerAddress(f"{url}/v1", "", url)


def target(*running: Running, or_serve: bool = False, **options: str) -> Target:
    """The target of a command while these run, the newest last."""
    with ExitStack() as stack:
        for number, each in enumerate(running):
            stack.enter_context(registered(replace(each, started_at=number)))
        return target_of(Options(**options), or_serve=or_serve)  # type: ignore[arg-type]


def test_a_record_is_private_and_ends_with_its_process(runtime: Path) -> None:
    running = record("serve", load_config(env={}), "http://0.0.0.0:8000")
    with registered(running):
        (file,) = runtime.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
        assert found() == [running]
        assert (running.url, running.models) == ("http://127.0.0.1:8000", ("tiny",))
        # Another start of the same PID, as after a kill.
        file.write_bytes(msgspec.json.encode(replace(running, process=f"{running.process}0")))
        assert found() == []
        assert not file.exists()
    assert found() == []


def test_a_password_is_not_recorded() -> None:
    config = load_config(env={}, overrides={"bus.url": "redis://:hunter2@10.0.0.5:6379"})
    with_password = record("up", config, None)
    assert b"hunter2" not in msgspec.json.encode(with_password)
    assert record("up", config, None, embedded=True).secret is False
    with pytest.raises(ConfigError, match="with a password"):
        target(with_password)
    by_http = target(replace(with_password, url="http://127.0.0.1:1"))
    assert by_http == at("http://127.0.0.1:1")


def test_without_a_folder_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "/proc/nowhere")
    with registered(Running(command="serve")):
        assert found() == []


def test_the_newest_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    serve = Running(command="serve", url="http://127.0.0.1:1", models=("a",))
    up = Running(command="up", url="http://127.0.0.1:2", bus=BUS, prefix="p", models=("b",))
    assert target(serve) == at("http://127.0.0.1:1")
    assert not capsys.readouterr().err
    over_bus = target(serve, up)
    assert isinstance(over_bus, Config)
    assert (over_bus.bus.url, over_bus.bus.prefix) == (BUS, "p")
    sentence = (
        f"2 are running; this goes to the newest, http://127.0.0.1:2 (`up`, process {os.getpid()})"
    )
    assert sentence in capsys.readouterr().err
    assert target(serve, up, or_serve=True) == at("http://127.0.0.1:2")
    assert target(serve, up, served="a") == at("http://127.0.0.1:1")


def test_an_address_that_is_given_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Running(command="serve", url="http://127.0.0.1:1")
    assert target(serve, url="127.0.0.1:3") == ServerAddress(
        "http://127.0.0.1:3/v1", "", "127.0.0.1:3"
    )
    given = target(serve, bus=BUS)
    assert isinstance(given, Config)
    assert given.bus.url == BUS
    monkeypatch.setenv("NANO_INFERENCE_BUS__URL", BUS)
    assert isinstance(target(serve), Config)


async def test_a_request_right_after_the_start_of_up_goes_to_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], closed_port: int
) -> None:
    for module in ("options", "connection"):
        url = f"redis://127.0.0.1:{closed_port}"
        monkeypatch.setattr(f"nano_inference.cli.{module}.DEFAULT_URL", url)
    with ExitStack() as stack:

        async def begin(seconds: float) -> None:
            stack.enter_context(registered(Running(command="up", bus=BUS, prefix="p")))

        monkeypatch.setattr(connection.anyio, "sleep", begin)
        found_target = await target_begun(Options())
    assert isinstance(found_target, Config)
    assert found_target.bus.url == BUS
    assert "`up` (process" in capsys.readouterr().err
