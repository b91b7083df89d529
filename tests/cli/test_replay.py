"""replay and digest: of records in files, and on a running pipeline."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

from nano_inference import Completion, EngineConfig, InferenceEngine, SamplingParams
from nano_inference.bus.codec import encode_output
from nano_inference.cli.replay import _read
from nano_inference.config import Config
from nano_inference.pipeline.digest import RunDigest, digest
from nano_inference.pipeline.replay import Replay
from nano_inference.pipeline.rollouts import completion_of

from ..pipeline import short_model
from .conftest import Run, assert_refused


@pytest.fixture(scope="module")
def records() -> list[Completion]:
    """Completions of requests "a" and "b", by weights that a folder has."""
    config = EngineConfig(model_path=str(short_model.folder()), dtype="float32")
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with InferenceEngine(config) as engine:
        samples = engine.generate([[5, 6, 7], [8, 9]], params)
    return [
        replace(completion_of(sample), request_id=name)
        for name, sample in zip("ab", samples, strict=True)
    ]


def written(file: Path, records: list[Completion]) -> Path:
    file.write_bytes(b"\n".join(map(encode_output, records)) + b"\n")
    return file


def test_recorded_lines_are_replayed_with_the_weights_of_then(
    run: Run, records: list[Completion], tmp_path: Path
) -> None:
    own, other = records
    (sample,) = other.samples
    changed = replace(sample, token_ids=(*sample.token_ids[:3], 1, *sample.token_ids[4:]))
    file = written(tmp_path / "results.jsonl", [own, replace(other, samples=(changed,))])
    weights = ("--weights", str(short_model.folder()), "--set", "engine.dtype=float32")
    ran = run("replay", "a", "--file", str(file), *weights)
    assert (ran.status, ran.stdout) == (0, "a: equal: 8 tokens, 8 logprobs to the bit\n"), ran
    ran = run("replay", "--file", str(file), *weights, "--at", "4")
    assert ran.status == 1
    first, second, *explained = ran.stdout.splitlines()
    assert first.startswith("a: equal")
    assert second.startswith("b: parts at sample 0, token 3: recorded 1 (")
    assert "3 of 8 tokens" in explained[0]
    assert any("version 0 of the weights" in line for line in explained)
    ran = run("replay", "b", "--file", str(file), *weights, "--json")
    assert msgspec.json.decode(ran.stdout, type=Replay).verdict == "different"


def test_a_missing_record_or_recipe_is_refused(
    run: Run, records: list[Completion], tmp_path: Path
) -> None:
    weights = ("--weights", str(short_model.folder()))
    file = written(tmp_path / "results.jsonl", [replace(records[0], recipe=None)])
    assert_refused(run("replay", "--file", str(file), *weights), "has no recipe")
    assert_refused(run("replay", "z", "--file", str(file), *weights), "nothing is recorded of")
    assert_refused(run("replay"), "give the id of a request")
    file.write_text("7\n")
    assert_refused(run("digest", "--file", str(file)), "line 1")


def test_the_digest_of_a_file(run: Run, records: list[Completion], tmp_path: Path) -> None:
    file = written(tmp_path / "results.jsonl", records[::-1])
    wanted = digest(records)
    ran = run("digest", "--file", str(file))
    assert ran.stdout == f"{wanted}\n"
    assert "2 results; 2 samples, 16 tokens" in ran.stderr
    assert run("digest", "a", "b*", "--file", str(file)).stdout == f"{wanted}\n"
    ran = run("digest", "a", "--file", str(file), "--json")
    found = msgspec.json.decode(ran.stdout, type=RunDigest)
    assert (found.digest, found.results) == (digest(records[:1]), 1)
    assert_refused(run("digest", "z", "--file", str(file)), "there are no results of 'z'")


def test_lines_of_rollouts_and_of_the_audit_log_are_read(
    records: list[Completion], tmp_path: Path
) -> None:
    audited = {"event": "call", "recorded": [encode_output(each).decode() for each in records]}
    change = {"event": "create_key", "now": {}}
    file = tmp_path / "audit"
    file.write_bytes(b"\n".join(map(msgspec.json.encode, (audited, change))))
    assert _read(file) == records
    config = EngineConfig(model_path=str(short_model.folder()))
    with InferenceEngine(config) as engine:
        samples = engine.generate([[5, 6]], SamplingParams(max_tokens=2), 2)
    file.write_bytes(b"\n".join(map(msgspec.json.encode, samples)))
    assert _read(file) == samples


def test_on_a_running_pipeline_and_at_its_server(run: Run, on_served: Config, url: str) -> None:
    (line,) = run("submit", "98 + 25 =", "-t", "1", "--json").stdout.splitlines()
    done = msgspec.json.decode(line, type=Completion)
    tokens = done.usage.completion_tokens
    ran = run("replay", done.entry_id)
    assert ran.stdout.endswith(f": equal: {tokens} tokens, {tokens} logprobs to the bit\n"), ran
    assert run("replay", done.entry_id, "--url", f"{url}/v1") == ran
    assert_refused(run("replay", "nothing", "--url", url), "nothing is recorded of")
    assert run("digest", done.entry_id).stdout == f"{digest([done])}\n"


def test_past_versions_of_a_log_compute_again(run: Run, tmp_path: Path) -> None:
    """Each record under the version that made it; scores of one version; a folder of another."""
    log, model = tmp_path / "log", str(short_model.folder())
    config = EngineConfig(model_path=model, dtype="float32", weight_log=str(log))
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    completions = []
    with InferenceEngine(config) as engine:
        for name in "ab":
            (sample,) = engine.generate([[5, 6, 7]], params)
            completions.append(replace(completion_of(sample), request_id=name))
            new = {key: tensor * 1.1 for key, tensor in engine.state_dict().items()}
            engine.update_weights(new, blocking=True)
    file = written(tmp_path / "results.jsonl", completions)
    engine_of = ("--log", str(log), "--set", f"engine.model_path={model}")
    engine_of += ("--set", "engine.dtype=float32")
    ran = run("replay", "--file", str(file), *engine_of)
    assert (ran.status, ran.stdout.count("equal: 8 tokens")) == (0, 2), ran
    assert run("replay", "--file", str(file), *engine_of, "--at", "1").status == 1
    ran = run("score", str(file), "--at", "1", *engine_of)
    scores = [msgspec.json.decode(line) for line in ran.stdout.splitlines()]
    assert [each["weight_version"] for each in scores] == [1, 1]
    assert tuple(scores[1]["logprobs"]) == completions[1].samples[0].logprobs
    ran = run("weights", "log", "--log", str(log), "--json")
    versions = [msgspec.json.decode(line)["version"] for line in ran.stdout.splitlines()]
    assert versions == [0, 1, 2]
    folder = tmp_path / "exported"
    assert run("weights", "export", str(folder), "--version", "2", *engine_of).status == 0
    with InferenceEngine(replace(config, model_path=str(folder), weight_log="")) as engine:
        assert torch.equal(engine.state_dict()["model.norm.weight"], new["model.norm.weight"])
    assert_refused(run("weights", "export", str(folder), "--version", "9", *engine_of), "exists")
