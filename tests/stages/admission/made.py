"""A replica's capacity and an accepted request, for tests that need any."""

from __future__ import annotations

from nano_inference.bus.control import ReplicaCapacity
from nano_inference.bus.messages import (
    AdmittedRequest,
    Prompt,
    RequestInfo,
    RequestOpened,
    SequenceSpec,
)
from nano_inference.config import SamplingParams
from nano_inference.stages.admission.arrivals import Accepted

CAPACITY = ReplicaCapacity(
    num_blocks=64, block_size=16, max_model_len=512, vocab_size=258, device="cpu"
)


def accepted(request_id: str, entry_id: str) -> Accepted:
    """Return a valid request of one sample."""
    ids, sequences = (request_id, entry_id), (SequenceSpec(1, 0, 0),)
    info, prompt = RequestInfo(*ids), Prompt((1,))
    admitted = AdmittedRequest(info, prompt, SamplingParams(), sequences, "", 0)
    return Accepted(RequestOpened(*ids, "m", 1, True, (), (1,)), admitted)
