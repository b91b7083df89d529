"""Lists that repeat each other agree: stages, back ends, folders, fields."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from nano_inference import SamplingParams
from nano_inference.bus.public import FinishReason
from nano_inference.bus.weights import IN_FLIGHT
from nano_inference.cli.terminal import STAGE_STYLES
from nano_inference.config import STAGES
from nano_inference.config.sampling import PARAMETERS, RANGES
from nano_inference.pipeline.supervisor import actor_class
from nano_inference.telemetry import trace_page

from .rig import load

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = {name.partition(".")[2] for name in PROJECT["tool"]["setuptools"]["packages"]}

CONTRACTS: list[dict[str, Any]] = PROJECT["tool"]["importlinter"]["contracts"]


def contract(beginning: str) -> dict[str, Any]:
    """The one import-linter contract of which the name begins so."""
    (found,) = [each for each in CONTRACTS if each["name"].startswith(beginning)]
    return found


def folders_in(room: str) -> set[str]:
    return {f"nano_inference.{name}" for name in PACKAGES if re.fullmatch(rf"{room}\.\w+", name)}


def test_each_folder_is_packaged() -> None:
    rooms = {name.partition(".")[0] for name in PACKAGES - {""}}
    inits = [path.parent for room in rooms for path in (ROOT / room).rglob("__init__.py")]
    found = {".".join(folder.relative_to(ROOT).parts) for folder in inits}
    assert found == PACKAGES - {""}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_has_a_shell_of_its_name(stage: str) -> None:
    assert actor_class(stage).name == stage


def test_stages_are_the_folders() -> None:
    stages = {f"nano_inference.stages.{stage}" for stage in STAGES}
    assert folders_in("stages") == stages


def test_each_stage_has_a_colour() -> None:
    assert tuple(STAGE_STYLES) == STAGES
    for stage in STAGES:
        assert trace_page._STYLE.count(f"--{stage}: #") == 2, "a light one and a dark one"


def test_cores_import_no_transport() -> None:
    transports = (folders_in("bus") | folders_in("store")) - {"nano_inference.bus.parts"}
    assert transports <= set(contract("Cores")["forbidden_modules"])


def test_no_interface_imports_another() -> None:
    interfaces = folders_in(r"gateway\.api")
    assert interfaces == set(contract("An interface")["modules"])


def test_the_page_draws_the_tree() -> None:
    page = (ROOT / "docs" / "tree.md").read_text()
    drawn, above = set(), [""]
    for indent, name in re.findall(r"^([│├└─ ]*)(\w+)/ ", page, re.M):
        depth = len(indent) // 4
        above[depth:] = [f"{above[depth - 1]}.{name}" if depth else name]
        drawn.add(above[depth])
    assert drawn == PACKAGES - {""}
    drawn_layers = re.findall(r"^(\w+)/ ", page, re.M)
    layers = contract("A folder")["layers"]
    assert [f"nano_inference.{layer}" for layer in drawn_layers] == layers


# --- sizes -------------------------------------------------------------------------------------

LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 700, 80


def product_code() -> list[Path]:
    folders = [ROOT / layer.rpartition(".")[2] for layer in contract("A folder")["layers"]]
    return [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]


def functions_in(place: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function in it. To walk through all expressions too takes seconds."""
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        inner = getattr(place, name, ())
        for node in inner if isinstance(inner, list) else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node
            yield from functions_in(node)


def test_no_file_and_no_function_is_long() -> None:
    """A longer one has a noun in it that wants a file of its own, or a step that wants a name."""
    sizes: dict[str, int] = {}
    functions: dict[str, int] = {}
    for path in product_code():
        name, source = str(path.relative_to(ROOT)), path.read_text()
        sizes[name] = len(source.splitlines())
        for node in functions_in(ast.parse(source)):
            functions[f"{name}: {node.name}"] = node.end_lineno - node.lineno + 1
    assert len(sizes) > 100
    assert {name: size for name, size in sizes.items() if size > LINES_OF_A_FILE} == {}
    assert {name: size for name, size in functions.items() if size > LINES_OF_A_FUNCTION} == {}


LINES_LOADED = {"stages/batching/core.py": 3_700, "pipeline/engine.py": 14_000}
"""Most lines of code that importing a file loads, its own included."""


@pytest.mark.parametrize(("start", "most"), LINES_LOADED.items(), ids=LINES_LOADED)
def test_a_module_loads_little_beside_itself(start: str, most: int) -> None:
    files = load("size").closure(Path(start))
    assert len(files) > 10
    biggest = sorted(files, key=files.__getitem__)[-10:]
    assert sum(files.values()) <= most, biggest


@pytest.mark.parametrize("stage", STAGES)
def test_a_core_names_none_of_its_parts(stage: str) -> None:
    """Neither a part's module nor its class; nor do the modules that the core imports."""
    folder = ROOT / "stages" / stage
    names: set[str] = set()
    for path in (folder / "parts").rglob("[!_]*.py"):
        classes = re.findall(r"^class (\w+)\(Part\b", path.read_text(), re.M)
        if classes:
            names |= {*path.relative_to(folder / "parts").with_suffix("").parts, *classes}
    names -= {"part"}
    assert len(names) > 10
    core = (folder / "core.py").read_text()
    # Fairness's queue has a protocol, and its state a count, of a part's name.
    modules = set(re.findall(r"^from \.(\w+) import", core, re.M)) - {"queue", "state"}
    imported = [folder / f"{name}.py" for name in modules]
    for path in (folder / "core.py", *filter(Path.exists, imported)):
        used = set(re.findall(r"\w+", ast.unparse(own_names(path.read_text()))))
        assert names & used == set(), path.name


def own_names(source: str) -> ast.Module:
    """A module without its strings, and without the names of other rooms' modules."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
        if isinstance(node, ast.ImportFrom) and node.level >= 3:
            node.module = ""
    return tree


# --- sampling parameters, pause modes and finish reasons --------------------------------------


def test_no_work_waits_for_the_threads_that_all_share() -> None:
    """Each call that runs work in a thread names a limiter: of the default one has everybody only
    40 threads, which one client's slow work would take."""
    found: list[str] = []
    for path in product_code():
        source = path.read_text()
        if "to_thread" not in source and "run_in_executor" not in source:
            continue  # most files, and to parse them takes seconds
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            limits = {word.arg: ast.unparse(word.value) for word in node.keywords}
            own = limits.get("limiter", "None") != "None" and "default" not in limits["limiter"]
            threads = name.endswith("to_thread.run_sync") and not own
            if threads or name.endswith((".run_in_executor", "asyncio.to_thread")):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found, "name a limiter"


def test_each_sampling_parameter_is_checked() -> None:
    """By the range in the table, or by a check of its own; every truth value is good."""
    folders = (ROOT / "stages" / "admission", ROOT / "config")
    refused = {
        node.value.removeprefix("invalid_")
        for path in (*folders[0].glob("*checks.py"), *folders[1].glob("sampling*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert set(PARAMETERS) - refused - RANGES.keys() == {
        *("ignore_eos", "response_cache", "return_sampling_mask", "return_routed_experts")
    }


def test_each_sampling_parameter_is_read_by_a_stage() -> None:
    """Beyond the check of its range."""
    read: set[str] = set()
    for path in (ROOT / "stages").rglob("*.py"):
        if not path.name.endswith("checks.py"):
            read |= set(re.findall(r"\bsampling\.(\w+)", path.read_text()))
    assert set(SamplingParams.__struct_fields__) <= read


def test_each_pause_mode_has_its_row() -> None:
    text = (ROOT / "docs" / "weights.md").read_text()
    table = text.partition("## What becomes of requests in flight")[2].partition("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.M)) == IN_FLIGHT


def test_each_finish_reason_stands_on_the_gateways_page() -> None:
    text = (ROOT / "docs" / "gateway.md").read_text()
    (row,) = re.findall(r"^\| `finish_reason` \| (.+) \|$", text, re.M)
    assert set(re.findall(r'"(?:err_)?type": "(\w+)"', row)) == set(get_args(FinishReason))


def test_an_engine_loads_nothing_that_it_does_not_use() -> None:
    program = (
        "import sys\n"
        "from nano_inference import EngineConfig, InferenceEngine\n"
        "with InferenceEngine(EngineConfig()): pass\n"
        "print(*sys.modules)"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()
    assert "nano_inference.stages.executor.parts.weights" in said
    executor = "nano_inference.stages.executor."
    unused = {
        *("redis", "grpc", "opentelemetry.sdk", "peft", "nano_inference.telemetry"),
        *(f"nano_inference.bus.{name}" for name in ("memory.bus", "channel", "codec")),
        *(f"nano_inference.pipeline.{name}" for name in ("image_inputs", "replay", "scoring")),
        *(
            f"nano_inference.text.{name}"
            for name in ("gguf", "grammar_trial", "images", "messages")
        ),
        *("nano_inference.config.load", "nano_inference.store.board"),
        "nano_inference.stages.batching.paged",
        *(f"{executor}parts.{name}" for name in ("tiers", "images", "speculation", "graphs")),
        *(f"{executor}driver.{name}" for name in ("images", "speculation")),
        *(f"{executor}runner.{name}" for name in ("tiers", "leader", "adapters.peft", "graphs")),
        *(f"{executor}runner.{name}" for name in ("ranks.processes", "weights.transports.group")),
        *(f"{executor}runner.{name}" for name in ("encoder", "vision")),
    }
    assert not unused.intersection(said)
