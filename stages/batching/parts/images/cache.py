"""The images whose embeddings the executor has, and the images of each step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from .....bus.control import ImageCapacity
from .....bus.media import MediaItem
from .....bus.parts.images import ImagesPlan
from ...sequence import Sequence
from .keys import PlacedImage

ImageKey = tuple[str, int]
"""`MediaItem.key`."""


NO_IMAGES: tuple[PlacedImage, ...] = ()


def images_of(seq: Sequence) -> tuple[PlacedImage, ...]:
    """Return the images of a sequence's prompt, in order."""
    images: tuple[PlacedImage, ...] = seq.extras.get("images", NO_IMAGES)
    return images


class ImageCache:
    """The images whose embeddings the executor has when a plan runs, least recently used first.

    The executor drops and encodes what a plan says. So what this class assumes is exact, in the
    order of the plans, and no sequence needs to hold an image: if it is dropped before a later
    part of a prompt needs it, it is encoded again.
    """

    def __init__(self, capacity: ImageCapacity) -> None:
        self.capacity = capacity
        self._tokens: OrderedDict[ImageKey, int] = OrderedDict()
        self._forgotten: list[ImageKey] = []
        self._num_encoded = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all images that the executor has."""
        return sum(self._tokens.values())

    def take_encoded(self) -> int:
        """Return the number of images planned to be encoded since the last call."""
        encoded, self._num_encoded = self._num_encoded, 0
        return encoded

    def __contains__(self, key: ImageKey) -> bool:
        return key in self._tokens

    def clear(self) -> None:
        """Forget all: the executor has dropped them."""
        self._tokens.clear()
        self._forgotten.clear()

    def spoil(self, seqs: Iterable[Sequence | None]) -> None:
        """Never share the KV of sequences that lacked an image, and let others try again."""
        for seq in filter(None, seqs):
            seq.allocation.generation = -1
            for image in images_of(seq):
                if self._tokens.pop(image.item.key, None) is not None:
                    self._forgotten.append(image.item.key)

    def plan(
        self, num_tokens: Mapping[int, int], index: Mapping[int, Sequence]
    ) -> tuple[Mapping[int, int], ImagesPlan]:
        """Plan the images of a step whose sequences have their blocks.

        Args:
            num_tokens: Tokens of each sequence, by id.
            index: Sequences by id.

        Returns:
            The tokens of each, fewer where a start found another prefix than was forecast; and the
            plan's section.
        """
        if not any(images_of(index[seq_id]) for seq_id in num_tokens):
            return num_tokens, self._take(())
        step, limited = StepImages(self), dict(num_tokens)
        for seq_id, number in num_tokens.items():
            seq = index[seq_id]
            if (images := images_of(seq)) and seq.num_scheduled <= images[-1].places[-1]:
                limited[seq_id] = step.limit(seq, seq.num_scheduled, number)
        self._make_room(step)
        rows = {seq_id: number for seq_id, number in limited.items() if number}
        return rows, self._take(tuple(step.new.values()))

    def _take(self, encodes: tuple[MediaItem, ...]) -> ImagesPlan:
        forgotten, self._forgotten = tuple(self._forgotten), []
        return ImagesPlan(forgotten, encodes)

    def _make_room(self, step: StepImages) -> None:
        for key in step.used:
            self._tokens.move_to_end(key)
        held = self.num_tokens + sum(item.num_tokens for item in step.new.values())
        while held > self.capacity.cache_tokens and len(self._tokens) > len(step.used):
            key, number = self._tokens.popitem(last=False)
            self._forgotten.append(key)
            held -= number
        self._tokens |= {key: item.num_tokens for key, item in step.new.items()}
        self._num_encoded += len(step.new)


class StepImages:
    """The images of one step.

    Attributes:
        used: Images that the executor has already.
        new: Images to encode.
        blocked: Whether a part of a prompt must wait until a step has room for a whole image.
    """

    def __init__(self, cache: ImageCache) -> None:
        self.used: dict[ImageKey, int] = {}
        self.new: dict[ImageKey, MediaItem] = {}
        self.blocked = False
        self._cache = cache
        self._encoded = self._held = 0

    def limit(self, seq: Sequence, start: int, num_tokens: int) -> int:
        """Take the images of a part of a prompt.

        Args:
            seq: The sequence.
            start: The part's first token.
            num_tokens: Tokens that may be computed.

        Returns:
            How many of them are computed in this step: none that needs an image beyond the limits,
            and no part of an image whose tokens see each other.
        """
        images, stop = images_of(seq), start + num_tokens
        if self._cache.capacity.sees_itself:
            for image in images:
                if image.places[0] < stop <= image.places[-1]:
                    stop = max(image.places[0], start)
                    self.blocked |= stop == start
        for image in images:
            if image.places[-1] < start or image.places[0] >= stop:
                continue
            if not self._take(image.item):
                return max(image.places[0], start) - start
        return stop - start

    def _take(self, item: MediaItem) -> bool:
        """Return whether an image fits in; the first one always does."""
        key, limits = item.key, self._cache.capacity
        if key in self.used or key in self.new:
            return True
        encodes = key not in self._cache
        encoded = self._encoded + item.num_tokens * encodes
        held = self._held + item.num_tokens
        if self.used or self.new:
            too_many = encodes and self.new and encoded > limits.max_tokens
            if too_many or held > limits.cache_tokens:
                return False
        self._encoded, self._held = encoded, held
        if encodes:
            self.new[key] = item
        else:
            self.used[key] = item.num_tokens
        return True
