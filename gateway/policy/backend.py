"""Where a policy is kept: the protocol, the bus as one such place, and how others register."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, Protocol

from anyio import to_thread
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

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
        from .backend import FileBackend

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


_MAGIC = b"nano-inference policy 1\n"
_SALT_BYTES, _NONCE_BYTES, _KEY_BYTES = 16, 12, 32
_HEADER_BYTES = len(_MAGIC) + _SALT_BYTES + _NONCE_BYTES

# 64 MiB and a fifth of a second for each guess (RFC 7914 has N, r, p).
_N, _R, _P = 2**16, 8, 1

LEAST_PASSPHRASE = 12
"""Characters. Whoever has the file can guess as long as he likes."""

MOST_BYTES = 256 << 20
"""Of a file that is read."""


class FileBackend:
    """A `PolicyBackend`, for gateways of one machine."""

    def __init__(self, path: str, passphrase: str) -> None:
        """Raises ConfigError when that can't be one; the file itself is looked at later."""
        if len(passphrase) < LEAST_PASSPHRASE:
            raise ConfigError(
                f"policy.passphrase has fewer than {LEAST_PASSPHRASE} characters; the file is no "
                "safer than it is, so take a long one"
            )
        self._path = Path(path).expanduser()
        self._passphrase = passphrase.encode()
        # Of the salt that the file had last.
        self._key: tuple[bytes, bytes] | None = None
        self._seen: tuple[int, int, int] | None = None
        self._version = ""

    async def read(self, known: str) -> StoredPolicy | None:
        return await to_thread.run_sync(self._read, known)

    async def replace(self, known: str, document: PolicyDocument) -> bool:
        return await to_thread.run_sync(self._replace, known, document)

    async def aclose(self) -> None:
        """Holds nothing open."""

    def _read(self, known: str) -> StoredPolicy | None:
        try:
            with self._path.open("rb") as file:
                told = os.fstat(file.fileno())
                seen = (told.st_ino, told.st_mtime_ns, told.st_size)
                if seen == self._seen and known == self._version:
                    return None
                raw = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return None if known == "" else StoredPolicy("", PolicyDocument())
        except OSError as error:
            raise self._trouble(f"can't be read: {error.strerror}") from None
        version = _version_of(raw)
        if version == known:
            self._seen, self._version = seen, version
            return None
        document = self._opened(raw)
        self._seen, self._version = seen, version
        return StoredPolicy(version, document)

    def _replace(self, known: str, document: PolicyDocument) -> bool:
        try:
            with self._locked():
                raw = self._path.read_bytes() if self._path.exists() else b""
                if (_version_of(raw) if raw else "") != known:
                    return False
                self._write(self._sealed(document, raw))
        except OSError as error:
            raise self._trouble(f"can't be written: {error.strerror}") from None
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Held by one writer at a time, on a file of its own: the other one is replaced."""
        lock = self._path.with_name(f"{self._path.name}.lock")
        handle = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _write(self, raw: bytes) -> None:
        temporary = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}.new")
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _sealed(self, document: PolicyDocument, before: bytes) -> bytes:
        salt = _salt_of(before) if before else secrets.token_bytes(_SALT_BYTES)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        header = _MAGIC + salt + nonce
        sealed = AESGCM(self._key_for(salt)).encrypt(nonce, encode_document(document), header)
        return header + sealed

    def _opened(self, raw: bytes) -> PolicyDocument:
        if len(raw) > MOST_BYTES or not raw.startswith(_MAGIC) or len(raw) < _HEADER_BYTES:
            raise self._trouble("is no policy of this program")
        header, sealed = raw[:_HEADER_BYTES], raw[_HEADER_BYTES:]
        try:
            plain = AESGCM(self._key_for(_salt_of(raw))).decrypt(
                header[-_NONCE_BYTES:], sealed, header
            )
            return decode_document(plain)
        except InvalidTag:
            raise self._trouble(
                "can't be opened: policy.passphrase is another one, or the file was changed"
            ) from None
        except (ValueError, RecursionError) as error:
            raise self._trouble(f"holds something else: {error}") from None

    def _key_for(self, salt: bytes) -> bytes:
        if self._key is None or self._key[0] != salt:
            made = Scrypt(salt=salt, length=_KEY_BYTES, n=_N, r=_R, p=_P).derive(self._passphrase)
            self._key = (salt, made)
        return self._key[1]

    def _trouble(self, what: str) -> PolicyUnavailable:
        return PolicyUnavailable(f"the policy file {str(self._path)!r} {what}")


def _salt_of(raw: bytes) -> bytes:
    return raw[len(_MAGIC) : len(_MAGIC) + _SALT_BYTES]


def _version_of(raw: bytes) -> str:
    """Each file has another, since each has another nonce."""
    return hashlib.sha256(raw).hexdigest()
