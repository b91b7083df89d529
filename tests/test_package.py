"""The package as it is installed: nothing forgotten, nothing loaded too early."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest

import nano_inference
import nano_inference.kserve

from .programs import Ran, run

ROOT = Path(__file__).parent.parent
KINDS = ("*.py", "error_codes.toml", "*.c", "*.h", "*.proto", "*.binpb")
USERS = ("serve", "kserve", "embedded", "gguf", "grpc", "batch", "mcp", "ray", "arc")
OUTSIDE = {"tests", "benchmarks", "examples", "docs", "deploy", "build"}


def tree() -> set[str]:
    """Return the files that belong in the wheel, from the files in the tree."""
    # Not through the virtual environment, which has many more.
    top = [path for path in ROOT.iterdir() if path.name[0] != "." and path.name not in OUTSIDE]
    inside = chain(top, *(path.rglob("*") for path in top if path.is_dir()))
    files = {path.relative_to(ROOT) for path in inside if any(map(path.match, KINDS))}
    for name in ("tiny", "tiny-vision"):
        files |= {path.relative_to(ROOT) for path in (ROOT / "models" / name).iterdir()}
    files |= {path.relative_to(ROOT) for path in (ROOT / "text" / "messages" / "formats").iterdir()}
    static = ROOT / "gateway" / "console" / "static"
    files |= {path.relative_to(ROOT) for path in static.iterdir()}
    files.add(Path("py.typed"))
    return {f"nano_inference/{path}" for path in files}


@pytest.mark.slow
def test_wheel_holds_the_tree(tmp_path: Path) -> None:
    wheel = built("wheel", tmp_path)
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == tree()


def built(kind: str, folder: Path) -> Path:
    """Build a wheel, or an editable one, from a copy of the tree; return its path.

    The build itself, as pip runs it: with an environment of its own it takes far longer.
    """
    build = f"import sys; from setuptools import build_meta as b; b.build_{kind}(sys.argv[1])"
    copy = folder / "source"
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\n")
    for name in filter(None, files):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name, follow_symlinks=False)
    command = [sys.executable, "-c", build, str(folder)]
    subprocess.run(command, cwd=copy, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    return wheel


TYPED = """
from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.kserve import NamedTensor

engine = InferenceEngine(EngineConfig(model_path="tiny"))
reveal_type(engine.generate(["a"], SamplingParams(temperature=0))[0].logprobs)
number: int = engine.generate(["a"])
"""


@pytest.mark.slow
@pytest.mark.soak(only=True)
def test_type_checkers_find_an_editable_installation(tmp_path: Path) -> None:
    """They check a file outside of the tree, in an environment that has the package alone."""
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    zipfile.ZipFile(built("editable", tmp_path)).extractall(packages)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "use.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache")]
    command += ["--python-executable", str(tmp_path / "venv/bin/python"), "use.py"]
    ran = subprocess.run(command, cwd=tmp_path / "outside", capture_output=True, text=True)
    lines = ran.stdout.splitlines()
    assert [line.partition(": ")[2] for line in lines[:2]] == [
        'note: Revealed type is "tuple[float, ...]"',
        'error: Incompatible types in assignment (expression has type "list[TrainingSample]", '
        'variable has type "int")  [assignment]',
    ], ran
    assert len(lines) == 3


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def names_of(requirements: Iterable[str]) -> set[str]:
    """The packages of requirements, in lower case with hyphens."""
    names = {re.split(r"[\[<>=;, ]", each)[0] for each in requirements}
    return {name.lower().replace("_", "-") for name in names} - {"nano-inference"}


def test_constraints_name_every_dependency() -> None:
    wanted = names_of([*PROJECT["dependencies"], *chain(*EXTRAS.values())])
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert wanted <= names_of(line for line in lines if "==" in line)


def imported_by(path: Path) -> set[str]:
    """The names of packages that a file imports anywhere."""
    found: set[str] = set()
    lines = re.findall(r"^ *((?:import|from) [a-zA-Z_].*)", path.read_text(), re.M)
    for line in lines:
        # To parse whole files takes seconds. Lines of texts are no statements.
        with suppress(SyntaxError):
            (node,) = ast.parse(line.removesuffix("(") + "(a)" * line.endswith("(")).body
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found


def test_each_imported_package_is_declared() -> None:
    """The product's packages; torch brings triton, and gRPC's stubs protobuf's `google`."""
    modules: set[str] = set()
    for name in tree():
        if name.endswith(".py"):
            modules |= imported_by(ROOT / name.removeprefix("nano_inference/"))
    modules -= {*sys.stdlib_module_names, "opentelemetry", "nano_inference", "triton"}
    packages = packages_distributions()
    # A package that is not installed is taken to have the name of its module.
    imported = {module: names_of(packages.get(module, [module])) for module in modules}
    declared = names_of([*PROJECT["dependencies"], *chain(*(EXTRAS[name] for name in USERS))])
    assert {module for module, names in imported.items() if not names & declared} == set()


# Of what a fork has imported, all of ours is imported anew.
WITHOUT = """
import sys
for name in [*sys.modules]:
    if name.partition(".")[0] in {{"nano_inference", *{names}}}:
        del sys.modules[name]
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
"""
OPTIONAL = {"cryptography", "google", "grpc", "jwt", "ml_dtypes", "re2", "starlette", "uvicorn"}


def without_extras(program: str, folder: Path) -> Ran:
    return run(WITHOUT.format(names=OPTIONAL) + program, folder)


def test_the_engine_needs_no_extra(tmp_path: Path) -> None:
    ran = without_extras(
        "from nano_inference import InferenceEngine\n"
        "with InferenceEngine() as engine:\n"
        "    print(len(engine.generate(['98 + 25 ='])))",
        tmp_path,
    )
    assert (ran.status, ran.stdout.strip()) == (0, "1"), ran.stderr


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    command = "from nano_inference.cli.app import main\nsys.exit(main(['serve', '--port', '0']))"
    ran = without_extras(command, tmp_path)
    assert ran.status == 2
    assert "pip install 'nano-inference[serve]'" in ran.stderr


@pytest.mark.parametrize("package", [nano_inference, nano_inference.kserve])
def test_every_public_name_can_be_had(package: ModuleType) -> None:
    assert sorted(package._HOME) == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="Engin"):
        _ = package.Engin


def test_type_checkers_find_every_public_name() -> None:
    imported = re.findall(r" as (\w+)$", (ROOT / "__init__.py").read_text(), re.M)
    assert sorted(imported) == nano_inference.__all__


def test_tensors_do_not_cost_grpc() -> None:
    code = (
        "import sys; from nano_inference.kserve import NamedTensor; sys.exit('grpc' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_clients_and_engines_not_yet_made_do_not_cost_torch() -> None:
    code = (
        "import sys; from nano_inference import BusClient, GenerateRequest, InferenceEngine; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_bundled_model_is_small() -> None:
    folder = ROOT / "models" / "tiny"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 6 << 20


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, "10000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
    ],
)
def test_threads_wait_for_one_another_briefly_unless_the_environment_says_otherwise(
    variables: dict[str, str], found: str
) -> None:
    program = "import os, nano_inference; print(os.environ.get('GOMP_SPINCOUNT'))"
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == found
