"""Decoding and processing of images in processes that may die."""

from __future__ import annotations

import json
import queue
import resource
import signal
import subprocess
import threading
import weakref
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from ..config import ImagesConfig, RequestError, cut, shown
from ..text.children import end_child, start_child

# Not imported: Pillow belongs into the child process alone.
_PROGRAM = Path(__file__).with_name("decode_process.py")

_LEAST_PATIENCE_S, PATIENCE = 20.0, 6
"""Time limit of one image: the least, for the start of the process, and so many times its limit of
CPU time. A busy machine refuses no image; a process that hangs is killed."""


class ProcessorSource(NamedTuple):
    """A model's image processor, for another process.

    Attributes:
        folder: With its settings.
        options: Its arguments.
    """

    folder: str
    options: Mapping[str, Any]


SPARE = 1
"""Processes beyond `images.decoders`, for a tenant none of whose images is being decoded."""


class DecodedImage(NamedTuple):
    """A decoded image.

    Attributes:
        id: SHA-256 of the size and all pixels, in hex: equal images have equal ids.
        width, height: In pixels.
        data: As the model's vision part takes it, a safetensors file; without a processor
            `[height, width, 3]` bytes.
    """

    id: str
    width: int
    height: int
    data: bytes


class ImageDecoder:
    """Decodes and processes image files in child processes; any thread may call it.

    A process starts with its first image, and again after it has ended.
    """

    def __init__(
        self,
        config: ImagesConfig,
        patience_s: float | None = None,
        processor: ProcessorSource | None = None,
    ) -> None:
        """Args:
        config: Limits.
        patience_s: Time limit of one image; by default it follows from its CPU time limit.
        processor: Processor of the model; None to decode only.
        """
        self._config = config
        patience_s = patience_s or _LEAST_PATIENCE_S + PATIENCE * config.decode_timeout_s
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for _ in range(config.decoders + SPARE):
            self._idle.put(_Worker(config, patience_s, processor))

    def decode(self, data: bytes, where: str = "image", *, alone: bool = True) -> DecodedImage:
        """Decode an image: the first frame, upright, on white; and process it for the model.

        Args:
            data: A file in one of the formats of `decode_process.FORMATS`.
            where: The image in a request, for errors, such as "images[0]".
            alone: Whether the prompt has no other image.

        Raises:
            RequestError: invalid_image, image_too_large, image_decode_failed: the process ran out
                of time or ended. internal_error: it can't start.
        """
        return self._run(data, where, {"size_only": False, "alone": alone})

    def size(self, data: bytes, where: str = "image") -> tuple[int, int]:
        """Return an image's width and height by its header; raises as `decode`."""
        found = self._run(data, where, {"size_only": True})
        return found.width, found.height

    def _run(self, data: bytes, where: str, job: Mapping[str, Any]) -> DecodedImage:
        check_file(data, self._config, where)
        worker = self._idle.get()
        try:
            return worker.run(data, where, job)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End the processes that decode nothing now; they start again when needed."""
        for _ in range(self._config.decoders + SPARE):
            try:
                worker = self._idle.get_nowait()
            except queue.Empty:
                return
            worker.stop()
            self._idle.put(worker)


def check_file(data: bytes, config: ImagesConfig, where: str) -> None:
    """Check the size of an image's file.

    Raises:
        RequestError: invalid_image: it is empty. image_too_large.
    """
    if not data:
        raise refusal("invalid_image", where, "it is empty; send a file in PNG, JPEG, WebP or GIF")
    if len(data) > config.max_bytes:
        raise refusal(
            "image_too_large",
            where,
            f"its file has {len(data)} bytes, and at most {config.max_bytes} are taken "
            "(images.max_bytes); scale it down, or compress it more",
        )


def check_size(width: int, height: int, config: ImagesConfig, where: str) -> None:
    """Check the size of an image that was decoded elsewhere.

    Raises:
        RequestError: invalid_image, image_too_large.
    """
    if width < 1 or height < 1:
        raise refusal("invalid_image", where, "it has no pixels; send another one")
    if width * height > config.max_pixels or max(width, height) > config.max_side:
        raise refusal(
            "image_too_large",
            where,
            f"it has {width} x {height} pixels, and at most {config.max_pixels} pixels "
            f"(images.max_pixels) with sides of {config.max_side} (images.max_side) are taken; "
            "scale it down",
        )


def refusal(code: str, where: str, reason: str) -> RequestError:
    """Return the refusal of an image."""
    return RequestError(f"{where} can't be used: {reason}", code=code)


class _Told(NamedTuple):
    """A process and our end of its connection."""

    process: subprocess.Popen[bytes]
    connection: Connection
    finalizer: weakref.finalize[..., _Worker]


class _Worker:
    """One child process, used by one thread at a time."""

    def __init__(
        self, config: ImagesConfig, patience_s: float, processor: ProcessorSource | None
    ) -> None:
        self._config, self._patience_s, self._processor = config, patience_s, processor
        self._child: _Told | None = None

    def run(self, data: bytes, where: str, job: Mapping[str, Any]) -> DecodedImage:
        """Have the process do a job, such as to return the size only, without id and data.

        Raises as `ImageDecoder.decode`.
        """
        try:
            child = self._child or self._start()
            # The process may have ended while it was idle.
            if child.process.poll() is not None:
                self.stop()
                child = self._start()
        except OSError as error:
            self.stop()
            raise RequestError(
                f"the process that decodes images can't start: {cut(str(error), 200)}; try again",
                code="internal_error",
            ) from None
        watch = threading.Timer(self._patience_s, child.process.kill)
        watch.daemon = True
        watch.start()
        try:
            connection = child.connection
            connection.send_bytes(json.dumps(job).encode())
            connection.send_bytes(data)
            found = json.loads(connection.recv_bytes(4096))
            if "code" in found:
                code = "image_too_large" if found["code"] == "image_too_large" else "invalid_image"
                raise refusal(code, where, str(found["reason"]))
            width, height = int(found["width"]), int(found["height"])
            check_size(width, height, self._config, where)
            if job["size_only"]:
                return DecodedImage("", width, height, b"")
            made = connection.recv_bytes(self._config.store_bytes)
            return DecodedImage(str(found["id"]), width, height, made)
        except (OSError, EOFError, ValueError, TypeError, LookupError) as error:
            raise self._failed(where, error) from None
        finally:
            watch.cancel()

    def _failed(self, where: str, error: Exception) -> RequestError:
        """Return the refusal of an image that has ended its process, and drop the process."""
        child, self._child = self._child, None
        assert child is not None, "an image was sent to it"
        child.process.kill()
        status = child.process.wait()
        child.finalizer()
        if status == -signal.SIGPROF:
            reason = (
                f"decoding it took longer than {self._config.decode_timeout_s:g} s of CPU time "
                "(images.decode_timeout_s); save it anew, or scale it down"
            )
        elif isinstance(error, EOFError | OSError):
            most, _ = resource.getrlimit(resource.RLIMIT_AS)
            reason = "decoding it ended its process, or took too long; save it anew"
            if most != resource.RLIM_INFINITY:
                reason = (
                    "decoding it ended its process, which may have no more than "
                    f"{most >> 20:,} MiB of address space (ulimit -v); raise that, or save it anew"
                )
        else:
            reason = f"the process that decodes it answered {shown(str(error))}; save it anew"
        return refusal("image_decode_failed", where, reason)

    def _start(self) -> _Told:
        connection, theirs = Pipe()
        process = start_child(_PROGRAM, [theirs])
        finalizer = weakref.finalize(self, end_child, process, [connection])
        self._child = _Told(process, connection, finalizer)
        config = self._config
        told = {
            "cpu_s": config.decode_timeout_s,
            "max_bytes": config.max_bytes,
            "max_pixels": config.max_pixels,
            "max_side": config.max_side,
            "processor": "",
            "options": {},
        }
        if self._processor is not None:
            told |= {"processor": self._processor.folder, "options": self._processor.options}
        connection.send_bytes(json.dumps(told).encode())
        return self._child

    def stop(self) -> None:
        """End the process, if it runs."""
        child, self._child = self._child, None
        if child is not None:
            child.finalizer()
