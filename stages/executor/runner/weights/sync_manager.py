"""New weights for the model that runs, and the version that says which ones made a token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .....config import WeightsError, shown
from .conversion import as_parameters
from .limits import WeightLimits, limits_of
from .storage import check_stored

_NAMED = 3
"""How many tensors an error names."""


class WeightSyncManager:
    """Replaces a model's weights in place, all of them or none.

    Everything that could be wrong with new weights is looked for before the first tensor is
    written, so a refused update leaves weights and version as they were. The version is raised
    once the last tensor is in place. Should a write fail all the same, the parameters count as
    empty: a mixture is never run.

    Attributes:
        version: Of the weights in place; 0 are those that were loaded.
        empty: The parameters hold nothing, since their memory was released or they are lost. Then
            only all of the weights are taken.
        lost: How a write has failed midway, if no whole update has succeeded since; else "".
        refused: Why the weights that waited last could not be put in place, with those before
            still there; None once it was taken.
        limits: The most that one source of new weights may bring.
    """

    def __init__(self, module: nn.Module, limits: WeightLimits | None = None) -> None:
        self.limits = limits or limits_of(module)
        self.version = 0
        self.empty = False
        self.lost = ""
        self.refused: WeightsError | None = None
        self._stuck: WeightsError | None = None
        self._closed = False
        self._module = module
        self._pending: tuple[Mapping[str, Tensor], int] | None = None

    @property
    def pending_version(self) -> int:
        """Of the weights that wait for `maybe_finish_sync`; 0 when none do."""
        return 0 if self._pending is None else self._pending[1]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self._module.parameters()).device

    def parameters(self) -> list[Tensor]:
        """Those of the module, each once."""
        return list(self._module.parameters())

    def close(self) -> None:
        """Takes no weights until `open`: there is no memory for them.

        Raises:
            WeightsError: Some wait to be put in place.
        """
        if self._pending is not None:
            raise _busy()
        self._closed = True

    def open(self) -> None:
        """Takes weights again."""
        self._closed = False

    @torch.no_grad()
    def prepare(
        self, new_weights: Mapping[str, Tensor], *, checkpoint: bool = False
    ) -> dict[str, Tensor]:
        """New weights under the module's own names and in its dtypes, so that only copying is left.

        May run on another thread, beside the forward pass.

        Args:
            new_weights: By name, as `start_sync` takes them.
            checkpoint: They come from a checkpoint and not from a module; see `as_parameters`.

        Raises:
            WeightsError: They are not those of this model, or not finite numbers.
        """
        check_stored(new_weights)
        named = as_parameters(self._module, new_weights, checkpoint=checkpoint)
        own = self._module.state_dict()
        prepared: dict[str, Tensor] = {}
        for name, tensor in named.items():
            if name in own:  # else `check` refuses it
                # Before it is cast: of the model's shape it takes no more memory than that.
                _check_fits(name, tensor, own[name])
                tensor = tensor.to(own[name].dtype)
            prepared[name] = tensor
        self._check_numbers(prepared)
        return prepared

    def covers(self, new_weights: Mapping[str, Tensor]) -> bool:
        """Whether they replace every parameter, so that what was in place before leaves nothing."""
        return not self._missing(new_weights)

    def start_sync(
        self,
        new_weights: Mapping[str, Tensor],
        version: int | None = None,
        *,
        partial: bool = False,
    ) -> int:
        """Takes new weights, to be put in place between two steps. They must not change till then.

        Args:
            new_weights: By parameter name, as `state_dict` gives them, or by the names of a
                checkpoint, on any device and in any dtype. One of several names of a tied
                parameter is enough.
            version: What to count from then on, above the present version; None for the next.
            partial: Whether parameters that are not among them stay as they are.

        Returns:
            The version that they will have.

        Raises:
            WeightsError: An update is waiting already, the weights don't fit the model, or their
                memory is released.
        """
        version = self.check_version(version)
        check_stored(new_weights)
        new_weights = as_parameters(self._module, new_weights)
        self.check(new_weights, partial=partial)
        self.check_complete(new_weights)
        self._pending = self._apart(new_weights), version
        return version

    def check_version(self, version: int | None) -> int:
        """What would be counted. Raises WeightsError as `start_sync`."""
        if self._pending is not None:
            raise _busy()
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

    def check_complete(self, new_weights: Mapping[str, Tensor]) -> None:
        """Whether they are all, where none are in place. Raises WeightsError as `start_sync`."""
        if self.empty and (missing := self._missing(new_weights)):
            why = "a write of new ones failed" if self.lost else "their memory was released"
            raise WeightsError(
                f"{len(missing)} tensors are missing, such as {missing[0]!r}, and none are in "
                f"place, since {why}; send all in one update",
                code="weights_incomplete",
            )

    def maybe_finish_sync(self) -> bool:
        """Puts the waiting weights in place, if there are any; returns whether it did.

        Raises:
            WeightsError: They were changed meanwhile and can't be written: nothing has changed.
                Or writing failed midway, as `weights_lost`, and `empty` is true.
        """
        if self._pending is None:
            return False
        (new_weights, version), self._pending = self._pending, None
        self._check_writable(new_weights)
        try:
            self._write(new_weights)
        except BaseException as error:
            self.empty = True
            self.lost = f"{type(error).__name__}: {shown(str(error))}"
            if not isinstance(error, Exception):
                raise  # interrupted
            raise weights_lost(self.lost) from error
        self.version = version
        self.empty = False
        self.lost = ""
        return True

    def finish_planned_sync(self, version: int) -> None:
        """Puts the waiting weights in place if a plan says so, which names this version.

        Those that can't be written any more are dropped, `refused` says why, and steps go on with
        the weights before, if there are any.

        Raises:
            WeightsError: No weights are in place, so the plan can't be run; nor, until
                `start_over`, can those behind it, which rest on it.
        """
        if self._stuck is not None:
            raise self._stuck
        if version <= self.version:
            return
        try:
            self.maybe_finish_sync()
        except WeightsError as error:
            if self.empty:
                self._stuck = error
                raise
            self.refused = error

    def start_over(self) -> None:
        """Plans that come from now on rest on none of those before."""
        self._stuck = None

    def take_refused(self) -> WeightsError | None:
        """Why the weights that a plan named last were dropped, once; None if they were not."""
        refused, self.refused = self.refused, None
        return refused

    def sync_blocking(
        self,
        new_weights: Mapping[str, Tensor],
        version: int | None = None,
        *,
        partial: bool = False,
    ) -> int:
        """Puts new weights in place at once.

        Raises:
            WeightsError: As `start_sync` and `maybe_finish_sync`.
        """
        version = self.start_sync(new_weights, version, partial=partial)
        self.maybe_finish_sync()
        return version

    def check(self, new_weights: Mapping[str, Tensor], *, partial: bool = False) -> None:
        """Whether they fit the model. Raises WeightsError as `start_sync`."""
        own = self._module.state_dict(keep_vars=True)
        unknown = sorted(new_weights.keys() - own.keys())
        missing = self._missing(new_weights)
        for kind, names in (
            ("does not have", unknown),
            ("needs, which are missing", [] if partial and len(missing) < len(own) else missing),
        ):
            if names:
                raise WeightsError(
                    f"the new weights don't fit: {len(names)} tensors that the model {kind}, such "
                    f"as {shown(names[0])}; pass the state_dict of the same architecture"
                )
        first_of: dict[int, str] = {}
        for name, tensor in new_weights.items():
            _check_fits(name, tensor, own[name])
            first = first_of.setdefault(id(own[name]), name)
            if first != name and not _same(tensor, new_weights[first]):
                raise WeightsError(
                    f"the new weights don't fit: {first!r} and {name!r} are one tensor in this "
                    "model, and differ; tie them in the trainer too"
                )

    def _missing(self, new_weights: Mapping[str, Tensor]) -> list[str]:
        """Names whose tensor is not there, under none of its names."""
        own = self._module.state_dict(keep_vars=True)
        given = {id(own[name]) for name in new_weights.keys() & own.keys()}
        return sorted(name for name, tensor in own.items() if id(tensor) not in given)

    def _check_numbers(self, new_weights: Mapping[str, Tensor]) -> None:
        """Raises WeightsError when a parameter is not finite; buffers may be, as masks are."""
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        bad = [
            name
            for name, tensor in new_weights.items()
            if name in parameters and not _is_finite(tensor)
        ]
        if bad:
            more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
            raise WeightsError(
                f"the new weights have NaN or infinity, in the model's dtype, in "
                f"{', '.join(bad[:_NAMED])}{more}; the trainer has diverged, or sent them before "
                "they were there",
                code="weights_not_finite",
            )

    def _apart(self, new_weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copies what lies in the module's own parameters under another name, as when two layers
        change places: the first write would change what the second one reads."""
        own = self._module.state_dict()
        storages = {tensor.untyped_storage().data_ptr() for tensor in own.values()}
        shared = {
            name: tensor.clone()
            for name, tensor in new_weights.items()
            if tensor.untyped_storage().data_ptr() in storages and not _alike(tensor, own[name])
        }
        return {**new_weights, **shared} if shared else new_weights

    def _check_writable(self, new_weights: Mapping[str, Tensor]) -> None:
        """Whether they can be written now, in the state that their owner has left them in."""
        own = self._module.state_dict()
        try:
            check_stored(new_weights)
            for name, tensor in new_weights.items():
                _check_fits(name, tensor, own[name])
        except WeightsError as error:
            raise WeightsError(
                f"the new weights were changed before they were in place: {error.message}; leave "
                "them as they are until then, or update with blocking=True"
            ) from None
        check_stored(own)

    @torch.no_grad()
    def _write(self, new_weights: Mapping[str, Tensor]) -> None:
        own = self._module.state_dict(keep_vars=True)
        for name, tensor in new_weights.items():
            own[name].data.copy_(tensor)


def _busy() -> WeightsError:
    return WeightsError(
        "a weight update is under way already; wait until it is in place", code="weights_busy"
    )


def weights_lost(why: str) -> WeightsError:
    """What is said where the parameters hold a mixture. `why`: how writing failed."""
    return WeightsError(
        f"writing new weights failed midway ({why}), so no weights are in place and nothing is "
        "generated; send all of them in one update",
        code="weights_lost",
    )


def _is_finite(tensor: object) -> bool:
    """In one pass that allocates nothing: the extremes of what has a NaN are NaN."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not tensor.numel():
        return True  # what does not fit is refused elsewhere
    return bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all())


def _check_fits(name: str, tensor: object, own: Tensor) -> None:
    """Whether it has the module's shape, and is of the same kind of number."""
    if not isinstance(tensor, Tensor) or tensor.shape != own.shape:
        shape = tuple(getattr(tensor, "shape", ())) or type(tensor).__name__
        raise WeightsError(
            f"the new weights don't fit: {name!r} is {shape}, and the model's is {tuple(own.shape)}"
        )
    if tensor.is_floating_point() != own.is_floating_point():
        raise WeightsError(
            f"the new weights don't fit: {name!r} is {tensor.dtype}, and the model's is "
            f"{own.dtype}; send a dtype of the same kind"
        )


def _same(left: Tensor, right: Tensor) -> bool:
    return _alike(left, right) or torch.equal(left, right)


def _alike(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one shape are the same memory."""
    of_left, of_right = (
        (tensor.data_ptr(), tensor.stride(), tensor.dtype) for tensor in (left, right)
    )
    return of_left == of_right
