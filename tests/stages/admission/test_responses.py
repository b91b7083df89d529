"""Requests that share a cached response, conditions for keeping one, and events that empty the
cache.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from nano_inference.bus.control import EmbeddingCapacity, ReplicaCapacity
from nano_inference.bus.messages import RequestOpened, StoredResponse, StoredSample
from nano_inference.bus.parts.adapters import AdapterCapacity
from nano_inference.bus.parts.responses import ResponseCaching
from nano_inference.bus.public import EmbedParams, KVSession
from nano_inference.bus.sections import with_sections
from nano_inference.config import (
    AdmissionConfig,
    Config,
    ConfigError,
    Constraint,
    EngineConfig,
    SamplingParams,
)
from nano_inference.stages.admission.arrivals import Accepted
from nano_inference.stages.admission.core import AdmissionCore
from nano_inference.stages.admission.participants import Participants
from nano_inference.stages.admission.parts.adapters import Adapters
from nano_inference.stages.admission.parts.responses import ENTRY_BYTES, Responses
from nano_inference.store.loaded_adapter import LoadedAdapter

from .made import CAPACITY
from .test_core import accept, entry_of

ADAPTER = LoadedAdapter("lora", 1)
EXACT = msgspec.structs.replace(
    CAPACITY,
    exact=True,
    parts=(AdapterCapacity((ADAPTER, LoadedAdapter("other", 1))),),
    weight_version=3,
)
GREEDY: dict[str, Any] = {"prompt": "abc", "temperature": 0, "max_tokens": 8}
SEEDED: dict[str, Any] = GREEDY | {"temperature": 0.5, "seed": 5}


def response_of(
    tokens: int = 3, weight_version: int = 3, adapter_version: int = 0, generation: int = 0
) -> StoredResponse:
    ids, logprobs = tuple(range(100, 100 + tokens)), (-0.1,) * tokens
    tops = (((7, -0.1), (9, -float("inf"))),) * tokens
    sample = StoredSample(ids, logprobs, tops, "stop")
    return StoredResponse((sample,), weight_version, adapter_version, generation)


def keep(core: AdmissionCore, accepted: Accepted, response: StoredResponse) -> None:
    """Report a finished response as streaming does for a request that was just opened."""
    generation = core.part(Responses).generation
    core.keep(accepted, msgspec.structs.replace(response, generation=generation))


def core_of(
    tokenizer: PreTrainedTokenizerFast,
    capacity: ReplicaCapacity = EXACT,
    admission: AdmissionConfig | None = None,
    **engine: Any,
) -> AdmissionCore:
    settings = {"model_path": "/models/tiny", "response_cache_bytes": 1 << 16} | engine
    settings.setdefault("deterministic", True)
    config = Config(engine=EngineConfig(**settings), admission=admission or AdmissionConfig())
    core = AdmissionCore(config, tokenizer, frozenset({1}))
    core.set_capacity(capacity)
    return core


@pytest.fixture
def core(tokenizer: PreTrainedTokenizerFast) -> AdmissionCore:
    return core_of(tokenizer)


def asked(core: AdmissionCore, **fields: Any) -> Accepted:
    return accept(core, entry_of(**GREEDY | fields))


def caching(opened: RequestOpened) -> ResponseCaching:
    return ResponseCaching.find(opened.parts) or ResponseCaching()


def found(core: AdmissionCore, **fields: Any) -> StoredResponse | None:
    response = caching(core.look_up(asked(core, **fields))).response
    return response and msgspec.structs.replace(response, generation=0)


def test_an_equal_request_gets_the_response(core: AdmissionCore) -> None:
    accepted = asked(core)
    opened = core.look_up(accepted)
    assert caching(opened) == ResponseCaching(core.part(Responses).generation)
    response = response_of(generation=caching(opened).generation)
    core.keep(accepted, response)
    opened = core.look_up(asked(core))
    assert caching(opened) == ResponseCaching(0, response)
    assert (core.part(Responses).hits, core.part(Responses).misses, len(core.part(Responses))) == (
        1,
        1,
        1,
    )
    assert core.part(Responses).take_counts() == {"hit": 1, "miss": 1}
    assert core.part(Responses).take_counts() == {"hit": 0, "miss": 0}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"request_id": "mine", "priority": 3, "budget_ns": 10**12, "stream": False}),
        ({}, {"prediction": "de", "max_draft_tokens": 0}),
        ({"seed": 1}, {"seed": 2}),
        ({"logit_bias": {5: 1.0, 7: 2.0}}, {"logit_bias": {7: 2.0, 5: 1.0}}),
        ({}, {"model": "tiny"}),
        # Both are cut to what the model's length leaves.
        ({"max_tokens": 5_000}, {"max_tokens": 6_000}),
        (SEEDED, SEEDED),
    ],
)
def test_fields_that_change_no_token_are_not_in_the_key(
    core: AdmissionCore, first: dict[str, Any], second: dict[str, Any]
) -> None:
    keep(core, asked(core, **first), response_of())
    assert found(core, **second) == response_of()


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": "abd"},
        {"tenant": "another"},
        {"cache_salt": "s"},
        {"model": "other"},
        {"n": 2},
        {"seed": 6},
        {"temperature": 0},
        {"temperature": 0.25},
        {"max_tokens": 7},
        {"stop_token_ids": frozenset({9})},
        {"top_k": 4},
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"stop": ("x",)},
        {"stop": ("x", "y")},
        {"ignore_eos": True},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": {5: 1.0}},
        {"min_tokens": 2},
        {"logprobs": 2},
        {"forced_tokens": (5,)},
        {"return_sampling_mask": True},
        {"constraint": Constraint(choice=("a", "b"))},
        {"constraint": Constraint(choice=("b", "a"))},
        {"constraint": Constraint(json_schema={"type": "object", "title": "t"})},
        {"constraint": Constraint(json_schema={"title": "t", "type": "object"})},
    ],
    ids=str,
)
def test_fields_that_may_change_the_response_are_in_the_key(
    core: AdmissionCore, other: dict[str, Any]
) -> None:
    keep(core, asked(core, **SEEDED), response_of())
    assert found(core, **SEEDED) is not None
    assert asked(core, **SEEDED | other).key is not None
    assert found(core, **SEEDED | other) is None
    own = response_of(adapter_version=1 if "model" in other else 0)
    keep(core, asked(core, **SEEDED | other), own)
    assert found(core, **SEEDED | other) == own
    assert len(core.part(Responses)) == 2


def test_every_parameter_is_in_the_key_or_known_to_change_nothing() -> None:
    """A new parameter is in it by itself; this list says which are not."""
    text = test_fields_that_may_change_the_response_are_in_the_key.pytestmark[0].args[1]  # type: ignore[attr-defined]
    tried = {name for row in text for name in row}
    rest = set(SamplingParams.__struct_fields__) - tried
    scored = {"prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start"}
    scored |= {"prompt_sampling_masks"}
    routed = {"return_routed_experts", "routed_experts_prompt_start"}
    assert rest == {"max_draft_tokens", "response_cache", *scored, *routed}


def test_the_order_of_a_schemas_fields_is_in_the_key(core: AdmissionCore) -> None:
    """A grammar writes properties in their order."""
    schemas = [{"type": "object", "title": "t"}, {"title": "t", "type": "object"}]
    first, second = (asked(core, constraint=Constraint(json_schema=each)) for each in schemas)
    assert first.key is not None
    assert second.key is not None
    assert first.key.digest != second.key.digest


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"prompt_logprobs": 0},
        {"response_cache": False},
        {"temperature": 1.0, "seed": 3, "sample_seeds": (4,)},
    ],
    ids=str,
)
def test_other_requests_are_never_looked_up(core: AdmissionCore, fields: dict[str, Any]) -> None:
    accepted = asked(core, **fields)
    assert accepted.key is None
    opened = core.look_up(accepted)
    assert caching(opened) == ResponseCaching()
    keep(core, accepted, response_of())
    assert len(core.part(Responses)) == 0
    assert (core.part(Responses).hits, core.part(Responses).misses) == (0, 0)


def test_an_embedding_is_never_looked_up(tokenizer: PreTrainedTokenizerFast) -> None:
    capacity = with_sections(EXACT, EmbeddingCapacity(8, "mean", True))
    core = core_of(tokenizer, capacity)
    entry = entry_of(prompt="abc")
    request = msgspec.structs.replace(
        entry.request,
        embed=EmbedParams(),
        sampling=type(entry.request.sampling)(),  # type: ignore[union-attr]
    )
    assert core.admit(msgspec.structs.replace(entry, request=request), 0, 0).key is None


def test_a_turn_of_a_session_is_never_looked_up(tokenizer: PreTrainedTokenizerFast) -> None:
    core = core_of(tokenizer, EXACT)
    turn = entry_of(prompt="abc", temperature=0.0, kv_session=KVSession(id="agent"))
    assert core.admit(turn, 0, 0).key is None
    assert core.admit(entry_of(prompt="abc", temperature=0.0), 0, 0).key is not None


@pytest.mark.parametrize(
    ("settings", "capacity", "reason"),
    [
        ({}, msgspec.structs.replace(EXACT, exact=False), "deterministic"),
        ({"reference_model_path": "/models/old"}, EXACT, "reference model"),
    ],
)
def test_a_lane_where_it_can_not_be_used_says_why(
    tokenizer: PreTrainedTokenizerFast,
    settings: dict[str, Any],
    capacity: ReplicaCapacity,
    reason: str,
) -> None:
    core = core_of(tokenizer, capacity, **settings)
    assert asked(core).key is None
    assert reason in core.part(Responses).why_off()


def test_without_memory_for_responses_none_is_looked_up(tokenizer: PreTrainedTokenizerFast) -> None:
    core = core_of(tokenizer, response_cache_bytes=0)
    accepted = asked(core)
    assert accepted.key is None
    assert core.look_up(accepted) is accepted.opened


def test_a_lane_where_it_is_used_gives_no_reason(core: AdmissionCore) -> None:
    assert core.part(Responses).why_off() == ""


def test_deterministic_mode_must_cover_adapters(tokenizer: PreTrainedTokenizerFast) -> None:
    """With "auto" it covers requests without an adapter alone."""
    core = core_of(tokenizer, deterministic="auto")
    assert asked(core).key is not None
    assert asked(core, model="lora").key is None
    assert asked(core_of(tokenizer), model="lora").key is not None


def test_without_deterministic_mode_the_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.response_cache_bytes .*deterministic: false"):
        EngineConfig(response_cache_bytes=1, deterministic=False)
    EngineConfig(response_cache_bytes=0, deterministic=False)


def test_tenants_share_responses_only_where_they_share_prefixes(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    shared = AdmissionConfig(share_prefixes_across_tenants=True)
    core = core_of(tokenizer, admission=shared)
    keep(core, asked(core, tenant="a"), response_of())
    assert found(core, tenant="b") is not None
    assert found(core, tenant="b", cache_salt="s") is None


# --- changes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["weights", "capacity", "flush", "exact"])
def test_a_change_drops_responses_and_those_in_flight(core: AdmissionCore, change: str) -> None:
    in_flight = asked(core, prompt="in flight")
    keep(core, asked(core), response_of())
    opened = core.look_up(in_flight)
    match change:
        case "weights":
            core.set_weights(4)
        case "capacity":
            core.set_capacity(msgspec.structs.replace(EXACT, weight_version=4))
        case "flush":
            core.part(Responses).clear()
        case "exact":
            core.set_capacity(msgspec.structs.replace(EXACT, exact=False))
            core.set_capacity(EXACT)
    assert found(core) is None
    for version in (3, 4):
        response = response_of(weight_version=version, generation=caching(opened).generation)
        core.keep(in_flight, response)
    assert found(core, prompt="in flight") is None
    assert (len(core.part(Responses)), core.part(Responses).num_bytes) == (0, 0)


def test_a_response_of_other_versions_is_not_kept(core: AdmissionCore) -> None:
    """The executor had new weights, or a new adapter, before admission learned of them."""
    keep(core, asked(core), response_of(weight_version=4))
    keep(core, asked(core, model="lora"), response_of(adapter_version=2))
    assert len(core.part(Responses)) == 0


def test_a_response_reported_for_another_cache_is_not_kept(
    core: AdmissionCore, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Streaming may report what was opened by admission's predecessor."""
    opened = core_of(tokenizer).look_up(asked(core_of(tokenizer)))
    core.keep(asked(core), response_of(generation=caching(opened).generation))
    assert len(core.part(Responses)) == 0


def test_an_adapter_that_is_loaded_again_has_no_response(core: AdmissionCore) -> None:
    keep(core, asked(core, model="lora"), response_of(adapter_version=1))
    keep(core, asked(core), response_of())
    assert found(core, model="lora") is not None
    core.part(Adapters).set((LoadedAdapter("lora", 2),))
    assert found(core, model="lora") is None
    assert found(core) is not None, "the model alone has not changed"


def test_the_same_capacity_again_keeps_responses(core: AdmissionCore) -> None:
    keep(core, asked(core), response_of())
    core.set_capacity(EXACT)
    core.set_weights(3)
    assert found(core) is not None


def test_replicas_of_different_versions_are_not_exact() -> None:
    both = Participants(2)
    capacity = msgspec.structs.replace(EXACT, weight_version=1)
    assert both.hold("executor", capacity).exact
    assert both.hold("executor.1", capacity).exact
    changed = both.change_weights("executor", 2)
    assert changed is not None
    assert not changed.exact
    changed = both.change_weights("executor.1", 2)
    assert changed is not None
    assert (changed.exact, changed.weight_version) == (True, 2)
    changed = both.change_adapters("executor", (LoadedAdapter("lora", 2),))
    assert changed is not None
    assert not changed.exact
    assert not both.hold("executor.1", msgspec.structs.replace(capacity, exact=False)).exact
    assert both.change_weights("executor.2", 2) is None, "it takes no part"


# --- size -------------------------------------------------------------------------------------


def size_of(response: StoredResponse) -> int:
    kept = msgspec.structs.replace(response, generation=1 << 48)
    return len(msgspec.msgpack.encode(kept)) + ENTRY_BYTES


def test_the_least_recently_used_response_leaves_a_full_cache(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    most = 3 * size_of(response_of())
    core = core_of(tokenizer, response_cache_bytes=most + 1)
    for prompt in "abc":
        keep(core, asked(core, prompt=prompt), response_of())
    assert core.part(Responses).num_bytes == most
    assert found(core, prompt="a") is not None
    keep(core, asked(core, prompt="d"), response_of())
    assert [found(core, prompt=prompt) is not None for prompt in "abcd"] == [
        True,
        False,
        True,
        True,
    ]
    assert core.part(Responses).num_bytes == most
    larger = response_of(tokens=20)
    keep(core, asked(core, prompt="e"), larger)
    assert core.part(Responses).num_bytes <= most
    assert found(core, prompt="e") == larger


def test_a_response_larger_than_the_cache_is_not_kept(tokenizer: PreTrainedTokenizerFast) -> None:
    core = core_of(tokenizer, response_cache_bytes=size_of(response_of()))
    keep(core, asked(core), response_of())
    keep(core, asked(core, prompt="long"), response_of(tokens=50))
    assert found(core) is not None, "the smaller one stays"
    assert found(core, prompt="long") is None


def test_equal_requests_in_flight_are_kept_once(core: AdmissionCore) -> None:
    first, second = asked(core), asked(core)
    assert caching(core.look_up(first)).generation
    assert caching(core.look_up(second)).generation
    for each in (first, second):
        keep(core, each, response_of())
    assert (len(core.part(Responses)), core.part(Responses).num_bytes) == (
        1,
        size_of(response_of()),
    )
