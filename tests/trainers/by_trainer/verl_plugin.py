"""A plug-in of verl: a rollout replica whose server is already running.

verl loads the module that `VERL_USE_EXTERNAL_MODULES` names, which registers the replica.
"""

from __future__ import annotations

import os

import httpx
import ray
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput


@ray.remote
class Forwarder:
    """An actor that answers verl's calls by those of the server."""

    def __init__(self, url: str) -> None:
        self.client = httpx.AsyncClient(base_url=url, timeout=None)
        self.steps = 0

    async def generate(self, request_id, prompt_ids, sampling_params, **_):
        params = dict(sampling_params)
        params["logprobs"] = 0 if params.pop("logprobs", False) else None
        body = {"request_id": request_id, "token_ids": prompt_ids, "sampling_params": params}
        choice = (await self._post("/inference/v1/generate", body))["choices"][0]
        logprobs = choice["logprobs"]
        return TokenOutput(
            token_ids=choice["token_ids"],
            log_probs=logprobs and [each["logprob"] for each in logprobs["content"]],
            stop_reason="aborted" if choice["finish_reason"] == "abort" else "completed",
            extra_fields={"global_steps": self.steps},
        )

    async def abort_all_requests(self, reject_request=False):
        await self._post("/pause_generation", {"mode": "abort"})

    async def resume_generation(self):
        await self._post("/continue_generation", {})

    async def clear_kv_cache(self):
        await self._post("/flush_cache", {})

    async def _post(self, path, body):
        answer = await self.client.post(path, json=body)
        answer.raise_for_status()
        return answer.json() if path.startswith("/inference") else None


class RunningReplica(RolloutReplica):
    """A replica in front of `NANO_INFERENCE_URL`."""

    async def init_standalone(self):
        # verl would reserve devices, which the server has already.
        await self.launch_servers()

    async def launch_servers(self):
        self._server_address = os.environ["NANO_INFERENCE_URL"]
        self._server_handle = Forwarder.remote(self._server_address)
        self.servers = [self._server_handle]


RolloutReplicaRegistry.register("nano-inference", lambda: RunningReplica)
