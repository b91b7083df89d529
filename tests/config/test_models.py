"""The models of a deployment in a file and in the environment; refusals that name the model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nano_inference.config import Config, ConfigError, ModelConfig, load_config

TWO = """
engine:
  block_size: 8
admission:
  max_in_flight: 100
models:
  - id: chat
    path: /models/chat
    aliases: [gpt, default]
    dtype: float32
    settings: {engine.block_size: 32, admission.max_in_flight: 7}
  - id: code
    path: /models/code
    default: true
    preload: false
    replicas: 2
    revision: v2
    role: generate
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "c.yaml"
    path.write_text(text)
    return path


def test_a_file_lists_models(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, TWO), env={})
    chat, code = config.models
    assert chat.names == ("chat", "gpt", "default")
    assert (code.default, code.preload, code.revision) == (True, False, "v2")
    assert config.default_model == "code"
    assert (config.bus.model, config.engine.model_id) == ("", ""), "of none of them"


def test_the_settings_of_a_model_are_those_of_all_and_its_own(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, TWO), env={})
    chat, code = (config.of_model(model) for model in config.models)
    assert (chat.bus.model, chat.engine.model_name) == ("chat", "chat")
    assert chat.engine.model_aliases == ("gpt", "default")
    assert (chat.engine.model_path, chat.engine.dtype) == ("/models/chat", "float32")
    assert (chat.engine.block_size, chat.admission.max_in_flight) == (32, 7)
    assert chat.pipeline.replicas == 1
    assert (code.bus.model, code.engine.model_name) == ("code", "code")
    assert (code.engine.block_size, code.admission.max_in_flight) == (8, 100), "nobody else's"
    assert code.pipeline.replicas == 2
    assert (chat.engine.role, code.engine.role) == ("all", "generate")


@pytest.mark.parametrize("write", [json.dumps, str], ids=["JSON", "YAML"])
def test_the_environment_lists_models_instead(tmp_path: Path, write: Any) -> None:
    env = {"NANO_INFERENCE_MODELS": write([{"id": "a", "path": "/a"}, {"id": "b", "path": "/b"}])}
    config = load_config(written(tmp_path, TWO), env=env)
    assert [model.id for model in config.models] == ["a", "b"]
    assert config.engine.block_size == 8, "what else is in the file"


def test_without_one_that_says_so_the_first_is_the_default() -> None:
    models = (ModelConfig(id="z", path="/z"), ModelConfig(id="a", path="/a"))
    config = Config(models=models)
    assert config.default_model == "z"
    assert [model.default for model in config.models] == [True, False]
    assert (Config().models, Config().default_model) == ((), "")


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ([{"path": "/a"}], "models[0].id is missing"),
        ([{"id": "a"}], "models[0].path is missing"),
        ([{"id": "a", "path": ""}], "models.path is ''; it must be a folder"),
        ([{"id": "a", "path": "/a\0"}], "it must be a folder"),
        ([{"id": "", "path": "/a"}], "'' can't name a model"),
        (
            [{"id": "a", "path": "/a", "settings": {"engine.model_id": "b"}}],
            "'a' sets 'engine.model_id', which its id, path and aliases say",
        ),
        (
            [{"id": "a", "path": "/a", "settings": {"engine.kv_secret": "s3cret"}}],
            "'a' sets 'engine.kv_secret', but others can read a model's settings",
        ),
        ([{"id": "a b", "path": "/a"}], "'a b' can't name a model"),
        ([{"id": "a{}", "path": "/a"}], "'a{}' can't name a model"),
        ([{"id": "x" * 129, "path": "/a"}], "1 to 128 printable characters"),
        ([{"id": "a", "path": "/a", "aliases": ["b c"]}], "'b c' can't name a model"),
        ([{"id": "a", "path": "/a", "adapters": {"": "/x"}}], "'' can't name a model"),
        ([{"id": "a", "path": "/a"}, {"id": "a", "path": "/b"}], "'a' names both 'a' and 'a'"),
        (
            [{"id": "a", "path": "/a", "aliases": ["c"]}, {"id": "c", "path": "/b"}],
            "'c' names both 'a' and 'c'",
        ),
        (
            [{"id": "a", "path": "/a", "default": True}, {"id": "b", "path": "/", "default": True}],
            "a, b are all the default",
        ),
        ([{"id": "a", "path": "/a", "colour": 1}], "models[0].colour is not known here"),
        (
            [{"id": "a", "path": "/a", "preload": "perhaps"}],
            "models[0].preload is 'perhaps'; it must be true or false",
        ),
        (
            [{"id": "a", "path": "/a", "replicas": "two"}],
            "models[0].replicas is 'two'; it must be a whole",
        ),
        (
            [{"id": "a", "path": "/a", "dtype": "int8"}],
            "models[0].dtype is 'int8'; it may be 'auto', ",
        ),
        ([{"id": "a", "path": "/a", "settings": {"bus.url": "x"}}], "'a' sets 'bus.url'"),
        ([{"id": "a", "path": "/a", "settings": {"colour": 1}}], "'a' sets 'colour'"),
        ({"id": "a", "path": "/a"}, "must be a list of models"),
        (["a"], "must be a list of models"),
        ("a", "must be a list of models"),
    ],
)
def test_bad_models_are_refused(tmp_path: Path, models: Any, words: str) -> None:
    path = written(tmp_path, json.dumps({"models": models}))
    for given in (path, {}), (None, {"NANO_INFERENCE_MODELS": json.dumps(models)}):
        with pytest.raises(ConfigError, match=re.escape(words)):
            load_config(given[0], env=given[1])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine.colour": 1}, "'a' sets 'engine.colour'; it must be a setting"),
        ({"engine.block_size": "many"}, "'a': engine.block_size is a text; it must be"),
        ({"engine.block_size": 0}, "engine.block_size is 0"),
    ],
)
def test_settings_of_a_model_that_can_not_be_are_refused_with_its_name(
    settings: dict[str, Any], words: str
) -> None:
    models = (ModelConfig(id="a", path="/a", settings=settings), ModelConfig(id="b", path="/b"))
    config = Config(models=models)
    with pytest.raises(ConfigError, match="'a'") as refused:
        config.of_model(config.models[0])
    assert words in refused.value.message
    assert config.of_model(config.models[1]).bus.model == "b"


def test_models_are_no_section(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="models are a list, which a file or NANO_INFERENCE_MODE"):
        load_config(env={}, overrides={"models.id": "a"})


def test_the_example_is_one() -> None:
    path = Path(__file__).parents[2] / "deploy" / "many-models.yaml"
    config = load_config(path, env={})
    assert config.default_model == "chat"
    assert len(config.models) == 3
    for model in config.models:
        assert config.of_model(model).engine.model_folder.is_dir()
    code = config.of_model(config.models[1])
    assert (code.pipeline.replicas, code.admission.max_in_flight) == (2, 64)
