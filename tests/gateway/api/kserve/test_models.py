"""The engine's models: tensors in, engine requests, and tensors out."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from nano_inference.bus.public import EmbedParams, GenerateRequest, Output
from nano_inference.config import Constraint, RequestError, load_config
from nano_inference.gateway.api.kserve.models.backend import SAMPLING
from nano_inference.gateway.api.kserve.service import InferenceService
from nano_inference.gateway.call import Call
from nano_inference.gateway.caller import Caller
from nano_inference.gateway.serving.chain import Outputs, PolicyChain
from nano_inference.gateway.serving.samples import MOST_UNSENT
from nano_inference.kserve.tensors import InferRequest, InferResponse, NamedTensor, TensorError

from ....errors import raises
from ....pipeline.kserve import a_call, arrays, as_lists, infer_request, service_of, stream
from ... import made
from ...fake import FakeEngine, completion, refused, sample

TEXT = {"text_input": "one two"}
IDS = {"input_ids": [1, 2]}
Lists = dict[str, Any]
"""The outputs of a response, by name."""


class Engine(FakeEngine):
    """An engine and its models.

    Attributes:
        service: The models.
    """

    service: InferenceService

    async def infer(self, model: str, /, outputs: Sequence[str] = (), **inputs: Any) -> Lists:
        """Call a model with what `infer_request` takes."""
        request = infer_request(model, outputs, **inputs)
        return as_lists(await self.service.infer_once(a_call(), request))

    async def stream(
        self, model: str, /, outputs: Sequence[str] = (), **inputs: Any
    ) -> list[Lists]:
        """The same as a stream, of which all responses are read."""
        request = infer_request(model, outputs, **inputs)
        return [as_lists(each) for each in await stream(self.service, request)]


@pytest.fixture
def engine() -> Engine:
    made = Engine()
    made.service = service_of(made, load_config(env={}))  # type: ignore[arg-type]
    return made


def in_pieces(request: GenerateRequest) -> list[Output]:
    """The second sample first, then the first one; the end tells the last token of each."""
    chunks: list[Output] = [
        made.chunk(request, index, place) for index in (1, 0) for place in range(2)
    ]
    return [*chunks, completion(request, made.told(request, 0), made.told(request, 1, "length"))]


# --- how to sample ----------------------------------------------------------------------------


async def test_parameters_have_the_names_of_vllm(engine: Engine) -> None:
    given = {
        "n": 2,
        "temperature": 0.5,
        "top_k": -1,
        "stop": ["a", "b"],
        "max_tokens": 7,
        "logit_bias": {"5": 1.5},
        "repetition_penalty": None,
        "spaces_between_special_tokens": False,
        "structured_outputs": {"choice": ["yes", "no"]},
    }
    await engine.service.infer_once(
        a_call("mine"), infer_request("tiny", **TEXT, sampling_parameters=given)
    )
    (request,) = engine.requests
    assert (request.prompt, request.n) == ("one two", 2)
    assert (request.tenant, request.stream) == ("mine", False)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.5, 0, 7)
    assert (sampling.stop, sampling.logit_bias) == (("a", "b"), {5: 1.5})
    assert sampling.constraint == Constraint(choice=("yes", "no"))


async def test_numbers_may_be_written_as_texts(engine: Engine) -> None:
    """vLLM's own examples send texts."""
    given = {
        "temperature": "0.1",
        "top_p": "0.95",
        "max_tokens": "100",
        "stop": "7",
        "ignore_eos": "True",
    }
    await engine.infer("tiny", **TEXT, sampling_parameters=given)
    await engine.infer("tiny", **TEXT, parameters=given)
    first, second = (each.sampling for each in engine.requests)
    assert first == second
    assert (first.temperature, first.top_p, first.max_tokens) == (0.1, 0.95, 100)
    assert (first.stop, first.ignore_eos) == (("7",), True)


async def test_request_parameters_are_no_sampling_parameters(engine: Engine) -> None:
    parameters = {
        "timeout_ns": 10**10,
        "timeout": 10**9,
        "triton_enable_empty_final_response": True,
        "priority": 3,
        "cache_salt": "s",
    }
    given = {"temperature": 0.5}
    beside = TEXT | {"sampling_parameters": {"max_tokens": 3}}
    await engine.infer("tiny", parameters=parameters | given, **TEXT)
    await engine.infer("tiny", parameters=parameters, **beside)
    # Where there is a tensor, it has them all.
    with raises("unsupported", param="parameters.temperature"):
        await engine.infer("tiny", parameters=given, **beside)
    first, second = engine.requests
    assert (first.priority, first.cache_salt, first.sampling.temperature) == (-3, "s", 0.5)
    assert 0 < first.budget_ns <= 10**10
    assert (second.priority, second.sampling.temperature) == (-3, 1)
    assert (first.sampling.max_tokens, second.sampling.max_tokens) == (16, 3)


@pytest.mark.parametrize(
    ("model", "inputs", "name", "place"),
    [
        ("tiny", TEXT, "stream", r"BOOL \[1\]; .* call ModelStreamInfer"),
        ("tiny.tokens", IDS, "stream", r"BOOL \[1\]; .* call ModelStreamInfer"),
        ("tiny.best_of", IDS, "best_of", r"INT64 \[1\]$"),
        ("tiny.embed", {"text_input": ["one"]}, "sampling_parameters", r"BYTES \[1\]$"),
    ],
)
async def test_an_input_sent_as_a_parameter_is_refused_with_advice(
    engine: Engine, model: str, inputs: dict[str, Any], name: str, place: str
) -> None:
    why = f"^{name} is an input of {model}, and no parameter; .*{place}"
    with pytest.raises(RequestError, match=why):
        await engine.infer(model, parameters={name: True}, **inputs)
    assert engine.requests == []


@pytest.mark.parametrize("model", ["tiny", "tiny.tokens", "tiny.best_of", "tiny.embed"])
async def test_an_error_says_whether_a_parameter_or_the_tensor_was_wrong(
    engine: Engine, model: str
) -> None:
    inputs: dict[str, Any] = {"tiny": TEXT, "tiny.embed": {"text_input": ["one"]}}.get(model, IDS)
    given = {"temprature": 1}
    with pytest.raises(RequestError, match=r"^parameters\.temprature is not"):
        await engine.infer(model, parameters=given, **inputs)
    with pytest.raises(RequestError, match=r"^sampling_parameters\.temprature is not"):
        await engine.infer(model, **inputs, sampling_parameters=given)


@pytest.mark.parametrize("model", ["tiny", "tiny.tokens", "tiny.score", "tiny.best_of"])
@pytest.mark.parametrize(
    ("given", "code", "word"),
    [
        ({"temprature": 1}, "unsupported", "temprature"),
        ({"lora_name": "mine"}, "unsupported", "lora_name"),
        ({"structured_outputs": "{}"}, "invalid_request", "structured_outputs"),
        ({"prompt_logprobs": 1}, "unsupported", "prompt_logprobs"),
        ({"temperature": "hot"}, "invalid_request", "hot"),
        ({"temperature": [1]}, "invalid_request", "temperature"),
        ({"n": 10**6}, "too_many_prompts", "samples"),
        ("[]", "invalid_tensor", "sampling_parameters"),
        ("{", "invalid_tensor", "sampling_parameters"),
        (b"\xff", "invalid_tensor", "UTF-8"),
    ],
)
async def test_other_parameters_are_refused_by_name(
    engine: Engine, model: str, given: Any, code: str, word: str
) -> None:
    inputs: dict[str, Any] = {
        "tiny": TEXT,
        "tiny.score": {"prompt_ids": [1], "completion_ids": [2]},
    }.get(model, IDS)
    with raises(code, word):
        await engine.infer(model, **inputs, sampling_parameters=given)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"skip_special_tokens": False}, False),
        ({"skip_special_tokens": True}, True),
        ({"include_stop_str_in_output": True}, False),
        ({"detokenize": False}, False),
    ],
)
async def test_texts_are_made_in_one_way(
    engine: Engine, given: dict[str, Any], taken: bool
) -> None:
    """Parameters about text have no effect on a model that returns tokens alone."""
    await engine.infer("tiny.tokens", **IDS, sampling_parameters=given)
    with nullcontext() if taken else raises("unsupported", next(iter(given))):
        await engine.infer("tiny", **TEXT, sampling_parameters=given)


# --- texts ------------------------------------------------------------------------------------


async def test_only_requested_outputs_are_returned(engine: Engine) -> None:
    engine.outputs = lambda request: [completion(request, made.told(request, 0))]
    alone = await engine.infer("tiny", **TEXT)
    assert alone == {"text_output": ["one twofive six seven"]}
    names = ["num_output_tokens", "text_output"]
    assert list(await engine.infer("tiny", names, **TEXT)) == names
    found = await engine.infer("tiny", names, **TEXT, return_num_output_tokens=False)
    assert list(found) == ["text_output"]


@pytest.mark.parametrize("exclude", [None, False, True])
async def test_the_prompt_stands_before_the_text_unless_it_is_excluded(
    engine: Engine, exclude: bool | None
) -> None:
    """Guardrails of outputs receive that text."""
    seen: list[str] = []

    class Seen:
        async def outputs(
            self, call: Call, request: GenerateRequest, outputs: Outputs, before: str
        ) -> Outputs:
            seen.append(before)
            async for output in outputs:
                yield output

    engine.service = service_of(engine, load_config(env={}), PolicyChain(outputs=[Seen()]))  # type: ignore[arg-type]
    flags = {} if exclude is None else {"exclude_input_in_output": exclude}
    found = await engine.infer("tiny", **TEXT, **flags)
    before = "" if exclude else "one two"
    assert found["text_output"] == [f"{before}five six"]
    assert seen == [before]


async def test_logprobs_are_json_as_vllm_writes_it(engine: Engine) -> None:
    engine.outputs = lambda request: [completion(request, made.told(request, 0))]
    given = {"logprobs": 2}
    found = await engine.infer("tiny", **TEXT, sampling_parameters=given, return_logprobs=True)
    places = json.loads(*found["logprobs"])
    assert [list(place) for place in places] == [["5", "6"], ["6", "7"], ["7", "8"]]
    assert places[0]["5"]["logprob"] == -0.25
    assert [entry["rank"] for entry in places[0].values()] == [1, 2]
    assert all(isinstance(entry["decoded_token"], str) for entry in places[0].values())


async def test_a_stream_has_the_new_tokens_of_all_samples(engine: Engine) -> None:
    engine.outputs = in_pieces
    names = ["text_output", "finish_reason", "cumulative_logprob", "num_output_tokens"]
    two = {"sampling_parameters": {"n": 2}}
    found = await engine.stream("tiny", names, **TEXT, **two, stream=True)
    for index, reason in enumerate(("stop", "length")):
        assert "".join(each["text_output"][index] for each in found) == "five six seven"
        assert sum(each["num_output_tokens"][index] for each in found) == 3
        assert found[-1]["finish_reason"][index] == reason
        sums = [each["cumulative_logprob"][index] for each in found]
        assert sums == sorted(sums, reverse=True)
        assert sums[-1] == -1.5
    assert engine.requests[0].stream
    assert found[0]["finish_reason"] == ["None", "None"]


@pytest.mark.parametrize("many", [True, False])
async def test_one_answer_is_whole_though_a_stream_was_wanted(engine: Engine, many: bool) -> None:
    """Both a unary call and a stream without `stream` get it."""
    if many:
        (alone,) = await engine.stream("tiny", **TEXT, stream=False)
    else:
        alone = await engine.infer("tiny", **TEXT, stream=True)
    assert alone["text_output"] == ["one twofive six" if many else "five six"]
    assert not engine.requests[0].stream


async def test_a_stream_does_not_begin_with_the_prompt(engine: Engine) -> None:
    with pytest.raises(RequestError, match="exclude_input_in_output"):
        await engine.stream("tiny", **TEXT, stream=True, exclude_input_in_output=False)


async def test_an_aborted_request_has_empty_samples(engine: Engine) -> None:
    """Also samples that never began, and those of a stream."""
    engine.outputs = lambda request: [
        completion(request, sample(finish_reason="abort"), status="cancelled")
    ]
    inputs: dict[str, Any] = {"sampling_parameters": {"n": 2}, "return_finish_reason": True}
    whole = await engine.infer("tiny", **TEXT, **inputs)
    assert whole["text_output"] == ["one twofive six", "one two"]
    assert whole["finish_reason"] == ["abort", "abort"]
    (streamed,) = await engine.stream("tiny", **TEXT, **inputs, stream=True)
    assert streamed["text_output"] == ["five six", ""]
    assert streamed["finish_reason"] == ["abort", "abort"]


# --- token ids and scores ---------------------------------------------------------------------


async def test_rows_are_padded_after_their_end(engine: Engine) -> None:
    engine.outputs = lambda request: [
        completion(request, made.told(request, 0), sample((8,), sample_index=1))
    ]
    assert await engine.infer("tiny.tokens", **IDS, sampling_parameters={"n": 2}) == {
        "output_ids": [[5, 6, 7], [8, -1, -1]],
        "num_output_tokens": [3, 1],
        "logprobs": [[-0.25, -0.5, -0.75], [-0.5, 0, 0]],
        "finish_reason": ["stop", "length"],
        "weight_version": [[3, 3, 4], [3, -1, -1]],
    }


async def test_a_stream_of_token_ids_says_which_weights_made_them(engine: Engine) -> None:
    engine.outputs = in_pieces
    two = {"sampling_parameters": {"n": 2}}
    found = await engine.stream("tiny.tokens", **IDS, **two, stream=True)

    def joined(name: str, index: int) -> list[Any]:
        parts = [each[name][index][: each["num_output_tokens"][index]] for each in found]
        return [value for part in parts for value in part]

    for index in (0, 1):
        assert joined("output_ids", index) == [5, 6, 7]
        assert joined("weight_version", index) == [3, 3, 4]
        assert joined("logprobs", index) == [-0.25, -0.5, -0.75]
    assert found[-1]["finish_reason"] == ["stop", "length"]


async def test_tokens_has_no_likeliest_tokens(engine: Engine) -> None:
    with raises("unsupported", "logprobs"):
        await engine.infer("tiny.tokens", **IDS, sampling_parameters={"logprobs": 2})


async def test_a_score_is_of_the_completion_alone(engine: Engine) -> None:
    engine.outputs = lambda request: [completion(request, **made.scores(request))]
    found = await engine.infer("tiny.score", prompt_ids=[1, 2], completion_ids=[3, 4, 5])
    assert found == {"logprobs": [-3, -4, -5], "weight_version": [3]}
    (sent,) = engine.requests
    assert (sent.prompt_token_ids, sent.sampling.max_tokens) == ((1, 2, 3, 4, 5), 1)


async def test_targets_are_scored_in_place_of_the_tokens(engine: Engine) -> None:
    engine.outputs = lambda request: [completion(request, **made.scores(request))]
    inputs = {"prompt_ids": [1, 2], "completion_ids": [3, 4]}
    found = await engine.infer("tiny.score", **inputs, target_ids=[[7, -1], [8, 9]])
    assert found["target_logprobs"] == [[-0.5, -np.inf], [-1.5, -2.5]]
    (request,) = engine.requests
    assert request.sampling.prompt_logprob_start == 1
    with raises("invalid_tensor", "target_ids has 1 rows for 2 tokens"):
        await engine.infer("tiny.score", **inputs, target_ids=[[7]])


async def test_an_aborted_score_is_an_error(engine: Engine) -> None:
    engine.outputs = lambda request: [completion(request, status="cancelled")]
    with raises("aborted"):
        await engine.infer("tiny.score", prompt_ids=[1], completion_ids=[3])


@pytest.mark.parametrize(
    ("inputs", "vectors"),
    [
        ({"text_input": ["abc", "de"]}, [[3, -0.5, 294], [2, -0.5, 201]]),
        ({"input_ids": [4, 5]}, [[2, -0.5, 9]]),
    ],
)
async def test_texts_or_tokens_are_embedded(
    engine: Engine, inputs: dict[str, Any], vectors: list[list[float]]
) -> None:
    engine.outputs = made.embedded
    given = {"pooling": "mean", "dimensions": 2, "normalize": False}
    request = infer_request("tiny.embed", **inputs, sampling_parameters=given)
    found = arrays(await engine.service.infer_once(a_call("mine"), request))
    assert found["embedding"].dtype == np.float32
    assert found["embedding"].tolist() == vectors
    assert found["weight_version"].tolist() == [3] * len(vectors)
    assert [(each.embed, each.tenant) for each in engine.requests] == [
        (EmbedParams(pooling="mean", dimensions=2, normalize=False), "mine")
    ] * len(vectors)


async def test_no_texts_are_refused(engine: Engine) -> None:
    nothing = NamedTensor("text_input", np.empty(0, np.object_))
    request = InferRequest(model_name="tiny.embed", inputs=(nothing,))
    with raises("empty_prompt"):
        await engine.service.infer_once(a_call(), request)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("inputs", "given", "code"),
    [
        ({}, {}, "invalid_tensor"),
        ({"text_input": ["a"], "input_ids": [1]}, {}, "invalid_tensor"),
        ({"input_ids": []}, {}, "empty_prompt"),
        ({"text_input": ["a"]}, {"temperature": 1}, "unsupported"),
        ({"text_input": ["a"]}, {"pooling": "max"}, "invalid_request"),
        ({"text_input": ["a"]}, {"dimensions": 1.5}, "invalid_request"),
        ({"text_input": ["a"]}, {"dimensions": 2**70}, "invalid_request"),
    ],
)
async def test_impossible_embeddings_are_refused(
    engine: Engine, inputs: dict[str, Any], given: dict[str, Any], code: str
) -> None:
    with raises(code):
        await engine.infer("tiny.embed", **inputs, sampling_parameters=given)
    assert engine.requests == []


@pytest.mark.parametrize("empty", ["prompt_ids", "completion_ids"])
async def test_token_ids_are_required(engine: Engine, empty: str) -> None:
    inputs: dict[str, Any] = {"prompt_ids": [1], "completion_ids": [2]}
    with raises("empty_prompt", empty):
        await engine.infer("tiny.score", **inputs | {empty: []})
    with raises("prompt_too_long", empty):
        await engine.infer("tiny.score", **inputs | {empty: [3] * 10**5})
    assert engine.requests == []


# --- every model ------------------------------------------------------------------------------


async def test_specs_of_the_models(engine: Engine) -> None:
    specs = {each.name: each for each in engine.service.specs()}
    assert {name: each.decoupled for name, each in specs.items()} == {
        "tiny": True,
        "tiny.tokens": True,
        "tiny.score": False,
        "tiny.embed": False,
        "tiny.best_of": False,
    }
    assert [each.name for each in specs["tiny"].inputs if not each.optional] == ["text_input"]


async def test_the_page_has_each_tensor_of_each_model(engine: Engine) -> None:
    """With its datatype. What all models take stands before them, and `return_X` for each X."""
    page = (Path(__file__).parents[4] / "docs" / "kserve-models.md").read_text()
    sections = dict(re.findall(r"^## `M([^`]*)`\n(.*?)(?=^## )", page, re.M | re.S))
    specs = {each.name.removeprefix("tiny"): each for each in engine.service.specs()}
    assert set(sections) == set(specs)
    for name, spec in specs.items():
        rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+)\?? \| ([^`]+) `", sections[name], re.M)
        written = {
            (tensor, datatype)
            for tensors, datatypes in rows
            for tensor, datatype in zip(
                re.findall(r"\w+", tensors), datatypes.split(", "), strict=True
            )
        }
        tensors = {
            ("return_X" if each.name.startswith("return_") else each.name, each.datatype)
            for each in (*spec.inputs, *spec.outputs)
            if each.name != SAMPLING.name
        }
        assert written == tensors


async def test_wrong_tensors_do_not_reach_the_engine(engine: Engine) -> None:
    for tensor in (
        NamedTensor("input_ids", np.zeros(2, np.int32)),
        NamedTensor("input_ids", np.zeros((1, 2), np.int64)),
        NamedTensor("ids", np.zeros(2, np.int64)),
    ):
        request = msgspec.structs.replace(infer_request("tiny.tokens"), inputs=(tensor,))
        with pytest.raises(TensorError):
            await engine.service.infer_once(a_call(), request)
    assert engine.requests == []


async def test_engine_errors_are_the_calls_errors(engine: Engine) -> None:
    engine.outputs = refused("overloaded", retry_after_s=2)
    with raises("overloaded"):
        await engine.infer("tiny", **TEXT)
    with raises("overloaded"):
        await engine.stream("tiny.tokens", **IDS, stream=True)
    assert engine.service.statistics.model("tiny").stats["fail"]["count"] == 1


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_call_that_is_cancelled_leaves_nothing_behind(
    engine: Engine, streamed: bool
) -> None:
    engine.outputs = lambda request: [made.chunk(request, 0, 0)]
    request = infer_request("tiny.tokens", **IDS, stream=streamed)
    async with anyio.create_task_group() as group:
        group.start_soon(stream, engine.service, request)
        await engine.until(lambda: bool(engine.requests))
        group.cancel_scope.cancel()
    assert engine.left == [engine.requests[0].request_id]
    failed = engine.service.statistics.model("tiny.tokens").stats["fail"]
    assert failed["count"] == 1


async def test_a_slow_reader_slows_its_own_request(engine: Engine) -> None:
    """Unread samples are bounded, and come in one response."""
    pulled = 0

    def many(request: GenerateRequest) -> Any:
        nonlocal pulled
        for _ in range(3 * MOST_UNSENT // 100):
            pulled += 100
            yield msgspec.structs.replace(
                made.chunk(request, 0, 0), token_ids=(5,) * 100, logprobs=(-1.0,) * 100
            )
        yield completion(request, sample((5,) * pulled))

    engine.outputs = many
    answers: list[InferResponse] = []
    reads = anyio.Event()

    async def respond(response: InferResponse) -> None:
        answers.append(response)
        await reads.wait()

    request = infer_request("tiny.tokens", **IDS, stream=True)
    async with anyio.create_task_group() as group:

        async def call() -> None:
            await engine.service.infer(a_call(), request, respond, many=True)

        group.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        assert pulled < 2 * MOST_UNSENT
        reads.set()
    sizes = [int(arrays(each)["num_output_tokens"][0]) for each in answers]
    assert sum(sizes) == pulled > 2 * MOST_UNSENT
    assert max(sizes) > MOST_UNSENT


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_failed_send_ends_the_call(engine: Engine, streamed: bool) -> None:
    """With its own error, and the engine goes on with nothing."""
    if streamed:
        engine.outputs = lambda request: [made.chunk(request, 0, 0)]

    async def respond(response: InferResponse) -> None:
        raise TensorError("there is no such region any more")

    request = infer_request("tiny.tokens", **IDS, stream=streamed)
    with pytest.raises(TensorError):
        await engine.service.infer(a_call(), request, respond, many=True)
    assert len(engine.left) == streamed


async def test_a_key_for_a_model_allows_its_variants(engine: Engine) -> None:
    allowed = a_call(caller=Caller(models=("tiny",)))
    other = a_call(caller=Caller(models=("large",)))
    for model, inputs in (("tiny", TEXT), ("tiny.tokens", IDS)):
        request = infer_request(model, **inputs)
        await engine.service.infer_once(allowed, request)
        with raises("model_not_found"):
            await engine.service.infer_once(other, request)
    assert len(engine.service.specs(caller=allowed.caller)) == 5
    assert engine.service.specs(caller=other.caller) == []


async def test_models_are_ready_with_their_engine(engine: Engine) -> None:
    assert all(each.ready for each in await engine.service.states())
    engine.why_not = "no lane works"
    fresh = service_of(engine, load_config(env={}))  # type: ignore[arg-type]
    states = await fresh.states()
    assert [each.ready for each in states] == [False] * 5
    assert all("no lane works" in each.reason for each in states)
