"""Media among the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from .control import InternalPart


class MediaItem(InternalPart, frozen=True, array_like=True):
    """A media item in a prompt, such as an image.

    Attributes:
        id: SHA-256 of its decoded content, of an image its pixels and size, hex. KV is found by it,
            within a `CacheScope`.
        start: Index of its first placeholder in the prompt.
        num_tokens: Its placeholders.
        width: Width of an image, in pixels.
        height: Likewise.
        alone: Whether it is the prompt's only image, which LLaVA-OneVision cuts into tiles.
        name: In the store, of the item as this model takes it; tenants that share no prefixes have
            other names.
        salt: `cache_salt` of the request; embeddings are shared by requests of an equal one.
        kind: Chooses the model's encoder.
    """

    id: str
    start: int
    num_tokens: int
    width: int
    height: int
    alone: bool = True
    name: str = ""
    salt: str = ""
    kind: str = "image"

    @property
    def key(self) -> tuple[str, int]:
        """Identity of its embeddings, besides the model, and of those who share them."""
        return f"{self.name} {self.salt}", self.num_tokens

    def places(self, token_ids: Sequence[int]) -> list[int]:
        """Return the indices of its placeholders in a prompt.

        Other tokens may stand between them, such as the numbers of tiles (Idefics 3).
        """
        placeholder = token_ids[self.start]
        places: list[int] = []
        for index in range(self.start, len(token_ids)):
            if len(places) == self.num_tokens:
                break
            if token_ids[index] == placeholder:
                places.append(index)
        return places
