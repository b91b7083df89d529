"""The response cache."""

from __future__ import annotations

from ..messages import StoredResponse
from ..sections import Section


class ResponseCaching(Section, frozen=True):
    """In RequestOpened.

    Attributes:
        generation: The cache's generation, if RequestFinished is to carry the response; else 0.
        response: The response from the cache; then no sequence of the request runs.
    """

    generation: int = 0
    response: StoredResponse | None = None
