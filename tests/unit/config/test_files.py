"""Every file under configs/ and of benchmarks/lib loads, and every one that can be run passes all checks."""

import re
from pathlib import Path

import pytest
from docs_config import FIRST, field_at, render

from megatron_tlt.config.checks.run import find_problems
from megatron_tlt.config.checks.sim import check_sim
from megatron_tlt.config.load import build_config, load_config
from megatron_tlt.config.planning.memory import KV, estimate_memory
from megatron_tlt.config.planning.parameters import GIB
from megatron_tlt.config.planning.report import fits_line, full_requests, render_check
from megatron_tlt.config.root import Config, SftConfig, without_tlt
from megatron_tlt.config.schema import section_of
from megatron_tlt.config.sim import SimConfig
from megatron_tlt.config.yaml_reader import deep_merge, read_config_file

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "configs").rglob("*.yaml"))
# Parts are for `defaults:` of others; alone they say nothing about ranks or prompts.
PARTS = ("models", "algorithms", "data")
RECIPES = [path for path in FILES if path.parent.name == "recipes"]
# GiB of a rank that training the drafter may take, all in, by hidden size (7B, 32B, 70B).
TRAINING_GIB = {3584: 6, 4096: 6, 5120: 10, 8192: 16}
SIMULATIONS = [path for path in FILES if path.parent.name == "sim"]


def is_part(path: Path) -> bool:
    return path.parent.name in PARTS or path.name in ("tlt.yaml", "tlt-off.yaml")


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [p for p in FILES if is_part(p)], ids=label)
def test_parts_load(path):
    config = build_config(deep_merge({"model": {"path": "m"}}, read_config_file(path)))
    shape = config.model.architecture
    if path.parent.name == "models":
        assert shape is not None
        assert shape.num_heads % shape.num_kv_heads == 0


@pytest.mark.parametrize("path", SIMULATIONS, ids=label)
def test_simulations_pass_every_check(path):
    assert list(check_sim(load_config(path, root=SimConfig))) == []


RUNS = [p for p in FILES if not is_part(p) and p not in SIMULATIONS] + sorted((ROOT / "benchmarks/lib").glob("*.yaml"))


@pytest.mark.parametrize("path", RUNS, ids=label)
def test_runnable_files_pass_every_check(path):
    values = read_config_file(path)
    config = load_config(path, root=SftConfig if "sft" in values else Config)
    ranks = config.cluster.num_ranks
    assert [str(p) for p in find_problems(config, None, ranks)] == []
    assert "Ranks:" in render_check(config, None, ranks)


def printed_runs() -> set[tuple[str, Path]]:
    """(configuration, where it goes) of every command of RL that a page or a file's head prints."""
    folders = [ROOT / name for name in ("docs", "configs", "examples", "benchmarks")]
    pages = [page for folder in folders for end in ("*.md", "*.yaml") for page in folder.rglob(end)]
    text = "\n".join(page.read_text().replace("\\\n", " ") for page in [ROOT / "README.md", *pages])
    found = set()
    for command in re.findall(r"launch/local\.sh -n \d+ ([^`#\n-][^`#\n]*)", text):
        name, *options = command.split()
        overrides = [option for option in options if option.startswith("train.run_dir=")]
        if (ROOT / name).is_file():
            found.add((name, (ROOT / load_config(ROOT / name, overrides).train.run_dir).resolve()))
    return found


def test_printed_runs_of_two_configurations_have_two_run_directories():
    """The second one would go on with the first one's checkpoint."""
    runs = printed_runs()
    directories = [directory for _, directory in runs]
    assert len(runs) > 20 and len(set(directories)) == len(directories), sorted(runs)


def test_no_run_directory_holds_what_another_command_writes():
    """A start refuses a directory with files that are not its own."""
    tuned = [load_config(path, root=SftConfig).sft for path in RUNS if "sft" in read_config_file(path)]
    runs = {directory for _, directory in printed_runs()}
    runs |= {Path(load_config(path).train.run_dir).resolve() for path in RUNS if "sft" not in read_config_file(path)}
    others = {Path(place).resolve() for sft in tuned for place in (sft.out, sft.train_path)}
    assert runs.isdisjoint(others)
    assert [(run, other) for run in runs for other in runs | others if run in other.parents] == []


def test_no_head_of_a_file_prints_a_command_that_writes_over_an_asset():
    """`sft` and `drafter train` refuse a finished output."""
    files = [*FILES, *(ROOT / "slurm").glob("*.sbatch")]
    heads = "\n".join(path.read_text() for path in files)
    found = []
    for name, rest in re.findall(r"^#   .*(configs/\S+\.yaml)(.*)$", heads, re.MULTILINE):
        options = [word for word in rest.split() if re.match(r"[\w.]+=", word)]
        out = rest.partition(" --out ")[2]
        if (ROOT / name).is_file() and "sft" in read_config_file(ROOT / name):
            out = load_config(ROOT / name, options, SftConfig).sft.out
        found.append(out)
    assert len(found) > 10 and [out for out in found if out and (ROOT / out).is_relative_to(ROOT / "assets")] == []


@pytest.mark.parametrize("path", RECIPES, ids=label)
def test_recipes_draft_and_train_their_drafter_and_fit(path):
    config = load_config(path)
    shape, limit = config.model.architecture, config.cluster.memory_gib
    with_trtllm = config.rollout.backend == "trtllm"
    assert config.rollout.speculation.drafts_by == "trained"
    assert config.idle.train_drafter
    assert config.rollout.dtype == config.actor.dtype == "bf16"
    assert limit is not None
    stages = estimate_memory(config, shape, config.cluster.num_ranks)
    assert max(stage.total for stage in stages) <= limit * GIB
    # Of 128k tokens a request of the 32B model takes 6 GiB on each of 8 ranks.
    assert full_requests(config, shape, stages[0].parts[KV]) >= (14 if config.model.max_context <= 32768 else 4)
    names = ("drafter training", "drafter step", "drafter's LM head")
    training = sum(stages[0].parts[name] for name in names)
    eagle3 = 5 * with_trtllm  # a head of its own, three positions, four hidden states a token
    assert training <= (TRAINING_GIB.get(shape.hidden_size, 2) + eagle3) * GIB


@pytest.mark.parametrize("path", [path for path in RECIPES if "trtllm" not in path.stem], ids=label)
def test_recipes_roll_out_in_vllm(path):
    """By one override; with memory that comes and goes the cache is near the embedded engine's."""
    ours, vllm = load_config(path), load_config(path, ["rollout.backend=vllm"])
    shape, ranks = ours.model.architecture, ours.cluster.num_ranks
    assert [str(p) for p in find_problems(vllm, None, ranks)] == []
    caches = [estimate_memory(config, shape, ranks)[0].parts[KV] for config in (ours, vllm)]
    assert caches[1] > 0.75 * caches[0]
    assert "no effect with vllm: algorithm.importance_cap" in render_check(vllm, None, ranks)


def test_another_algorithm_over_a_recipe_has_its_own_clips():
    algorithm = load_config(ROOT / "configs/recipes/dapo-qwen2.5-32b-8n8g.yaml", ["algorithm.name=gspo"]).algorithm
    assert (algorithm.ratio_clip_low, algorithm.ratio_clip_high) == (None, None)


@pytest.mark.parametrize("path", [*RECIPES, ROOT / "configs/quickstart.yaml"], ids=label)
def test_tlt_is_turned_off_by_one_file(path):
    """The plan of both stands in one line."""
    off, ranks = load_config(path, [str(ROOT / "configs/tlt-off.yaml")]), load_config(path).cluster.num_ranks
    assert off == without_tlt(load_config(path))
    assert find_problems(off, None, ranks) == []
    if off.model.architecture is not None:
        lines = render_check(load_config(path), None, ranks).splitlines()
        (line,) = [line for line in lines if "TLT off to on" in line]
        caches = [estimate_memory(c, c.model.architecture, ranks)[0].parts[KV] / GIB for c in (off, load_config(path))]
        assert f"KV cache {caches[0]:.1f} to {caches[1]:.1f} GiB" in line
        assert "TLT off" not in render_check(off, None, ranks)


def test_only_parts_of_some_size_are_printed():
    config = load_config(ROOT / "configs/recipes/grpo-qwen2.5-7b-1n8g.yaml")
    few, whole = render_check(config, None, 8), render_check(config, None, 8, all_rows=True)
    assert " 0.00\n" in whole and " 0.00\n" not in few
    rows = [{" ".join(line.split()) for line in text.splitlines()} for text in (few, whole)]
    assert rows[0] < rows[1]
    assert fits_line(config, None, 8).startswith("Fits: 0.00 GiB to spare; the plan takes 79.00 GiB of a rank in the ")


def test_the_generated_page_is_fresh():
    page = (ROOT / "docs" / "reference" / "config.md").read_text()
    assert page == render(), "docs/reference/config.md is stale: run `make docs`"


def test_settings_changed_first_exist():
    """At most ten a section, by names that the section or one inside it has; a wrong name raises KeyError."""
    for section, names in FIRST.items():
        root = SftConfig if section == "sft" else Config
        model = section_of(root.model_fields[section].annotation)
        assert model is not None and 0 < len(names) <= 10
        assert all(field_at(model, name).description for name in names), section
        rows = render().split(f"\n### `{section}`\n")[1].split("\nThe others:\n")[0]
        assert re.findall(r"^\| `([\w.]+)`", rows, re.M) == list(names)


def test_every_setting_is_documented():
    settings, _ = render().split("## Names elsewhere")
    rows = [line for line in settings.splitlines() if line.startswith("| `")]
    undocumented = [row for row in rows if row.rsplit("|", 2)[-2].strip() == ""]
    assert undocumented == []
