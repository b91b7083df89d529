"""Messages between admission and streaming about requests that go on after a failure."""

from __future__ import annotations

from .control import Internal, InternalPart
from .entries import entry_key


class RecoveryItem(InternalPart, frozen=True, array_like=True):
    """A request that admission holds, after a failure.

    Attributes:
        stream: The key of its result stream.
    """

    stream: str
    entry_id: str
    request_id: str

    @property
    def key(self) -> str:
        """The identity of its entry."""
        return entry_key(self.entry_id, self.request_id)


class Recover(Internal, frozen=True):
    """Admission to streaming, in a new epoch: report what there is of these requests.

    It comes after their RequestOpened, on the same link. Each is answered with Recovered, or with
    RequestFinished when its terminal message is written.

    Attributes:
        replica: One of which the executor takes part in this epoch.
    """

    requests: tuple[RecoveryItem, ...]
    replica: int = 0


class Retracted(Internal, frozen=True):
    """Streaming to admission: samples whose tokens are dropped, and which are to begin anew.

    Attributes:
        key: Identity of the request's entry.
        sample_indices: The samples. Their sequences are halted.
    """

    key: str
    sample_indices: tuple[int, ...]


class RecoveredSample(InternalPart, frozen=True, array_like=True):
    """Streaming's tokens of one sample, from memory or from the result stream."""

    sample_index: int
    token_ids: tuple[int, ...]
    finished: bool


class Recovered(Internal, frozen=True):
    """Streaming to admission: go on after these tokens. Samples that never began are not here.

    Attributes:
        key: The identity of the request's entry.
    """

    key: str
    samples: tuple[RecoveredSample, ...]


class Fenced(Internal, frozen=True):
    """Streaming to admission: the streams of these entries take nothing more in this epoch.

    The requests queue shows their present owner: a larger epoch's, or outputs are missing there. Or
    they were begun in an older epoch, and run anew.

    Attributes:
        keys: The identities of the entries.
    """

    keys: tuple[str, ...]
