"""No command line, log line or message holds a password, however it is written."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import exceptions
from rich.console import Console

from nano_inference.cli.children import ForkServer, ForkServerLost
from nano_inference.cli.options import Options
from nano_inference.cli.up import _child_environment
from nano_inference.config import (
    BusConfig,
    BusError,
    Config,
    ConfigError,
    EngineConfig,
    as_environment,
    load_config,
    redact,
)
from nano_inference.store.redis.address import parse_address
from nano_inference.store.redis.client import Server

from ..processes import processes_of

PLACES = ("redis://host:6379/0", "rediss+cluster://host:6379", "redis+sentinel://host:6379/main")

# Text with the characters that mean something in a URL, and digits, which could be a port.
secrets = st.text(st.sampled_from("@/#?:%&=[]0123ab\\ '\"ü"), max_size=12) | st.text(max_size=12)


def with_userinfo(place: str, userinfo: str) -> str:
    scheme, _, rest = place.partition("://")
    return f"{scheme}://{userinfo}@{rest}"


def refused_without_a_secret(why: str | None = None) -> pytest.RaisesExc[ConfigError]:
    return pytest.RaisesExc(ConfigError, match=why, check=lambda error: "cret" not in error.message)


@pytest.mark.parametrize("place", PLACES)
@settings(deadline=None)
@given(user=secrets, password=secrets)
def test_nothing_of_a_userinfo_is_shown(place: str, user: str, password: str) -> None:
    url = with_userinfo(place, f"{user}:{password}")
    scheme = place.partition("://")[0]
    names = (place, f"{scheme}://***")
    assert redact(url) in names
    # Without its beginning, or with a wrong one, it is not even clear what is a part of what.
    for broken in (url.partition("//")[2], f"{user}{url}", f"x{url}", url.replace("://", ":/")):
        assert redact(broken) in (*names, "***")
    try:
        server = Server(url)
    except BusError as error:
        said = str(error)
    else:
        reason = "Error 111 connecting to ab:12. Connect call failed ('127.0.0.1', 12)"
        said = str(server.explain(exceptions.ConnectionError(reason)))
    wanted = " is not a valid Redis URL;", ": connection refused;"
    assert said.startswith(
        tuple(
            f"{start}{name}{then}"
            for start in ("bus.url ", "can't reach Redis at ")
            for name in names
            for then in wanted
        )
    )


@settings(deadline=None)
@given(user=secrets, password=secrets)
def test_a_url_is_refused_or_read_as_it_was_meant(user: str, password: str) -> None:
    url = with_userinfo(PLACES[0], f"{user}:{password}")
    try:
        options = parse_address(url).options
    except (ValueError, TypeError):
        return
    if "?" in user + password:  # with options that redis-py knows, it may have another meaning
        return
    assert (options["host"], options["port"]) == ("host", 6379)


@pytest.mark.parametrize(
    "url",
    [
        *("redis://:12#34@host:6379/0", "redis://:12/34@host:6379/0", "redis://:12?34@host:6379/0"),
        *("redis://u:12/34@host:6379/0", "unix://:12/34@/tmp/socket"),
        "redis+cluster://u:12/34@host:6379",
    ],
)
def test_a_password_is_not_taken_for_a_port(url: str) -> None:
    with pytest.raises(BusError, match="percent-encode special characters") as caught:
        Server(url)
    assert not {"12", "34"} & set(caught.value.message.replace("@", "/").split("/"))


def test_an_at_sign_may_stand_where_it_means_nothing_else() -> None:
    assert parse_address("unix:///tmp/a@b.sock").options["path"] == "/tmp/a@b.sock"
    assert parse_address("redis://h:1/0?password=p@w").options["password"] == "p@w"


@pytest.mark.parametrize(
    "url", ["http://:s3cret@h", "s3cret", "redis:/:s3cret@h", ":s3cret@h:6379", "s3cret://h"]
)
def test_a_url_of_another_kind_is_not_quoted(url: str) -> None:
    with refused_without_a_secret(r"bus\.url has (another|no) scheme; it must be 'memory', or"):
        BusConfig(url=url)


@pytest.mark.parametrize(
    "text",
    [
        *("redis://:s3cret@h", "bus.url:redis://:s3cret@h", "redis://:s3.cret@h/0?db=1"),
        *("bus_url=redis://:s3cret@h", "bus.urll=redis://:s3cret@h", "bus.url=[redis://:s3cret@h"),
        *("bus.url={redis: s3cret}", "bus=redis://:s3cret@h"),
    ],
)
def test_a_setting_that_is_misspelt_is_not_quoted(text: str) -> None:
    with refused_without_a_secret():
        Options(settings=[text]).config()


def test_a_settings_file_is_not_quoted(tmp_path: Path) -> None:
    file, url = tmp_path / "settings.yaml", "redis://:s3cret@h"
    for content in (url, f"- {url}", f"bus: {url}", "bus: [s3cret", "a: b: s3cret"):
        file.write_text(content)
        with refused_without_a_secret():
            load_config(file, env={})


# --- what settings show of themselves -------------------------------------------------------------

SECRET = {
    "bus.url": "redis://user:s3cret@host",
    "policy.passphrase": "s3cret",
    "policy.audit_key": "s3cret",
    "policy.opa_url": "http://user:s3cret@host",
    "policy.oidc_jwks_url": "https://user:s3cret@host",
}


def test_settings_show_no_secret_when_they_are_printed() -> None:
    config = load_config(env={}, overrides=SECRET)
    assert config.policy.passphrase == "s3cret"
    out = io.StringIO()
    Console(file=out, width=10_000).print(config)
    for text in (repr(config), str(config.policy), f"{config.bus!r}", out.getvalue()):
        assert "s3cret" not in text
        assert "***" in text or "url='redis://host'" in text
    assert repr(Config()) == "Config()"


@pytest.mark.parametrize("name", SECRET)
def test_a_secret_that_is_refused_is_not_quoted(name: str) -> None:
    with refused_without_a_secret():
        load_config(env={}, overrides={name: ["s3cret"]})


@pytest.mark.parametrize("name", ["policy.opa_url", "policy.oidc_jwks_url"])
def test_an_address_that_is_refused_is_not_quoted(name: str) -> None:
    with refused_without_a_secret(r"is '\*\*\*'; it must be an http"):
        load_config(env={}, overrides={name: "htps://user:s3cret@host"})


# --- what `up` hands to its children ------------------------------------------------------------


@settings(deadline=None)
@given(text=st.text(max_size=30) | secrets)
def test_an_environment_shows_its_settings(text: str) -> None:
    url = f"redis://:{text}@h"
    env = as_environment({"bus.url": url, "telemetry.service_name": text}, {})
    found = load_config(env={name: os.fsdecode(os.fsencode(value)) for name, value in env.items()})
    assert (found.bus.url, found.telemetry.service_name) == (url, text)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.floats(0.1, 1e300), max_size=3))
def test_an_environment_says_more_than_text(weights: dict[str, float]) -> None:
    env = as_environment({"fairness.tenant_weights": weights, "admission.max_in_flight": 7}, {})
    found = load_config(env=env)
    assert found.fairness.tenant_weights == weights
    assert found.admission.max_in_flight == 7


def test_given_settings_override_every_spelling_in_the_environment() -> None:
    before = {
        "NANO_INFERENCE_BUS__URL": "redis://a",
        "NANO_INFERENCE_bus__url": "redis://b",
        "NANO_INFERENCE_BUS__PREFIX": "kept",
        "PATH": "/bin",
    }
    env = as_environment({"bus.url": "redis://c"}, before)
    assert env["PATH"] == "/bin"
    found = load_config(env=env)
    assert (found.bus.url, found.bus.prefix) == ("redis://c", "kept")


def test_children_read_the_settings_of_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANO_INFERENCE_BUS__URL", "redis://wrong")
    monkeypatch.setenv("NANO_INFERENCE_ENGINE__SEED", "5")
    options = Options(
        bus="redis://:p@ss: #w0rd@h",
        settings=["engine.seed=6", "bus.lane=007", "engine.dtype=float32"],
        log_level="error",
    )
    parent = options.config()
    env = _child_environment(parent, options.overrides())
    child = load_config(env=env)
    assert child == parent
    assert (child.engine.seed, child.telemetry.log_level) == (6, "error")
    options = Options(bus="redis://wrong", settings=["bus.url=redis://right"])
    env = _child_environment(options.config(), options.overrides())
    assert load_config(env=env).bus.url == "redis://right"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
async def test_no_fork_has_a_password_in_its_command_line() -> None:
    url = "redis://user:s3cret@127.0.0.1:1/0"
    overrides = Options(settings=[f"bus.url={url}"]).overrides()
    config = load_config(env={}, overrides=overrides)
    processes = processes_of(config, _child_environment(config, overrides))
    forks = processes.forks
    try:
        async with asyncio.timeout(60):
            child = await forks.start("fairness", processes._command("fairness"))
            server = forks._servers["fairness"]._process
            assert server is not None
            for pid in (server.pid, child.pid):
                assert b"s3cret" not in Path(f"/proc/{pid}/cmdline").read_bytes()  # noqa: ASYNC240
            child.send_signal(signal.SIGKILL)
            await child.wait()
    finally:
        forks.close()


async def test_no_child_has_a_password_in_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "redis://user:s3cret@127.0.0.1:1/0"
    given = [f"bus.url={url}", "gateway.port=1", "policy.passphrase=an0ther"]
    overrides = Options(settings=given).overrides()
    overrides["pipeline.start_method"] = "spawn"
    config = load_config(env={}, overrides=overrides)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"; env | grep ^NANO | tr "\\n" " " >&2\n')
    python.chmod(stat.S_IRWXU)
    monkeypatch.setattr(sys, "executable", str(python))
    environment = _child_environment(config, overrides)
    for role in ("admission", "executor", "gateway"):
        shown = io.StringIO()
        assert await processes_of(config, environment, stream=shown)._run_once(role) == 0
        arguments, variables = shown.getvalue().splitlines()
        assert "nano_inference" in arguments
        assert "s3cret" not in arguments
        assert "an0ther" not in arguments
        assert url in variables
        assert "an0ther" in variables


async def test_a_fork_server_that_loads_a_model_has_no_secret_in_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, shown = tmp_path / "python", tmp_path / "shown"
    python.write_text(f'#!/bin/sh\necho "$@" > {shown}\n')
    python.chmod(stat.S_IRWXU)
    monkeypatch.setattr(sys, "executable", str(python))
    server = ForkServer(["executor"], None, engine=EngineConfig(kv_secret="s3cret"))
    with pytest.raises(ForkServerLost):
        await server.start([])
    assert "executor" in shown.read_text()
    assert "s3cret" not in shown.read_text()


def test_the_gateway_takes_the_severity_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent says it by the environment; by default it is the setting's own."""
    monkeypatch.setenv("NANO_INFERENCE_TELEMETRY__LOG_LEVEL", "error")
    monkeypatch.setattr("nano_inference.cli.options.setup_logging", lambda _: None)
    assert Options().client_config(least=None).telemetry.log_level == "error"
    assert Options().client_config().telemetry.log_level == "warning"
    monkeypatch.delenv("NANO_INFERENCE_TELEMETRY__LOG_LEVEL")
    assert Options().client_config(least=None).telemetry.log_level == (Config().telemetry.log_level)
