"""Policies of others: checkov's rules for Kubernetes and for Dockerfiles, in an environment of its
own."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from ..examples.environments import environment
from .charts import OVERLAYS, ROOT, rendered, values_of

LIMIT_S = 600

# Images by digest, which `image.digest` and a build argument give, or pulled at each start.
OF_DIGESTS = {"CKV_K8S_15", "CKV_K8S_43", "CKV_DOCKER_7"}


@pytest.mark.slow
@pytest.mark.soak
def test_checkov_finds_nothing_else(
    soak: bool, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    if not soak:
        pytest.skip("installs packages; run it with --soak")
    cache: pytest.Cache = pytestconfig.cache  # type: ignore[assignment]
    programs = environment("checkov", cache.mkdir("clients"))
    for name in OVERLAYS:
        objects = rendered(values_of(name))
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all(objects))
    shutil.copy(ROOT / "deploy" / "Dockerfile", tmp_path)
    # It would ask its vendor for texts about its rules.
    options = ["--framework", "kubernetes", "dockerfile", "--quiet", "--skip-download"]
    ran = subprocess.run(
        [programs / "checkov", "--directory", tmp_path, *options, "--output", "json"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ran.stdout, ran.stderr
    reports = {each["check_type"]: each for each in json.loads(ran.stdout)}
    for kind in ("kubernetes", "dockerfile"):
        assert reports[kind]["summary"]["parsing_errors"] == 0
        assert reports[kind]["summary"]["passed"] > 10
    found = [each for report in reports.values() for each in report["results"]["failed_checks"]]
    assert {each["check_id"] for each in found} == OF_DIGESTS
