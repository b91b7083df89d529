"""An executor's record of its weights, for its successor."""

from __future__ import annotations

from ....config import WeightsError
from ....store.in_place import WeightsInPlace
from . import effects as do


class Succession:
    """Records this executor's weights for its successor, and compares with its predecessor's.

    The store keeps the lane's newest weights, and the admission under which they were in place.
    While that admission lives, so does the lane, and a new executor must have those weights. A
    later admission may have begun a new lane, with the weights of `engine.model_path`.

    Attributes:
        behind: The lane's version when this executor joined without it; 0 otherwise.
    """

    def __init__(self) -> None:
        self.behind = 0
        # The last admission; the version and origin of this executor's own weights.
        self._leader = ""
        self._own: tuple[int, do.WeightsOrigin | None] = 0, None

    def put_in_place(self, version: int, origin: do.WeightsOrigin | None) -> do.Effect:
        """New weights are in place. `origin`: of all of them, if they came in one update."""
        self._own, self.behind = (version, origin), 0
        return self._record()

    def begin_epoch(self, leader: str) -> list[do.Effect]:
        """Begin an epoch of an admission; this executor takes part once the effects are done.

        At the first one the lane's record is read, unless this executor has had an update: then a
        new admission gets a record of that.
        """
        if leader == self._leader:
            return []
        first, self._leader = not self._leader, leader
        if self._own[0]:
            return [self._record()]
        return [do.ReadRecord()] if first else []

    def read(self, record: WeightsInPlace | None) -> list[do.Effect]:
        """Handle the lane's record; None if unknown."""
        if record is None:
            return []
        if record.leader == self._leader:
            return [do.Restore(record)]
        reason = "the lane was restarted; its earlier weights are not restored"
        fields = {"before": record.version, "reason": reason}
        return [do.Log("weights_of_model_path", fields, warning=True)]

    def fall_behind(self, version: int, why: str) -> list[do.Effect]:
        """The lane's weights can't be restored: this executor serves those that it loaded."""
        self.behind = version
        reason = f"{why}; this executor serves the weights of model_path until they are updated"
        fields = {"version": 0, "of_the_lane": version, "reason": reason}
        return [do.Log("weights_behind", fields, warning=True)]

    def check(self, covers: bool) -> None:
        """Check that new weights may be put in place. `covers`: they replace every parameter.

        Raises:
            WeightsError: They would mix with weights that the trainer doesn't expect here.
        """
        if self.behind and not covers:
            raise WeightsError(
                "this executor was restarted with the weights of model_path, not version "
                f"{self.behind}, which a partial update needs; send all weights in one update",
                code="weights_behind",
            )

    def _record(self) -> do.Remember:
        version, origin = self._own
        folder, stamp = origin or ("", "")
        return do.Remember(
            WeightsInPlace(version=version, leader=self._leader, folder=folder, stamp=stamp)
        )


def supersedes(new: WeightsInPlace, record: WeightsInPlace | None) -> bool:
    """Whether to replace a record: another replica may be ahead, if an update failed here."""
    return record is None or record.leader != new.leader or record.version < new.version
