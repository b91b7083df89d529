"""Clients of others, each in an environment of its own, hold what `serve` promises to them.

The programs lie in `programs/`. Each prints which of its promises are kept, and ends with 1 if one
is broken.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .environments import CLIENTS, CLIENTS_FOR_NODE, run

PROGRAMS = Path(__file__).parent / "programs"


def test_every_program_has_its_environment() -> None:
    programs = {path.name for path in PROGRAMS.glob("with_*")}
    wanted = {f"with_{name}.py" for name in CLIENTS}
    assert programs == wanted | {f"with_{name}.mjs" for name in CLIENTS_FOR_NODE}


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("name", CLIENTS)
def test_promises_to_a_client_of_python_are_kept(
    name: str, addresses: dict[str, str], programs: Callable[[str], Path], tmp_path: Path
) -> None:
    command = [str(programs(name) / "python"), str(PROGRAMS / f"with_{name}.py")]
    run(command, tmp_path, HOME=str(tmp_path), **addresses)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("name", CLIENTS_FOR_NODE)
def test_promises_to_a_client_of_node_are_kept(
    name: str, addresses: dict[str, str], node_folders: Callable[[str], Path]
) -> None:
    folder = node_folders(name)
    # A program finds packages from where it lies.
    shutil.copy(PROGRAMS / f"with_{name}.mjs", folder)
    run(["node", f"with_{name}.mjs"], folder, **addresses)


def test_a_broken_promise_is_reported(tmp_path: Path) -> None:
    """So that a program that ends well has run, and has kept, all of them."""
    (tmp_path / "program.py").write_text(
        f"import sys; sys.path.insert(0, {str(PROGRAMS)!r})\n"
        "from promises import keep, promise, raises\n"
        "@promise\nasync def good(): pass\n"
        "@promise\ndef bad():\n    with raises(ValueError, 'a word'): raise ValueError('another')\n"
        "keep()\n"
    )
    ran = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=os.environ | {"NANO_INFERENCE_URL": "", "NANO_INFERENCE_METRICS_URL": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stdout.startswith("kept: good\nbroken: bad\n")
    assert "['a word'] not in another" in ran.stdout
