"""The pages: generated ones are up to date, the site builds, links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs_results import render

from tests.helpers.mpi import ROOT

LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
TEXT = {".py", ".yaml", ".yml", ".sh", ".sbatch", ".md", ".toml"}


def test_the_page_of_results_is_up_to_date():
    page = (ROOT / "docs/reference/results.md").read_text()
    assert page == render(), "docs/reference/results.md is stale: run `make docs`"


def test_the_site_builds_without_a_warning(tmp_path: Path):
    """Every page is in the navigation, every link and anchor between pages exists (mkdocs.yml, `validation`)."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "examples"])
def test_links_outside_the_site_lead_somewhere(page: str):
    pages = [ROOT / page] if page.endswith(".md") else list((ROOT / page).rglob("*.md"))
    for path in pages:
        targets = [t for t in LINK.findall(path.read_text()) if not t.startswith("http")]
        assert [t for t in targets if not (path.parent / t).exists()] == [], path


def test_pages_that_code_and_configurations_name_exist():
    named = re.compile(r"docs/[\w/-]+\.(?:md|svg)")
    folders = ("megatron_tlt", "tools", "tests", "benchmarks", "configs", "slurm", "launch", ".github")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXT]
    files += [ROOT / name for name in ("Makefile", "Dockerfile", "pyproject.toml", "requirements-gpu.txt")]
    missing = {
        f"{path.relative_to(ROOT)}: {page}"
        for path in files
        for page in named.findall(path.read_text())
        if not (ROOT / page).exists()
    }
    assert missing == set()
