"""Scaling from no lane relies on a gateway that takes requests, and counts them, without one."""

from __future__ import annotations

import asyncio

import httpx

from nano_inference import BusClient, Gateway, Pipeline, load_config

LIMIT_S = 120


async def test_a_request_waits_for_the_first_lane(redis_url: str) -> None:
    config = load_config(
        env={}, overrides={"bus.url": redis_url, "bus.prefix": "none", "engine.dtype": "bfloat16"}
    )
    async with (
        asyncio.timeout(LIMIT_S),
        BusClient.connect(config.bus) as client,
        Gateway(client, config) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S) as http,
    ):
        # The readiness probe of the overlay `keda`, and the usual one.
        assert (await http.get("/livez")).status_code == 200
        assert (await http.get("/readyz")).status_code == 503
        body = {"prompt": "98 + 25 =", "temperature": 0}
        answer = asyncio.create_task(http.post("/v1/completions", json=body))
        state = {"queue_length": 0}
        while not state["queue_length"]:
            state = (await http.get("/status")).json()
        assert state["queue_length"] == 1
        async with Pipeline(config):
            assert (await answer).json()["choices"][0]["text"] == " 123"
            state = (await http.get("/status")).json()
            while state["in_flight"] or state["queue_length"]:
                state = (await http.get("/status")).json()
