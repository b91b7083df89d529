"""A tenant can't learn another tenant's prompts from the cache."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from nano_inference import Config, GenerateRequest, Pipeline, load_config
from nano_inference.bus import RequestEntry
from nano_inference.bus.messages import CacheScope
from nano_inference.config import AdmissionConfig

from .conftest import admission

LIMIT_S = 60
SECRET = (7,) * 200


class Salts:
    """Admission's cache salts of tenants and salts."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, **settings: bool) -> None:
        config = Config(admission=AdmissionConfig(max_in_flight=1 << 20, **settings))
        self._core = admission(config, tokenizer, max_model_len=1000)
        self._number = 0

    def of(self, tenant: str, salt: str = "") -> CacheScope:
        self._number += 1
        request = GenerateRequest(prompt_token_ids=SECRET, tenant=tenant, cache_salt=salt)
        entry = RequestEntry(f"{self._number}-0", request)
        return self._core.admit(entry, 0, 0).admitted.cache_scope


TENANTS = st.sampled_from(["default", "a", "ab", "a/b", "a:", "0"]) | st.text(
    st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=8
)
SALTS = st.sampled_from(["", "b", "a\0b", "\0", "default\0", ":"]) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=8
)


@pytest.fixture(scope="session")
def salts(tokenizer: PreTrainedTokenizerFast) -> Salts:
    return Salts(tokenizer)


@given(st.lists(st.tuples(TENANTS, SALTS), min_size=2, max_size=6, unique=True))
def test_no_two_pairs_of_tenant_and_salt_share_a_prefix(
    salts: Salts, pairs: list[tuple[str, str]]
) -> None:
    assert len({salts.of(*pair) for pair in pairs}) == len(pairs)


def test_where_it_is_set_only_the_salt_counts(tokenizer: PreTrainedTokenizerFast) -> None:
    salts = Salts(tokenizer, share_prefixes_across_tenants=True)
    assert salts.of("a", "s") == salts.of("b", "s") != salts.of("a", "t")


@pytest.mark.parametrize("cache_type", ["radix", "paged"])
@pytest.mark.parametrize("shared", [False, True])
async def test_a_guessed_prompt_is_cached_for_the_tenant_alone_that_sent_it(
    cache_type: str, shared: bool
) -> None:
    overrides = {
        "engine.dtype": "float32",
        "engine.cache_type": cache_type,
        "admission.share_prefixes_across_tenants": shared,
    }
    config = load_config(env={}, overrides=overrides)
    async with asyncio.timeout(LIMIT_S), Pipeline(config) as pipeline:

        async def cached(tenant: str, salt: str = "") -> int:
            sampling = {"temperature": 0, "max_tokens": 1}
            who = {"tenant": tenant, "cache_salt": salt}
            prompt = {"prompt_token_ids": list(SECRET), "sampling": sampling}
            end = await pipeline.complete(prompt | who)
            assert end.status == "done"
            return end.usage.cached_tokens

        for salt in ("", "mine"):
            assert await cached("victim", salt) == 0
            assert (await cached("guesser", salt) > 0) == shared
            assert await cached("victim", salt) > 0
