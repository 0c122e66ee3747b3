from pathlib import Path

import pytest
from docs_recipes import memory_cells, published_drafters, seconds

from megatron_tlt.cli.main import main
from megatron_tlt.config.load import load_config
from megatron_tlt.config.planning.memory import KV, estimate_memory
from megatron_tlt.errors import ConfigError
from megatron_tlt.sim.cost_model import cache_tokens
from megatron_tlt.sim.from_run import simulation_of, usual_modes
from tests.helpers.sim import few_steps  # noqa: F401

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "configs/recipes").glob("*.yaml"))


def test_the_cache_that_is_simulated_is_the_planned_one():
    config = load_config(ROOT / "configs/recipes/grpo-qwen2.5-32b-8n8g.yaml")
    cache = estimate_memory(config, config.model.architecture, 64)[0].parts[KV]
    # Of a token on one of 4 ranks: 64 layers and the drafter's (all 8 heads) of keys and values, and a hidden state.
    token = 2 * (64 * 2 + 8) * 128 * 2 + 5120 * 2
    assert cache_tokens(simulation_of(config)[0]) == pytest.approx(cache / token, rel=1e-4)


def test_what_does_not_fit_is_not_simulated(capsys):
    recipe = ROOT / "configs/recipes/dapo-llama3.3-70b-32n8g.yaml"
    with pytest.raises(ConfigError, match=r"cluster\.memory_gib.* in the update"):
        simulation_of(load_config(recipe, ["cluster.memory_gib=40"]))
    assert main(["simulate", str(recipe), "cluster.memory_gib=40"]) == 2
    assert "cluster.memory_gib" in capsys.readouterr().err


@pytest.mark.parametrize(("memory", "gpu"), [(23.5, "rtx4090"), (79, "h100"), (80, "h100"), (139, "h200")])
def test_the_memory_decides_which_gpu_is_simulated(memory, gpu):
    recipe = ROOT / "configs/recipes/grpo-qwen2.5-0.5b-1n1g.yaml"
    assert simulation_of(load_config(recipe, [f"cluster.memory_gib={memory}"]))[0].cluster.gpu == gpu
    with pytest.raises(ConfigError, match=r"cluster\.memory_gib = None: is required"):
        simulation_of(load_config(recipe, ["cluster.memory_gib=null"]))


def test_a_step_with_tlt_is_no_slower():
    few = ["train.prompts_per_step=32", "rollout.max_tokens=2048", "algorithm.overlong_buffer=512"]
    few += ["rollout.speculation.selector=beg_mab"]  # which is asked for fewer steps
    step = seconds(load_config(ROOT / "configs/recipes/dapo-r1-distill-qwen-7b-1n8g.yaml", few))
    assert 0 < step["tlt"] <= step["off"]


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        (["algorithm.kl_coef=0"], 0),
        (["algorithm.kl_coef=0", "rollout.backend=vllm"], 0),
        (["algorithm.kl_coef=0.1"], 1),
        (["algorithm.kl_coef=0.1", "algorithm.kl_in=reward"], 2),
    ],
)
def test_every_pass_of_log_probs_is_counted(overrides, passes):
    config = load_config(ROOT / "configs/recipes/grpo-qwen2.5-7b-1n8g.yaml", [*overrides, "cluster.memory_gib=139"])
    simulation, _ = simulation_of(config)
    assert simulation.training.logprob_passes == passes


def test_what_a_simulation_leaves_out_of_a_run_is_said(capsys):
    recipe, few = ROOT / "configs/recipes/grpo-qwen2.5-0.5b-1n1g.yaml", ["train.prompts_per_step=8"]
    plain, said = simulation_of(load_config(recipe, ["rollout.speculation.drafter=none", "idle.train_drafter=false"]))
    assert plain.workload.prompt_tokens == 256 and said[0] == "the mean is of 2 steps"
    assert len(said) == 2 and said[1].startswith("prompts have 256 tokens")
    few += ["data.max_prompt_tokens=100", "env.kind=calculator", "rewards.functions=[{name: env}]"]
    assert main(["simulate", str(recipe), *few, "rollout.max_tokens=1024", "--compare", "off"]) == 0
    text = capsys.readouterr().out
    assert "prompts have 100 tokens (data.max_prompt_tokens: 100)" in text
    assert "chance of 0.5 at first, and with one of 0.82 once" in text
    assert "responses have one turn" in text and "(env.kind = 'calculator')" in text
    assert "a forward costs" not in text
    types = ["cluster.memory_gib=139", "rollout.dtype=fp32", "actor.dtype=fp32"]
    said = simulation_of(load_config(recipe, types))[1]
    assert [text.rpartition(": ")[2] for text in said[-2:]] == ["rollout.dtype = fp32", "actor.dtype = fp32"]
    dapo = load_config(ROOT / "configs/recipes/dapo-r1-distill-qwen-7b-1n8g.yaml")
    assert any("dynamic_sampling drops no group" in text for text in simulation_of(dapo)[1])


def test_where_a_mode_pre_rolls_most_of_the_steps_have_something_pre_rolled():
    config = load_config(ROOT / "configs/recipes/grpo-qwen2.5-7b-1n8g.yaml")
    simulation, said = simulation_of(config, ["off", "tlt+pre"])
    assert simulation.workload.steps == 4
    assert said[0] == "the mean is of 4 steps, of which the first has no pre-rolled responses"


def test_what_a_run_s_engine_cannot_do_is_refused_and_no_usual_mode():
    trtllm = load_config(ROOT / "configs/recipes/grpo-qwen3-8b-1n8g-trtllm.yaml")
    with pytest.raises(ConfigError, match=r"'tlt\+pre': cannot run with rollout\.backend: trtllm") as error:
        simulation_of(trtllm, ["off", "suffix", "tlt+pre"])
    assert [problem.value for problem in error.value.problems] == ["suffix", "tlt+pre"]
    assert usual_modes([trtllm], ["off", "suffix", "tlt"]) == ["off", "tlt"]
    simulation, said = simulation_of(trtllm, ["off", "tlt"])
    assert simulation.rollout.schedule == "static" and not simulation.idle.pre_rollout
    assert any("rollout.backend = 'trtllm' is not simulated" in text for text in said)
    embedded = load_config(ROOT / "configs/recipes/grpo-qwen3-8b-1n8g.yaml")
    assert usual_modes([embedded], ["off", "suffix", "tlt"]) == ["off", "suffix", "tlt", "tlt+pre"]
    plain = ["rollout.speculation.drafter=none", "idle.train_drafter=false"]
    undrafted = load_config(ROOT / "configs/recipes/grpo-qwen3-8b-1n8g.yaml", plain)
    assert usual_modes([undrafted], ["off", "suffix", "tlt"]) == ["off", "suffix"]
    given = ["rollout.speculation.drafter_path=far/away", "idle.train_drafter=false"]
    frozen = load_config(ROOT / "configs/recipes/grpo-qwen3-8b-1n8g.yaml", given)
    assert usual_modes([frozen], ["off", "suffix", "tlt"]) == ["off", "suffix", "frozen"]
    assert simulation_of(embedded)[0].rollout.schedule == "pull" and simulation_of(embedded)[0].idle.pre_rollout


def test_a_teacher_s_pass_is_priced_by_its_own_shape():
    recipe = ROOT / "configs/recipes/grpo-qwen2.5-7b-1n8g.yaml"
    config = load_config(recipe, ["algorithm.name=distill", "algorithm.teacher=far/away", "cluster.memory_gib=139"])
    unknown, said = simulation_of(config)
    assert (unknown.training.logprob_passes, unknown.training.teacher) == (1, None)
    assert "algorithm.teacher = 'far/away' is not on this machine" in said[-1]
    shape = config.model.architecture.model_copy(update={"num_layers": 56})
    algorithm = config.algorithm.with_teacher_shape(shape)
    known, said = simulation_of(config.model_copy(update={"algorithm": algorithm}))
    assert (known.training.logprob_passes, known.training.teacher) == (0, shape) and "teacher" not in said[-1]


def test_a_drafter_that_is_not_here_is_said_and_the_positions_it_is_trained_at_are_the_run_s(tmp_path):
    recipe, at = ROOT / "configs/recipes/grpo-qwen2.5-7b-1n8g.yaml", "rollout.speculation"
    given = [f"{at}.drafter=eagle3", f"{at}.drafter_path={tmp_path / 'no'}", "drafter.online.draft_steps=2"]
    given.append("cluster.memory_gib=139")
    simulation, said = simulation_of(load_config(recipe, given))
    assert any("costs as a new one over 152,064 tokens" in text for text in said)
    assert simulation.training.draft_steps == 2
    (tmp_path / "no").mkdir()
    assert not any("152,064" in text for text in simulation_of(load_config(recipe, given))[1])


def test_adapters_are_trained_with_frozen_weights():
    recipe = ROOT / "configs/recipes/grpo-qwen2.5-7b-1n1g-lora.yaml"
    assert simulation_of(load_config(recipe))[0].training.lora
    assert not simulation_of(load_config(RECIPES[0]))[0].training.lora


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_memory_of_the_page_is_fresh(path):
    config = load_config(path)
    stages = estimate_memory(config, config.model.architecture, config.cluster.num_ranks)
    cells = " | ".join(memory_cells(config, stages))
    (row,) = [
        line for line in (ROOT / "docs/reference/recipes.md").read_text().splitlines() if f"`{path.stem}`" in line
    ]
    assert cells in row, "docs/reference/recipes.md is stale: run `make docs`"


def test_the_published_drafters_of_the_page_are_fresh():
    assert published_drafters() in (ROOT / "docs/reference/recipes.md").read_text(), "stale: run `make docs`"
