"""Limits of how old a sample may become while it is generated."""

from __future__ import annotations

from ....bus.entries import RequestEntry
from ....bus.messages import Prompt
from ....bus.parts.version_lag import VersionLagLimit
from ....bus.pooling import Pooling
from ....bus.public import GenerateRequest
from ....config import RequestError, SamplingParams, shown
from . import Part


class VersionLags(Part):
    """Checks a request's limit, and sends it to streaming."""

    def opened(
        self,
        entry: RequestEntry,
        request: GenerateRequest,
        adapter: str,
        prompt: Prompt,
        sampling: SamplingParams,
        pooling: Pooling | None,
        seeds: tuple[int, ...],
    ) -> VersionLagLimit | None:
        """Raises RequestError: invalid_version_lag."""
        most, beyond, wrong = request.max_version_lag, request.on_version_lag, ""
        if most is None and beyond == "flag":
            return None
        if most is None:
            wrong = f"on_version_lag {beyond} takes max_version_lag"
        elif most < 0:
            wrong = f"max_version_lag is {shown(most)}; it must be 0 or more"
        elif pooling is not None:
            wrong = "a prompt's vector is of one version; leave out embed or max_version_lag"
        elif beyond == "retract" and request.stream:
            wrong = "a retracted sample begins anew, and a stream has sent it; set stream to false"
        if wrong:
            raise RequestError(f"version lag: {wrong}", code="invalid_version_lag")
        assert most is not None
        return VersionLagLimit(most, beyond)
