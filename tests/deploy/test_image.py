"""The container image: what can be checked without building it."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path

from .charts import CHART, ROOT

DOCKERFILE = ROOT / "deploy" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """The instructions, each with its text in one line."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.M)
    lines = text.replace("\\\n", " ").splitlines()
    found = [line.partition(" ") for line in lines if line.strip()]
    return [(name, " ".join(rest.split())) for name, _, rest in found]


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    ran = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "")


def test_the_image_runs_as_a_user_of_the_chart() -> None:
    """By number, which Kubernetes checks for runAsNonRoot."""
    (user,) = [text for name, text in instructions() if name == "USER"]
    assert user == "10001:10001"
    template = (CHART / "templates" / "_pod.tpl").read_text()
    assert f"runAsUser: {user.split(':')[0]}\n" in template


def test_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    arguments = dict(text.split("=", 1) for name, text in instructions() if name == "ARG")
    assert arguments["VERSION"] == project["version"]
    assert arguments["EXTRAS"].split(",") == [
        each for each in arguments["EXTRAS"].split(",") if each in project["optional-dependencies"]
    ]
    chart = (CHART / "Chart.yaml").read_text()
    assert f"\nappVersion: {project['version']}\n" in chart


def test_every_installation_is_constrained() -> None:
    installs = [
        part
        for name, text in instructions()
        if name == "RUN"
        for part in re.split(r"&&|;", text)
        if "pip install" in part
    ]
    assert len(installs) == 2
    assert all("--constraint /src/constraints.txt" in each for each in installs)


def test_commands_and_health_check_are_of_the_command_line() -> None:
    found = dict(instructions())
    assert json.loads(found["ENTRYPOINT"]) == ["nano-inference"]
    assert json.loads(found["CMD"])[0] == "serve"
    check = json.loads(found["HEALTHCHECK"].partition(" CMD ")[2])
    assert check[:3] == ["nano-inference", "health", "--live"]


def test_the_context_has_the_files_of_the_wheel() -> None:
    """Each package of pyproject.toml is in; tests and documents are not."""
    lines = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    inside = {line[1:] for line in lines if line.startswith("!")}
    assert lines[1] == "*"
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    rooms = {each.split(".")[1] for each in packages if "." in each} | {"models"}  # data
    files = {path.name for path in ROOT.glob("*.py")} | {"py.typed", "pyproject.toml"}
    assert inside == rooms | files | {"constraints.txt", "README.md", "LICENSE", ".typing"}
    assert not [each for each in inside if not (ROOT / each).exists()]
    assert not fnmatch.filter(inside, "*tests*")
