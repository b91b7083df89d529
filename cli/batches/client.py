"""A client of a server's files and batches, and of any of its calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import IO, Any
from urllib.parse import quote

from ..clients import REFUSALS, ServerClient


class BatchClient(ServerClient):
    """A client of OpenAI's batches. Its methods raise as those of ServerClient."""

    async def post(
        self, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """Return status, content and headers of the answer to a JSON body, whatever they are.

        Args:
            path: Such as "/v1/embeddings", also where OpenAI's interface is elsewhere.
            body: The body.
            headers: More headers.
        """
        below = path.removeprefix("/v1/")
        url = f"{self.root}{path}" if below == path else f"{self.url}/{below}"
        headers = {"Content-Type": "application/json", **headers}
        async with self._answer(
            "POST", url, headers=headers, accepted=REFUSALS, content=body
        ) as response:
            return response.status_code, await response.aread(), response.headers

    async def upload(self, name: str, file: IO[bytes], purpose: str = "batch") -> dict[str, Any]:
        """Upload a file; return its record."""
        async with self._answer(
            "POST", f"{self.url}/files", files={"file": (name, file)}, data={"purpose": purpose}
        ) as response:
            return self._decoded(await response.aread(), dict[str, Any])

    async def download(self, file_id: str) -> AsyncGenerator[bytes, None]:
        """Yield the content of a file."""
        url = f"{self.url}/files/{quote(file_id, safe='')}/content"
        async with self._answer("GET", url) as response:
            async for part in response.aiter_bytes():
                yield part

    async def file(self, file_id: str, method: str = "GET") -> dict[str, Any]:
        """Read, or delete, the record of a file."""
        url = f"{self.url}/files/{quote(file_id, safe='')}"
        return await self._call(method, url, dict[str, Any])

    async def pages(self, name: str, query: str = "") -> list[dict[str, Any]]:
        """Return all of a list, as `files` or `batches`, with this at the end of its query."""
        found: list[dict[str, Any]] = []
        after = ""
        while True:
            url = f"{self.url}/{name}?limit=100{after}{query}"
            page = await self._call("GET", url, dict[str, Any])
            found += page["data"]
            if not page.get("has_more"):
                return found
            after = f"&after={quote(found[-1]['id'], safe='')}"

    async def batches(self, path: str = "", body: Any = None) -> dict[str, Any]:
        """Create a batch, or read the list, or one of `path`, or with a body change it."""
        method = "GET" if body is None else "POST"
        return await self._call(method, f"{self.url}/batches{path}", dict[str, Any], body)
