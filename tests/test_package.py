"""The package as it is installed: nothing forgotten, nothing loaded too early."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest

import nano_inference
import nano_inference.kserve

ROOT = Path(__file__).parent.parent
KINDS = ("*.py", "*.c", "*.h", "*.proto", "*.binpb")
OUTSIDE = {"tests", "benchmarks", "examples", "docs", "deploy", "build"}


def tree() -> set[str]:
    """What belongs in the wheel, by what lies in the tree."""
    files = {path.relative_to(ROOT) for kind in KINDS for path in ROOT.rglob(kind)}
    files |= {path.relative_to(ROOT) for path in (ROOT / "models" / "tiny").iterdir()}
    files |= {path.relative_to(ROOT) for path in (ROOT / "text" / "messages" / "formats").iterdir()}
    files |= {Path("py.typed"), Path("models/card.md")}
    return {
        f"nano_inference/{path}"
        for path in files
        if path.parts[0] not in OUTSIDE and not path.parts[0].startswith(".")
    }


@pytest.mark.slow
def test_wheel_holds_the_tree(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    copy = tmp_path / "source"
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\n")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(copy)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == tree()


def test_constraints_name_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    names = {re.split(r"[\[<>]", line)[0].lower() for line in wanted}
    pinned = (ROOT / "constraints.txt").read_text().lower().splitlines()
    assert names <= {line.split("==")[0] for line in pinned}


@pytest.mark.parametrize("package", [nano_inference, nano_inference.kserve])
def test_every_public_name_can_be_had(package: ModuleType) -> None:
    assert sorted(package._HOME) == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="Engin"):
        _ = package.Engin


def test_type_checkers_know_every_public_name() -> None:
    imported = re.findall(r" as (\w+)$", (ROOT / "__init__.py").read_text(), re.M)
    assert sorted(imported) == nano_inference.__all__


def test_tensors_do_not_cost_grpc() -> None:
    code = (
        "import sys; from nano_inference.kserve import NamedTensor; sys.exit('grpc' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_client_does_not_pay_for_torch() -> None:
    code = (
        "import sys; from nano_inference import BusClient, GenerateRequest, Config; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_bundled_model_is_small() -> None:
    folder = ROOT / "models" / "tiny"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 6 << 20
