"""The messages are Triton's, in one process with those of its client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from tritonclient.grpc import model_config_pb2, service_pb2

from nano_inference.kserve.protobuf import METHODS, message

ROOT = Path(__file__).parents[2]
THEIRS: dict[str, Descriptor] = {
    **service_pb2.DESCRIPTOR.message_types_by_name,
    **model_config_pb2.DESCRIPTOR.message_types_by_name,
}
OURS = {
    each.removeprefix("message ").split(" ")[0]
    for each in (ROOT / "kserve" / "inference.proto").read_text().splitlines()
    if each.startswith("message ")
}


def fields_of(found: Any) -> dict[str, tuple[int, int, bool, object]]:
    """Of a message and those within it: number, type, whether repeated, and of which message."""
    described = {}
    for field in found.fields:
        inner: object = field.message_type and field.message_type.name
        if field.message_type and field.message_type.containing_type is not None:
            inner = fields_of(field.message_type)
        described[field.name] = (field.number, field.type, field.is_repeated, inner)
    return described


@pytest.mark.parametrize("name", sorted(OURS))
def test_each_field_is_tritons(name: str) -> None:
    ours, theirs = fields_of(message(name).DESCRIPTOR), fields_of(THEIRS[name])
    assert ours.items() <= theirs.items()
    if name in service_pb2.DESCRIPTOR.message_types_by_name:
        assert ours == theirs


def test_each_method_of_triton_exists() -> None:
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    assert [(each.name, each.input_type.name, each.server_streaming) for each in theirs] == [
        (each.name, each.request.DESCRIPTOR.name, each.streams) for each in METHODS.values()
    ]
    assert len(METHODS) == 20


def test_the_descriptor_file_matches_the_proto(tmp_path: Path) -> None:
    """`make proto` after a change of `inference.proto`."""
    made = tmp_path / "made.binpb"
    command = ["-m", "grpc_tools.protoc", "-I", "kserve", f"--descriptor_set_out={made}"]
    subprocess.run([sys.executable, *command, "inference.proto"], cwd=ROOT, check=True)
    assert made.read_bytes() == (ROOT / "kserve" / "inference.binpb").read_bytes()
