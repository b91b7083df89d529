"""OpenAI's uploads: files in parts; docs/batches.md."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ....store.blobs import UNFINISHED_S
from ....store.files import FileRecord
from ...batches.files import About
from ...batches.uploads import Uploads, upload_id_of
from ...call import Call
from ...server.forms import FileForm
from ...server.http import JsonResponse, Response, read_object
from ...serving.fields import read_part
from ..routes import PolicyRoute
from .batches import OutputExpiry
from .files import checked_purpose, file_name, file_object

PATH = "/v1/uploads"

_MOST_BYTES = 1 << 18


class UploadBody(msgspec.Struct, frozen=True):
    """The body of a new upload."""

    bytes: Annotated[int, Meta(ge=1)]
    filename: str
    mime_type: str
    purpose: str
    expires_after: OutputExpiry | None = None


class CompleteBody(msgspec.Struct, frozen=True):
    """The body that completes an upload."""

    part_ids: Annotated[list[str], Meta(min_length=1)]
    md5: str = ""


def upload_routes(uploads: Uploads) -> list[PolicyRoute]:
    """Return the endpoints."""
    longest_s = uploads.files.config.files_ttl_s

    async def create(call: Call) -> Response:
        body = read_part(await read_object(call, _MOST_BYTES), UploadBody)
        after = body.expires_after
        ttl_s = longest_s if after is None else min(after.seconds, longest_s)
        about = About(file_name(body.filename), checked_purpose(body.purpose), ttl_s)
        return JsonResponse(upload_object(await uploads.begin(call.tenant, about, body.bytes)))

    async def add(call: Call) -> Response:
        form, upload_id = FileForm(call, "data"), call.params["upload_id"]
        part_id = await uploads.add(call.tenant, upload_id, form.content())
        made = {"id": part_id, "object": "upload.part", "created_at": int(time.time())}
        return JsonResponse(made | {"upload_id": upload_id})

    async def complete(call: Call) -> Response:
        body = read_part(await read_object(call, _MOST_BYTES), CompleteBody)
        upload_id = call.params["upload_id"]
        record = await uploads.complete(call.tenant, upload_id, body.part_ids, body.md5)
        return JsonResponse(upload_object(record))

    async def cancel(call: Call) -> Response:
        record = await uploads.cancel(call.tenant, call.params["upload_id"])
        return JsonResponse(upload_object(record) | {"status": "cancelled"})

    one = f"POST {PATH}/{{upload_id}}"
    return [
        PolicyRoute(f"POST {PATH}", "generate", create),
        PolicyRoute(f"{one}/parts", "generate", add),
        PolicyRoute(f"{one}/complete", "generate", complete),
        PolicyRoute(f"{one}/cancel", "generate", cancel),
    ]


def upload_object(record: FileRecord) -> dict[str, Any]:
    """Return an upload in OpenAI's form."""
    return {
        "id": upload_id_of(record),
        "object": "upload",
        "bytes": record.num_bytes,
        "created_at": record.created_s,
        "expires_at": record.created_s + UNFINISHED_S,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "completed" if record.ready else "pending",
        "file": file_object(record) if record.ready else None,
    }
