"""One set of template processes for all gateways of this folder's tests."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from nano_inference.gateway.serving import chat_templates
from nano_inference.text.chat_template import TemplateWorkers


@pytest.fixture(scope="package", autouse=True)
def shared_template_workers() -> Iterator[None]:
    """Start the processes once: each start imports Transformers, most of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_templates, "TemplateWorkers", functools.cache(TemplateWorkers))
        yield
