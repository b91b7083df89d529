"""KServe's models in front of a pipeline, called without a transport."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from nano_inference.config import Config
from nano_inference.gateway.api.kserve.repository import open_service
from nano_inference.gateway.api.kserve.service import InferenceService
from nano_inference.gateway.call import Call
from nano_inference.gateway.caller import ANYBODY
from nano_inference.gateway.policy.policy import Policy
from nano_inference.gateway.server.measures import Measures
from nano_inference.gateway.serving.chain import PolicyChain
from nano_inference.gateway.serving.lane_state import Readiness
from nano_inference.gateway.serving.services import Services
from nano_inference.kserve.tensors import (
    DTYPES,
    Array,
    InferRequest,
    InferResponse,
    NamedTensor,
    RequestedOutput,
)
from nano_inference.pipeline.client import BusClient


def service_of(
    client: BusClient, config: Config, policy: PolicyChain | None = None
) -> InferenceService:
    """The models of a gateway with these settings."""
    return open_service(services_of(client, config, policy))


def services_of(client: BusClient, config: Config, policy: PolicyChain | None = None) -> Services:
    """Return what the engine's models share."""
    measures = Measures()
    made = Services(
        client,
        config,
        Policy(client, config, measures).chain_of,
        measures,
        Readiness(client.deployment),
        None,
    )
    made.submissions.policy = policy or PolicyChain()
    return made


def a_call(tenant: str = "default", deadline_ns: int | None = None, **more: Any) -> Call:
    call = Call(deadline_ns=deadline_ns, **{"caller": ANYBODY, **more})
    call.tenant = tenant
    return call


def tensor(name: str, found: Any) -> NamedTensor:
    """Texts, objects (as JSON), truth values and token ids as models take them."""
    if isinstance(found, dict):
        found = json.dumps(found)
    if isinstance(found, str | bytes):
        data = np.empty(1, np.object_)
        data[0] = found.encode() if isinstance(found, str) else found
        return NamedTensor(name, data)
    if isinstance(found, list) and found and isinstance(found[0], str):
        data = np.empty(len(found), np.object_)
        data[:] = [each.encode() for each in found]
        return NamedTensor(name, data)
    if isinstance(found, bool):
        return NamedTensor(name, np.array([found]))
    dtype = DTYPES["INT64"]
    return NamedTensor(name, np.array(found if isinstance(found, Sequence) else [found], dtype))


def infer_request(
    model: str,
    /,
    outputs: Sequence[str] = (),
    parameters: dict[str, Any] | None = None,
    **inputs: Any,
) -> InferRequest:
    return InferRequest(
        model_name=model,
        id="mine",
        parameters=parameters or {},
        inputs=tuple(tensor(name, each) for name, each in inputs.items()),
        outputs=tuple(map(RequestedOutput, outputs)),
    )


def arrays(response: InferResponse) -> dict[str, Array]:
    return {each.name: each.data for each in response.outputs}


def as_lists(response: InferResponse) -> dict[str, Any]:
    """All outputs as lists; texts as `str`."""
    found = {}
    for name, data in arrays(response).items():
        texts = data.dtype == np.object_
        found[name] = [each.decode() for each in data] if texts else data.tolist()
    return found


async def stream(
    service: InferenceService, request: InferRequest, whose: Call | None = None
) -> list[InferResponse]:
    """All answers to a call that takes many."""
    found: list[InferResponse] = []

    async def respond(response: InferResponse) -> None:
        found.append(response)

    await service.infer(whose or a_call(), request, respond, many=True)
    return found
