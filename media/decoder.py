"""Decoding of images in processes that may die."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import threading
import weakref
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from ..config import ImagesConfig, RequestError, cut, shown
from ..config.images import RGB_BYTES
from ..store.images import StoredImage
from ..text.children import end_child, start_child

# Not imported: Pillow belongs into the child process alone.
_PROGRAM = Path(__file__).with_name("decode_process.py")

_LEAST_PATIENCE_S, PATIENCE = 20.0, 6
"""Time limit of one image: the least, for the start of the process, and so many times its limit of
CPU time. A busy machine refuses no image; a process that hangs is killed."""


class ImageDecoder:
    """Decodes image files in child processes; any thread may call it.

    A process starts with its first image, and again after it has ended.
    """

    def __init__(self, config: ImagesConfig, patience_s: float | None = None) -> None:
        """Args:
        config: Limits.
        patience_s: Time limit of one image; by default it follows from its CPU time limit.
        """
        self._config = config
        self._patience_s = patience_s or _LEAST_PATIENCE_S + PATIENCE * config.decode_timeout_s
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for _ in range(config.decoders):
            self._idle.put(_Worker(config))

    def decode(self, data: bytes, where: str = "image") -> StoredImage:
        """Decode an image: the first frame, upright, on white.

        Args:
            data: A file in one of the formats of `decode_process.FORMATS`.
            where: The image in a request, for errors, such as "images[0]".

        Raises:
            RequestError: invalid_image, image_too_large, image_decode_failed: the process ran out
                of time or ended. internal_error: it can't start.
        """
        check_file(data, self._config, where)
        worker = self._idle.get()
        try:
            return worker.decode(data, where, self._patience_s)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End the processes that decode nothing now; they start again when needed."""
        for _ in range(self._config.decoders):
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


def check_pixels(image: StoredImage, config: ImagesConfig, where: str) -> None:
    """Check an image that was decoded elsewhere.

    Raises:
        RequestError: invalid_image, image_too_large.
    """
    width, height = image.width, image.height
    if width < 1 or height < 1 or len(image.rgb) != RGB_BYTES * width * height:
        raise refusal("invalid_image", where, "its size and its pixels don't fit; send its file")
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

    def __init__(self, config: ImagesConfig) -> None:
        self._config = config
        self._child: _Told | None = None

    def decode(self, data: bytes, where: str, patience_s: float) -> StoredImage:
        """Decode an image; raises as `ImageDecoder.decode`."""
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
        watch = threading.Timer(patience_s, child.process.kill)
        watch.daemon = True
        watch.start()
        try:
            return self._ask(child.connection, data, where)
        except (OSError, EOFError, ValueError, TypeError, LookupError) as error:
            raise self._failed(where, error) from None
        finally:
            watch.cancel()

    def _ask(self, connection: Connection, data: bytes, where: str) -> StoredImage:
        connection.send_bytes(data)
        found = json.loads(connection.recv_bytes(4096))
        if "code" in found:
            code = "image_too_large" if found["code"] == "image_too_large" else "invalid_image"
            raise refusal(code, where, str(found["reason"]))
        width, height = int(found["width"]), int(found["height"])
        most = RGB_BYTES * self._config.max_pixels
        image = StoredImage(width, height, connection.recv_bytes(most))
        check_pixels(image, self._config, where)
        return image

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
            reason = "decoding it ended its process, or took too long; save it anew"
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
        }
        connection.send_bytes(json.dumps(told).encode())
        return self._child

    def stop(self) -> None:
        """End the process, if it runs."""
        child, self._child = self._child, None
        if child is not None:
            child.finalizer()
