"""Dead letters over HTTP."""

from __future__ import annotations

from nano_inference.bus.memory.bus import MemoryBus
from nano_inference.bus.public import ErrorInfo
from nano_inference.config import BusConfig, Config
from nano_inference.gateway.app import make_app
from nano_inference.pipeline.client import BusClient

from .fake import http_of


async def test_dead_letters_are_listed_tried_again_and_dropped() -> None:
    bus = MemoryBus(BusConfig())
    for prompt in ("a", "b"):
        await bus.requests.publish({"prompt": prompt, "request_id": f"r-{prompt}"})
    for entry in await bus.requests.take():
        error = ErrorInfo(code="lane_failed", message="it kills its lane")
        await bus.requests.add_dead_letter(entry, error, 3)
    async with http_of(make_app(BusClient(bus), Config())) as http:
        first, second = (await http.get("/admin/dead_letters")).json()["data"]
        assert (first["request_id"], first["prompt"], first["deaths"]) == ("r-a", "a", 3)
        assert first["error"] == {"code": "lane_failed", "message": "it kills its lane"}

        retried = await http.post(f"/admin/dead_letters/{first['id']}/retry")
        (again,) = await bus.requests.take()
        assert again.request.prompt == "a"  # type: ignore[union-attr]
        assert retried.json() == {"id": first["id"], "request_id": again.entry_id}

        dropped = await http.delete(f"/admin/dead_letters/{second['id']}")
        assert dropped.json()["deleted"]
        assert (await http.get("/admin/dead_letters")).json()["data"] == []
        assert (await http.delete(f"/admin/dead_letters/{second['id']}")).status_code == 404
    await bus.aclose()
