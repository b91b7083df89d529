"""The engine for Python callers: the pipeline's answers and refusals, and its contract."""

from __future__ import annotations

import inspect
import math
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

import nano_inference
from nano_inference import (
    ChatRenderer,
    Config,
    EngineConfig,
    InferenceEngine,
    RequestError,
    RolloutEngine,
    SamplingParams,
    WeightsError,
)
from nano_inference.bus.steps import StepPlan, StepResult
from nano_inference.config import ConfigError
from nano_inference.pipeline.engine_requests import prompt_of
from nano_inference.stages.executor.parts.memory import MemoryRelease
from nano_inference.stages.executor.runner.memory import ReplicaMemory
from nano_inference.text.tokenizer import default_sampling_params

from ..soaking import in_soak
from . import reference
from .builders import finish, raises

GREEDY = SamplingParams(temperature=0, max_tokens=24)
ENDLESS = SamplingParams(max_tokens=1000, ignore_eos=True)
ENDLESS_8 = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[InferenceEngine]:
    with InferenceEngine() as engine:
        yield engine


def test_greedy_text_prompts_equal_transformers(engine: InferenceEngine) -> None:
    prompts = [f"{i} + {3 * i} =" for i in range(24)]
    for prompt, sample in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        prompt_ids = reference.tokenizer().encode(prompt)
        assert list(sample.prompt_tokens) == prompt_ids
        tokens = list(sample.completion_tokens)
        assert tokens == reference.generate(prompt_ids, 24, claimed=tokens)
        wanted = reference.logprobs(prompt_ids, list(sample.completion_tokens))
        assert sample.logprobs == pytest.approx(wanted, abs=1e-4)


def test_results_come_in_order_of_prompts_then_samples(engine: InferenceEngine) -> None:
    prompts = [[40 + i, 50, 60] for i in range(5)]
    params = [SamplingParams(max_tokens=3 + 5 * (4 - i), seed=i) for i in range(5)]
    samples = engine.generate(prompts, params, num_samples_per_prompt=3)
    assert [list(sample.prompt_tokens) for sample in samples] == [p for p in prompts for _ in "abc"]
    again = engine.generate(prompts, params, num_samples_per_prompt=3)
    assert [s.completion_tokens for s in again] == [s.completion_tokens for s in samples]


KINDS_OF_SAMPLES: list[dict[str, Any]] = [
    {},
    {"temperature": 0, "logprobs": 3},
    {"top_p": 0.8, "top_k": 20, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"min_tokens": 5, "logit_bias": {65: 3.0}},
    {"constraint": {"regex": "[0-9]{3,9}"}},
    {"prompt_logprobs": 1},
    {"max_tokens": 1},
]


@pytest.mark.parametrize(
    ("length", "speculation"),
    [(16, "auto"), (21, "off"), in_soak(16, "off"), in_soak(21, "auto")],
)
def test_samples_of_one_prompt_equal_single_samples(
    length: int, speculation: Literal["off", "auto"]
) -> None:
    """Together, the others get their first token from the step that computes the first's prompt."""
    prompt = [40 + place * 7 % 50 for place in range(length)]
    params = [
        msgspec.convert({"seed": seed, "max_tokens": 12, **kind}, SamplingParams)
        for seed, kind in enumerate(KINDS_OF_SAMPLES * 2)
    ]
    config = EngineConfig(dtype="float32", speculation=speculation, cache_type="radix")
    with InferenceEngine(config) as engine:
        together = engine.generate([prompt] * len(params), params)
        forked = engine._batching.take_counters()
        assert forked.prefilled <= 3 * length, "two more compute it for its logprobs"
        for one, sampling in zip(together, params, strict=True):
            engine.flush_cache()
            (alone,) = engine.generate([prompt], sampling)
            assert one.completion_tokens == alone.completion_tokens
            assert one.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
            assert one.finish_reason == alone.finish_reason
            assert one.prompt_logprobs == alone.prompt_logprobs


def test_samples_carry_the_id_of_their_request(engine: InferenceEngine) -> None:
    """With the type that it was given, so that 7 and "7" are two requests."""
    chosen: list[str | int] = [7, "7", "", -(10**30), "rollout/\ud800"]
    for request_id in chosen:
        given = engine.add_request("1 + 1 =", GREEDY, num_samples=2, request_id=request_id)
        assert given is request_id
    own = [engine.add_request("1 + 1 =", GREEDY, num_samples=2) for _ in range(2)]
    samples = finish(engine)
    found = Counter((type(sample.request_id), sample.request_id) for sample in samples)
    assert found == {(type(request_id), request_id): 2 for request_id in [*chosen, *own]}
    assert [sample.request_id for sample in engine.generate(["1 + 1 ="], GREEDY)] == [None]


def test_an_id_is_taken_until_its_request_has_ended(engine: InferenceEngine) -> None:
    engine.add_request("1 + 1 =", ENDLESS, request_id=7)
    with raises("duplicate_request", "request 7 is not finished"):
        engine.add_request("2 + 2 =", GREEDY, request_id=7)
    for wrong in (True, 7.0, b"7"):
        with raises("invalid_request_id", "text or an integer"):
            engine.add_request("2 + 2 =", GREEDY, request_id=wrong)  # type: ignore[arg-type]
    for _ in range(3):
        engine.step()
    assert [sample.request_id for sample in engine.abort(7)] == [7]
    assert engine.abort(7) == []
    with pytest.raises(RequestError, match="empty"):
        engine.add_request("", GREEDY, request_id=7)
    engine.add_request("2 + 2 =", GREEDY, request_id=7)
    assert not engine.abort("7")
    engine.abort(7)
    assert not engine.has_pending()


def test_chosen_and_generated_ids_never_collide(engine: InferenceEngine) -> None:
    made = engine.add_request("1 + 1 =", GREEDY)
    number = int(str(made).removeprefix("engine-"))
    ahead = [f"engine-{number + more}" for more in range(1, 5)]
    for request_id in ahead:
        engine.add_request("1 + 1 =", GREEDY, request_id=request_id)
    last = engine.add_request("1 + 1 =", GREEDY)
    ids = {made, last, *ahead}
    assert len(ids) == 6
    samples = finish(engine)
    assert {sample.request_id for sample in samples} == ids


def test_abort_returns_partial_samples_of_one_request(engine: InferenceEngine) -> None:
    aborted = engine.add_request("7 + 7 =", ENDLESS, num_samples=2)
    engine.add_request("12 + 30 =", GREEDY)
    finished = [sample for _ in range(4) for sample in engine.step()]
    cut_short = engine.abort(aborted)
    assert [sample.finish_reason for sample in cut_short] == ["abort", "abort"]
    assert all(2 < len(sample.completion_tokens) <= 4 for sample in cut_short)
    assert all(len(s.logprobs) == len(s.completion_tokens) for s in cut_short)
    assert engine.abort(aborted) == engine.abort("never heard of") == []
    while engine.has_pending():
        finished += engine.step()
    (sample,) = finished
    assert list(sample.prompt_tokens) == reference.tokenizer().encode("12 + 30 =")
    engine.step()
    assert engine._batching.idle


def test_abort_before_the_first_step(engine: InferenceEngine) -> None:
    assert engine.abort(engine.add_request("7 + 7 =", ENDLESS)) == []
    assert not engine.has_pending()
    assert engine.step() == []
    assert engine._batching.idle


def test_generate_keeps_other_samples_for_the_next_step(engine: InferenceEngine) -> None:
    engine.add_request("1 + 1 =", GREEDY)
    (other,) = engine.generate(["98 + 25 = "], GREEDY)
    assert reference.tokenizer().decode(other.prompt_tokens) == "98 + 25 = "
    assert engine.has_pending()
    (sample,) = engine.step()
    assert reference.tokenizer().decode(sample.prompt_tokens) == "1 + 1 ="
    assert not engine.has_pending()


def test_an_interrupted_generate_leaves_nothing_running(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = iter(range(3))
    execute = engine._executor.execute

    def interrupted(plan: StepPlan) -> StepResult:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return execute(plan)

    with monkeypatch.context() as patched:
        patched.setattr(engine._executor, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["7 + 7 =", "8 + 8 ="], ENDLESS)
    assert not engine.has_pending()


def test_progress_is_shown_on_request(
    engine: InferenceEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.generate(["1 + 1 ="], GREEDY)
    assert capsys.readouterr() == ("", "")
    engine.generate(["1 + 1 =", "2 + 2 ="], GREEDY, show_progress=True)
    engine.embed(["1 + 1 ="], show_progress=True)
    engine.score([[70, 71]], [[72]], show_progress=True)
    engine.score_targets([[70, 71]], [[[72]]], show_progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("100%") == 4
    assert "Generating: 100%" in shown.err
    assert "Embedding: 100%" in shown.err
    assert shown.err.count("Scoring: 100%") == 2


def test_samples_have_text_and_message_wherever_they_are(engine: InferenceEngine) -> None:
    (sample,) = engine.generate(["98 + 25 ="], replace(GREEDY, stop=("3",)))
    assert sample.text == " 12"
    assert sample.message is sample.message
    assert sample.message == {"role": "assistant", "content": " 123"}
    elsewhere = pickle.loads(pickle.dumps(sample))
    assert "message" not in vars(elsewhere), "it is parsed there, if somebody reads it"
    assert (elsewhere, hash(elsewhere)) == (sample, hash(sample))
    assert elsewhere.message == sample.message
    assert replace(sample, model_path="/a/copy") == sample != replace(sample, text="")
    assert repr(sample) == "TrainingSample(' 12', <7 + 4 tokens>, 'stop', weight_version=0)"
    with raises("invalid_request", "parse it with ChatRenderer"):
        _ = replace(sample, model_path="").message


def test_a_message_has_the_calls_of_the_conversation_s_tools(engine: InferenceEngine) -> None:
    numbers = {name: {"type": "integer"} for name in "ab"}
    parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    times = {"name": "times", "description": "Multiplies", "parameters": parameters}
    prompt = ChatRenderer("tiny").render(
        [{"role": "user", "content": "What is 31 times 3?"}],
        tools=[{"type": "function", "function": times}],
        enable_thinking=False,
    )
    params = SamplingParams(temperature=0, max_tokens=60)
    engine.add_request(prompt, params)
    for sample in (*engine.generate([prompt], params), *finish(engine)):
        (call,) = sample.message["tool_calls"]
        assert call["function"] == {"name": "times", "arguments": '{"a": 31, "b": 3}'}


def test_an_engine_takes_a_path_and_names_it(engine: InferenceEngine) -> None:
    assert EngineConfig.of("tiny") == EngineConfig.of(None) == EngineConfig()
    assert EngineConfig.of(Path("/models/a")) == EngineConfig(model_path="/models/a")
    assert repr(engine).startswith("InferenceEngine('tiny', weight_version=")
    for wrong, why in {Config(): "not Config.*; pass its .engine", 5: "not 5"}.items():
        with raises("invalid_config", why, ConfigError):
            InferenceEngine(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "params", "code"),
    [
        ("", GREEDY, "empty_prompt"),
        ([], GREEDY, "empty_prompt"),
        ([10**6], GREEDY, "invalid_token_ids"),
        ("1 + 1 =", replace(GREEDY, max_tokens=0), "invalid_max_tokens"),
        ("1 + 1 =", replace(GREEDY, temperature=math.nan), "invalid_temperature"),
        ("1 + 1 =", replace(GREEDY, temperature="hot"), "invalid_request"),
    ],
)
def test_a_refused_prompt_leaves_nothing_behind(
    engine: InferenceEngine, prompt: str | list[int], params: SamplingParams, code: str
) -> None:
    with raises(code):
        engine.generate(["2 + 2 =", prompt], [GREEDY, params])
    assert not engine.has_pending()
    assert len(engine.generate(["2 + 2 ="], GREEDY)) == 1


def test_the_settings_of_an_engine_have_the_batch_size_in_use(engine: InferenceEngine) -> None:
    assert EngineConfig().max_batch_size == 256
    assert engine.config.max_batch_size == engine._executor.max_batch_size == 128, "on a CPU"


def test_as_many_parameters_as_prompts(engine: InferenceEngine) -> None:
    with pytest.raises(ValueError, match="2 prompts and 1 sampling_params"):
        engine.generate(["1 + 1 =", "2 + 2 ="], [GREEDY])


def test_predictions_are_one_for_each_prompt_and_change_no_token(engine: InferenceEngine) -> None:
    prompts = ["1 + 1 =", "2 + 2 =", [5, 6, 7]]
    alone = engine.generate(prompts, GREEDY)
    predicted = engine.generate(prompts, GREEDY, predictions=["2", None, [8, 9]])
    assert [each.completion_tokens for each in predicted] == [
        each.completion_tokens for each in alone
    ]
    assert {(each.num_draft_tokens, each.num_accepted_draft_tokens) for each in predicted} == {
        (0, 0)
    }, "an engine that does not speculate drafts nothing"
    with pytest.raises(ValueError, match="3 prompts and 1 predictions"):
        engine.generate(prompts, GREEDY, predictions=["2"])


@pytest.mark.parametrize("prediction", [[-1], [10**6], ["a"], 7, "a" * 100_000, [None]])
def test_invalid_predictions_are_refused(engine: InferenceEngine, prediction: object) -> None:
    with raises("invalid_prediction"):
        engine.generate(["1 + 1 ="], GREEDY, predictions=[prediction])  # type: ignore[list-item]
    with pytest.raises(RequestError):
        engine.add_request("1 + 1 =", GREEDY, prediction=prediction)  # type: ignore[arg-type]
    assert not engine.has_pending()


def test_calls_after_shutdown_raise() -> None:
    with InferenceEngine(EngineConfig(max_model_len=64), EngineConfig()) as engine:
        engine.shutdown()  # and once more at the end of the block
        for use in (
            lambda: engine.generate(["1 + 1 ="]),
            engine.state_dict,
            engine.get_weight_version,
            lambda: engine.score([(1, 2)], [(3,)]),
        ):
            with pytest.raises(RuntimeError, match="was shut down"):
                use()


def test_default_sampling_params_come_from_the_folder(engine: InferenceEngine) -> None:
    assert engine.default_sampling_params() == default_sampling_params(reference.FOLDER)


FLOAT = EngineConfig(dtype="float32")


def test_reference_logprobs_come_from_the_second_weights() -> None:
    """Frozen while the others change; held against Transformers' own forward pass."""
    prompts = ["98 + 25 =", "Once upon"]
    sampled = [SamplingParams(max_tokens=9, seed=1), SamplingParams(max_tokens=4, temperature=0)]
    with InferenceEngine(FLOAT, reference=FLOAT) as engine:
        for sample in engine.generate(prompts, sampled):
            assert sample.ref_logprobs == pytest.approx(sample.logprobs, abs=1e-4)
        new = {name: tensor * 0.7 for name, tensor in engine.state_dict().items()}
        engine.update_weights(new, blocking=True)
        requests = [engine.add_request(prompt, sampled[0], 2) for prompt in prompts]
        samples = finish(engine)
        assert len(samples) == 2 * len(requests)
        for sample in samples:
            wanted = reference.logprobs(list(sample.prompt_tokens), list(sample.completion_tokens))
            assert sample.ref_logprobs == pytest.approx(wanted, abs=1e-4)
            assert sample.logprobs != pytest.approx(wanted, abs=1e-2)


def test_completions_can_be_scored(engine: InferenceEngine) -> None:
    """The same as the sampler reported, at the sampler's temperature."""
    params = [SamplingParams(max_tokens=8, temperature=t, seed=3) for t in (0.5, 2.0)]
    samples = engine.generate([[70, 71, 72], [80] * 40], params)
    scores = engine.score(
        [sample.prompt_tokens for sample in samples],
        [sample.completion_tokens for sample in samples],
        params,
    )
    for sample, score in zip(samples, scores, strict=True):
        assert score == pytest.approx(sample.logprobs, abs=1e-3)
    with pytest.raises(ValueError, match="at least one token"):
        engine.score([[70]], [[]])
    with pytest.raises(ValueError, match="one completion for each"):
        engine.score([[70], [71]], [[5]])


def test_memory_is_released_under_way_and_taken_again() -> None:
    """Requests under way go on with the tokens that they would have had."""
    with InferenceEngine(FLOAT, reference=FLOAT) as engine:
        state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        prompt = list(range(60, 100))
        (wanted,) = engine.generate([prompt], ENDLESS_8)
        engine.add_request(prompt, ENDLESS_8)
        for _ in range(3):
            engine.step()
        engine.release_memory(["kv_cache"])
        engine.release_memory()
        for stuck in (engine.step, engine.state_dict, lambda: engine.generate(["a"])):
            with raises("memory_released", "weights, kv_cache", kind=WeightsError):
                stuck()
        engine.resume_memory(["kv_cache"])
        with pytest.raises(WeightsError, match="resume it before"):
            engine.update_weights(state)
        engine.resume_memory()
        assert engine.step() == [], "the refused request has ended"
        with pytest.raises(WeightsError, match="all of them"):
            engine.step()
        engine.update_weights(state)
        samples = finish(engine)
        (sample,) = samples
        assert sample.completion_tokens == wanted.completion_tokens
        assert sample.weight_versions == ((0, 0), (1, 3))
        assert sample.ref_logprobs == pytest.approx(wanted.ref_logprobs, abs=1e-4)


def test_an_interrupted_release_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with InferenceEngine(FLOAT) as engine:
        (wanted,) = engine.generate([[60, 61]], ENDLESS_8)
        with monkeypatch.context() as patch:
            patch.setattr(ReplicaMemory, "release", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.release_memory()
        engine.resume_memory()
        assert engine.generate([[60, 61]], ENDLESS_8) == [wanted], "nothing was lost"
        engine.release_memory(["kv_cache"])
        assert engine._executor.part(MemoryRelease).memory.released == {"kv_cache"}


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_cpu_threads_sets_torch_s_threads() -> None:
    before = torch.get_num_threads()
    try:
        for number in (2, 1):
            with InferenceEngine(EngineConfig(cpu_threads=number)):
                assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(before)


# --- arguments -------------------------------------------------------------------------------


TWO_TOKENS = SamplingParams(temperature=0, max_tokens=2)


NO_PROMPT: list[tuple[Any, str]] = [
    ([1.5], "invalid_token_ids"),
    ([True, 2], "invalid_token_ids"),
    (["a"], "invalid_token_ids"),
    ([[1]], "invalid_token_ids"),
    (np.array([1.0, 2.0]), "invalid_token_ids"),
    (torch.tensor([True]), "invalid_token_ids"),
    (b"ab", "invalid_prompt"),
    (None, "invalid_prompt"),
    (7, "invalid_prompt"),
    ({1: 2}, "invalid_prompt"),
    ({1, 2}, "invalid_prompt"),
]


@pytest.mark.parametrize(("prompt", "code"), NO_PROMPT)
def test_prompt_of_a_wrong_type_is_refused(engine: InferenceEngine, prompt: Any, code: str) -> None:
    for refuse in (
        lambda: engine.generate(["1 + 1 =", prompt], TWO_TOKENS),
        lambda: engine.add_request(prompt, TWO_TOKENS),
        lambda: engine.embed([prompt]),
        lambda: engine.score([prompt], [[1]]),
        lambda: engine.score([[1]], [prompt]),
    ):
        with raises(code):
            refuse()
    prediction: Any = 0 if prompt is None else prompt
    with raises("invalid_prediction"):
        engine.generate(["1 + 1 ="], TWO_TOKENS, predictions=[prediction])
    assert not engine.has_pending()


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([{"role": "user", "content": "hi"}], r"by ChatRenderer\(model\).render\(messages\)"),
        ({"prompt_token_ids": [1]}, "pass the list of its prompt_token_ids"),
    ],
)
def test_prompts_of_other_engines_are_refused_with_the_form_here(prompt: Any, says: str) -> None:
    with raises("invalid_prompt", says):
        prompt_of(prompt)


@pytest.mark.parametrize("prompts", ["abc", b"abc", 7, None, {"a": 1}, np.array(5), np.array(b"a")])
def test_prompts_that_are_no_list_are_refused(engine: InferenceEngine, prompts: Any) -> None:
    for refuse in (
        lambda: engine.generate(prompts, TWO_TOKENS),
        lambda: engine.embed(prompts),
        lambda: engine.score(prompts, [[1]] * 3),
    ):
        with raises("invalid_prompt", "pass a list"):
            refuse()
    if prompts is not None:
        with raises("invalid_prediction", r"predictions is .*; pass a list"):
            engine.generate(["1 + 1 ="], TWO_TOKENS, predictions=prompts)


def test_prompts_may_be_arrays_tensors_and_iterators(engine: InferenceEngine) -> None:
    wanted = engine.generate([[5, 6], [7, 8]], TWO_TOKENS)
    for prompts in (
        [np.array([5, 6]), torch.tensor([7, 8])],
        torch.tensor([[5, 6], [7, 8]]),
        iter([[np.int64(5), torch.tensor(6)], range(7, 9)]),
    ):
        found = engine.generate(prompts, TWO_TOKENS)  # type: ignore[arg-type]
        assert [each.prompt_tokens for each in found] == [each.prompt_tokens for each in wanted]
        # Bits are equal in deterministic mode, which needs the kernels.
        error = 1e-4 if "deterministic" in engine._executor.off else 0.0
        assert [each.logprobs for each in found] == [
            pytest.approx(each.logprobs, abs=error, rel=0.0) for each in wanted
        ]


@pytest.mark.parametrize("number", [1.5, 2.0, True, "2", None, 0])
def test_wrong_number_of_samples_is_refused(engine: InferenceEngine, number: Any) -> None:
    with raises("invalid_n"):
        engine.generate([[1]], TWO_TOKENS, number)


def test_a_prompt_may_have_more_samples_than_a_server_allows(engine: InferenceEngine) -> None:
    assert len(engine.generate([[1]], SamplingParams(max_tokens=1), 70)) == 70


def test_calls_translate_names_of_other_engines(engine: InferenceEngine) -> None:
    for given, said in ({"n": 4}, "num_samples_per_prompt=4"), ({"use_tqdm": 1}, "show_progress=1"):
        with pytest.raises(TypeError, match=f"generate has no {next(iter(given))}; say {said}"):
            engine.generate([[1]], TWO_TOKENS, **given)  # type: ignore[arg-type]
    with raises("invalid_request", "takes a TrainingSample or a Completion, not 'x'"):
        engine.replay("x")  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="has no LLM; use InferenceEngine"):
        nano_inference.LLM  # noqa: B018


@pytest.mark.parametrize("params", [5, "abc", [object()], {"temperature": 0}, [5]])
def test_parameters_of_a_wrong_type_are_refused(engine: InferenceEngine, params: Any) -> None:
    for refuse in (
        lambda: engine.generate([[1]], params),
        lambda: engine.score([[1]], [[2]], params),
    ):
        with raises("invalid_request", "sampling_params"):
            refuse()


@pytest.mark.parametrize("name", ["stop", "constraint"])
def test_bytes_in_place_of_text_are_refused(engine: InferenceEngine, name: str) -> None:
    given: dict[str, Any] = {"stop": (b"ab",), "constraint": {"regex": b"ab"}}
    with raises("invalid_request", "it must be a text"):
        engine.generate([[1]], SamplingParams(**{name: given[name]}))


@pytest.mark.parametrize("adapter", [5, None, ["a"]])
def test_adapter_of_a_wrong_type_is_refused(engine: InferenceEngine, adapter: Any) -> None:
    with raises("unknown_model"):
        engine.generate([[1]], TWO_TOKENS, adapter=adapter)


# --- the contract with trainers --------------------------------------------------------------


METHODS = ("flush_cache", "generate", "get_weight_version", "shutdown", "update_weights")


def test_a_trainer_written_against_the_contract_runs() -> None:
    """One round in flight and one in turn, by the contract alone."""
    made = InferenceEngine()
    weights = made.state_dict()
    engine: RolloutEngine = made
    assert isinstance(engine, RolloutEngine)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    samples = engine.generate([[70, 71], [80]], params, num_samples_per_prompt=2)
    engine.update_weights(weights)
    samples += engine.generate([[70, 71]], [params])
    engine.update_weights(weights, blocking=True)
    engine.flush_cache()
    assert engine.get_weight_version() == 2
    samples += engine.generate([[80]], params)
    engine.shutdown()
    engine.shutdown()
    prompts = [(70, 71), (70, 71), (80,), (80,), (70, 71), (80,)]
    assert [sample.prompt_tokens for sample in samples] == prompts
    assert [sample.weight_version for sample in samples] == [0, 0, 0, 0, 1, 2]
    assert all(len(sample.logprobs) == len(sample.completion_tokens) for sample in samples)


def test_a_class_without_a_method_does_not_fulfil_the_contract() -> None:
    assert not isinstance(SamplingParams(), RolloutEngine)
    assert sorted(name for name in vars(RolloutEngine) if name[0] != "_") == list(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_the_engine_s_signatures_match_the_contract(method: str) -> None:
    """By the same names, in the same order, and nothing more that is needed."""
    wanted = inspect.signature(getattr(RolloutEngine, method)).parameters
    ours = inspect.signature(getattr(InferenceEngine, method)).parameters
    assert list(ours)[: len(wanted)] == list(wanted)
    for name, parameter in wanted.items():
        if parameter.default is not parameter.empty:
            assert ours[name].default == parameter.default
    for name in ours.keys() - wanted.keys():
        assert ours[name].default is not inspect.Parameter.empty
