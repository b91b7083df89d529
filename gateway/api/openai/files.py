"""OpenAI's files: uploaded as forms, listed, read and deleted; docs/batches.md."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ....config import RequestError, shown
from ....store.batches import ENDED, BatchStore
from ....store.files import FileRecord
from ...batches.files import About, Files
from ...call import Call
from ...server.forms import FileForm
from ...server.http import JsonResponse, Response, StreamingResponse, field_error
from ...serving.fields import read_query
from ..routes import PolicyRoute

PATH = "/v1/files"

PURPOSES = ("batch", "fine-tune", "assistants", "vision", "user_data", "evals")
"""Purposes that OpenAI's clients send. Only "batch" means anything here."""

_MOST_NAME = 255
_SHORTEST_S, _LONGEST_S = 3600, 30 * 86_400
_AFTER = "expires_after[seconds]"


class FilesQuery(msgspec.Struct, frozen=True):
    """The query of the list of files."""

    after: str = ""
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: str = ""


def takes_files(call: Call) -> bool:
    """Return whether a call's body is a form with a file."""
    path = call.path
    is_part = "/v1/uploads/" in path and path.endswith("/parts")
    return call.method == "POST" and (is_part or path.endswith(PATH))


def file_routes(files: Files, batches: BatchStore) -> list[PolicyRoute]:
    """Return the endpoints."""
    config = files.config

    async def upload(call: Call) -> Response:
        form = FileForm(call, "file")
        length = call.header("content-length") or ""
        most = int(length) if length.isdecimal() and len(length) < 16 else None

        def about() -> About:
            ttl_s = _ttl_s(form.fields, config.files_ttl_s)
            return About(
                file_name(form.filename or ""),
                checked_purpose(form.fields.get("purpose", "")),
                ttl_s,
            )

        return JsonResponse(
            file_object(await files.write(call.tenant, form.content(), about, most))
        )

    async def listed(call: Call) -> Response:
        query = read_query(call, FilesQuery)
        found = await files.records.listed(call.tenant)
        if query.order == "asc":
            found.reverse()
        found = [each for each in found if each.ready and query.purpose in ("", each.purpose)]
        return JsonResponse(page([file_object(each) for each in found], query.after, query.limit))

    async def one(call: Call) -> Response:
        return JsonResponse(file_object(await files.find(call.tenant, call.params["file_id"])))

    async def content(call: Call) -> Response:
        record = await files.find(call.tenant, call.params["file_id"])
        name = record.filename.encode("ascii", "replace").decode().replace('"', "'")
        headers = {
            "Content-Length": str(record.num_bytes),
            # Never shown as a page: the file is its client's own.
            "Content-Disposition": f'attachment; filename="{name}"',
            "X-Content-Type-Options": "nosniff",
        }
        kind = "application/octet-stream"
        return StreamingResponse(files.content(record), headers=headers, media_type=kind)

    async def delete(call: Call) -> Response:
        record = await files.find(call.tenant, call.params["file_id"])
        if await _is_read(batches, record):
            raise RequestError(
                f"file {record.id} is read by a batch that has not ended",
                remedy="wait for its end, or cancel it",
                code="file_in_use",
            )
        await files.delete(record)
        return JsonResponse({"id": record.id, "object": "file", "deleted": True})

    return [
        PolicyRoute(f"POST {PATH}", "generate", upload),
        PolicyRoute(f"GET {PATH}", "read", listed),
        PolicyRoute(f"GET {PATH}/{{file_id}}", "read", one),
        PolicyRoute(f"GET {PATH}/{{file_id}}/content", "read", content),
        PolicyRoute(f"DELETE {PATH}/{{file_id}}", "generate", delete),
    ]


def file_name(given: str) -> str:
    """Return a name that a header and a log can hold."""
    return "".join(each for each in given if each.isprintable())[:_MOST_NAME] or "file"


def file_object(record: FileRecord) -> dict[str, Any]:
    """Return a file in OpenAI's form."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": record.created_s,
        "expires_at": record.expires_s,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
    }


def page(found: list[dict[str, Any]], after: str, limit: int) -> dict[str, Any]:
    """Return a page of a list in OpenAI's form.

    Args:
        found: The whole list.
        after: The id of the last object before the page; "" for the first page.
        limit: The page's most objects.

    Raises:
        FieldError: `after` is none of the list's.
    """
    start = 0
    if after:
        ids = [each["id"] for each in found]
        if after not in ids:
            raise field_error("after", f"is {shown(after)}", "it must be an id of this list")
        start = ids.index(after) + 1
    data = found[start : start + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + limit < len(found),
    }


async def _is_read(batches: BatchStore, record: FileRecord) -> bool:
    if record.purpose != "batch":
        return False
    open_ones = [each.state for each in await batches.listed(record.tenant)]
    return any(each.input_file == record.id and each.status not in ENDED for each in open_ones)


def checked_purpose(found: str) -> str:
    """Return a purpose. Raises FieldError: it is missing or unknown."""
    if found not in PURPOSES:
        why = f"is {shown(found)}" if found else "is missing"
        raise field_error("purpose", why, f"it must be one of {', '.join(PURPOSES)}")
    return found


def _ttl_s(fields: dict[str, str], longest_s: int) -> int:
    anchor = fields.get("expires_after[anchor]", "created_at")
    if anchor != "created_at":
        raise field_error("expires_after[anchor]", f"is {shown(anchor)}", "it must be created_at")
    text = fields.get(_AFTER)
    if text is None:
        return longest_s
    if not (text.isascii() and text.isdigit() and _SHORTEST_S <= int(text) <= _LONGEST_S):
        raise field_error(
            _AFTER,
            f"is {shown(text)}",
            f"it must be a number of seconds from {_SHORTEST_S} to {_LONGEST_S}",
        )
    return min(int(text), longest_s)
