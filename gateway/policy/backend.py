"""Policy backends: the bus, an encrypted file, or one that a package registers.

The file is AES-256-GCM under a key that scrypt derives from a passphrase with the file's own salt;
its header is authenticated too. A change replaces the file atomically, under a lock. Sources: NIST
SP 800-38D, RFC 7914.
"""

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

from anyio import CapacityLimiter, to_thread
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from ...config import ConfigError, NanoInferenceError, PolicyConfig, nearest
from ...config.temporary import lock_file
from ...store.policy import PolicyRecord
from .document import PolicyDocument, decode_document, encode_document

ENTRY_POINTS = "nano_inference.policy_backends"
"""The entry-point group in which a package registers a function that takes PolicyConfig and returns
a backend. Its name is the value of `policy.backend`."""


class StoredPolicy(NamedTuple):
    """A document with its version."""

    version: str
    document: PolicyDocument


class PolicyUnavailable(NanoInferenceError):
    """The policy is unknown, so that every call is refused. Answered with status 503."""

    code = "policy_unavailable"


class PolicyBackend(Protocol):
    """Stores one document, for any number of processes."""

    async def read(self, known: str) -> StoredPolicy | None:
        """Return the document; None if it is unchanged since the version `known`.

        A document that was never written is empty and has the version "".

        Raises:
            NanoInferenceError: It can't be read.
        """

    async def replace(self, known: str, document: PolicyDocument) -> bool:
        """Write the document, unless it has changed since the version `known`; return whether it
        was written.

        Raises:
            NanoInferenceError: It can't be written.
        """

    async def aclose(self) -> None:
        """Close the backend."""


class BusBackend:
    """The policy on the bus, shared by all gateways."""

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
        """The bus is the client's, and stays open."""


_MAGIC = b"nano-inference policy 1\n"
_SALT_BYTES, _NONCE_BYTES, _KEY_BYTES = 16, 12, 32
_HEADER_BYTES = len(_MAGIC) + _SALT_BYTES + _NONCE_BYTES

# scrypt: 64 MiB and a fifth of a second for each guess.
_N, _R, _P = 2**16, 8, 1

LEAST_PASSPHRASE = 12
"""Characters. An attacker with the file can guess offline."""

MOST_BYTES = 256 << 20
"""Bytes of a policy file."""


class FileBackend:
    """A `PolicyBackend`, for gateways of one machine."""

    def __init__(self, path: str, passphrase: str) -> None:
        """Raises ConfigError for a short passphrase. The file itself is read later."""
        if len(passphrase) < LEAST_PASSPHRASE:
            raise ConfigError(
                f"policy.passphrase has fewer than {LEAST_PASSPHRASE} characters; the file is no "
                "safer than it is, so take a long one"
            )
        self._path = Path(path).expanduser()
        self._passphrase = passphrase.encode()
        # (salt, key) of the file as last read.
        self._key: tuple[bytes, bytes] | None = None
        self._seen: tuple[int, int, int] | None = None
        self._version = ""
        self._threads = CapacityLimiter(1)

    async def read(self, known: str) -> StoredPolicy | None:
        return await to_thread.run_sync(self._read, known, limiter=self._threads)

    async def replace(self, known: str, document: PolicyDocument) -> bool:
        return await to_thread.run_sync(self._replace, known, document, limiter=self._threads)

    async def aclose(self) -> None:
        """Nothing is open."""

    def _read(self, known: str) -> StoredPolicy | None:
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                seen = (status.st_ino, status.st_mtime_ns, status.st_size)
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
        """Lock out other writers, by a file of its own, since the policy file is replaced."""
        lock = self._path.with_name(f"{self._path.name}.lock")
        with lock_file(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

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
        return PolicyUnavailable(
            "the policy file can't be used; the log of this process says more",
            detail=f"the policy file {str(self._path)!r} {what}",
        )


def _salt_of(raw: bytes) -> bytes:
    return raw[len(_MAGIC) : len(_MAGIC) + _SALT_BYTES]


def _version_of(raw: bytes) -> str:
    """Every write has another version, since it has another nonce."""
    return hashlib.sha256(raw).hexdigest()


def open_backend(config: PolicyConfig, record: PolicyRecord | None) -> PolicyBackend:
    """Return the backend that `policy.backend` names.

    Args:
        record: The policy on the bus; None for other backends.

    Raises:
        ConfigError: The name is unknown, or the settings are invalid.
    """
    if config.backend == "bus":
        assert record is not None
        return BusBackend(record)
    if config.backend == "file":
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
