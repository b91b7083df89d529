"""Where a policy is kept: the protocol, the bus as one such place, and how others register."""

from __future__ import annotations

from importlib import metadata
from typing import NamedTuple, Protocol

from ...config import ConfigError, NanoInferenceError, PolicyConfig, nearest
from ...store.policy import PolicyRecord
from .document import PolicyDocument, decode_document, encode_document

ENTRY_POINTS = "nano_inference.policy_backends"
"""The group in which a package registers a function that takes PolicyConfig and gives a backend,
under the name that `policy.backend` then has."""


class StoredPolicy(NamedTuple):
    """A document, and the version in which it stands there."""

    version: str
    document: PolicyDocument


class PolicyUnavailable(NanoInferenceError):
    """It can't be told who may do what, so nobody may. Answered with status 503."""

    code = "policy_unavailable"


class PolicyBackend(Protocol):
    """Keeps one document. Any number of processes may use the same place at a time."""

    async def read(self, known: str) -> StoredPolicy | None:
        """None while it is what it was in the version `known`; "" for no version.

        A document that nobody has written is empty, in the version "".

        Raises:
            NanoInferenceError: It can't be read.
        """

    async def replace(self, known: str, document: PolicyDocument) -> bool:
        """Writes it, unless somebody has since the version `known`; returns whether it did.

        Raises:
            NanoInferenceError: It can't be written.
        """

    async def aclose(self) -> None:
        """Lets go of what it holds."""


class BusBackend:
    """The policy on the bus, shared by all of its gateways."""

    def __init__(self, record: PolicyRecord) -> None:
        self._record = record

    async def read(self, known: str) -> StoredPolicy | None:
        if (state := await self._record.read(known)) is None:
            return None
        try:
            return StoredPolicy(state.version, decode_document(state.document))
        except (ValueError, RecursionError) as error:
            raise PolicyUnavailable(f"what the bus has as policy is none: {error}") from None

    async def replace(self, known: str, document: PolicyDocument) -> bool:
        return await self._record.replace(known, encode_document(document))

    async def aclose(self) -> None:
        """Leaves the bus open, which is not its own."""


def open_backend(config: PolicyConfig, record: PolicyRecord | None) -> PolicyBackend:
    """The backend that `policy.backend` names.

    Args:
        record: Where the one on the bus is; other backends take None.

    Raises:
        ConfigError: There is none of that name, or it can't be used.
    """
    if config.backend == "bus":
        assert record is not None, "a bus is at hand where the policy is on it"
        return BusBackend(record)
    if config.backend == "file":
        from .file import FileBackend

        return FileBackend(config.file, config.passphrase)
    known = {each.name: each for each in metadata.entry_points(group=ENTRY_POINTS)}
    if (found := known.get(config.backend)) is None:
        names = ["off", "bus", "file", *known]
        raise ConfigError(
            f"policy.backend is {config.backend!r}{nearest(config.backend, names)}; there are: "
            f"{', '.join(names)}"
        )
    backend: PolicyBackend = found.load()(config)
    return backend
