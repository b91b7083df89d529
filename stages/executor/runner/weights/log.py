"""The log of weights: every version on the disk, as deltas with a snapshot now and then.

A folder for each run of a lane, or of an engine. Its files are named by the version: a delta (see
`WeightDelta`), or a snapshot, which is a checkpoint by the model's parameter names. The metadata of
both have the digest of all weights of the version, so that a version is read back exactly, or not
at all. Executors of one lane share a run: the first one writes a version.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash
from torch import Tensor

from .....config import WeightsError, shown
from .delta import WeightDelta, digest
from .files import replacing, sync_folder, write_tensors
from .transports.folder import metadata_of, read_folder

_FILE = re.compile(r"v(\d{19})\.(delta|snapshot)\.safetensors")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PREPARED_S = 3600.0
"""Age of a prepared version after which it is deleted: its update was dropped."""

Digests = dict[str, bytes]


class LoggedVersion(NamedTuple):
    """A version in the log.

    Attributes:
        run: The run that it belongs to.
        version: The version.
        kind: "snapshot" or "delta".
        num_bytes: Bytes of its file.
        path: The file.
        written: Unix time of the file.
    """

    run: str
    version: int
    kind: str
    num_bytes: int
    path: Path
    written: float


class PreparedVersion(NamedTuple):
    """A version on the disk that has no number yet.

    Attributes:
        run: The run that it belongs to.
        path: The file.
        kind: "snapshot" or "delta".
        digests: XXH3 of each tensor of the version.
    """

    run: str
    path: Path
    kind: str
    digests: Digests

    @property
    def digest(self) -> str:
        """The digest of all."""
        return _digest_of_all(self.digests)


class LogBounds(NamedTuple):
    """Bounds of a log.

    Attributes:
        every: Deltas between two snapshots.
        versions: The most versions.
        num_bytes: The most bytes.
    """

    every: int
    versions: int
    num_bytes: int


class WeightLog:
    """Reads a log of weights."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def runs(self) -> list[str]:
        """Return the runs, the newest last."""
        found = self.folder.glob("*/run.json")
        return [path.parent.name for path in sorted(found, key=lambda path: _began(path))]

    def versions(self, run: str = "") -> list[LoggedVersion]:
        """Return the versions of a run, or of all runs, oldest first."""
        runs = [run] if run else self.runs()
        return [each for name in runs for each in self._of_run(name)]

    def weights(self, version: int, run: str = "", digest_of_all: str = "") -> dict[str, Tensor]:
        """Return the weights of a version, by the model's parameter names.

        Args:
            version: The version.
            run: Its run; "" for the newest run.
            digest_of_all: Digest of the version's weights, if known.

        Raises:
            WeightsError: `weights_unlogged`: the log has no such version, or only a part of what it
                is made of. `weights_delta`: a file is damaged.
        """
        return self._read(version, run, digest_of_all)[0]

    def _read(
        self, version: int, run: str, digest_of_all: str
    ) -> tuple[dict[str, Tensor], Digests]:
        run = run or next(reversed(self.runs()), "")
        by_version = {each.version: each for each in self._of_run(run)}
        chain: list[LoggedVersion] = []
        at = version
        while (entry := by_version.get(at)) is not None and len(chain) <= len(by_version):
            chain.append(entry)
            if entry.kind == "snapshot":
                break
            at = int(metadata_of(entry.path)["base_version"])
        if not chain or chain[-1].kind != "snapshot":
            raise self._unlogged(version, run, by_version)
        state: dict[str, Tensor] = {}
        for entry in reversed(chain):
            if entry.kind == "snapshot":
                state = dict(read_folder(str(entry.path)))
            else:
                state |= WeightDelta.load(entry.path).apply(state)
        metadata = metadata_of(chain[0].path)
        digests = {name: digest(tensor) for name, tensor in state.items()}
        found = _digest_of_all(digests)
        if found != metadata.get("digest") or digest_of_all not in ("", found):
            raise WeightsError(
                f"version {version} of {shown(str(self.folder / run))} has other weights than were "
                "in place; send all weights again",
                code="weights_delta",
            )
        return state, digests

    def _of_run(self, run: str) -> list[LoggedVersion]:
        if not _RUN.fullmatch(run):
            return []
        found = []
        for path in sorted((self.folder / run).glob("v*.safetensors")):
            if match := _FILE.fullmatch(path.name):
                status = path.stat()
                place = status.st_size, path, status.st_mtime
                found.append(LoggedVersion(run, int(match[1]), match[2], *place))
        return found

    def _unlogged(self, version: int, run: str, known: Mapping[int, object]) -> WeightsError:
        if not run:
            return WeightsError(
                f"there is no log of weights in {shown(str(self.folder))}",
                code="weights_unlogged",
                remedy="set engine.weight_log",
            )
        having = f"{min(known)} to {max(known)}" if known else "none"
        return WeightsError(
            f"version {version} is not in the log {shown(str(self.folder / run))}, which has "
            f"{having}; older ones are dropped by engine.weight_log_max_versions and _max_bytes",
            code="weights_unlogged",
            remedy="name one that it has",
        )


class WeightLogWriter(WeightLog):
    """Writes the versions of one executor's weights.

    A version is written before it is in place, so that a token's weights are in the log whenever
    the token exists.

    Attributes:
        run: The run; of a lane the incarnation of the admission under which it began.
    """

    def __init__(self, folder: str | Path, bounds: LogBounds, base: Callable[[], Digests]) -> None:
        """`base`: returns the digests of the weights in place, of each tensor once."""
        super().__init__(folder)
        self.run = ""
        self._bounds = bounds
        self._base = base
        # By version: those of the last two.
        self._digests: dict[int, Digests] = {}

    def prepare(
        self,
        version: int,
        new: Mapping[str, Tensor],
        base_of: Callable[[str], Tensor] | None,
    ) -> PreparedVersion:
        """Write the next version, without a number.

        Args:
            version: The version in place.
            new: The tensors that change, by one of their names.
            base_of: Returns a tensor in place; None if they hold nothing, and `new` is everything.

        Raises:
            WeightsError: `weights_log`: it can't be written.
        """
        with _as_refusal(), self._locked():
            self.run = self.run or f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:8]}"
            folder = self.folder / self.run
            if not (folder / "run.json").exists():
                folder.mkdir(parents=True, exist_ok=True)
                _write(folder / "run.json", msgspec.json.encode({"began": time.time()}))
            self._clean(folder)
            if base_of is None:
                return self._snapshot(folder, new, {name: digest(new[name]) for name in new})
            if (before := self._digests.get(version)) is None:
                before = self._digests[version] = self._base()
            has_base = self._has(version, before)
            if not has_base and not self._of_run(self.run):
                first = self._snapshot(folder, {name: base_of(name) for name in before}, before)
                self.commit(first, version, locked=True)
                has_base = True
            digests = before | {name: digest(tensor) for name, tensor in new.items()}
            if not has_base or self._is_due(version):
                whole = {name: new[name] if name in new else base_of(name) for name in before}
                return self._snapshot(folder, whole, digests)
            found = _digest_of_all(digests)
            path = folder / f".prepared-{version}-{found}.delta"
            if not path.exists():
                old = {name: base_of(name) for name in new}
                delta = WeightDelta.between(old, new, base_version=version)
                metadata = {"base_version": str(version), "digest": found}
                write_tensors(path, dict(delta), metadata)
            return PreparedVersion(self.run, path, "delta", digests)

    def commit(self, prepared: PreparedVersion, version: int, *, locked: bool = False) -> None:
        """Give a prepared version its number; delete what the bounds exclude.

        Raises:
            WeightsError: `weights_log`: it can't be written.
        """
        if not locked:
            with _as_refusal(), self._locked():
                self.commit(prepared, version, locked=True)
            return
        folder = self.folder / prepared.run
        found = _digest_of_all(prepared.digests)
        for each in self._of_run(prepared.run):
            # Of an update that was refused after all.
            is_other = each.version == version and metadata_of(each.path)["digest"] != found
            if is_other or each.version > version:
                each.path.unlink()
        path = folder / f"v{version:019d}.{prepared.kind}.safetensors"
        others = [each for each in self._of_run(prepared.run) if each.version == version]
        if others:  # another executor of the lane was first
            prepared.path.unlink(missing_ok=True)
        else:
            prepared.path.replace(path)
            sync_folder(folder)
        newest = max(self._digests, default=version)
        self._digests = {
            known: digests for known, digests in self._digests.items() if known == newest
        }
        self._digests[version] = prepared.digests
        self._prune()

    def recover(self, run: str, version: int, digest_of_all: str) -> dict[str, Tensor]:
        """Return the weights of a version that was decided, and prepared by an earlier process; it
        gets its number unless another executor was first.

        Raises:
            WeightsError: `weights_incomplete`: it was not prepared here; or as `weights`.
        """
        with _as_refusal(), self._locked():
            numbered = [each for each in self._of_run(run) if each.version == version]
            if not any(metadata_of(each.path).get("digest") == digest_of_all for each in numbered):
                found = sorted((self.folder / run).glob(f".prepared-*{digest_of_all}.*"))
                if not found or not _RUN.fullmatch(run):
                    raise WeightsError(
                        f"the decided weights of version {version} are not in the log of weights; "
                        "send all weights again",
                        code="weights_incomplete",
                    )
                for each in self._of_run(run):
                    if each.version >= version:
                        each.path.unlink()
                kind = found[0].suffix.removeprefix(".")
                found[0].replace(self.folder / run / f"v{version:019d}.{kind}.safetensors")
                sync_folder(self.folder / run)
            self.run = run
            return self.catch_up(version, digest_of_all)

    def catch_up(self, version: int, digest_of_all: str) -> dict[str, Tensor]:
        """Return the weights of a version of this run, which will be in place. Raises as
        `weights`."""
        state, self._digests[version] = self._read(version, self.run, digest_of_all)
        return state

    def digest_of(self, version: int) -> str:
        """Return the digest of all weights of a version of this executor; "" if unknown."""
        digests = self._digests.get(version)
        return "" if digests is None else _digest_of_all(digests)

    def _snapshot(
        self, folder: Path, tensors: Mapping[str, Tensor], digests: Digests
    ) -> PreparedVersion:
        found = _digest_of_all(digests)
        path = folder / f".prepared-{found}.snapshot"
        if not path.exists():
            write_tensors(path, tensors, {"digest": found})
        return PreparedVersion(self.run, path, "snapshot", digests)

    def _has(self, version: int, digests: Digests) -> bool:
        """Whether the log has these weights as this version."""
        for each in self._of_run(self.run):
            if each.version == version:
                return metadata_of(each.path).get("digest") == _digest_of_all(digests)
        return False

    def _is_due(self, version: int) -> bool:
        """Whether the next version is a snapshot."""
        kinds = [each.kind for each in self._of_run(self.run) if each.version <= version]
        return "snapshot" not in kinds[-self._bounds.every :]

    def _clean(self, folder: Path) -> None:
        for path in folder.glob(".*"):
            if time.time() - path.stat().st_mtime > _PREPARED_S:
                path.unlink(missing_ok=True)

    def _prune(self) -> None:
        """Delete the oldest versions, each snapshot with its deltas. The newest snapshot of this
        run and its deltas stay, beyond the bounds."""
        entries = self.versions()
        segments: list[list[LoggedVersion]] = []
        for each in entries:
            if each.kind == "snapshot" or not segments or segments[-1][0].run != each.run:
                segments.append([])
            segments[-1].append(each)
        number, num_bytes = len(entries), sum(each.num_bytes for each in entries)
        own = [segment for segment in segments if segment[0].run == self.run]
        for segment in segments:
            if number <= self._bounds.versions and num_bytes <= self._bounds.num_bytes:
                break
            if segment is own[-1]:
                continue
            # Deltas first, so that none is without its snapshot.
            for each in reversed(segment):
                each.path.unlink(missing_ok=True)
                number, num_bytes = number - 1, num_bytes - each.num_bytes
        for run in self.runs():
            if run != self.run and not self._of_run(run):
                shutil.rmtree(self.folder / run, ignore_errors=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@contextmanager
def _as_refusal() -> Iterator[None]:
    """Raises WeightsError for a log that can't be written."""
    try:
        yield
    except OSError as error:
        why = f"{shown(str(error.filename or ''))}: {error.strerror}"
    except WeightsError as error:
        if error.code != "weights_refused":
            raise
        why = error.message
    else:
        return
    raise WeightsError(
        f"the log of weights can't be written ({why}), so the update is refused; make room, or set "
        "engine.weight_log to ''",
        code="weights_log",
    )


def _digest_of_all(digests: Mapping[str, bytes]) -> str:
    found = xxhash.xxh3_128()
    for name in sorted(digests):
        found.update(name.encode() + b"\0" + digests[name])
    return found.hexdigest()


def _began(path: Path) -> float:
    try:
        return float(msgspec.json.decode(path.read_bytes())["began"])
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError):
        return 0.0


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        os.write(file, content)
