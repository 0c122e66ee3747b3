from types import SimpleNamespace

import pytest

from megatron_tlt.config.checks.layout import check_architecture, check_attention
from megatron_tlt.config.checks.learning import check_lora
from megatron_tlt.config.checks.run import check_config
from megatron_tlt.config.drafter_kinds import DRAFTERS
from megatron_tlt.config.load import build_config
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.root import SftConfig

SHAPE = ArchitectureConfig(
    family="qwen3",
    vocab_size=512,
    hidden_size=64,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    intermediate_size=192,
)
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
BASE = {
    "model": {"path": "m", "max_context": 512},
    "rollout": {"max_tokens": 256, "max_running_requests": 64},
    "data": {"max_prompt_tokens": 128, "train": {"tasks": [{"name": "chain_sum"}]}},
}


CARRY = "rollout.carry_over"
GREEDY = ("eval.temperature=0", "eval.samples_per_prompt=2")
DISTILL = ("algorithm.name=distill", "algorithm.teacher=t")
EVALUATED = ("data.eval={tasks: [{name: chain_sum}]}", "eval.max_tokens=64")
ALONE = ("rewards.functions=[]", "rollout.samples_per_prompt=1")


def paths(*overrides: str, ranks: int = 4, **kwargs) -> set[str]:
    config = build_config(BASE, overrides)
    return {p.path for p in check_config(config, SHAPE, ranks, **kwargs)}


@pytest.mark.parametrize(("version", "is_taken"), [("1.9.0", False), ("1.10", True), ("2.4.0+b1", True)])
def test_context_parallelism_by_transformer_engines_version(version, is_taken):
    config = build_config(BASE, ["actor.cp=2", "actor.dtype=bf16"])
    assert [p.path for p in check_attention(config, "cuda", version)] == ([] if is_taken else ["actor.cp"])
    assert not list(check_attention(config, "cpu", None))


def test_transformer_engines_attention_of_packed_rows_takes_no_fp32():
    engine = ["actor.layer_spec=transformer_engine", "actor.dtype=fp32"]
    assert [p.path for p in check_attention(build_config(BASE, engine), "cuda", "2.11")] == ["actor.dtype"]
    assert not list(check_attention(build_config(BASE, [*engine[:1], "actor.dtype=bf16"]), "cuda", "2.11"))
    assert not list(check_attention(build_config(BASE, engine[1:]), "cuda", "2.11")), "auto: local layers"


def test_grouped_products_take_ranks_of_whole_16_bytes():
    shape = SHAPE.model_copy(update=EXPERTS | {"family": "qwen3_moe"})
    for rank, dtype, more, step in (
        (8, "bf16", (), None),
        (4, "bf16", (), 8),
        (4, "fp32", (), None),
        (2, "fp32", (), 4),
        (2, "bf16", ("targets=[q_proj,o_proj]",), None),
    ):
        given = [f"actor.dtype={dtype}", *(f"actor.lora.{override}" for override in (f"rank={rank}", *more))]
        found = [str(problem) for problem in check_lora(build_config(BASE, given), shape)]
        said = f"actor.lora.rank = {rank}: must be a multiple of {step} for experts with actor.dtype: {dtype}: "
        assert len(found) == (step is not None) and all(text.startswith(said) for text in found)


@pytest.mark.parametrize(
    ("sizes", "dtype", "said"),
    [
        ({"moe_intermediate_size": 36}, "bf16", "'bf16': needs the model's experts' width (36) to be a multiple of 8"),
        ({"moe_intermediate_size": 36}, "fp32", None),
        ({"moe_intermediate_size": 30}, "fp32", "'fp32': needs the model's experts' width (30) to be a multiple of 4"),
        ({"hidden_size": 68}, "bf16", "'bf16': needs the model's hidden size (68) to be a multiple of 8"),
    ],
)
def test_the_actors_experts_have_rows_of_whole_16_bytes(sizes, dtype, said):
    shape = SHAPE.model_copy(update=EXPERTS | {"family": "qwen3_moe"} | sizes)
    sft = {"model": {"path": "m"}, "sft": {"train_path": "a", "out": "b"}}
    given = [f"actor.dtype={dtype}"]
    for config in (build_config(BASE, given), build_config(sft, given, root=SftConfig)):
        found = [str(p) for p in check_config(config, shape, 1, "cpu") if p.path == "actor.dtype"]
        assert [text.startswith(f"actor.dtype = {said}") for text in found] == [True] * (said is not None)


@pytest.mark.parametrize(("kernels", "wanted"), [("torch", {"rollout.tp"}), ("native", set())])
def test_each_ranks_part_of_an_expert_has_rows_of_whole_16_bytes_in_pytorch(kernels, wanted):
    shape = SHAPE.model_copy(update=EXPERTS | {"family": "qwen3_moe", "moe_intermediate_size": 72})
    for tp, found in ((2, wanted), (1, set())):
        config = build_config(BASE, ["rollout.dtype=bf16", f"rollout.tp={tp}", f"rollout.kernels={kernels}"])
        assert {problem.path for problem in check_config(config, shape, 2, "cpu")} == found


@pytest.mark.parametrize(
    ("changes", "lora", "width"),
    [
        ({}, ["rank=16"], "key/value"),
        ({}, ["rank=16", "targets=[v_proj]"], "key/value"),
        ({}, ["rank=16", "targets=[q_proj,o_proj,gate_proj]"], None),
        ({}, ["rank=64", "targets=[gate_proj]"], "hidden"),
        ({"intermediate_size": 16}, ["rank=16", "targets=[up_proj]"], "MLP"),
        (EXPERTS | {"moe_intermediate_size": 8}, ["rank=8", "targets=[q_proj]"], None),
        (EXPERTS | {"moe_intermediate_size": 8}, ["rank=8", "targets=[down_proj]"], "expert"),
        (EXPERTS | {"intermediate_size": 8}, ["rank=8", "targets=[down_proj]"], None),
    ],
)
def test_a_rank_is_below_the_widths_that_its_targets_have(changes, lora, width):
    shape = SHAPE.model_copy(update={"num_kv_heads": 1, **changes})
    found = list(check_lora(build_config(BASE, [f"actor.lora.{text}" for text in lora]), shape))
    assert [problem.allowed.rpartition("the model's ")[2] for problem in found] == ([f"{width} width"] if width else [])


def test_a_good_configuration_has_no_problems():
    assert paths() == set()
    assert paths(f"{CARRY}=64", "rollout.stop=[x]") == set()
    assert paths(f"{CARRY}=64", "rollout.backend=vllm", "algorithm.mask_off_policy=true") == set()
    assert paths(f"{CARRY}=64", "algorithm.mask_off_policy=true", "algorithm.importance_cap=0") == set()
    assert paths("actor.tp=2", "actor.pp=2", "rollout.tp=2", "actor.sequence_parallel=true", device="cpu") == set()
    assert paths(*DISTILL, *ALONE) == set()
    assert paths(*DISTILL, *ALONE, "rewards.functions=[{name: task, weight: 0}]") == set()
    assert paths("data.eval={tasks: [{name: chain_sum}]}") == set(), "its stream is another one with the same seed, too"
    assert paths("optimizer.min_lr=1e-7", "optimizer.schedule=linear") == set()
    own = "rewards.functions=[{name: exact}]"
    assert paths("data.train.tasks=[{name: puzzle24}]", own) == set(), "only its own verifier is refused"
    assert paths("env.kind=number_guess", "env.max_observation_tokens=64", EVALUATED[1]) == set(), "without evaluations"
    assert paths(*GREEDY) == paths("data.eval={tasks: [{name: chain_sum}]}", GREEDY[0]) == set()


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["actor.tp=3"], "actor.tp * actor.pp * actor.cp"),
        (["actor.tp=8", "actor.pp=1"], "actor.tp"),
        (["actor.pp=3"], "actor.pp"),
        (["rollout.tp=3"], "rollout.tp"),
        (["actor.sequence_parallel=true"], "actor.sequence_parallel"),
        (["actor.cp=3"], "actor.tp * actor.pp * actor.cp"),
        (["actor.distributed_optimizer=on", "optimizer.name=sgd"], "actor.distributed_optimizer"),
        (["actor.lora.targets=[q_proj,q_proj]"], "actor.lora.targets"),
        (["actor.lora.rank=64"], "actor.lora.rank"),  # as wide as keys and values are
        (["cluster.nodes=2", "cluster.ranks_per_node=2", "actor.tp=4"], "actor.tp"),
        (["rollout.max_running_requests=4000"], "rollout.max_running_requests"),
        (["rollout.top_k=513"], "rollout.top_k"),
        (["eval.top_k=513"], "eval.top_k"),
        (["rollout.kv_cache_mib=1", "data.max_prompt_tokens=256", "model.max_context=600"], "rollout.kv_cache_mib"),
        (["train.prompts_per_step=66"], "train.prompts_per_step"),
        (["train.prompts_per_step=64", "algorithm.mini_batches=3"], "train.prompts_per_step"),
        (
            ["train.prompts_per_step=4", "rollout.samples_per_prompt=2", "algorithm.mini_batches=4"],
            "train.prompts_per_step * rollout.samples_per_prompt",
        ),
        (["rollout.max_tokens=400"], "data.max_prompt_tokens + rollout.max_tokens"),
        (["eval.max_tokens=400"], "data.max_prompt_tokens + eval.max_tokens"),
        (["rollout.samples_per_prompt=1"], "rollout.samples_per_prompt"),
        ([*DISTILL, "rollout.samples_per_prompt=1"], "rollout.samples_per_prompt"),
        ([*DISTILL, *ALONE, "algorithm.overlong_buffer=9"], "rollout.samples_per_prompt"),
        (["rollout.samples_per_prompt=1", "algorithm.dynamic_sampling=true"], "algorithm.dynamic_sampling"),
        (["rollout.temperature=0"], "rollout.temperature"),
        (["algorithm.ratio_clip_low=1"], "algorithm.ratio_clip_low"),
        (["algorithm.kl_in=reward"], "algorithm.kl_in"),
        (["algorithm.name=distill"], "algorithm.teacher"),
        (["algorithm.teacher=t"], "algorithm.teacher"),
        ([*DISTILL, "algorithm.kl_coef=0"], "algorithm.kl_coef"),
        ([*DISTILL, "algorithm.kl_in=reward"], "algorithm.kl_in"),
        ([*DISTILL, "algorithm.dynamic_sampling=true"], "algorithm.dynamic_sampling"),
        ([*DISTILL, "rewards.functions=[]", "data.eval={kind: jsonl, path: x}"], "rewards.functions"),
        (["algorithm.overlong_buffer=256"], "algorithm.overlong_buffer"),
        (["algorithm.importance_cap=0.5"], "algorithm.importance_cap"),
        (["optimizer.min_lr=1", "optimizer.schedule=linear"], "optimizer.min_lr"),
        (["optimizer.min_lr=1e-7"], "optimizer.min_lr"),
        (["stop.warning_s=10"], "stop.warning_s"),
        (["watchdog.hang_s=5"], "watchdog.hang_s"),
        (["stop.term_s=9.5"], "stop.term_s"),
        (["optimizer.schedule=cosine", "optimizer.warmup_steps=100"], "optimizer.warmup_steps"),
        (["data.train.tasks=[]"], "data.train.tasks"),
        (["data.train.tasks=[{name: a}, {name: b}, {name: a}]"], "data.train.tasks.2.name"),
        (["data.train.tasks=[{name: puzzle24}]"], "data.train.tasks.0.name"),
        (
            ["data.train.tasks=[{name: puzzle24}]", "env.kind=retry", "rewards.functions=[{name: env}]"],
            "data.train.tasks.0.name",
        ),
        (["data.train.kind=jsonl", "rewards.functions=[{name: math}]"], "data.train.path"),
        (["data.eval={kind: jsonl, path: x}"], "rewards.functions.0.name"),
        (["data.eval={tasks: [{name: chain_sum}]}", *GREEDY], "eval.samples_per_prompt"),
        (["data.train={kind: jsonl, path: x}", "data.eval={kind: jsonl, path: ./x}"], "data.eval.path"),
        (["data.train={kind: hf, path: a/b@v1}", "data.eval={kind: hf, path: a/b, split: train}"], "data.eval.path"),
        (["data.train={kind: jsonl, path: x, split: a}"], "data.train.split"),
        (["data.train={kind: parquet, path: x, subset: a}"], "data.train.subset"),
        (["data.train={kind: hf, path: x, answer_pattern: '####'}"], "data.train.answer_pattern"),
        (["rewards.functions=[]"], "rewards.functions"),
        (["rewards.functions=[{name: task, threshold: null}]"], "rewards.functions"),
        (["rewards.functions=[{name: python}]"], "rewards.functions.0.path"),
        (["rewards.functions=[{name: python, path: ':f'}]"], "rewards.functions.0.path"),
        (["rewards.functions=[{name: format}]"], "rewards.functions.0.pattern"),
        (["rewards.functions=[{name: exact, pattern: '(a'}]"], "rewards.functions.0.pattern"),
        (["rewards.functions=[{name: exact, pattern: 'a'}]"], "rewards.functions.0.pattern"),
        (["rewards.functions=[{name: exact, params: {a: 1}}]"], "rewards.functions.0.name"),
        (["rewards.functions=[{name: env}]"], "rewards.functions.0.name"),
        (["rewards.functions=[{name: task, turns: last}]"], "rewards.functions.0.turns"),
        (["data.train={kind: env}"], "data.train.kind"),
        (["data.train={kind: env, path: x}", "env.kind=number_guess"], "data.train.path"),
        (["data.train={kind: env, tasks: [{name: a}]}", "env.kind=number_guess"], "data.train.tasks"),
        (["env={}"], "env.kind"),
        (["env={kind: number_guess, path: 'a:B'}"], "env.kind"),
        (["env.path=a.py"], "env.path"),
        (["env.kind=number_guess", "rollout.backend=trtllm"], "rollout.backend"),
        (["env.kind=number_guess", "env.max_observation_tokens=256"], "env.max_observation_tokens"),
        ([*EVALUATED, "env.kind=number_guess", "env.max_observation_tokens=64"], "env.max_observation_tokens"),
        (["env.kind=number_guess", "env.max_turn_tokens=257"], "env.max_turn_tokens"),
        ([f"{CARRY}=256"], CARRY),
        ([f"{CARRY}=64", "env.kind=number_guess"], CARRY),
        ([f"{CARRY}=64", "rollout.backend=trtllm"], "rollout.backend"),
        ([f"{CARRY}=64", "algorithm.dynamic_sampling=true"], "algorithm.dynamic_sampling"),
        ([f"{CARRY}=64", "actor.router_replay=rollout"], "actor.router_replay"),
        ([f"{CARRY}=64", "rollout.backend=vllm", "rollout.stop=[x]"], "rollout.stop"),
        ([f"{CARRY}=64", "rollout.backend=vllm"], "algorithm.mask_off_policy"),
        ([f"{CARRY}=64", "algorithm.importance_cap=0"], "algorithm.importance_cap"),
        ([f"{CARRY}=64", *DISTILL], "algorithm.mask_off_policy"),
        (["algorithm.mask_off_policy=true"], "algorithm.mask_off_policy"),
        (
            ["model.architecture=" + str(SHAPE.model_dump(mode="json") | {"num_layers": 5})],
            "model.architecture.num_layers",
        ),
    ],
)
def test_every_check_fires(overrides, path):
    ranks = 8 if "actor.tp=8" in overrides else 3 if "rollout.tp=3" in overrides else 4
    assert path in paths(*overrides, ranks=ranks)


def test_a_reward_that_needs_tasks_names_those_that_can_be_in_its_place():
    """The prompts of an environment have no answers."""
    for kind, others in (("env", "env, format or python"), ("hf", "math, exact, format or python")):
        config = build_config(BASE, [f"data.train.kind={kind}", "data.train.tasks=[]", "env.kind=number_guess"])
        (found,) = [p for p in check_config(config, SHAPE, 4) if p.path == "rewards.functions.0.name"]
        assert found.allowed.endswith(f"; use {others}")


@pytest.mark.parametrize(
    ("experts", "overrides", "path"),
    [
        (0, ["actor.ep=2"], "actor.ep"),
        (0, ["actor.router_replay=rollout"], "actor.router_replay"),
        (6, ["actor.ep=3"], "actor.ep"),  # of 4 ranks
        (6, ["actor.ep=4"], "actor.ep"),
        (8, ["actor.tp=2"], "actor.sequence_parallel"),
        (8, ["actor.lora.rank=8", "actor.router_z_loss=0.01"], "actor.router_z_loss"),
        (8, ["actor.lora.rank=8", "actor.load_balancing_loss=0.01"], "actor.load_balancing_loss"),
        (8, ["rollout.backend=trtllm"], "rollout.backend"),
    ],
)
def test_checks_of_experts(experts: int, overrides: list[str], path: str) -> None:
    shape = SHAPE.model_copy(update=EXPERTS | {"num_experts": experts} if experts else {})
    config = build_config(BASE, overrides)
    assert path in {p.path for p in check_config(config, shape, 4)}
    good = ["actor.ep=2", "actor.tp=2", "actor.sequence_parallel=true", "actor.router_z_loss=0.01"]
    fine = build_config(BASE, good if experts else [])
    assert path not in {p.path for p in check_config(fine, shape, 4)}


@pytest.mark.parametrize(
    ("dense", "overrides", "is_taken"),
    [
        ((0, 1), [], False),
        ((0, 1), ["actor.pp=1"], True),
        ((0, 1), ["optimizer.name=sgd"], True),
        ((0, 2, 3), [], True),
        ((0, 1), ["actor.lora.targets=[q_proj]"], True),  # experts are not trained
        ((2,), [], True),
        ((2,), ["actor.lora.targets=[up_proj]"], False),  # only experts are, in the first stage
    ],
)
def test_the_first_stage_trains_all_that_adams_step_is_saved_of(dense, overrides, is_taken) -> None:
    shape = SHAPE.model_copy(update=EXPERTS | {"family": "qwen3_moe", "dense_layers": dense})
    config = build_config(BASE, ["actor.pp=2", *overrides])
    problems = [p for p in check_config(config, shape, 4) if p.path == "actor.pp"]
    assert len(problems) == (not is_taken) and all("Adam's step" in p.allowed for p in problems)


@pytest.mark.parametrize(
    ("sizes", "overrides", "allowed"),
    [
        ({"vocab_size": 500}, [], "has 500 rows of embedding, fewer than the policy's 512"),
        ({"num_kv_heads": 2}, ["actor.tp=4"], "actor.tp = 4 must divide the model's key/value heads 2"),
        ({"num_layers": 6}, ["actor.pp=4"], "actor.pp = 4 must divide the model's 6 layers"),
        (EXPERTS, ["actor.tp=2"], "actor.sequence_parallel = False must be true for a mixture of experts"),
        (EXPERTS | {"moe_intermediate_size": 30}, [], "actor.dtype = fp32 needs the model's experts' width (30) to be"),
    ],
)
def test_a_teacher_must_fit_vocabulary_and_layout(sizes, overrides, allowed):
    for changed, is_wrong in ((sizes, True), ({"hidden_size": 128}, False)):
        shape = SHAPE.model_copy(update=changed)
        config = build_config(BASE, [*DISTILL, *overrides])
        config = config.model_copy(update={"algorithm": config.algorithm.with_teacher_shape(shape)})
        found = check_config(config, SHAPE, 4)
        mine = [problem for problem in found if problem.path == "algorithm.teacher"]
        assert len(mine) == is_wrong and all(allowed in problem.allowed for problem in mine)


@pytest.mark.parametrize(("family", "wrong"), [("mixtral", True), ("qwen2_moe", True), ("qwen3_moe", False)])
def test_vllm_hands_out_layers_of_one_family_with_experts(family: str, wrong: bool) -> None:
    more = EXPERTS | {"family": family}
    given, at = ["rollout.backend=vllm", "idle.train_drafter=true"], "rollout.speculation.drafter"
    for kind in ("eagle", "eagle3"):
        found = check_config(build_config(BASE, [*given, f"{at}={kind}"]), SHAPE.model_copy(update=more), 4)
        assert {p.path for p in found} == ({at} if wrong and DRAFTERS[kind].layers_read else set())


def test_vllm_has_room_for_the_hidden_states_of_a_request() -> None:
    """Or the drafter would train on none: 20,992 tokens of 64 values, of eagle3 four times as many."""
    sizes = ["model.max_context=32768", "data.max_prompt_tokens=512", "rollout.max_tokens=20480"]
    given, at = [*sizes, "rollout.backend=vllm", "idle.train_drafter=true"], "rollout.vllm.hidden_mib"
    shape = SHAPE.model_copy(update={"hidden_size": 64})
    for kind, dtype, least in (("eagle", "fp32", 6), ("eagle", "bf16", 3), ("eagle3", "bf16", 11)):
        more = [*given, f"rollout.speculation.drafter={kind}", f"rollout.dtype={dtype}"]
        for mib in (least, least - 1):
            found = check_config(build_config(BASE, [*more, f"{at}={mib}"]), shape, 4)
            allowed = [problem.allowed for problem in found if problem.path == at]
            assert [text.startswith(f"must be >= {least} with idle") for text in allowed] == [True] * (mib < least)


def test_dense_layers_are_compared_as_a_set() -> None:
    there = SHAPE.model_copy(update={**EXPERTS, "dense_layers": (0, 3)})
    for dense, is_wrong in (((3, 0), False), ((0,), True)):
        promised = there.model_copy(update={"dense_layers": dense})
        config = SimpleNamespace(model=SimpleNamespace(architecture=promised, path="m"))
        found = [problem.path for problem in check_architecture(config, there)]  # type: ignore[arg-type]
        assert found == (["model.architecture.dense_layers"] if is_wrong else [])


def test_the_width_of_dense_layers_is_divided_where_there_are_some() -> None:
    config = build_config(BASE, ["actor.tp=4", "actor.sequence_parallel=true", "rollout.tp=4"])
    for dense, wanted in (((), set()), ((1,), {"actor.tp", "rollout.tp"})):
        shape = SHAPE.model_copy(update=EXPERTS | {"intermediate_size": 190, "dense_layers": dense})
        assert {p.path for p in check_config(config, shape, 4)} == wanted


@pytest.mark.parametrize(
    ("override", "device"),
    [
        ("actor.layer_spec=transformer_engine", "cpu"),
        ("actor.distributed_optimizer=on", "cpu"),
        ("rollout.kernels=native", "cuda"),
    ],
)
def test_checks_of_the_device(override, device):
    path = override.split("=")[0]
    assert path in paths(override, device=device)
    other = "cuda" if device == "cpu" else "cpu"
    assert path not in paths(override, device=other)
    assert path in paths(override, f"distributed.device={device}"), "the config's own word counts as well"


def test_local_layers_compute_no_norm_again():
    norms, at = ["actor.recompute=selective", "actor.recompute_modules=[layernorm]"], "actor.recompute_modules"
    assert paths(*norms, device="cpu") == paths(*norms, "actor.layer_spec=local") == {at}
    assert paths(*norms, device="cuda") == paths(*norms) == set(), "auto may mean Transformer Engine's"
    assert paths(norms[0], device="cpu") == paths(norms[1], device="cpu") == set()


def test_a_trained_drafter_needs_cache_too():
    fits = ["rollout.kv_cache_mib=1", "data.max_prompt_tokens=224"]  # 480 tokens of 2 KiB in four layers
    eagle = ["rollout.speculation.drafter=eagle", "rollout.speculation.drafter_path=d"]
    assert paths(*fits) == set()
    assert paths(*fits, *eagle) == {"rollout.kv_cache_mib"}


def test_training_in_idle_time_needs_a_drafter_that_can_be_trained():
    train = "idle.train_drafter=true"
    assert paths(train) == paths(train, "rollout.speculation.drafter=suffix") == {"idle.train_drafter"}
    # Without a directory it starts from random weights.
    assert paths(train, "rollout.speculation.drafter=eagle") == set()
    assert paths("rollout.speculation.drafter=eagle") == {"rollout.speculation.drafter_path"}
    alone = [train, "rollout.speculation.drafter=eagle"]
    assert paths(*alone, ranks=1) == {"rollout.speculation.drafter_path"}  # no other rank: it would stay so
    assert paths(*alone, "rollout.speculation.drafter_path=d", ranks=1) == set()
    turns = [*alone, "env.kind=calculator", "env.max_observation_tokens=16"]
    assert paths(*turns, ranks=1) == set(), "it trains while all trajectories wait"
    assert paths(*turns, "rollout.release_cache=true", ranks=1) == {"rollout.speculation.drafter_path"}
    assert paths(*alone, "drafter.online.fp8=te", device="cpu") == {"drafter.online.fp8"}
    assert paths(*alone, "drafter.online.buffer_mib=0.01") == {"drafter.online.buffer_mib"}


@pytest.mark.parametrize(
    ("trained", "held_out", "is_refused"),
    [
        ("a.jsonl", "./a.jsonl", True),
        ("a.jsonl", "b.jsonl", False),
        ("a/b", "a/b", False),  # of a data set the splits train and test
        ("a/b", "a/b@v1", False),
    ],
)
def test_fine_tuning_is_not_measured_on_the_records_that_it_learns(trained, held_out, is_refused):
    for split, refused in (("test", is_refused), ("train", is_refused or trained != "a.jsonl")):
        sft = {"train_path": trained, "eval_path": held_out, "eval_split": split, "out": "b"}
        config = build_config({"model": {"path": "m"}, "sft": sft}, root=SftConfig)
        assert [p.path for p in check_config(config, SHAPE, 1)] == ["sft.eval_path"] * refused


def test_sft_checks_its_layout():
    values = {"model": {"path": "m"}, "sft": {"train_path": "a", "out": "b"}, "actor": {"pp": 3}}
    found = {p.path for p in check_config(build_config(values, root=SftConfig), SHAPE, 3)}
    assert found == {"actor.pp"}
    replays = build_config(values | {"actor": {"router_replay": "rollout"}}, root=SftConfig)
    assert {p.path for p in check_config(replays, None, 3)} == {"actor.router_replay"}, "no rollout recorded any"
