"""Settings from file, environment and flags; refusals that name the setting."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from nano_inference.config import (
    Config,
    ConfigError,
    EngineConfig,
    as_environment,
    load_config,
    nearest,
)


def loaded(path: Path | None = None, **variables: object) -> Config:
    """Return the settings of a file and of an environment, whose names lack the prefix."""
    env = {f"NANO_INFERENCE_{name}": str(value) for name, value in variables.items()}
    return load_config(path, env=env)


def test_defaults_are_the_embedded_pipeline() -> None:
    config = load_config(env={})
    assert config == Config()
    assert config.bus.url == "memory"
    assert (config.engine.model_folder / "..").is_dir()


def test_later_sources_win(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("engine:\n  block_size: 4\n  max_batch_size: 8\n  seed: 1\n")
    env = {"NANO_INFERENCE_ENGINE__MAX_BATCH_SIZE": "16", "NANO_INFERENCE_ENGINE__SEED": "2"}
    engine = load_config(path, env=env, overrides={"engine.seed": 3}).engine
    assert (engine.block_size, engine.max_batch_size, engine.seed) == (4, 16, 3)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"engine.block_sise": 4}, "did you mean 'block_size'"),
        ({"engin.block_size": 4}, "no section 'engin'; did you mean 'engine'"),
        ({"engine.block_size": 0}, "engine.block_size is 0; it must be at least 1"),
        ({"engine.block_size": "many"}, "engine.block_size is 'many'; it must be a whole number"),
        ({"engine.gpu_memory_utilization": 1.5}, "above 0, at most 1"),
        ({"engine.gpu_memory_utilization": float("nan")}, "above 0, at most 1"),
        ({"engine.max_tokens_per_batch": 8, "engine.max_batch_size": 9}, "at least max_batch_size"),
        ({"engine.max_batch_size": 0}, "engine.max_batch_size is 0; it must be at least 1"),
        ({"fairness.aging_s": float("inf")}, "fairness.aging_s is inf"),
        ({"bus.url": "amqp://x"}, "redis://"),
        ({"bus.links": "redis"}, "needs bus.url"),
        ({"pipeline.stages": ["executor"]}, "missing: admission, fairness, batching, streaming"),
        ({"pipeline.stages": ["exec"]}, "pipeline.stages[0] is 'exec'; it may be 'admission', "),
        ({"bus.url": "redis://h", "pipeline.stages": ["executor", "executor"]}, "repetition"),
        ({"pipeline.replicas": 0}, "pipeline.replicas is 0; it must be from 1 to 64"),
        ({"bus.url": "redis://h", "pipeline.replica": 1}, "from 0 to pipeline.replicas - 1"),
        ({"pipeline.replicas": 2, "pipeline.replica": 0}, "runs all replicas"),
        ({"deployment.max_memory_bytes": -1}, "at least 0"),
        ({"deployment.load_timeout_s": 0}, "above 0"),
        ({"deployment.load_timeout_s": float("inf")}, "at most 86400"),
        (
            {"deployment.load_on_demand": "perhaps"},
            "deployment.load_on_demand is 'perhaps'; it must be true or false",
        ),
    ],
)
def test_bad_settings_are_refused(overrides: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config(env={}, overrides=overrides)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("engine: [", "not valid YAML"),
        ("- a\n- b", "must hold sections"),
        ("engine: 3", "section 'engine' must hold"),
        ("engine:\n  colour: red", "no setting 'colour'"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}.*{words}"):
        loaded(path)


@pytest.mark.parametrize(
    ("name", "known", "end"),
    [
        ("tool", ["tools", "top_p"], "; did you mean 'tools'?"),
        ("foo", ["tools", "top_p"], "; known: tools, top_p"),
        ("foo", [], ""),
    ],
)
def test_only_near_names_are_suggested(name: str, known: list[str], end: str) -> None:
    assert nearest(name, known) == end


def test_a_missing_file_and_an_unknown_variable_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        loaded(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="NANO_INFERENCE_ENGINE__BATCH"):
        loaded(ENGINE__BATCH=3)


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        EngineConfig().block_size = 3  # type: ignore[misc]


def test_a_lane_may_be_a_number() -> None:
    assert loaded(BUS__LANE=1).bus.lane == "1"
    assert load_config(env={}, overrides={"bus.lane": 7}).bus.lane == "7"


@pytest.mark.parametrize(
    ("settings", "cpu", "cuda"),
    [
        ({}, 128, 256),
        ({"max_batch_size": 256}, 128, 256),
        ({"max_batch_size": 200}, 200, 200),
        ({"max_batch_size": 300}, 300, 300),
        ({"max_tokens_per_batch": 40}, 40, 40),
    ],
)
def test_sequences_at_a_time_suit_the_device(settings: dict[str, int], cpu: int, cuda: int) -> None:
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    assert (config.batch_size_on("cpu"), config.batch_size_on("cuda")) == (cpu, cuda)


# --- values in files -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b"one two\n", "one two"),
        (b"12345", "12345"),
        (b"a: b\r\n", "a: b"),
        (b" two\nlines \n\n", " two\nlines \n"),
    ],
)
def test_text_in_a_file_is_taken_as_it_stands(tmp_path: Path, content: bytes, value: str) -> None:
    (tmp_path / "secret").write_bytes(content)
    assert loaded(POLICY__PASSPHRASE_FILE=tmp_path / "secret").policy.passphrase == value


def test_other_values_in_files_are_read_as_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "setting").write_text("7\n")
    assert loaded(ENGINE__SEED_FILE=tmp_path / "setting").engine.seed == 7


def test_a_setting_that_is_a_file_is_none_that_is_in_a_file(tmp_path: Path) -> None:
    policy = loaded(POLICY__FILE="a", POLICY__AUDIT_FILE="b", POLICY__AUDIT_KEY="k").policy
    assert (policy.file, policy.audit_file) == ("a", "b")
    # Which can itself be in one.
    (tmp_path / "place").write_text("c\n")
    policy = loaded(POLICY__AUDIT_FILE_FILE=tmp_path / "place", POLICY__AUDIT_KEY="k").policy
    assert policy.audit_file == "c"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "can't read .*: No such file"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"s3cret\xff", "is not text in UTF-8"),
        (b"s3cret" * 20_000, "is larger than 65536 bytes"),
    ],
)
def test_files_that_hold_no_value_are_refused(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as refused:
        loaded(POLICY__PASSPHRASE_FILE=file)
    assert refused.value.message.startswith("NANO_INFERENCE_POLICY__PASSPHRASE_FILE: ")
    assert "s3cret" not in refused.value.message


def test_a_value_is_not_both_in_a_file_and_not(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("a")
    env = {
        "NANO_INFERENCE_POLICY__PASSPHRASE_FILE": str(file),
        "NANO_INFERENCE_POLICY__PASSPHRASE": "b",
    }
    with pytest.raises(ConfigError, match="set by both"):
        load_config(env=env)
    # What is given otherwise comes after all of the environment, as ever.
    del env["NANO_INFERENCE_POLICY__PASSPHRASE"]
    overrides = {"policy.passphrase": "c"}
    assert load_config(env=env, overrides=overrides).policy.passphrase == "c"
    assert load_config(env=as_environment(overrides, env)).policy.passphrase == "c"


@pytest.mark.parametrize("name", ["speculation", "kernels", "cuda_graphs", "huge_pages"])
def test_off_is_off_however_it_is_written(tmp_path: Path, name: str) -> None:
    """YAML, unless it is quoted, takes the word for false."""
    file = tmp_path / "settings.yaml"
    file.write_text(f"engine:\n  {name}: off\n")
    variable = f"ENGINE__{name.upper()}"
    for config in (loaded(file), loaded(**{variable: "off"})):
        assert getattr(config.engine, name) == "off"
    with pytest.raises(ConfigError, match=name):
        loaded(**{variable: "on"})


def test_a_name_may_be_off_and_a_path_may_not() -> None:
    config = loaded(GATEWAY__MESSAGE_FORMAT="off", POLICY__BACKEND="off")
    assert (config.gateway.message_format, config.policy.backend) == ("off", "off")
    with pytest.raises(ConfigError, match="model_path"):
        loaded(ENGINE__MODEL_PATH="off")


def test_where_drafts_come_from_is_a_list(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("engine:\n  draft_sources: [ngram, suffix]\n")
    passed = as_environment({"engine.draft_sources": ["ngram", "suffix"]}, {})
    by_variable = loaded(ENGINE__DRAFT_SOURCES="[ngram, suffix]")
    for config in (loaded(file), by_variable, load_config(env=passed)):
        assert config.engine.draft_sources == ("ngram", "suffix")
    with pytest.raises(ConfigError, match="draft_sources"):
        loaded(ENGINE__DRAFT_SOURCES="[ngrams]")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"speculation": "on"}, "engine.speculation is 'on'; it may be 'auto', 'off'"),
        ({"draft_sources": ("model",)}, "engine.draft_sources.* may be 'prediction', 'grammar'"),
        ({"cpu_threads": "2"}, "engine.cpu_threads is a text; it must be a whole"),
        ({"max_model_len": 2.5}, "engine.max_model_len is a number; it must be a whole"),
    ],
)
def test_types_are_checked_in_python_too(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**settings)


def test_a_path_and_a_list_are_taken_from_python(tmp_path: Path) -> None:
    given: dict[str, Any] = {"model_path": tmp_path, "draft_sources": ["ngram"]}
    config = EngineConfig(**given)
    assert (config.model_path, config.draft_sources) == (str(tmp_path), ("ngram",))


def test_a_list_may_be_plain_words() -> None:
    for text in ("a, b", "[a, b]"):
        assert loaded(GATEWAY__MODELS=text).gateway.models == ("a", "b")
    config = loaded(GATEWAY__MODELS="mine", IMAGES__URL_PORTS="80,8443")
    assert (config.gateway.models, config.images.url_ports) == (("mine",), (80, 8443))
    with pytest.raises(ConfigError, match=r"gateway.models"):
        loaded(GATEWAY__MODELS="12")
