"""Each check, well and unwell."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
import torch

from nano_inference.cli import doctor as checks
from nano_inference.cli.model_files import check_model_files
from nano_inference.config import BUNDLED_MODEL, BusConfig, Config, EngineConfig, ModelError
from nano_inference.stages.executor.runner import device
from nano_inference.stages.executor.runner.kernels.compile import KernelsUnavailable
from nano_inference.stages.executor.runner.quantize import sizes
from nano_inference.text import gguf

from ..gguf_files import nothing, write_gguf
from .conftest import Run


def test_this_environment_passes() -> None:
    assert checks.check_python().state == "ok"
    assert checks.check_packages().state == "ok"
    assert next(checks.check_torch()).state == "ok"


def test_a_package_of_the_wrong_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        checks.metadata, "requires", lambda name: ["torch>=999", "no-such-package", "typer"]
    )
    check = checks.check_packages()
    assert check.state == "fail"
    assert "is not >=999" in check.found
    assert "no-such-package is missing" in check.found
    assert "typer" not in check.found


def test_a_redis_that_answers_and_one_that_is_down(redis_url: str, closed_port: int) -> None:
    check = checks.check_bus(BusConfig(url=redis_url))
    assert (check.state, check.found.split()[0]) == ("ok", "Valkey")
    assert "round trip" in check.found
    check = checks.check_bus(BusConfig(url=f"redis://127.0.0.1:{closed_port}"))
    assert check.state == "fail"
    assert "--bus" in check.advice


def test_no_redis_given(monkeypatch: pytest.MonkeyPatch, closed_port: int) -> None:
    monkeypatch.setattr(checks, "DEFAULT_URL", f"redis://127.0.0.1:{closed_port}")
    assert checks.check_bus(BusConfig()).state == "ok"
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    check = checks.check_bus(BusConfig())
    assert check.state == "warn"
    assert "nano-inference[embedded]" in check.advice


def test_endpoints_of_traces(closed_port: int) -> None:
    check = checks.check_endpoint("")
    assert (check.state, check.found) == ("ok", "no endpoint set: traces are not exported")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert checks.check_endpoint(f"http://127.0.0.1:{port}").state == "ok"
    for endpoint in (f"http://127.0.0.1:{closed_port}", "http://host:port", "collector"):
        assert checks.check_endpoint(endpoint).state == "fail"


def test_model_folder(tmp_path: Path) -> None:
    assert checks.check_folder(BUNDLED_MODEL).state == "ok"
    assert checks.check_folder(str(tmp_path / "no")).state == "fail"
    assert "`nano-inference pull org/name`" in checks.check_folder("org/name").advice
    (tmp_path / "config.json").write_text("{}")
    check = checks.check_folder(str(tmp_path))
    assert check.state == "fail"
    assert "has no weights" in check.found
    assert "config.json" not in check.found
    (tmp_path / "model.safetensors").touch()
    check = checks.check_folder(str(tmp_path))
    assert (check.state, "no tokenizer" in check.found) == ("warn", True)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    check = checks.check_folder(str(tmp_path))
    assert (check.state, "only the tokenizer's settings" in check.found) == ("fail", True)
    with pytest.raises(ModelError, match=r"holds no tokenizer\.json"):
        check_model_files(Config(engine=EngineConfig(model_path=str(tmp_path))), None)


def test_the_format_of_quantised_weights_is_said_or_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    for fields, state, sentence in [
        ({"quant_method": "gptq", "bits": 4}, "warn", "0 MB of weights in GPTQ int4)"),
        ({"quant_method": "hqq"}, "fail", "quant_method 'hqq' is not supported"),
    ]:
        content = {"model_type": "qwen2", "quantization_config": fields}
        (tmp_path / "config.json").write_text(json.dumps(content))
        check = checks.check_folder(str(tmp_path))
        assert (check.state, sentence in check.found) == (state, True)
    assert "unquantised checkpoint" in check.advice


def test_a_model_that_can_not_be_loaded(tmp_path: Path) -> None:
    check = checks.check_answer(Config(), str(tmp_path), "The", "model")
    assert (check.name, check.state) == ("model", "fail")
    assert str(tmp_path) in check.found
    assert "save_pretrained" in check.advice


@pytest.mark.slow
def test_doctor(run: Run, redis_url: str) -> None:
    ran = run("doctor", "--bus", redis_url)
    assert (ran.status, ran.stderr) == (0, "")
    rows = [line.split() for line in ran.stdout.splitlines() if not line.startswith(" ")]
    assert [name for _, name, *_ in rows] == [
        *("python", "packages", "torch", "device", "kernels", "pages"),
        *("bundled", "quantisation", "speed", "redis", "traces"),
    ]
    assert {state for state, *_ in rows} <= {"ok", "warn"}
    assert "'98 + 25 =' → '123'" in ran.stdout


@pytest.mark.slow
def test_doctor_finds_a_fault(run: Run, closed_port: int) -> None:
    ran = run("doctor", "--bus", f"redis://127.0.0.1:{closed_port}", "--model", "/no/model")
    assert ran.status == 1
    failed = [line.split()[1] for line in ran.stdout.splitlines() if line.startswith("fail")]
    assert failed == ["folder", "redis"]


def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "_cache_folder", lambda: tmp_path)
    path = write_gguf(tmp_path / "m.gguf", "Q4_0")
    check = checks.check_folder(str(path))
    assert (check.state, check.found) == ("ok", f"{path} (qwen2, 1 MB of weights in Q4_0, F32)")
    bare = write_gguf(tmp_path / "bare.gguf", tokenizer=nothing)
    check = checks.check_folder(str(bare))
    assert (check.state, "no tokenizer" in check.found) == ("warn", True)
    path.write_bytes(b"GGUF")
    check = checks.check_folder(str(path))
    assert check.state == "fail"
    assert "cut off" in check.found
    assert "download it again" in check.advice


def test_a_missing_device_fails() -> None:
    found = list(checks.check_torch("xpu:7"))
    assert [(check.name, check.state) for check in found] == [("torch", "ok"), ("device", "fail")]
    assert "'xpu:7' is missing; here" in found[1].found


def test_an_untested_device_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_TESTED", frozenset())
    monkeypatch.setattr(device, "resolve_device", lambda name: torch.device("mps"))
    monkeypatch.setattr(device, "devices_here", lambda: {"mps": 1})
    check = checks.check_device("auto")
    assert check is not None
    assert (check.state, check.found) == ("warn", "mps (unverified)")


def test_what_quantisation_saves_of_a_model(run: Run, tmp_path: Path) -> None:
    folder = str(EngineConfig(model_path="tiny").model_folder)
    check = checks.check_codes(folder)
    assert check.state == "ok"
    # Matrices of 491,520 weights and 768 embeddings of 128, tied to the output layer, and norms.
    wanted = re.findall(r"(\w+) 0\.00 GB \(at most ([\d.]+) times", check.found)
    assert [kind for kind, _ in wanted] == ["int8", "int4"]
    assert 1.9 < float(wanted[0][1]) < 2
    assert 3 < float(wanted[1][1]) < 4
    assert run("quantize", "tiny", str(tmp_path / "new"), "--format", "int4").status == 0
    assert (
        "the checkpoint is compressed-tensors int4"
        in checks.check_codes(str(tmp_path / "new")).found
    )
    assert checks.check_codes("").found.startswith("int8 and int4 weights by ")


def test_instructions_without_which_codes_gain_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> str:
        raise KernelsUnavailable("there is no C compiler")

    monkeypatch.setattr(sizes, "codes_instructions", none)
    check = checks.check_codes("")
    assert (check.state, check.found.endswith("there is no C compiler")) == ("warn", True)
