"""Sessions by the command line, on a running pipeline."""

from __future__ import annotations

import json

import pytest

from nano_inference.config import Config

from .conftest import Run, assert_refused, eventually

TURN = ("submit", "98 + 25 = 123 and 12 + 30 = 42 and", "--max-tokens", "20", "--json")
TURN = (*TURN, "--sampling", "ignore_eos=true", "--tenant", "cli")


def test_a_turn_and_calls_between_turns(run: Run, on_served: Config) -> None:
    given = ("--kv-session", "cli-1", "--kv-session-ttl", "60", "--kv-session-after", "release")
    ran = run(*TURN, *given)
    assert ran.status == 0, ran.stderr
    assert json.loads(ran.stdout)["kv_session"] == {"outcome": "accepted"}
    pinned = run("kv-session", "pin", "cli-1", "--ttl", "300", "--tenant", "cli", "--json")
    assert pinned.status == 0, pinned.stderr
    result = json.loads(pinned.stdout)
    assert (result["outcome"], result["tier"]) == ("accepted", "device")
    blocks = result["num_tokens"] // 16
    assert blocks
    # Stages report about once a second.
    shown = f"{blocks} pinned by sessions"
    eventually(lambda: shown in " ".join(run("status").stdout.replace("│", " ").split()))
    released = run("kv-session", "release", "cli-1", "--tenant", "cli")
    assert released.stdout == f"accepted: {result['num_tokens']} tokens on the device\n"
    ran = run("kv-session", "pin", "cli-1")  # the default tenant's
    assert ran.status == 1
    assert ran.stdout.startswith("missing: 0 tokens (the session is not known")


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (("submit", "a", "--kv-session-ttl", "5"), "--kv-session"),
        (("kv-session", "keep", "a"), "prefetch"),
    ],
)
def test_wrong_options_are_refused(run: Run, command: tuple[str, ...], hint: str) -> None:
    assert_refused(run(*command), hint)
