"""One SHA-256 over all results of a run, equal however the run went. docs/replay.md defines it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ..bus.public import Completion, TokenLogprob
from ..config import RequestError, shown
from .rollouts import TrainingSample, completion_of

FORMAT = b"nano-inference digest 1"
"""The format's name, hashed first; another number means other bytes."""


class RunDigest(msgspec.Struct, frozen=True, kw_only=True):
    """The digest of a run.

    Attributes:
        digest: SHA-256, in hexadecimal digits.
        results: Number of requests.
        samples, tokens: Numbers of samples and tokens in the digest.
        failed: Requests whose status is not "done".
    """

    digest: str
    results: int
    samples: int
    tokens: int
    failed: int


class Digest:
    """Results, in any order, and the digest of all.

    It holds the id and a hash of each result.
    """

    def __init__(self) -> None:
        self._hashes: dict[str, bytes] = {}
        self._samples = self._tokens = self._failed = 0

    def add(self, result: Completion) -> None:
        """Add a result.

        Raises:
            RequestError: `duplicate_request`: a result with this id was added before.
        """
        id = result.request_id or result.entry_id
        if id in self._hashes:
            raise RequestError(
                f"there are two results of request {shown(id)}; a digest is over one of each: "
                "give requests ids of their own, or the results of one run alone",
                code="duplicate_request",
            )
        self._hashes[id] = result_hash(id, result)
        self._samples += len(result.samples)
        self._tokens += sum(len(sample.token_ids) for sample in result.samples)
        self._failed += result.status != "done"

    def result(self) -> RunDigest:
        """Return the digest of all results so far, in the order of their ids."""
        whole = hashlib.sha256(FORMAT)
        for _, each in sorted(self._hashes.items(), key=lambda pair: pair[0].encode()):
            whole.update(each)
        return RunDigest(
            digest=whole.hexdigest(),
            results=len(self._hashes),
            samples=self._samples,
            tokens=self._tokens,
            failed=self._failed,
        )


class VersionDigests:
    """Results, in any order, and the digest of each version's; see `digests`."""

    def __init__(self) -> None:
        self._found: dict[int, Digest] = {}

    def add(self, result: Completion) -> None:
        """Add a result. Raises RequestError as `Digest.add`, within a version."""
        self._found.setdefault(version_of(result), Digest()).add(result)

    def result(self) -> dict[int, RunDigest]:
        """Return the digests so far, by version."""
        return {version: self._found[version].result() for version in sorted(self._found)}


def digest(results: Iterable[Completion | TrainingSample]) -> str:
    """Return the SHA-256 of results: of terminal messages in any order, or of rollouts.

    Rollouts with one `request_id` are the samples of one request, in their order. Without ids
    (`generate`), each is a request of its own, and its place in the order is its id.

    Raises:
        RequestError: `duplicate_request`: two terminal messages have one id.
    """
    found = Digest()
    for each in completions_of(results):
        found.add(each)
    return found.result().digest


def digests(results: Iterable[Completion | TrainingSample]) -> dict[int, RunDigest]:
    """Return the digest of the results of each epoch of a run: of each version of the weights.

    A result belongs to the version that sampled its oldest token, the least of all its samples;
    0 without tokens. In each digest only that version's results count, as in `digest`.

    Raises:
        RequestError: As `digest`.
    """
    found = VersionDigests()
    for each in completions_of(results):
        found.add(each)
    return found.result()


def version_of(result: Completion) -> int:
    """Return the version of the weights to whose epoch a result belongs."""
    return min(
        (
            version
            for sample in result.samples
            for version, _ in sample.weight_versions or ((sample.weight_version, 0),)
        ),
        default=0,
    )


def completions_of(results: Iterable[Completion | TrainingSample]) -> Iterable[Completion]:
    """Return terminal messages, and those that rollouts stand for, as `digest` takes them."""
    rollouts: dict[str, list[TrainingSample]] = {}
    for position, each in enumerate(results):
        if isinstance(each, Completion):
            yield each
        else:
            id = f"{position:020}" if each.request_id is None else str(each.request_id)
            rollouts.setdefault(id, []).append(each)
    for id, samples in rollouts.items():
        yield completion_of(*samples, request_id=id)


# --- bytes ----------------------------------------------------------------------------------------


def result_hash(id: str, result: Completion) -> bytes:
    """Return the SHA-256 of one result."""
    content = hashlib.sha256()
    content.update(_text(id))
    content.update(_text(result.status))
    content.update(_numbers(result.prompt_logprobs))
    content.update(struct.pack("<I", len(result.samples)))
    for sample in sorted(result.samples, key=lambda each: each.sample_index):
        content.update(struct.pack("<I", sample.sample_index))
        content.update(_text(sample.finish_reason))
        content.update(_integers(sample.token_ids))
        content.update(_numbers(sample.logprobs))
        content.update(_tops(sample.top_logprobs))
        content.update(_numbers(sample.embedding))
    return content.digest()


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<I", len(encoded)) + encoded


def _integers(values: Sequence[int]) -> bytes:
    return struct.pack(f"<I{len(values)}i", len(values), *values)


def _numbers(values: Sequence[float | None] | None) -> bytes:
    """Return the number of values and their bits as float32; None is a NaN."""
    given: Any = [float("nan") if each is None else each for each in values or ()]
    return struct.pack(f"<I{len(given)}f", len(given), *given)


def _tops(values: Sequence[Sequence[TokenLogprob]] | None) -> bytes:
    """Return the number of positions; for each its token ids, and their logprobs."""
    parts = [struct.pack("<I", len(values or ()))]
    for tops in values or ():
        parts.append(_integers([top.token_id for top in tops]))
        parts.append(_numbers([top.logprob for top in tops]))
    return b"".join(parts)
