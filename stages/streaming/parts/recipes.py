"""Recipes of completions."""

from __future__ import annotations

from ....bus.control import Cancel
from ....bus.recipes import RecipeParts
from ..deliveries import Ending
from ..samples import RequestState
from . import Part


class Recipes(Part):
    """Adds a Completion's recipe."""

    def completed(
        self, request: RequestState | None, cancel: Cancel | None, ending: Ending
    ) -> None:
        if request is not None and (made := RecipeParts.find(request.info.parts)) is not None:
            ending.fields["recipe"] = made.recipe()
