"""The field of a session's turn: checked, and passed on to batching."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from nano_inference.bus.parts.sessions import SessionTurn
from nano_inference.bus.public import EmbedParams, KVSession
from nano_inference.stages.admission.core import AdmissionCore

from ...errors import raises
from .test_core import admit, core_of, entry_of


@pytest.fixture
def core(tokenizer: PreTrainedTokenizerFast) -> AdmissionCore:
    return core_of(tokenizer)


def test_a_turn_reaches_batching_with_its_session_also_after_a_failure(core: AdmissionCore) -> None:
    session = KVSession(id="x" * 128, ttl_s=3, after="demote")
    request = admit(core, entry_of(kv_session=session))
    assert SessionTurn.find(request.parts) == SessionTurn(session)
    assert core.resumed(request, ()).parts == request.parts
    assert admit(core, entry_of()).parts == ()


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"kv_session": KVSession(id="")}, "1 to 128 printable"),
        ({"kv_session": KVSession(id="x" * 129)}, "1 to 128 printable"),
        ({"kv_session": KVSession(id="a\n")}, "1 to 128 printable"),
        ({"kv_session": KVSession(id="a"), "n": 2}, "set n to 1"),
        ({"kv_session": KVSession(id="a"), "embed": EmbedParams()}, "leave out embed"),
    ],
)
def test_invalid_session_fields_are_refused(
    core: AdmissionCore, fields: dict[str, Any], hint: str
) -> None:
    with raises("invalid_kv_session", hint):
        admit(core, entry_of(**fields))
