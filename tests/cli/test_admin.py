"""admin: keys, tenants and guardrails, at a file, at a bus, and over a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nano_inference.config import Config, GatewayConfig, PolicyConfig
from nano_inference.gateway.policy import backend as policy_file

from ..certificates import Authority
from .conftest import Ran, Run, assert_refused, eventually, gateway_of

PREFIX = "NANO_INFERENCE_POLICY__"


@pytest.fixture
def on_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_file, "_N", 2)
    monkeypatch.setenv(f"{PREFIX}BACKEND", "file")
    monkeypatch.setenv(f"{PREFIX}FILE", str(tmp_path / "policy"))
    monkeypatch.setenv(f"{PREFIX}PASSPHRASE", "correct horse battery")


@pytest.fixture(scope="module")
def url(served: Config) -> Iterator[str]:
    """A gateway with keys on the bus."""
    with gateway_of(served, policy=PolicyConfig(backend="bus", refresh_s=0.05)) as url:
        yield url


@pytest.fixture(params=["file", "url"])
def place(
    request: pytest.FixtureRequest, run: Run, on_served: Config, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The options that name it. The first key is made at the bus itself, without one."""
    if request.param == "file":
        request.getfixturevalue("on_file")
        return []
    monkeypatch.setenv(f"{PREFIX}BACKEND", "bus")
    url = request.getfixturevalue("url")
    key = known_key(run, url, "root", "--scope", "admin")
    monkeypatch.setenv("NANO_INFERENCE_API_KEY", key)
    return ["--url", url]


def known_key(run: Run, url: str, *wish: str) -> str:
    """A key made at the bus, once a gateway has seen it."""
    made = run("admin", "keys", "create", *wish)
    assert made.status == 0
    key = made.stdout.splitlines()[-1]  # the gateway here may log that there is none yet
    eventually(lambda: run("models", "--url", url, "--api-key", key).status == 0)
    return key


def keys(run: Run, place: list[str]) -> dict[str, dict[str, object]]:
    lines = run("admin", "keys", "list", "--json", *place).stdout.splitlines()
    return {key["name"]: key for key in map(json.loads, lines)}


def test_a_key_s_life(run: Run, place: list[str]) -> None:
    create = ["admin", "keys", "create", "ci", "--tenant", "gold", "--allow-model", "tiny"]
    made = run(*create, "--requests-per-minute", "5", "--expires-in", "30d", *place)
    assert made.status == 0
    assert made.stdout.startswith("ni-")
    key = keys(run, place)["ci"]
    assert key["id"] in made.stdout
    assert (key["tenant"], key["models"], key["scopes"]) == ("gold", ["tiny"], ["generate"])
    key_id = str(key["id"])
    change = ["admin", "keys", "change", key_id, "--requests-per-minute", "none"]
    assert run(*change, "--max-in-flight", "2", "--max-priority", "-1", *place) == Ran(0, "", "")
    changed = keys(run, place)["ci"]
    limits = {"requests_per_minute": None, "tokens_per_minute": None, "max_in_flight": 2}
    assert (changed["limits"], changed["max_priority"]) == (limits, -1)
    assert changed["expires_ns"] == key["expires_ns"]
    assert run("admin", "keys", "change", key_id, "--allow-model", "none", *place).status == 0
    assert keys(run, place)["ci"]["models"] is None
    shown = run("admin", "keys", "list", *place)
    assert "2 in flight" in shown.stdout
    assert run("admin", "keys", "revoke", key_id, *place) == Ran(0, "", "")
    assert "ci" not in keys(run, place)
    again = run("admin", "keys", "revoke", key_id, *place)
    assert again.status == 1
    assert again.stderr.endswith("(unknown_key)\n")


@pytest.mark.usefixtures("on_file")
def test_changes_by_the_command_line_are_audited(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = tmp_path / "audit"
    monkeypatch.setenv(f"{PREFIX}AUDIT_FILE", str(audit))
    monkeypatch.setenv(f"{PREFIX}AUDIT_KEY", "of its own")
    made = run("admin", "keys", "create", "ci")
    assert run("admin", "keys", "list").status == 0
    (line,) = map(json.loads, audit.read_text().splitlines())
    assert (line["event"], line["by"], line["now"]["name"]) == ("create_key", "command line", "ci")
    assert line["changed"] in made.stdout
    assert made.stdout.strip() not in audit.read_text()
    monkeypatch.setenv(f"{PREFIX}AUDIT_FILE", str(tmp_path / "missing" / "audit"))
    assert_refused(run("admin", "keys", "create", "unheard"), "policy.audit_file")
    monkeypatch.delenv(f"{PREFIX}AUDIT_FILE")
    assert "unheard" not in keys(run, [])


def test_tenants_and_guardrails(run: Run, place: list[str], tmp_path: Path) -> None:
    assert run("admin", "tenants", "set", "a/b", "--weight", "3", *place) == Ran(0, "", "")
    more = ["--tokens-per-minute", "1000"]
    assert run("admin", "tenants", "set", "a/b", *more, *place) == Ran(0, "", "")
    shown = json.loads(run("admin", "tenants", "list", "--json", *place).stdout)
    assert (shown["a/b"]["weight"], shown["a/b"]["limits"]["tokens_per_minute"]) == (3, 1000)
    assert "1000 tok/min" in run("admin", "tenants", "list", *place).stdout
    assert run("admin", "tenants", "remove", "a/b", *place) == Ran(0, "", "")
    assert json.loads(run("admin", "tenants", "list", "--json", *place).stdout) == {}
    blocked = tmp_path / "blocked.yaml"
    blocked.write_text("literals: [foo]\npatterns: ['b[a4]r']\n")
    assert run("admin", "guardrails", "set", str(blocked), *place) == Ran(0, "", "")
    told = json.loads(run("admin", "guardrails", "show", *place).stdout)
    assert told == {"literals": ["foo"], "patterns": ["b[a4]r"]}
    blocked.write_text("{}")
    assert run("admin", "guardrails", "set", str(blocked), *place) == Ran(0, "", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["keys", "change", "0a"], "nothing is given"),
        (["keys", "create", "a", "--expires-in", "soon"], "30d"),
        (["keys", "create", "a", "--max-in-flight", "many"], "no number"),
        (["guardrails", "set", "/nowhere"], "can't read /nowhere"),
    ],
)
def test_bad_arguments_are_refused(
    run: Run, on_file: None, arguments: list[str], words: str
) -> None:
    assert_refused(run("admin", *arguments), words)


def test_malformed_values_are_refused(run: Run, on_file: None) -> None:
    for arguments in (["--scope", "everything"], ["--requests-per-minute", "0"]):
        assert run("admin", "keys", "create", "a", *arguments)[:2] == (1, "")
    assert run("admin", "keys", "list").stdout.startswith("no keys;")


def test_without_a_policy_admin_is_refused(run: Run, on_served: Config) -> None:
    assert_refused(run("admin", "keys", "list"), "policy.backend")


def test_a_server_without_a_key_is_refused(run: Run, url: str) -> None:
    ran = run("admin", "keys", "list", "--url", url)
    assert (ran.status, ran.stdout) == (1, "")
    assert ran.stderr.endswith("(missing_api_key)\n")


def test_a_key_opens_the_gateway_until_it_is_revoked(
    run: Run, url: str, on_served: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{PREFIX}BACKEND", "bus")
    key = known_key(run, url, "asker")
    asking = ["complete", "98 + 25 =", "--url", url, "--api-key"]
    assert run(*asking, key) == Ran(0, " 123\n", "")
    assert run(*asking, key[:-3] + "abc").stderr.endswith("(invalid_api_key)\n")
    assert run("admin", "keys", "revoke", key.split("-")[1]) == Ran(0, "", "")
    eventually(lambda: run(*asking, key).status != 0)
    refused = run(*asking, key)
    assert (refused.status, refused.stderr.endswith("(invalid_api_key)\n")) == (1, True)


def test_a_key_in_a_file_over_tls(
    run: Run, on_served: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an authority of one's own, which the environment names as for other programs."""
    authority = Authority(tmp_path / "authority")
    own = authority.issue("gateway")
    monkeypatch.setenv(f"{PREFIX}BACKEND", "bus")
    file = tmp_path / "key"
    file.write_text(run("admin", "keys", "create", "in-a-file").stdout)
    monkeypatch.setenv("NANO_INFERENCE_API_KEY_FILE", str(file))
    tls = GatewayConfig(tls_certificate=str(own.certificate), tls_key=str(own.key))
    with gateway_of(on_served, gateway=tls, policy=PolicyConfig(backend="bus")) as url:
        assert url.startswith("https://")
        assert "certificate verify failed" in run("models", "--url", url).stderr
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        assert run("models", "--url", url).stdout.startswith("tiny ")
    file.unlink()
    lost = run("models", "--url", url)
    assert (lost.status, "API_KEY_FILE: can't read" in lost.stderr) == (2, True)
