"""New weights for the running model, and the version by which results name them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .....config import WeightsError, shown
from ..ranks.rank_error import RankError
from ..shards import NewShard, NewWeight, Receipt, ShardedWeights
from .checks import (
    WeightLimits,
    busy,
    check_fits,
    check_open,
    check_stored,
    digest_of,
    is_finite,
    limits_of,
    not_finite,
    number_of,
    remedy_for,
)

if TYPE_CHECKING:
    from .parts import PartsTaker


class WeightSyncManager:
    """Replaces a model's weights in place, all of them or none.

    New weights are fully checked before the first tensor is written, so a refused update leaves
    weights and version as they were. The version rises once the last tensor is in place. After a
    failed write the parameters count as empty: a mixture never runs.

    Attributes:
        version: Version of the weights in place; 0 for the loaded ones.
        empty: The parameters hold nothing: their memory was released, or they are lost. Then only a
            complete update is accepted.
        lost: Error of a write halfway, if no complete update has succeeded since; else "".
        refused: Why the last staged weights could not be put in place, with the weights before
            intact; None once it was taken.
        borrowed: The staged weights are tensors of a caller who can write to them, so their numbers
            are checked again before they are put in place; the step after turns it off.
        limits: The limits of one source of new weights.
        shards: The weights in place.
        read_everywhere: Returns a whole tensor of several ranks; None for one rank.
        divert: Takes tensors that are of another module, and returns the others; None for none.
    """

    divert: Callable[[Mapping[str, NewWeight]], Mapping[str, NewWeight]] | None = None

    def __init__(
        self,
        module: nn.Module,
        limits: WeightLimits | None = None,
        *,
        shards: ShardedWeights | None = None,
        write: Callable[[Mapping[str, NewWeight]], None] | None = None,
        read: Callable[[str], Tensor] | None = None,
    ) -> None:
        """Manage the weights of a module.

        Args:
            module: The module.
            limits: Limits of new weights; None derives them from the model.
            shards: If the module is one rank's shard, or holds tensors in another form: new weights
                are those of the whole model.
            write: Copies new weights to all ranks; None for this one only.
            read: Returns a whole tensor of all ranks, likewise.
        """
        self.shards = ShardedWeights.of(module) if shards is None else shards
        # Names and shapes; without `shards` the numbers too.
        self._whole = self.shards.whole
        self.limits = limits or limits_of(self._whole)
        self.version = 0
        self.empty = False
        self.lost = ""
        self.refused: WeightsError | None = None
        self._closed = False
        self._module = module
        self._write_everywhere = write
        self.read_everywhere = read
        self.borrowed = False
        self._pending: tuple[Mapping[str, NewWeight], int] | None = None
        self._writes: dict[str, int] = {}  # torch's count of writes to each staged tensor

    @property
    def pending_version(self) -> int:
        """The version of the staged weights; 0 for none."""
        return 0 if self._pending is None else self._pending[1]

    @property
    def pending_receipt(self) -> bool:
        """Whether ranks hold parts of staged weights, in the layout of now."""
        pending = () if self._pending is None else self._pending[0].values()
        return any(isinstance(each, NewShard) for each in pending)

    @property
    def converts(self) -> bool:
        """Whether new weights get another form, which `taker` makes of each tensor as it comes.

        Ranks make it when they get their parts of the whole tensors.
        """
        return self._write_everywhere is None and self.shards.converts

    def taker(self, names: Sequence[str], *, checkpoint: bool = False) -> PartsTaker:
        """Return an object that takes tensors one by one, in place of `prepare` for all.

        Args:
            names: Names of all tensors that will come.
            checkpoint: As for `prepare`.
        """
        from .parts import PartsTaker

        receipt = Receipt(0, self.shards.layout)
        return PartsTaker(self.shards, names, receipt, checks=True, checkpoint=checkpoint)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self._module.parameters()).device

    def parameters(self) -> list[Tensor]:
        """Return the module's parameters, each once."""
        return list(self._module.parameters())

    def close(self) -> None:
        """Refuse weights until `open`, since their memory is released.

        Raises:
            WeightsError: Some are staged.
        """
        if self._pending is not None:
            raise busy()
        self._closed = True

    def open(self) -> None:
        """Accept weights again."""
        self._closed = False

    @torch.no_grad()
    def prepare(
        self, new_weights: Mapping[str, NewWeight], *, checkpoint: bool = False
    ) -> Mapping[str, NewWeight]:
        """Convert new weights to the module's names and dtypes, so that only copying remains.

        May run on another thread, beside the forward pass.

        Args:
            new_weights: By name, as for `start_sync`.
            checkpoint: They come from a checkpoint and not from a module; see `as_parameters`.

        Raises:
            WeightsError: They don't fit this model, or are not finite.
        """
        from .conversion import as_parameters

        check_stored(new_weights)
        if self.divert is not None:
            new_weights = self.divert(new_weights)
        # Those that ranks have received by themselves are prepared.
        prepared: dict[str, NewWeight] = {
            name: each for name, each in new_weights.items() if isinstance(each, NewShard)
        }
        named = as_parameters(self._whole, _whole_ones(new_weights), checkpoint=checkpoint)
        own = self._whole.state_dict()
        for name, tensor in named.items():
            if name in own:  # otherwise `check` refuses it
                # Check the shape before the cast, which allocates memory.
                check_fits(name, tensor, own[name])
                tensor = tensor.to(own[name].dtype)
            prepared[name] = tensor
        self._check_numbers(prepared)
        return self._converted(prepared)

    def covers(self, new_weights: Mapping[str, NewWeight]) -> bool:
        """Return whether they replace every parameter."""
        return not self.shards.missing(new_weights)

    def start_sync(
        self,
        new_weights: Mapping[str, NewWeight],
        version: int | None = None,
        *,
        partial: bool = False,
        base: int | None = None,
    ) -> int:
        """Stage new weights, to be put in place between two steps. They must not change until then.

        Args:
            new_weights: By parameter name, as in `state_dict`, or by checkpoint name, on any device
                and in any dtype. One of several names of a tied parameter is enough.
            version: Their version, above the present one; None for the next.
            partial: Keep parameters that are not among them.
            base: The version of which they are a delta; None if they are none.

        Returns:
            Their version.

        Raises:
            WeightsError: An update is staged already, the weights don't fit the model, or their
                memory is released.
        """
        version = self.check_version(version)
        self.check_base(base)
        check_stored(new_weights)
        if whole := _whole_ones(new_weights):
            from .conversion import as_parameters

            received = {name: each for name, each in new_weights.items() if name not in whole}
            new_weights = {**received, **as_parameters(self._whole, whole)}
        self.check(new_weights, partial=partial)
        self.check_complete(new_weights)
        self._pending = self._converted(self._apart(new_weights)), version
        self._writes = _writes_to(self._pending[0])
        return version

    def check_version(self, version: int | None) -> int:
        """Return the version of an update. Raises WeightsError as `start_sync`."""
        if self._pending is not None:
            raise busy()
        if self._closed:
            raise WeightsError(
                "the memory of the weights is released; resume it before an update",
                code="memory_released",
            )
        if version is None:
            version = self.version + 1
        elif isinstance(version, bool) or not isinstance(version, int) or version <= self.version:
            raise WeightsError(
                f"version {shown(version)} is not above that of the weights in place, "
                f"{self.version}; give a larger one, or none"
            )
        return version

    def check_base(self, base: int | None) -> None:
        """Check that the weights in place are those of a delta's base version, if it is one.

        Raises:
            WeightsError: `weights_base`: they are not.
        """
        if base is None:
            return
        from .delta import other_base

        if self.empty:
            raise other_base("none are in place")
        if base != self.version:
            raise other_base(f"it begins with version {base}, and {self.version} is in place")

    def check_complete(self, new_weights: Mapping[str, NewWeight]) -> None:
        """Check that an update of empty weights is complete. Raises as `start_sync`."""
        if self.empty and (missing := self.shards.missing(new_weights)):
            why = "an update failed midway" if self.lost else "their memory was released"
            raise WeightsError(
                f"{number_of(len(missing))} missing, such as {missing[0]!r}, and none are in "
                f"place, since {why}; send all in one update",
                code="weights_incomplete",
            )

    def maybe_finish_sync(self) -> bool:
        """Put staged weights in place; return whether there were any.

        Raises:
            WeightsError: They were changed meanwhile and can't be written: nothing has changed.
                Or writing failed midway (`weights_lost`), and `empty` is true.
            RankError: A rank has ended, and with it the executor: its successor has weights.
        """
        if self._pending is None:
            return False
        (new_weights, version), self._pending = self._pending, None
        try:
            self._check_writable(new_weights)
        finally:
            self.borrowed = False
        try:
            self._write(new_weights)
        except BaseException as error:
            self.empty = True
            self.lost = f"{type(error).__name__}: {shown(str(error))}"
            if isinstance(error, RankError) or not isinstance(error, Exception):
                raise
            raise weights_lost(self.lost) from error
        self.version = version
        self.empty = False
        self.lost = ""
        return True

    def finish_planned_sync(self, version: int) -> None:
        """Put staged weights in place for a plan that names this version.

        Weights that can't be written any more are dropped (`refused`), and steps go on with the
        weights before.

        Raises:
            WeightsError: No weights are in place, so no plan can run.
        """
        if version <= self.version:
            return
        try:
            self.maybe_finish_sync()
        except WeightsError as error:
            if self.empty:
                raise
            self.refused = error

    def take_refused(self) -> WeightsError | None:
        """Return why the last plan's weights were dropped, once; None if they were not."""
        refused, self.refused = self.refused, None
        return refused

    def sync_blocking(
        self,
        new_weights: Mapping[str, NewWeight],
        version: int | None = None,
        *,
        partial: bool = False,
        base: int | None = None,
    ) -> int:
        """Put new weights in place at once.

        Raises:
            WeightsError: As `start_sync` and `maybe_finish_sync`.
        """
        version = self.start_sync(new_weights, version, partial=partial, base=base)
        self.maybe_finish_sync()
        return version

    def check(self, new_weights: Mapping[str, NewWeight], *, partial: bool = False) -> None:
        """Check that they fit the model. Raises WeightsError as `start_sync`."""
        own = self._whole.state_dict(keep_vars=True)
        unknown = sorted(new_weights.keys() - own.keys())
        missing = self.shards.missing(new_weights)
        for kind, names in (
            ("does not have", unknown),
            (
                f"needs, which {'is' if len(missing) == 1 else 'are'} missing",
                [] if partial and len(missing) < len(own) else missing,
            ),
        ):
            if names:
                remedy = remedy_for(new_weights, own)
                if not unknown and len(missing) < len(own):
                    remedy += ", or partial=True to keep the missing ones"
                raise WeightsError(
                    f"the new weights don't fit: {number_of(len(names))} that the model "
                    f"{kind}, such as {shown(names[0])}",
                    remedy=remedy,
                )
        layout = self.shards.layout
        received = (each for each in new_weights.values() if isinstance(each, NewShard))
        if any(each.receipt.layout != layout for each in received):
            raise WeightsError(
                "experts have changed their owners since the new weights came; send them again",
                code="weights_interrupted",
            )
        first_of: dict[int, str] = {}
        for name, tensor in new_weights.items():
            check_fits(name, tensor, own[name])
            check_open(name, self.shards.shards[name])
            first = first_of.setdefault(id(own[name]), name)
            if first != name and not _same(tensor, new_weights[first]):
                raise WeightsError(
                    f"the new weights don't fit: {first!r} and {name!r} are one tensor in this "
                    "model, and differ; tie them in the trainer too"
                )

    def _converted(self, new_weights: Mapping[str, NewWeight]) -> Mapping[str, NewWeight]:
        """Give tensors the form that the module holds them in. Raises WeightsError as `prepare`."""
        if not self.converts:
            return new_weights
        shards = self.shards.shards
        names = [
            name for name in _whole_ones(new_weights) if name in shards and shards[name].converts
        ]
        taker = self.taker(names)
        for name in names:
            tensor = new_weights[name]
            assert isinstance(tensor, Tensor)
            taker.take(name, tensor)
        return {**new_weights, **taker.parts()}

    def _check_numbers(self, new_weights: Mapping[str, NewWeight]) -> None:
        """Raises WeightsError for parameters that are not finite; buffers may be, such as masks."""
        parameters = dict(self._whole.named_parameters(remove_duplicate=False))
        bad = [
            name
            for name, tensor in new_weights.items()
            if name in parameters and not is_finite(tensor)
        ]
        if bad:
            raise not_finite(bad)

    def _apart(self, new_weights: Mapping[str, NewWeight]) -> Mapping[str, NewWeight]:
        """Copy tensors that share memory with other parameters of the module, as when two layers
        swap places: the first write would change the source of the second."""
        own = self._whole.state_dict()
        parts = self._module.state_dict().values()
        storages = {tensor.untyped_storage().data_ptr() for tensor in parts}
        shared = {
            name: tensor.clone()
            for name, tensor in _whole_ones(new_weights).items()
            if tensor.untyped_storage().data_ptr() in storages and not _alike(tensor, own[name])
        }
        return {**new_weights, **shared} if shared else new_weights

    def _check_writable(self, new_weights: Mapping[str, NewWeight]) -> None:
        """Raises WeightsError if their owner has written to them, or made them unwritable."""
        own = self._whole.state_dict()
        try:
            check_stored(new_weights)
            for name, tensor in new_weights.items():
                check_fits(name, tensor, own[name])
            for name, number in _writes_to(new_weights).items():
                if number != self._writes[name]:
                    raise WeightsError(f"{shown(name)} was written to")
            if self.borrowed:
                self._check_numbers(new_weights)
        except WeightsError as error:
            raise WeightsError(
                f"the new weights were changed before they were in place: {error.message}; leave "
                "them as they are until then, or update with blocking=True"
            ) from None
        check_stored(self._module.state_dict())

    @torch.no_grad()
    def _write(self, new_weights: Mapping[str, NewWeight]) -> None:
        if self._write_everywhere is not None:
            self._write_everywhere(new_weights)
            return
        self.shards.write(_whole_ones(new_weights))
        self.shards.write_parts(
            {name: each.parts for name, each in new_weights.items() if isinstance(each, NewShard)}
        )


def weights_lost(why: str) -> WeightsError:
    """Return the error for parameters that hold a mixture. `why`: how writing failed."""
    return WeightsError(
        f"writing new weights failed midway ({why}), so no weights are in place and nothing is "
        "generated; send all of them in one update",
        code="weights_lost",
    )


def _whole_ones(new_weights: Mapping[str, NewWeight]) -> dict[str, Tensor]:
    """Return those that this process has as a whole; values of other types too."""
    return {
        name: tensor for name, tensor in new_weights.items() if not isinstance(tensor, NewShard)
    }


def _writes_to(new_weights: Mapping[str, NewWeight]) -> dict[str, int]:
    """Return how often each tensor or its storage was written to; torch does not count this for
    tensors of its inference mode, nor writes through `data`."""
    return {
        name: tensor._version
        for name, tensor in _whole_ones(new_weights).items()
        if not tensor.is_inference()
    }


def _same(left: NewWeight, right: NewWeight) -> bool:
    if isinstance(left, NewShard) or isinstance(right, NewShard):
        return _digest(left) == _digest(right)
    return _alike(left, right) or torch.equal(left, right)


def _digest(tensor: NewWeight) -> int:
    return tensor.digest if isinstance(tensor, NewShard) else digest_of(tensor)


def _alike(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors of one shape share their memory."""
    of_left, of_right = (
        (tensor.data_ptr(), tensor.stride(), tensor.dtype) for tensor in (left, right)
    )
    return of_left == of_right
