"""Constraints made of the schemas of the public JSON-Schema-Test-Suite.

https://github.com/json-schema-org/JSON-Schema-Test-Suite, as the sources of `jsonschema` have it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from jsonschema.validators import validator_for

from nano_inference.config import Constraint, RequestError

from .writer import Writer

ROOT = Path(__file__).parents[4]
INSTALL_LIMIT_S = 900

# Not all schemas of the suite name their draft; a constraint's schema must.
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}

NARROWER = {
    # Properties come in the order of the schema, or of its parts.
    ("allOf", "allOf"),
    ("const", "const with object"),
    # Numbers are written as the schema writes them.
    ("const", "const with -2.0 matches integer and float types"),
    ("const", "const with 0 does not match other zero-like types"),
    ("const", "const with 1 does not match true"),
    ("const", "float and integers are equal up to 64-bit representation limits"),
    ("enum", "enum with 0 does not match false"),
    ("enum", "enum with 1 does not match true"),
    ("enum", "enum with [0] does not match [false]"),
    ("enum", "enum with [1] does not match [true]"),
    ("type", "integer type matches integers"),
    # Siblings of a reference count in every draft.
    ("ref", "ref overrides any sibling keywords"),
}
"""(file, schema): valid values that can't be written."""


@pytest.fixture(scope="module")
def suite(pytestconfig: pytest.Config, soak: bool) -> Path:
    """The suite's tests, by draft."""
    if not soak:
        pytest.skip("fetches a package; run it with --soak")
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("json-schema-test-suite")
    name = f"jsonschema-{version('jsonschema')}"
    if not (folder / f"{name}.tar.gz").exists():
        package = [f"jsonschema=={version('jsonschema')}", "--no-binary", "jsonschema"]
        command = [sys.executable, "-m", "pip", "download", "--no-deps", *package, "-d", folder]
        subprocess.run(command, check=True, timeout=INSTALL_LIMIT_S)
    with tarfile.open(folder / f"{name}.tar.gz") as sources:
        sources.extractall(folder, filter="data")
    return folder / name / "json" / "tests"


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer()


def groups(suite: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(draft, file, a schema with its tests)."""
    for draft, uri in DRAFTS.items():
        for file in sorted((suite / draft).glob("*.json")):
            for group in json.loads(file.read_text()):
                if isinstance(group["schema"], dict):
                    group["schema"] = {"$schema": uri, **group["schema"]}
                    yield draft, file.stem, group


def in_order(value: Any, schema: dict[str, Any]) -> str:
    """A value as JSON, its properties in the schema's order."""
    if isinstance(value, dict):
        known = [name for name in schema.get("properties", {}) if name in value]
        value = {name: value[name] for name in [*known, *value]}
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.slow
@pytest.mark.soak
def test_schemas_of_the_json_schema_suite(suite: Path, writer: Writer) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    unsound, narrower = [], set()
    for draft, file, group in groups(suite):
        schema = group["schema"]
        constraint = Constraint(json_schema=json.dumps(schema))
        try:
            writer.compiler.check(constraint)
        except RequestError:
            counts[draft, "refused"] += 1
            continue
        counts[draft, "followed"] += 1
        for test in group["tests"]:
            taken = writer.takes(constraint, in_order(test["data"], schema))
            counts[draft, f"valid={test['valid']} taken={taken}"] += 1
            if taken and not test["valid"]:
                unsound.append((draft, file, group["description"], test["description"]))
            elif test["valid"] and not taken and file != "format":
                narrower.add((file, group["description"]))
        validator = validator_for(schema)(schema)
        for seed in range(3):
            text, complete = writer.write(constraint, seed)
            counts[draft, "written" if complete else "cut off"] += 1
            if complete and not validator.is_valid(json.loads(text)):
                unsound.append((draft, file, group["description"], text))
    assert unsound == []
    assert narrower <= NARROWER
    documented = (ROOT / "docs" / "constraints.md").read_text()
    for draft in DRAFTS:
        assert counts[draft, "written"] > counts[draft, "cut off"]
        followed, refused = counts[draft, "followed"], counts[draft, "refused"]
        valid = counts[draft, "valid=True taken=True"]
        rest = counts[draft, "valid=True taken=False"]
        assert (
            f"{followed} of {followed + refused} schemas, {valid} of {valid + rest}" in documented
        )
