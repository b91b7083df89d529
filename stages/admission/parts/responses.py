"""The response cache: finished responses, to be served again to equal requests.

A response may be kept only if it is a function of its key: deterministic mode, and greedy sampling
or the request's own seed. What a response depends on is in the key, or empties the cache: a new
epoch, new weights, a flush. A response in flight at that time is not kept.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict

import msgspec

from ....bus.control import ReplicaCapacity
from ....bus.messages import AdmittedRequest, RequestOpened, StoredResponse
from ....bus.parts.responses import ResponseCaching
from ....bus.public import GenerateRequest
from ....config import EngineConfig, SamplingParams
from ..arrivals import Accepted, ResponseKey
from . import Part
from .adapters import Adapters

ENTRY_BYTES = 512
"""Memory of an entry besides its response: the key's hash, objects of Python, the table's place."""

_KEY = msgspec.msgpack.Encoder(order="deterministic")
_RESPONSE = msgspec.msgpack.Encoder()
_STORED = msgspec.msgpack.Decoder(StoredResponse)


class Responses(Part):
    """Responses by key, as MessagePack. The least recently used ones leave a full cache.

    Attributes:
        max_bytes: Limit of `num_bytes`.
        generation: Number of the time since the last `clear`, for requests that are opened.
        num_bytes: Memory of the responses, `ENTRY_BYTES` for each included.
        hits: Lookups that found a response.
        misses: Lookups that did not.
    """

    def __init__(self, engine: EngineConfig, adapters: Adapters) -> None:
        self.max_bytes = engine.response_cache_bytes
        self._deterministic = engine.deterministic
        self._has_reference = bool(engine.reference_model_path)
        self._adapters = adapters
        self._capacity: ReplicaCapacity | None = None
        self.num_bytes = self.hits = self.misses = 0
        # Random, since streaming may report a response for a predecessor of this object.
        self.generation = 1 << 48 | secrets.randbits(48)
        # The least recently used one first.
        self._responses: OrderedDict[bytes, bytes] = OrderedDict()
        self._counted = (0, 0)

    def __len__(self) -> int:
        return len(self._responses)

    def take_counts(self) -> dict[str, int]:
        """Return hits and misses since the last call."""
        before, self._counted = self._counted, (self.hits, self.misses)
        return {"hit": self.hits - before[0], "miss": self.misses - before[1]}

    def clear(self) -> None:
        """Drop all responses, and those of requests in flight."""
        self.generation += 1
        self._responses.clear()
        self.num_bytes = 0

    def weights_changed(self, capacity: ReplicaCapacity) -> None:
        self._capacity = capacity
        self.clear()

    def why_off(self) -> str:
        """Return why no response is cached; "" if some are."""
        if self._has_reference:
            return "a reference model scores each response"
        if self._capacity is None or self._capacity.exact:
            return ""
        return "an executor has no deterministic mode, or replicas have different weights"

    def look_up(self, accepted: Accepted) -> ResponseCaching | None:
        """Return a new request's response, or that its response is to be kept."""
        if accepted.key is None:
            return None
        response = self.find(accepted.key)
        return ResponseCaching(self.generation if response is None else 0, response)

    def finished(self, accepted: Accepted, response: StoredResponse) -> None:
        if accepted.key is not None:
            self.add(accepted.key, response)

    def key(
        self, request: GenerateRequest, opened: RequestOpened, admitted: AdmittedRequest
    ) -> ResponseKey | None:
        """Return a request's key; None if it can't be cached.

        Whether it streams, its priority, budget, prediction and limit of drafts change no token.
        Without randomness the seed doesn't either.
        """
        capacity = self._capacity
        sampling, adapter = admitted.sampling, self._adapters.get(admitted.info.adapter)
        if (
            capacity is None
            or not capacity.exact
            or self._has_reference
            or request.embed is not None
            or request.kv_session is not None  # its KV is to be kept
            or request.sample_seeds  # which the key doesn't have
            or sampling.scores_prompt
            or sampling.return_routed_experts
            or not sampling.response_cache
            or not is_repeatable(sampling)
            # With "auto" deterministic mode doesn't cover adapters.
            or (adapter is not None and self._deterministic is not True)
        ):
            return None
        adapter_version = 0 if adapter is None else adapter.version
        weight_version = capacity.weight_version
        scope = admitted.cache_scope
        sampling = msgspec.structs.replace(
            sampling,
            stop=opened.stop,
            seed=sampling.seed if sampling.temperature else None,
            max_draft_tokens=None,
            logit_bias={},
        )
        content = (
            admitted.prompt,
            sampling,
            sorted(admitted.sampling.logit_bias.items()),  # the encoder sorts texts alone
            opened.n,
            scope._replace(adapter_version=adapter_version),
            weight_version,
        )
        digest = hashlib.sha256(_KEY.encode(content)).digest()
        return ResponseKey(digest, weight_version, adapter_version)

    def find(self, key: ResponseKey) -> StoredResponse | None:
        """Return the response of a key, and count a hit or a miss."""
        stored = self._responses.get(key.digest)
        if stored is None:
            self.misses += 1
            return None
        self.hits += 1
        self._responses.move_to_end(key.digest)
        return _STORED.decode(stored)

    def add(self, key: ResponseKey, response: StoredResponse) -> None:
        """Keep a response, unless something has changed since its request was opened."""
        versions = response.weight_version, response.adapter_version
        if response.generation != self.generation or versions != key[1:]:
            return
        stored = _RESPONSE.encode(response)
        size = len(stored) + ENTRY_BYTES
        if size > self.max_bytes or key.digest in self._responses:
            return
        self._responses[key.digest] = stored
        self.num_bytes += size
        while self.num_bytes > self.max_bytes:
            _, oldest = self._responses.popitem(last=False)
            self.num_bytes -= len(oldest) + ENTRY_BYTES


def is_repeatable(sampling: SamplingParams) -> bool:
    """Return whether a request of tokens gives the same ones again, in deterministic mode."""
    return sampling.temperature == 0 or sampling.seed is not None
