"""The systemd units: valid, hardened as the page says, and stopped only after the drain."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from nano_inference.cli.app import app
from nano_inference.config import Config

from .charts import ROOT

UNITS = ("nano-inference.service", "nano-inference@.service")
FOLDER = ROOT / "deploy" / "systemd"
ANALYZE = shutil.which("systemd-analyze")

needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")


class Unit(configparser.RawConfigParser):
    """A unit's settings; of those that occur several times the last."""

    def __init__(self, name: str) -> None:
        super().__init__(strict=False)
        self.optionxform = str  # type: ignore[assignment, method-assign]
        self.read_string((FOLDER / name).read_text())


def analyze(*arguments: str) -> str:
    assert ANALYZE is not None
    ran = subprocess.run(
        [ANALYZE, "--no-pager", *arguments], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_unit_is_valid(name: str, tmp_path: Path) -> None:
    """With a program that exists in place of the installed one; a wrong setting is printed."""
    text = (FOLDER / name).read_text()
    assert "/opt/nano-inference/bin/nano-inference" in text
    copy = tmp_path / name.replace("@", "@a")
    copy.write_text(text.replace("/opt/nano-inference/bin/nano-inference", "/bin/true"))
    # `redis-server.service` may be missing here; it is only wanted.
    assert analyze("verify", "--man=no", str(copy)) == ""
    copy.write_text(copy.read_text().replace("ProtectHome=yes", "ProtectHom=yes"))
    ran = subprocess.run([str(ANALYZE), "verify", str(copy)], capture_output=True, text=True)
    assert "ProtectHom" in ran.stderr


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_exposure_is_as_the_page_says(name: str) -> None:
    printed = analyze("security", "--offline=true", str(FOLDER / name))
    (found,) = re.findall(r"Overall exposure level for .*?: ([\d.]+)", printed)
    assert float(found) < 2
    if analyze("--version").startswith("systemd 252 "):
        page = (ROOT / "docs" / "deploy.md").read_text()
        assert f"| `{name}` | {found} |" in page


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_is_stopped_after_the_drain(name: str) -> None:
    """`up` drains its gateway and then its stages; SIGTERM goes to it alone."""
    service = Unit(name)["Service"]
    drains = 2 if " up " in service["ExecStart"] else 1
    assert float(service["TimeoutStopSec"]) > drains * Config().pipeline.drain_timeout_s
    assert service["KillMode"] == "mixed"


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_starts_a_command(name: str) -> None:
    program, command, *options = shlex.split(Unit(name)["Service"]["ExecStart"])
    assert program == "/opt/nano-inference/bin/nano-inference"
    assert command in {each.name or each.callback.__name__ for each in app.registered_commands}  # type: ignore[union-attr]
    assert options[:2] == ["--config", "/etc/nano-inference/config.yaml"]
