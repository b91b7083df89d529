"""What the weights of an executor that starts anew have to do with those that its lane had.

The bus remembers the lane's newest weights, and under which admission they were in place. As long
as that admission lives, so does the lane, and whoever joins it is expected to have them. An
admission that came later has begun a lane anew, for all that can be known here, with the weights of
`engine.model_path`.
"""

from __future__ import annotations

from ....bus import WeightsInPlace
from ....config import BusError, WeightsError
from ...actor import Actor
from .parts import Origin


class Succession:
    """Remembers this executor's weights for its successor, and knows its predecessor's.

    Attributes:
        behind: The version that the lane had when this executor joined it without; 0 when it has
            what it should have.
    """

    def __init__(self, actor: Actor) -> None:
        self.behind = 0
        self._actor = actor
        # The admission that has been asked about last; the weights of this executor's own.
        self._leader = ""
        self._own: tuple[int, Origin | None] = 0, None

    async def remember(self, version: int, origin: Origin | None) -> None:
        """These weights are in place, all of them of one update or on top of what there was."""
        self._own, self.behind = (version, origin), 0
        await self._write()

    async def inherited(self) -> WeightsInPlace | None:
        """What is to be put in place before this executor takes part in a new epoch, if anything.

        Only the first time, and not when it has had an update: then this tells the admission's
        lane of those.
        """
        leader = self._actor.leader
        if leader == self._leader:
            return None
        first, self._leader = not self._leader, leader
        if self._own[0]:
            await self._write()
            return None
        try:
            found = await self._actor.bus.weights.read() if first else None
        except BusError as error:
            self._actor.log.warning("weights_of_the_lane_unknown", reason=error.message)
            return None
        if found is None or found.leader == leader:
            return found
        self._actor.log.warning(
            "weights_of_model_path",
            before=found.version,
            reason="the lane was begun anew; what it had before is not restored",
        )
        return None

    def fall_behind(self, version: int, why: str) -> None:
        """The lane's weights can't be had: this executor serves those that it loaded."""
        self.behind = version
        self._actor.log.warning(
            "weights_behind",
            version=0,
            of_the_lane=version,
            reason=f"{why}; this executor serves the weights of model_path until they are updated",
        )

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

    async def _write(self) -> None:
        version, origin = self._own
        leader, memory = self._actor.leader, self._actor.bus.weights
        folder, stamp = origin or ("", "")
        own = WeightsInPlace(version=version, leader=leader, folder=folder, stamp=stamp)
        try:
            found = await memory.read()
            # Another replica may be further on, when an update has failed in this one.
            if found is None or found.leader != leader or found.version < version:
                await memory.put(own)
        except BusError as error:
            # Nobody loses anything by it but a successor, which serves what it loads.
            self._actor.log.warning("weights_not_remembered", reason=error.message)
