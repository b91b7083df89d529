"""What the weights of an executor that starts anew have to do with those that its lane had.

The bus remembers the lane's newest weights, and under which admission they were in place. As long
as that admission lives, so does the lane, and whoever joins it is expected to have them. An
admission that came later has begun a lane anew, for all that can be known here, with the weights of
`engine.model_path`.
"""

from __future__ import annotations

from ....config import WeightsError
from ....store.in_place import WeightsInPlace
from .effects import Effect, Log, ReadRecord, Remember, Restore
from .parts import Origin


class Succession:
    """Remembers this executor's weights for its successor, and knows its predecessor's.

    Attributes:
        behind: The version that the lane had when this executor joined it without; 0 when it has
            what it should have.
    """

    def __init__(self) -> None:
        self.behind = 0
        # The admission that was heard of last; the weights of this executor's own.
        self._leader = ""
        self._own: tuple[int, Origin | None] = 0, None

    def put_in_place(self, version: int, origin: Origin | None) -> list[Effect]:
        """These weights are in place, all of them of one update or on top of what there was."""
        self._own, self.behind = (version, origin), 0
        return [self._record()]

    def begin_epoch(self, leader: str) -> list[Effect]:
        """An admission begins an epoch. Before this executor takes part all of it must be done.

        The first one is asked for the lane's weights, unless this executor has had an update:
        then an admission that is new is told of that.
        """
        if leader == self._leader:
            return []
        first, self._leader = not self._leader, leader
        if self._own[0]:
            return [self._record()]
        return [ReadRecord()] if first else []

    def read(self, record: WeightsInPlace | None) -> list[Effect]:
        """What the lane has, as far as it is known."""
        if record is None:
            return []
        if record.leader == self._leader:
            return [Restore(record)]
        reason = "the lane was begun anew; what it had before is not restored"
        return [_warning("weights_of_model_path", before=record.version, reason=reason)]

    def fall_behind(self, version: int, why: str) -> list[Effect]:
        """The lane's weights can't be had: this executor serves those that it loaded."""
        self.behind = version
        reason = f"{why}; this executor serves the weights of model_path until they are updated"
        return [_warning("weights_behind", version=0, of_the_lane=version, reason=reason)]

    def check(self, covers: bool) -> None:
        """Whether new weights may be put in place. `covers`: they replace every parameter.

        Raises:
            WeightsError: They would be mixed with those that the trainer does not expect here.
        """
        if self.behind and not covers:
            raise WeightsError(
                f"this executor was started anew and has the weights of model_path, not version "
                f"{self.behind}, which these would be a part on top of; send all weights in one "
                "update",
                code="weights_behind",
            )

    def _record(self) -> Remember:
        version, origin = self._own
        folder, stamp = origin or ("", "")
        return Remember(
            WeightsInPlace(version=version, leader=self._leader, folder=folder, stamp=stamp)
        )


def supersedes(new: WeightsInPlace, record: WeightsInPlace | None) -> bool:
    """Whether it is to be written down: another replica may be further on, when an update has
    failed in this one."""
    return record is None or record.leader != new.leader or record.version < new.version


def _warning(event: str, **fields: object) -> Log:
    return Log(event, fields, warning=True)
