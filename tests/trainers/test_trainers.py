"""Each trainer, in an environment of its own, runs unmodified against a server of a real model."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ..examples.environments import beside_environment
from .results import write_result
from .served import served, trainer_config
from .trainers import HERE, TRAINERS

LIMIT_S = 600

# A call of each form is in test_replayed.py.
pytestmark = [pytest.mark.slow, pytest.mark.soak(only=True)]


@pytest.fixture(scope="module")
def install(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """Install a trainer; return the folder of its programs."""
    cache: pytest.Cache = pytestconfig.cache  # type: ignore[assignment]
    folder = cache.mkdir("trainers")

    def installed(name: str) -> Path:
        trainer = TRAINERS[name]
        # Several programs of one package share an environment.
        kind = re.sub(r"\W", "_", f"trainer_{trainer.package}")
        return beside_environment(kind, trainer.packages, trainer.alone, folder)

    return installed


@pytest.mark.parametrize("name", TRAINERS)
async def test_a_trainer_runs_unmodified(
    name: str, install: Callable[[str], Path], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    trainer = TRAINERS[name]
    own = {}
    if trainer.variable:
        if not (sources := os.environ.get(trainer.variable)):
            pytest.skip(f"set {trainer.variable} to a checkout of {trainer.repository}")
        own["PYTHONPATH"] = sources
    python = await asyncio.to_thread(install, name) / "python"
    run = tmp_path / "run"
    (run / "adapters").mkdir(parents=True)
    config = trainer_config(run, trainer.settings)
    async with served(config) as gateway:
        command = [str(HERE / trainer.program), gateway.url, str(run)]
        folder = str(config.engine.model_folder)
        printed = await _ran([str(python), *command, folder], tmp_path, own)
    calls = gateway.recorder.calls
    failed = [
        call
        for call in gateway.recorder.failed
        if not f"{call.method} {call.path}".startswith(trainer.probes)
    ]
    assert not failed, failed
    assert any(call.method == "POST" for call in calls), printed
    if pytestconfig.getoption("--write-docs"):
        write_result(name, trainer, gateway.recorder)


async def _ran(command: list[str], folder: Path, own: dict[str, str]) -> str:
    """Return what a program printed that ended well."""
    kept = {name: os.environ[name] for name in ("TMPDIR", "LANG", "PATH") if name in os.environ}
    kept |= {"HOME": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=kept | own,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            printed = (await process.communicate())[0].decode(errors="replace")
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, printed
    return printed
