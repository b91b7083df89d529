from __future__ import annotations

from typing import Any

import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from nano_inference.bus.control import ReplicaCapacity
from nano_inference.bus.entries import Malformed, RequestEntry
from nano_inference.bus.messages import AdmittedRequest, RequestInfo
from nano_inference.bus.parts.recipes import FingerprintCapacity
from nano_inference.bus.public import ChatMessage, Fingerprint, GenerateRequest, Recipe
from nano_inference.bus.recipes import RecipeParts
from nano_inference.bus.sections import with_sections
from nano_inference.config import (
    AdmissionConfig,
    Config,
    EngineConfig,
    RequestError,
    SamplingParams,
)
from nano_inference.stages.admission.arrivals import Accepted
from nano_inference.stages.admission.checks import request_id_of
from nano_inference.stages.admission.core import AdmissionCore, status_of
from nano_inference.stages.admission.participants import differing_fields, fingerprints_of, smallest
from nano_inference.stages.admission.parts.adapters import Adapters
from nano_inference.store.loaded_adapter import LoadedAdapter

from ...errors import raises

CAPACITY = ReplicaCapacity(
    num_blocks=4, block_size=16, max_model_len=100, vocab_size=258, device="cpu"
)
HUGE = 10**5000
SURROGATE = "\ud800"
RECEIVED_NS = 1_000
NOW_NS = 1_500


def core_of(
    tokenizer: PreTrainedTokenizerFast, *, capacity: ReplicaCapacity = CAPACITY, **engine: Any
) -> AdmissionCore:
    config = Config(
        engine=EngineConfig(model_path="/models/tiny-7b", **engine),
        admission=AdmissionConfig(max_in_flight=3, max_samples=4),
    )
    core = AdmissionCore(config, tokenizer, frozenset({1}))
    core.set_capacity(capacity)
    return core


@pytest.fixture
def core(tokenizer: PreTrainedTokenizerFast) -> AdmissionCore:
    return core_of(tokenizer)


def entry_of(entry_id: str = "7-0", **fields: Any) -> RequestEntry:
    """A valid request, with these fields changed; those of SamplingParams count as fields."""
    sampling = {
        name: fields.pop(name) for name in SamplingParams.__struct_fields__ if name in fields
    }
    if not {"prompt", "prompt_token_ids", "messages"} & fields.keys():
        fields["prompt"] = "abc"
    sampling.setdefault("max_tokens", 8)
    request = GenerateRequest(
        sampling=msgspec.structs.replace(SamplingParams(), **sampling), **fields
    )
    return RequestEntry(entry_id, request)


def recipe_of(accepted: Accepted) -> Recipe:
    found = RecipeParts.find(accepted.opened.parts)
    assert found is not None
    return found.recipe()


def accept(core: AdmissionCore, entry: RequestEntry, *, owner: str | None = None) -> Accepted:
    return core.admit(entry, RECEIVED_NS, NOW_NS, owner=owner, trace=("00-a-b-01", "k=v"))


def admit(core: AdmissionCore, entry: RequestEntry, *, owner: str | None = None) -> AdmittedRequest:
    return accept(core, entry, owner=owner).admitted


def turns(*pairs: tuple[str, str]) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(role=role, content=content) for role, content in pairs)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "tiny", "gpt", "default"])
def test_each_name_of_a_model_is_accepted(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    core = core_of(tokenizer, model_id="tiny", model_aliases=("gpt", "default"))
    assert accept(core, entry_of(model=name)).opened.model == "tiny", "its id is reported"
    for other in ("tiny-7b", "gp", "Tiny"):
        with pytest.raises(RequestError, match="ask for 'tiny'"):
            admit(core, entry_of(model=other))


@pytest.mark.parametrize(
    ("beside", "own", "admitted"),
    [
        ("tiny", "another", True),
        ("gpt", "another", True),
        ("another", "tiny", False),
        ("tiny", "gpt", True),
        ("tiny", "", True),
        ("", "another", False),
    ],
)
def test_an_entrys_model_wins_over_its_requests(
    tokenizer: PreTrainedTokenizerFast, beside: str, own: str, admitted: bool
) -> None:
    core = core_of(tokenizer, model_id="tiny", model_aliases=("gpt",))
    entry = msgspec.structs.replace(entry_of(model=own), model=beside)
    if admitted:
        assert accept(core, entry).opened.model == "tiny"
        return
    with raises("unknown_model"):
        admit(core, entry)


def test_a_model_does_not_answer_for_its_adapter_that_was_unloaded(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Gateways name the model beside the adapter, and may know of the unload a second later."""
    core = core_of(tokenizer, model_id="tiny")
    entry = msgspec.structs.replace(entry_of(model="lora"), model="tiny")
    core.part(Adapters).set([LoadedAdapter("lora", 1)])
    assert accept(core, entry).opened.model == "lora"
    core.part(Adapters).unload("lora")
    with raises("unknown_model"):
        admit(core, entry)
    core.part(Adapters).set([])
    with raises("unknown_model"):
        admit(core, entry)
    core.part(Adapters).set([LoadedAdapter("lora", 2)])
    assert accept(core, entry).opened.model == "lora"


def test_an_admitted_request_is_complete(core: AdmissionCore) -> None:
    entry = entry_of(
        request_id="mine", stream=False, priority=-3, tenant="team a", stop=("x",), n=2
    )
    opened, request, key = accept(core, entry)
    assert key is None, "the response cache is off"
    assert (opened.request_id, opened.entry_id, opened.model) == ("mine", "7-0", "tiny-7b")
    assert (opened.n, opened.stream, opened.stop) == (2, False, ("x",))
    assert (opened.traceparent, opened.tracestate) == ("00-a-b-01", "k=v")
    assert (opened.received_ns, opened.prompt_token_ids) == (1_000, request.prompt.token_ids)
    assert request.info == RequestInfo("mine", "7-0", "00-a-b-01", "k=v")
    assert (request.sampling.stop, request.has_stop_strings) == ((), True), "streaming has them"
    assert (request.tenant, request.priority) == ("team a", -3)
    assert [spec.sample_index for spec in request.sequences] == [0, 1]
    assert request.sampling.stop_token_ids == {1}
    msgspec.msgpack.encode((opened, request))


def test_a_request_without_an_id_has_its_entry_id(core: AdmissionCore) -> None:
    assert admit(core, entry_of("9-1")).info.request_id == "9-1"


def test_raw_text_gets_the_tokenizers_special_tokens(
    core: AdmissionCore, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = admit(core, entry_of(prompt="hé")).prompt.token_ids
    assert ids[0] == 0
    assert tokenizer.decode(ids[1:]) == "hé"


def test_a_conversation_goes_through_the_template_once(
    core: AdmissionCore, tokenizer: PreTrainedTokenizerFast
) -> None:
    messages = turns(("system", "be brief"), ("user", "hi"))
    ids = admit(core, entry_of(messages=messages)).prompt.token_ids
    assert ids.count(0) == 1
    assert tokenizer.decode(ids) == "<s>system:be brief</s>user:hi</s>assistant:"


def test_token_ids_are_taken_as_they_are(core: AdmissionCore) -> None:
    prompt = admit(core, entry_of(prompt_token_ids=(5, 257, 1, 0))).prompt
    assert prompt.token_ids == (5, 257, 1, 0)


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        ("unknown_model", {"model": "gpt-5"}),
        ("unknown_model", {"model": SURROGATE * 500}),
        *[
            (f"invalid_{name}", {name: value})
            for name, values in {
                "repetition_penalty": (0.0, -1.0, 1e-5, 10.01, float("nan"), float("inf")),
                "presence_penalty": (-2.01, 2.01, float("nan"), float("inf")),
                "frequency_penalty": (-2.01, 2.01, float("nan"), -float("inf")),
                "logit_bias": (
                    {258: 1.0},
                    {-1: 1.0},
                    {HUGE: 1.0},
                    {3: 100.5},
                    {3: -100.5},
                    {2: 1.0, 3: float("nan")},
                    {3: float("inf")},
                    dict.fromkeys(range(1025), 0.0),
                ),
                "min_tokens": (-1, 9, HUGE),
                "logprobs": (-1, 101, HUGE),
                "prompt_logprobs": (-1, 101, HUGE),
                "prompt_logprob_start": (-1, 3, HUGE),
                "prompt_logprob_token_ids": (
                    [[]],
                    [[1]] * 4,
                    [[258], [], []],
                    [[-2], [], []],
                    [[HUGE], [], []],
                    [[1] * 1025, [], []],
                ),
                "request_id": ("x" * 513, "a\nb", SURROGATE),
                "tenant": ("", "t" * 129, "a\x00"),
                "cache_salt": ("s" * 257, SURROGATE),
                "priority": (1001, -HUGE),
                "n": (0, 5, HUGE),
                "max_tokens": (0, -HUGE),
                "temperature": (float("nan"), float("inf"), -0.5, 1e-5, HUGE),
                "top_k": (-1, HUGE),
                "top_p": (0.0, 1.01, float("nan")),
                "min_p": (-0.1, 1.5, float("nan")),
                "seed": (2**63, -(2**63) - 1),
                "stop": (("a",) * 17, ("a", ""), ("é" * 513,), (SURROGATE,)),
                "stop_token_ids": (frozenset({258}), frozenset({-1}), frozenset({HUGE})),
                "prompt": (None, "a" + SURROGATE),
                "messages": (
                    turns(("user", "divide")),
                    turns(("user", SURROGATE)),
                ),
            }.items()
            for value in values
        ],
        ("invalid_min_tokens", {"min_tokens": 1, "stop_token_ids": frozenset(range(258)) - {1}}),
        ("no_routed_experts", {"return_routed_experts": True}),
        ("invalid_routed_experts_prompt_start", {"routed_experts_prompt_start": 1}),
        ("invalid_budget", {"budget_ns": HUGE}),
        ("expired", {"budget_ns": 0}),
        ("expired", {"budget_ns": -HUGE}),
        ("expired", {"budget_ns": 500}),
        ("expired", {"budget_ns": 500, "model": "an-adapter"}),
        ("invalid_prompt", {"prompt": "a", "prompt_token_ids": (1,)}),
        ("invalid_prompt", {"prompt": "", "messages": ()}),
        ("empty_prompt", {"prompt": ""}),
        ("empty_prompt", {"prompt_token_ids": ()}),
        ("empty_prompt", {"messages": ()}),
        ("invalid_token_ids", {"prompt_token_ids": (3, 258)}),
        ("invalid_token_ids", {"prompt_token_ids": (3, -1)}),
        ("invalid_token_ids", {"prompt_token_ids": (3, HUGE)}),
        ("prompt_too_long", {"prompt_token_ids": (3,) * 100}),
        ("exceeds_kv_capacity", {"prompt_token_ids": (3,) * 60, "max_tokens": 5}),
        ("exceeds_kv_capacity", {"prompt_token_ids": (3,) * 70}),
    ],
)
def test_refusals(core: AdmissionCore, code: str, fields: dict[str, Any]) -> None:
    with raises(code) as caught:
        admit(core, entry_of(**fields))
    assert status_of(code) == ("expired" if code == "expired" else "error")
    # The message goes on the bus and to people.
    assert 10 < len(caught.value.message.encode()) < 400


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "tiny-7b"},
        {"request_id": "日本 {x}/1"},
        {"priority": 1000},
        {"budget_ns": 501},
        {"n": 4},
        {"repetition_penalty": 1e-4},
        {"repetition_penalty": 10.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"logit_bias": {0: -100.0, 257: 100.0}},
        {"logit_bias": dict.fromkeys(range(258), 1.0)},
        {"min_tokens": 8},
        {"min_tokens": 0, "stop_token_ids": frozenset(range(258))},
        {"min_tokens": 1, "stop_token_ids": frozenset(range(257))},
        {"min_tokens": 1, "stop_token_ids": frozenset(range(258)) - {1}, "ignore_eos": True},
        {"logprobs": 20, "prompt_logprobs": 20},
        {"prompt_logprobs": 0},
        {"temperature": 0.0},
        {"temperature": 1e-4},
        {"temperature": 1e4},
        {"top_k": 0},
        {"top_k": 1 << 40},
        {"top_p": 1.0},
        {"min_p": 1.0},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"stop": ("a" * 1024,) * 16},
        {"stop_token_ids": frozenset({0, 257})},
        {"prompt_token_ids": (3,) * 56},
        {"tenant": "t" * 128},
    ],
)
def test_values_at_the_limits_are_accepted(core: AdmissionCore, fields: dict[str, Any]) -> None:
    msgspec.msgpack.encode(admit(core, entry_of(**fields)))


def test_a_conversation_without_a_template_is_refused(
    plain_tokenizer: PreTrainedTokenizerFast,
) -> None:
    with raises("no_chat_template"):
        admit(core_of(plain_tokenizer), entry_of(messages=turns(("user", "hi"))))


@pytest.mark.parametrize(("prompt", "code"), [("blue", "invalid_prompt"), (" ", "empty_prompt")])
def test_text_that_the_tokenizer_can_not_use(
    word_tokenizer: PreTrainedTokenizerFast, prompt: str, code: str
) -> None:
    with raises(code):
        admit(core_of(word_tokenizer), entry_of(prompt=prompt))


def test_a_tokenizer_larger_than_the_model_is_no_crash(tokenizer: PreTrainedTokenizerFast) -> None:
    small = msgspec.structs.replace(CAPACITY, vocab_size=10)
    with raises("invalid_token_ids"):
        admit(core_of(tokenizer, capacity=small), entry_of(prompt="é"))


def test_a_malformed_request_has_its_cause_as_code(core: AdmissionCore) -> None:
    entry = RequestEntry("8-0", Malformed("", "request_too_large", "it has 9 MB"))
    with raises("request_too_large", "it has 9 MB"):
        admit(core, entry)


def test_duplicates_are_refused_before_anything_else(core: AdmissionCore) -> None:
    malformed = RequestEntry("2-0", Malformed("mine", "malformed", "bad JSON"))
    for entry in (entry_of("2-0", request_id="mine", n=0), malformed):
        with raises("duplicate_request"):
            admit(core, entry, owner="1-0")


def test_an_entry_may_own_its_request_id(core: AdmissionCore) -> None:
    assert admit(core, entry_of("2-0", request_id="mine"), owner="2-0").info.entry_id == "2-0"


def test_an_unusable_id_is_replaced_by_the_entry_id() -> None:
    assert request_id_of(entry_of("7-0", request_id="a\nb")) == "7-0"
    assert request_id_of(entry_of("7-0", request_id="ab")) == "ab"
    assert request_id_of(RequestEntry("7-0", Malformed(SURROGATE, "malformed", ""))) == "7-0"


@pytest.mark.parametrize(
    ("prompt_tokens", "asked", "given"), [(40, 10**30, 10), (49, 1, 1), (49, 2, 1), (40, 3, 3)]
)
def test_max_tokens_is_cut_to_the_models_length(
    tokenizer: PreTrainedTokenizerFast, prompt_tokens: int, asked: int, given: int
) -> None:
    short = msgspec.structs.replace(CAPACITY, max_model_len=50)
    entry = entry_of(prompt_token_ids=(3,) * prompt_tokens, max_tokens=asked)
    assert admit(core_of(tokenizer, capacity=short), entry).sampling.max_tokens == given


def test_streaming_gets_the_reporting_options(core: AdmissionCore) -> None:
    opened = accept(core, entry_of("1-0", min_tokens=3, logprobs=4, prompt_logprobs=0)).opened
    assert (opened.min_tokens, opened.logprobs, opened.prompt_logprobs) == (3, 4, 0)
    opened = accept(core, entry_of("2-0")).opened
    assert (opened.min_tokens, opened.logprobs, opened.prompt_logprobs) == (0, 0, None)


def test_min_tokens_is_checked_against_the_clients_max_tokens(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """The model's length may cut max_tokens below it; then the length ends the request."""
    short = msgspec.structs.replace(CAPACITY, max_model_len=50)
    entry = entry_of(prompt_token_ids=(3,) * 48, max_tokens=5, min_tokens=5)
    sampling = admit(core_of(tokenizer, capacity=short), entry).sampling
    assert (sampling.max_tokens, sampling.min_tokens) == (2, 5)


def test_more_logprobs_than_the_vocabulary_has_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    small = core_of(tokenizer, capacity=msgspec.structs.replace(CAPACITY, vocab_size=10))
    for name in ("logprobs", "prompt_logprobs"):
        with raises(f"invalid_{name}", "from 0 to 10"):
            admit(small, entry_of(prompt_token_ids=(3,), **{name: 11}))


def test_stop_ids_are_the_requests_and_the_models(core: AdmissionCore) -> None:
    own = frozenset({40})
    both = admit(core, entry_of("1-0", stop_token_ids=own)).sampling.stop_token_ids
    assert both == {1, 40}
    only = admit(core, entry_of("2-0", stop_token_ids=own, ignore_eos=True)).sampling
    assert only.stop_token_ids == own


def seeds(core: AdmissionCore, **fields: Any) -> list[int]:
    return [spec.seed for spec in admit(core, entry_of(n=4, **fields)).sequences]


def test_seeds_are_distinct_and_repeatable(tokenizer: PreTrainedTokenizerFast) -> None:
    core, other = core_of(tokenizer), core_of(tokenizer, seed=5)
    first = seeds(core, request_id="mine")
    assert len(set(first)) == 4
    assert all(0 <= seed < 2**63 for seed in first)
    assert seeds(core, request_id="mine") == first
    assert not set(seeds(core, request_id="yours")) & set(first)
    assert not set(seeds(other, request_id="mine")) & set(first)


def test_a_requests_seed_is_independent_of_its_id(tokenizer: PreTrainedTokenizerFast) -> None:
    core, other = core_of(tokenizer), core_of(tokenizer, seed=5)
    first = seeds(core, request_id="mine", seed=-1)
    assert len(set(first)) == 4
    assert seeds(other, request_id="yours", seed=-1) == first
    assert not set(seeds(core, request_id="mine", seed=1)) & set(first)


def test_derived_seeds_never_change(core: AdmissionCore) -> None:
    """Across releases: recorded samples are repeated by them."""
    assert seeds(core, seed=0)[:2] == [538306621209178557, 6612716206176872004]


def test_sequence_ids_are_never_given_twice(core: AdmissionCore) -> None:
    ids = [s.seq_id for k in range(3) for s in admit(core, entry_of(f"{k}-0", n=3)).sequences]
    assert len(set(ids)) == 9


def test_nothing_is_admitted_before_the_capacity_is_known(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    core = AdmissionCore(Config(), tokenizer, frozenset())
    with pytest.raises(RuntimeError, match="set_capacity"):
        admit(core, entry_of())


def test_client_texts_in_messages_are_short_and_encodable(core: AdmissionCore) -> None:
    with pytest.raises(RequestError) as caught:
        admit(core, entry_of(model=SURROGATE * 100))
    assert caught.value.message.isascii()
    assert "..." in caught.value.message
    with pytest.raises(RequestError, match="an integer of 16610 bits"):
        admit(core, entry_of(n=HUGE))


def test_a_recipe_computes_the_samples_again(tokenizer: PreTrainedTokenizerFast) -> None:
    made = Fingerprint(digest="a", torch="2")
    capacity = with_sections(
        msgspec.structs.replace(CAPACITY, num_blocks=9), FingerprintCapacity((made,))
    )
    core = core_of(tokenizer, capacity=capacity)
    accepted = accept(core, entry_of(tenant="anna", n=2, max_tokens=500, ignore_eos=False))
    recipe = recipe_of(accepted)
    assert recipe.seeds == tuple(each.seed for each in accepted.admitted.sequences)
    assert (recipe.tenant, recipe.executors) == ("anna", (made,))
    # As resolved: what fits the model, and its stop tokens.
    assert (recipe.sampling.max_tokens, recipe.sampling.stop_token_ids) == (96, {1})
    again = admit(core, entry_of("8-0", n=2, sample_seeds=recipe.seeds, seed=3))
    assert [each.seed for each in again.sequences] == [*recipe.seeds]
    greedy = recipe_of(accept(core, entry_of("9-0", temperature=0)))
    assert greedy is not None
    assert greedy.seeds == ()


@pytest.mark.parametrize(("seeds", "hint"), [((1,), "n is 2"), ((1, -1), "-1; it must be")])
def test_seeds_of_samples_are_checked(
    core: AdmissionCore, seeds: tuple[int, ...], hint: str
) -> None:
    with raises("invalid_sample_seeds", hint):
        admit(core, entry_of(n=2, sample_seeds=seeds))


def test_a_lane_has_the_fingerprint_of_each_kind_of_executor() -> None:
    one, other = Fingerprint(digest="a"), Fingerprint(digest="b")
    of = [with_sections(CAPACITY, FingerprintCapacity((each,))) for each in (other, one, other)]
    assert fingerprints_of(smallest(of)) == (one, other)


def test_replicas_that_compute_other_bits_are_not_exact_together() -> None:
    """Such as one that found no compiler. Their weights may be of different versions for a time."""
    fingerprints = [
        Fingerprint(digest="a", kernels="AVX2", weight_version=1),
        Fingerprint(digest="b", kernels="AVX2", weight_version=2),
        Fingerprint(digest="c", kernels="none", weight_version=2),
    ]
    exact = msgspec.structs.replace(CAPACITY, exact=True)
    of = [with_sections(exact, FingerprintCapacity((each,))) for each in fingerprints]
    assert smallest(of[:2]).exact
    assert differing_fields(fingerprints[:2]) == []
    assert not smallest(of).exact
    assert differing_fields(fingerprints) == ["kernels"]
