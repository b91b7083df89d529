"""The gRPC server: telemetry, limits, shutdown, ports and TLS."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import structlog

from nano_inference.config import ConfigError
from nano_inference.gateway.api.kserve.grpc_connection import client_of
from nano_inference.gateway.gateway import Gateway
from nano_inference.kserve.grpc_codec import encode_infer_request
from nano_inference.kserve.protobuf import METHODS
from nano_inference.kserve.tensors import InferRequest, NamedTensor
from nano_inference.telemetry.instruments import HTTP_DURATION

from ....certificates import Authority, Issued
from ...fake import FakeEngine
from ...recorded import Recorded, ids
from .calls import LIMIT_S, Client, Failed, Model, code_of, request, served, until, values

KEYS = {"policy__backend": "bus"}


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ("ipv4:127.0.0.1:5", ("127.0.0.1", 5)),
        ("ipv6:%5B::1%5D:7", ("::1", 7)),
        ("ipv6:[fe80::1%25eth0]:7", ("fe80::1%eth0", 7)),
        ("unix:/tmp/a", None),
        ("", None),
    ],
)
def test_client_address_of_a_grpc_peer(peer: str, client: tuple[str, int] | None) -> None:
    assert client_of(peer) == client


# --- telemetry ------------------------------------------------------------------------------------


class ToldEngine(FakeEngine):
    """An engine whose gateway's measures can be read back."""

    def __init__(self) -> None:
        super().__init__()
        self.told = Recorded()
        self.tracing = self.told.measures.tracing
        self.metrics = self.told.measures.metrics


PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


async def test_a_call_is_measured_traced_and_logged(tmp_path: Path) -> None:
    engine, model, audit = ToldEngine(), Model(), tmp_path / "audit"
    metadata = (("traceparent", PARENT), ("x-request-id", "mine"))
    settings = {"access_log": True, "policy__audit_file": str(audit), "policy__audit_key": "k" * 32}
    with structlog.testing.capture_logs() as lines:
        async with served(model, engine=engine, **settings) as (_, call):
            await call("ModelInfer", request(), metadata=metadata)
            await call("ModelInfer", request("none"))
            stream = call.stream(metadata=metadata)
            await stream.send(request(), request("none"))
            assert len(await stream.read_all()) == 2
    route = "/inference.GRPCInferenceService/ModelInfer"
    stream_route = "/inference.GRPCInferenceService/ModelStreamInfer"
    counts = engine.told.values(HTTP_DURATION)
    assert {labels for labels in counts if route in labels} == {
        ("POST", route, "200"),
        ("POST", route, "404"),
    }
    # Each request of a stream is a call.
    assert {labels for labels in counts if stream_route in labels} == {
        ("POST", stream_route, "200"),
        ("POST", stream_route, "404"),
    }
    span = next(each for each in engine.told.spans() if each.name == f"POST {route}")
    assert ids(span)[::2] == ("a" * 32, "b" * 16)
    assert model.calls[0].call.trace.traceparent.split("-")[1] == "a" * 32
    logged = [line for line in lines if line["event"] == "http_call"]
    assert [line["status"] for line in logged] == [200, 404, 200, 404]
    assert logged[0]["call_id"] == "mine"
    assert logged[0]["client"] == "127.0.0.1"
    assert logged[0]["sent_bytes"] > 8
    answered = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(line["route"], line["status"], line["complete"]) for line in answered] == [
        (route, 200, True),
        (route, 404, True),
        (stream_route, 200, True),
        (stream_route, 404, True),
    ]
    assert answered[1]["code"] == "model_not_found"


async def test_health_checks_begin_no_trace() -> None:
    engine = ToldEngine()
    async with served(engine=engine) as (_, call):
        await call("ServerReady")
    assert engine.told.spans() == []


# --- how much there may be ------------------------------------------------------------------------


async def test_calls_beyond_the_limit_are_refused_with_retry_after() -> None:
    model = Model(decoupled=True, held=True)
    async with served(model, max_connections=1) as (_, call):
        stream = call.stream()
        await stream.send(request())
        await until(lambda: model.calls)
        full = await call("ModelInfer", request())
        assert (full.code, full.stable) == ("RESOURCE_EXHAUSTED", "overloaded")
        assert full.trailers["retry-after"] == "1"
        # Probes are answered.
        assert (await call("ServerLive")).live
        await stream.send(request(request_id="other"))
        assert code_of(await stream.read()) == "overloaded"
        model.free.set()
        assert len(await stream.read_all()) == 1
        assert values(await call("ModelInfer", request())) == [1, 2]


async def test_trailing_metadata_names_the_ignored_parameters() -> None:
    ids = NamedTensor("input_ids", np.array([1, 2]))
    given: dict[str, Any] = {"max_tokens": 2, "flat_logprobs": True, "colour": "red"}
    asked = InferRequest(model_name="tiny.tokens", inputs=(ids,), parameters=given)
    data = encode_infer_request(asked).SerializeToString()
    async with served() as (_, call):
        failed = await call("ModelInfer", data)
        assert failed.stable == "unsupported", failed.details
        assert "parameters.colour" in failed.details
        assert failed.trailers["x-ignored-fields"] == "parameters.flat_logprobs"
    async with served(unknown_fields="ignore") as (_, call):
        begun = call.begin("ModelInfer", data)
        assert not isinstance(await call.end("ModelInfer", begun), Failed)
        trailers = dict(await begun.trailing_metadata())
        # The parameters of a message have no order.
        named = {"parameters.flat_logprobs", "parameters.colour"}
        assert {*str(trailers["x-ignored-fields"]).split(", ")} == named
        stream = call.stream()
        await stream.send(data, request())
        assert len(await stream.read_all()) == 2
        trailers = dict(await stream.call.trailing_metadata())
        assert {*str(trailers["x-ignored-fields"]).split(", ")} == named


async def test_bytes_of_all_messages_are_limited() -> None:
    model = Model(held=True)
    most = 1 << 20
    large = request(values=[0.0] * (most // 4 - 100)).SerializeToString()
    async with served(
        model, max_body_bytes=most, max_weights_bytes=most, max_bodies_bytes=most
    ) as (gateway, call):
        first = call.begin("ModelInfer", large)
        await until(lambda: model.calls)
        full = await call("ModelInfer", large)
        assert (full.code, full.stable) == ("RESOURCE_EXHAUSTED", "overloaded")
        small = call.begin("ModelInfer", request().SerializeToString())
        await until(lambda: len(model.calls) == 2)
        model.free.set()
        for each in (first, small):
            assert not isinstance(await call.end("ModelInfer", each), Failed)
        await gateway._server.calls.idle()
        assert gateway._server.limits.held_bytes == 0


async def test_silent_streams_do_not_shut_out_calls() -> None:
    model, engine = Model(decoupled=True), ToldEngine()
    async with served(model, engine=engine, max_connections=2) as (_, call):
        silent = [call.stream() for _ in range(2)]
        for each in silent:
            await each.send(request())
            assert values((await each.read()).infer_response) == [1, 2]
        assert values(await call("ModelInfer", request())) == [1, 2]
        # It has waited longest, so the call took its place.
        ended = await silent[0].read()
        assert (ended.code, ended.stable) == ("RESOURCE_EXHAUSTED", "overloaded")
        await silent[1].send(request())
        assert len(await silent[1].read_all()) == 1
    assert engine.told.refused() == {"replaced": 1}


async def test_a_call_without_a_message_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "nano_inference.gateway.api.kserve.grpc_connection.LEAST_BYTES_PER_S"
    monkeypatch.setattr(module, 1 << 40)
    engine = ToldEngine()
    async with served(Model(), engine=engine, body_timeout_s=0.01) as (_, call):
        silent = call.channel.stream_unary(METHODS["ModelInfer"].path)()
        late = await call.end("ModelInfer", silent)
        assert (late.code, late.stable) == ("DEADLINE_EXCEEDED", "request_timeout")
    assert engine.told.refused() == {"slow_body": 1}


async def test_connections_are_bounded() -> None:
    async with served(max_connections=1) as (gateway, call):
        assert (await call("ServerLive")).live
        opened = []
        # More than the connections on which calls are refused for lack of room.
        for _ in range(140):
            opened.append(await asyncio.open_connection("127.0.0.1", gateway.grpc_port))
        closed = [reader for reader, _ in opened if not await reader.read(1)]
        assert len(closed) >= 10
        assert (await call("ServerLive")).live
        for _, writer in opened:
            writer.close()


# --- how it ends ----------------------------------------------------------------------------------


async def test_draining_ends_streams_after_their_responses() -> None:
    model = Model(decoupled=True, held=True)
    async with served(model) as (gateway, call):
        idle, busy = call.stream(), call.stream()
        await busy.send(request())
        await until(lambda: model.calls)
        model_calls = len(model.calls)
        await idle.call.wait_for_connection()
        drained = asyncio.create_task(gateway.drain(30))
        ended = await idle.read()
        assert (ended.code, ended.stable) == ("UNAVAILABLE", "shutting_down")
        assert not (await call("ServerReady")).ready
        assert not drained.done()
        model.free.set()
        assert values((await busy.read()).infer_response) == [1, 2]
        assert (await busy.read()).stable == "shutting_down"
        assert await drained
        # A new stream is refused at once.
        assert (await call.stream().read()).stable == "shutting_down"
        assert len(model.calls) == model_calls


@pytest.mark.parametrize("streams", [False, True])
async def test_late_calls_are_ended_with_an_error(
    monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    monkeypatch.setattr("nano_inference.gateway.server.server.LEAVE_S", 0.01)
    model = Model(decoupled=True, held=True)
    async with served(model) as (gateway, _):
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}")
        call = Client(channel)
        if streams:
            stream = call.stream()
            await stream.send(request())
            ending = asyncio.create_task(stream.read())
        else:
            begun = call.begin("ModelInfer", request().SerializeToString())
            ending = asyncio.create_task(call.end("ModelInfer", begun))
        await until(lambda: model.calls)
    ended = await ending
    await channel.close()
    assert (ended.code, ended.stable) == ("UNAVAILABLE", "shutting_down")
    assert model.ended == ["cancelled"]


# --- where it listens -----------------------------------------------------------------------------


async def opened(**settings: Any) -> None:
    async with served(**settings):
        return


async def test_a_taken_port_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1 port {port}, for gRPC"):
            await opened(grpc_port=port)


async def test_two_gateways_do_not_share_a_port() -> None:
    async with served() as (gateway, _):
        with pytest.raises(ConfigError, match="for gRPC"):
            await opened(grpc_port=gateway.grpc_port)


async def test_the_port_is_released_if_the_policy_fails(tmp_path: Path) -> None:
    audit = {"policy__audit_file": str(tmp_path / "none" / "audit"), "policy__audit_key": "k" * 32}
    with pytest.raises(ConfigError, match="audit log"):
        await opened(**audit)


async def test_a_public_address_needs_keys() -> None:
    async with served(host="0.0.0.0", **KEYS) as (_, call):
        assert (await call("ServerLive")).live
        assert (await call("ModelInfer", request())).code == "UNAUTHENTICATED"


async def test_places_name_both_ports() -> None:
    async with served() as (gateway, _):
        assert gateway.places == {"url": gateway.url, "grpc": f"127.0.0.1:{gateway.grpc_port}"}


# --- TLS ------------------------------------------------------------------------------------------


def tls(own: Issued, **more: str) -> dict[str, str]:
    return {"tls_certificate": str(own.certificate), "tls_key": str(own.key), **more}


@asynccontextmanager
async def safely(
    gateway: Gateway, authority: Authority, own: Issued | None = None
) -> AsyncIterator[Client]:
    """A client of a new connection, with a certificate of its own or without."""
    files = (None, None) if own is None else (own.key.read_bytes(), own.certificate.read_bytes())
    credentials = grpc.ssl_channel_credentials(authority.file.read_bytes(), *files)
    place = f"localhost:{gateway.grpc_port}"
    # Or it would take the connection of another channel.
    alone = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(place, credentials, alone) as channel:
        yield Client(channel)


async def serial(port: int | None, authority: Authority) -> str:
    """Return the serial number of the certificate that a new connection is shown."""
    context = ssl.create_default_context(cafile=authority.file)
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("localhost", port, ssl=context)
    found: str = writer.get_extra_info("peercert")["serialNumber"]
    writer.transport.abort()
    return found


async def test_a_renewed_certificate_is_used(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, other = authority.issue("own"), authority.issue("other")
    async with served(Model(), **tls(own)) as (gateway, unsafe):
        assert (await unsafe("ServerLive", timeout=LIMIT_S)).code == "UNAVAILABLE"
        async with safely(gateway, authority) as call:
            assert values(await call("ModelInfer", request())) == [1, 2]
            before = await serial(gateway.grpc_port, authority)
            certificates = gateway._server.certificates
            # One file after the other: meanwhile they do not belong together.
            shutil.copy(other.key, own.key)
            certificates.refresh()
            assert await serial(gateway.grpc_port, authority) == before
            shutil.copy(other.certificate, own.certificate)
            certificates.refresh()
            assert await serial(gateway.grpc_port, authority) != before
            # The connection that there was goes on.
            assert (await call("ServerLive")).live
        async with safely(gateway, authority) as call:
            assert (await call("ServerLive")).live


async def test_client_certificates_are_required(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs", "theirs")
    settings = tls(authority.issue("own"), tls_client_ca=str(authority.file))
    async with served(Model(), **settings) as (gateway, _):
        async with safely(gateway, authority, authority.issue("client")) as call:
            assert (await call("ServerLive")).live
        for certificate in (None, stranger.issue("client")):
            async with safely(gateway, authority, certificate) as call:
                assert (await call("ServerLive", timeout=LIMIT_S)).code == "UNAVAILABLE"


# --- without gRPC ---------------------------------------------------------------------------------

IMPORTS = """
import sys
from nano_inference.cli.fork_server import import_stages
from nano_inference.gateway.gateway import Gateway
import_stages(["gateway"])
sys.stdout.write(" ".join(name for name in sys.modules if name.partition(".")[0] == "grpc"))
"""


def test_grpc_is_not_imported_without_its_port() -> None:
    """It takes a while, and has threads that could not be forked."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
