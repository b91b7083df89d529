"""Guardrails in front of a pipeline that makes its own text."""

from __future__ import annotations

import json
from typing import Any

import httpx

from nano_inference import Gateway, Pipeline
from nano_inference.config import load_config
from nano_inference.gateway.policy.administration import Administration
from nano_inference.gateway.policy.backend import open_backend
from nano_inference.gateway.policy.block_list import normalise
from nano_inference.gateway.policy.store import PolicyStore

from .conftest import bearer

LIMIT_S = 60
MANY = 4000
BODY = {"prompt": "Ana has", "temperature": 0, "ignore_eos": True, "stream": True}


def events_of(answer: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """(id, data) of each event but the last."""
    assert answer.status_code == 200, answer.text
    parts = [part.split("\n") for part in answer.text.split("\n\n") if part.startswith("id: ")]
    return [(of[4:], json.loads(data[6:])) for of, data in parts if data != "data: [DONE]"]


def text_of(events: list[tuple[str, dict[str, Any]]]) -> str:
    return "".join(choice["text"] for _, event in events for choice in event["choices"])


async def test_an_answer_and_its_request_end_before_a_match() -> None:
    config = load_config(env={}, overrides={"policy.backend": "bus", "policy.refresh_s": 0.05})
    async with Pipeline(config) as pipeline:
        store = PolicyStore(open_backend(config.policy, pipeline.client.bus.store.policy))
        administration = Administration(store)
        key = await administration.create_key({"name": "somebody"})
        path, headers = "/v1/completions", bearer(key)
        async with (
            Gateway(pipeline.client, config) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S, headers=headers) as http,
        ):
            whole = text_of(events_of(await http.post(path, json=BODY | {"max_tokens": 100})))
        literal = whole[60:72].swapcase()
        at = normalise(whole).index(normalise(literal))
        await administration.set_guardrails({"literals": [literal]})
        async with (
            Gateway(pipeline.client, config) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S, headers=headers) as http,
        ):
            events = events_of(await http.post(path, json=BODY | {"max_tokens": MANY}))
            assert text_of(events) == whole[:at]
            assert events[-1][1]["choices"][0]["finish_reason"] == "content_filter"
            answer_id = events[0][0].partition(".")[0]
            for number, (event_id, _) in enumerate(events, 1):
                last = {"Last-Event-ID": event_id}
                rest = events_of(await http.get(f"/v1/streams/{answer_id}", headers=last))
                assert text_of(events[:number] + rest) == whole[:at]
            in_one_piece = BODY | {"max_tokens": 100, "stream": False}
            (choice,) = (await http.post(path, json=in_one_piece)).json()["choices"]
            assert (choice["text"], choice["finish_reason"]) == (whole[:at], "content_filter")
        # It was not computed to its end.
        end = await pipeline.client.bus.results.last(answer_id, "")
        assert end is not None
        assert getattr(end, "status", "") == "cancelled"
