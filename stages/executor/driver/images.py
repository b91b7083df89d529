"""Images of sequences: what they change in the inputs of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from ....bus.control import Cancel, ImageCapacity
from ....bus.media import MediaItem
from ....bus.steps import NewSequence, StepPlan
from ....config import EngineConfig
from ..runner.interface import (
    IntArray,
    LoadedModel,
    MediaEmbeddings,
    MediaEncoder,
    MediaError,
    Positions,
    Rows,
    StepInputs,
    Uploader,
)
from .sequences import SequenceTable


class PlacedImages(msgspec.Struct, frozen=True):
    """The images of a sequence.

    Attributes:
        items: Items of the prompt, in order.
        places: For each image its placeholders' indices in the prompt, rising.
        positions: Rotary positions; None if they are the tokens' indices.
        reach: `[prompt]`, the last token that each token sees; None if all are causal.
    """

    items: tuple[MediaItem, ...]
    places: tuple[IntArray, ...]
    positions: Positions | None
    reach: IntArray | None


class SequenceImages:
    """Puts embeddings of images into steps, and tracks the sequences that lack one.

    Attributes:
        embeddings: Embeddings of the images that plans have encoded.
        capacity: The model's limits for images.
    """

    def __init__(
        self, config: EngineConfig, model: LoadedModel, vision: MediaEncoder, table: SequenceTable
    ) -> None:
        self.embeddings = MediaEmbeddings(vision)
        self._vision, self._table = vision, table
        self._upload = Uploader(model.device)
        width = int(model.hf_config.get_text_config().hidden_size)
        token_bytes = (1 + vision.num_deep) * width * model.dtypes.activations.itemsize
        cache_tokens = config.image_cache_bytes // token_bytes
        most = min(config.max_image_tokens_per_step, cache_tokens, model.max_model_len)
        self._looks_ahead = vision.looks_ahead != "nowhere"
        if self._looks_ahead:
            most = min(most, config.max_tokens_per_batch)
        self.capacity = ImageCapacity(most, cache_tokens, self._looks_ahead)
        self._failed: dict[str, Cancel] = {}
        self._spoiled: dict[int, None] = {}

    def clear(self) -> None:
        """Drop all: there are no sequences any more."""
        self.embeddings.clear()
        self._failed.clear()
        self._spoiled.clear()

    def add(self, new: NewSequence, media: tuple[MediaItem, ...]) -> None:
        """Place the images of a sequence that the table has."""
        row = self._table.row_of(new.seq_id)
        assert row is not None
        prompt = new.token_ids[: len(new.token_ids) - new.num_generated]
        places = tuple(np.array(item.places(prompt), np.int64) for item in media)
        positions: Positions | None = None
        try:
            positions = self._vision.positions(prompt, media)
        except MediaError as error:
            self._fail(row, str(error))
        reach: IntArray | None = None
        if self._looks_ahead:
            reach = np.arange(len(prompt))
            for own in places:
                reach[own] = own[-1]
        self._table.images[row] = PlacedImages(media, places, positions, reach)
        self._table.images_end[row] = int(places[-1][-1]) + 1
        self._table.position_shift[row] = positions.shift if positions is not None else 0

    def take_failures(self) -> tuple[Cancel, ...]:
        """Return cancellations of requests whose images can't be used, each once."""
        failed, self._failed = tuple(self._failed.values()), {}
        return failed

    def take_spoiled(self, plan: StepPlan) -> tuple[int, ...]:
        """Return the sequences whose KV is invalid since the last call, which was before `plan`."""
        if not self._spoiled:
            return ()
        spoiled, self._spoiled = self._spoiled, {}
        leader = -1
        for seq_id, num_tokens in zip(plan.seq_ids, plan.num_tokens, strict=True):
            if num_tokens:
                leader = seq_id
            elif leader in spoiled:  # it shares the prefill
                spoiled[seq_id] = None
        return tuple(spoiled)

    def in_step(self, rows: IntArray, starts: IntArray) -> bool:
        """Return whether a row of a step, from these positions on, may compute an image's token."""
        return bool((starts < self._table.images_end[rows]).any())

    def concern(self, rows: IntArray, starts: IntArray) -> bool:
        """Return whether embeddings or positions of a step differ by images."""
        return bool(self._table.position_shift[rows].any()) or self.in_step(rows, starts)

    def look_ahead(self, rows: IntArray, batch: Rows) -> Rows:
        """Return a step with its `reach`. `rows`: of the table, in batch order."""
        if not self._looks_ahead:
            return batch
        first_token = np.cumsum(batch.num_tokens) - batch.num_tokens
        reach = batch.flat[1].copy()
        for index, row in self._before_images_end(rows, batch.starts):
            own = self._images_of(row).reach
            assert own is not None
            part = own[batch.starts[index] : batch.contexts[index]]
            reach[first_token[index] : first_token[index] + len(part)] = part
        in_windows = self._vision.looks_ahead == "windows"
        return replace(batch, reach=reach, reach_in_windows=in_windows)

    def put_in(self, inputs: StepInputs, rows: IntArray, batch: Rows) -> StepInputs:
        """Return the inputs of a step with its images.

        Args:
            inputs: Inputs of the step, without images so far.
            rows: Rows of the table, in batch order.
            batch: The step.
        """
        first_token = np.cumsum(batch.num_tokens) - batch.num_tokens
        parts: list[tuple[IntArray, Tensor]] = []
        for index, row in self._before_images_end(rows, batch.starts):
            images, start = self._images_of(row), batch.starts[index]
            for item, places in zip(images.items, images.places, strict=True):
                low, high = np.searchsorted(places, (start, batch.contexts[index]))
                if low < high and (embeddings := self._embeddings_of(row, item)) is not None:
                    targets = places[low:high] - start + first_token[index]
                    parts.append((targets, embeddings[:, low:high]))
        changes: dict[str, Any] = {}
        if self._vision.rotates_in_space:
            changes["position_ids"] = self._rotary_positions(rows, batch, first_token)
        if parts:
            changes["media"] = self._arguments(inputs, parts)
        return msgspec.structs.replace(inputs, **changes)

    # --- inside -------------------------------------------------------------------------------

    def _before_images_end(self, rows: IntArray, starts: IntArray) -> Iterator[tuple[int, int]]:
        """Iterate over rows of a step that start before the end of their images: index in the step,
        row of the table."""
        for index in np.flatnonzero(starts < self._table.images_end[rows]).tolist():
            yield index, int(rows[index])

    def _images_of(self, row: int) -> PlacedImages:
        images: PlacedImages = self._table.images[row]
        return images

    def _rotary_positions(self, rows: IntArray, batch: Rows, first_token: IntArray) -> Tensor:
        """Return `[3, 1, tokens]`."""
        of_token, indices = batch.flat
        positions = np.tile(indices + self._table.position_shift[rows[of_token]], (3, 1))
        for index, row in self._before_images_end(rows, batch.starts):
            if (own := self._images_of(row).positions) is not None:
                part = own.prompt[:, batch.starts[index] : batch.contexts[index]]
                first = first_token[index]
                positions[:, first : first + part.shape[1]] = part
        return self._upload(positions)[0][:, None]

    def _embeddings_of(self, row: int, item: MediaItem) -> Tensor | None:
        """Return an image's embeddings; None, with the sequence spoiled, if there are none."""
        try:
            return self.embeddings.of(item)
        except MediaError as error:
            self._fail(row, str(error))
        return None

    def _arguments(
        self, inputs: StepInputs, parts: list[tuple[IntArray, Tensor]]
    ) -> Mapping[str, Any]:
        (places,) = self._upload(np.concatenate([targets for targets, _ in parts]))
        rows = torch.cat([rows for _, rows in parts], 1)
        return self._vision.arguments(inputs.input_ids, places, rows)

    def _fail(self, row: int, why: str) -> None:
        info = self._table.info[row]
        (seq_id,) = self._table.ids_of(np.array([row])).tolist()
        assert info is not None
        self._spoiled[seq_id] = None
        self._failed[info.request_id] = Cancel(
            info.request_id, info.entry_id, "error", "invalid_image", why
        )
