"""The pages: generated ones are up to date, the site builds, links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from docs_results import render

from megatron_tlt.config.load import load_config
from megatron_tlt.config.planning.memory import estimate_memory
from megatron_tlt.config.planning.parameters import GIB
from megatron_tlt.config.planning.report import render_check
from megatron_tlt.envs.schemas import tool_schemas
from tests.helpers.mpi import ROOT

LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
SECTIONS = (ROOT / "docs/reference/results.md").read_text().split("\n## ")
COMMANDS = [
    re.search(r"^\| `(benchmarks/.*)` \| \|$", section, re.MULTILINE)[1]
    for section in SECTIONS
    if "\n| processor |" in section and "Its script is in commit" not in section
]
GUIDES = "\n".join(page.read_text().replace("\\\n", " ") for page in sorted((ROOT / "docs/guides").glob("*.md")))
COMMANDS += re.findall(r"^ {4}\.venv/bin/python (benchmarks/.*)$", GUIDES, re.MULTILINE)
TEXT = {".py", ".yaml", ".yml", ".sh", ".sbatch", ".md", ".toml"}


def test_the_page_of_results_is_up_to_date():
    page = (ROOT / "docs/reference/results.md").read_text()
    assert page == render(), "docs/reference/results.md is stale: run `make docs`"


@pytest.mark.ci
@pytest.mark.parametrize("command", COMMANDS)
def test_scripts_take_the_commands_of_the_pages(command: str):
    """`--help` prints and leaves once the words before it are parsed, but for names of options."""
    words = [sys.executable, *shlex.split(command), "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--[\w-]+", done.stdout))


def test_the_report_that_the_page_of_clusters_prints_is_that_of_check():
    text = (ROOT / "docs/guides/gpu_cluster.md").read_text().split("\n`check` prints for this run:\n\n")[1]
    overrides = ["cluster.nodes=2", "rollout.backend=vllm"]
    config = load_config(ROOT / "configs/recipes/grpo-qwen2.5-7b-1n8g.yaml", overrides)
    report = render_check(config, config.model.architecture, 16).splitlines()
    assert [line[4:] for line in text.split("\n\n")[0].splitlines() if line[4:] not in report] == []


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


def test_no_target_that_the_readme_prints_writes_over_a_record():
    """Their `--out` and `--picture` are ignored by Git."""
    targets = set(re.findall(r"^ +make ([\w-]+)", (ROOT / "README.md").read_text(), re.MULTILINE)) | {"gpu-check"}
    done = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=True)
    written = re.findall(r"--(?:out|picture) (\S+)", done.stdout)
    assert {"proof", "real"} < targets and len(written) >= 5
    assert [path for path in written if not path.startswith("runs/")] == []


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


def test_the_figures_of_what_to_change_when_memory_is_out_are_those_of_the_plan():
    text = (ROOT / "docs/guides/memory.md").read_text().split("## Out of memory")[1].split("\n## ")[0]
    base = re.search(r"own savings \(`([^`]+)`\)", text)[1].split()
    rows = re.findall(r"^\| (?:`(\w+)`.*?)?\| (?:none|`([^`]+)`) \| ([\d.]+) \|", text, re.MULTILINE)
    assert len(rows) == 17
    phase = ""
    for name, change, planned in rows:
        phase = name or phase
        config = load_config(ROOT / "configs/recipes/grpo-qwen2.5-7b-1n8g.yaml", [*base, *filter(None, [change])])
        (rank,) = estimate_memory(config, config.model.architecture, 8)
        assert f"{rank.of_phase(phase) / GIB:.1f}" == planned, (phase, change)


def test_a_known_gap_is_a_row_of_few_words_with_a_link():
    page = (ROOT / "docs/reference/known_gaps.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| gap |")]
    assert len(rows) > 50
    for row in rows:
        _, gap, more, _ = row.split("|")
        assert len(gap.split()) <= 25 and LINK.search(more), row


def test_the_tool_class_of_the_page_has_schemas():
    page = (ROOT / "docs/guides/agents.md").read_text()
    code = re.search(r"^```python\n# my_tools.py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert code is not None
    scope: dict[str, type] = {}
    exec(code[1], scope)
    (schema,) = tool_schemas(scope["Shop"])
    function = schema["function"]
    assert function["name"] == "price" and set(function["parameters"]["properties"]) == {"item", "count"}
    assert scope["Shop"](currency="USD").price("pear", 2) == "6 USD"
