from pathlib import Path

import pytest

from megatron_tlt.config.checks.memory import check_memory
from megatron_tlt.config.checks.run import find_problems
from megatron_tlt.config.dims import Dims
from megatron_tlt.config.load import build_config, load_config
from megatron_tlt.config.planning import engine
from megatron_tlt.config.planning.activations import activation_bytes
from megatron_tlt.config.planning.graphs import least_graph_bytes
from megatron_tlt.config.planning.memory import KV, PHASES, estimate_memory
from megatron_tlt.config.planning.parameters import GIB, active_parameters, kv_bytes_per_token, total_parameters
from megatron_tlt.config.planning.policy import micro_batch_tokens
from megatron_tlt.config.planning.report import render_check
from megatron_tlt.config.root import Config, SftConfig
from megatron_tlt.models.decoders.torch import paged

CONFIGS = Path(__file__).parents[4] / "configs"
# Published parameter counts (model cards).
PUBLISHED = {
    "qwen2.5-7b": 7.61e9,
    "qwen3-8b": 8.2e9,
    "qwen3-30b-a3b": 30.5e9,
    "r1-distill-qwen-7b": 7.61e9,
    "qwen2.5-32b": 32.5e9,
    "llama3.3-70b": 70.6e9,
}


def shape_of(name: str):
    architecture = load_config(CONFIGS / "models" / f"{name}.yaml").model.architecture
    assert architecture is not None
    return architecture


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_match_the_published_ones(name):
    assert total_parameters(shape_of(name)) == pytest.approx(PUBLISHED[name], rel=0.01)


def test_a_token_passes_the_published_share_of_the_experts():
    assert active_parameters(shape_of("qwen3-30b-a3b")) == pytest.approx(3.3e9, rel=0.02)
    assert active_parameters(shape_of("qwen3-8b")) == total_parameters(shape_of("qwen3-8b"))


def config_of(*overrides: str):
    return build_config({"model": {"path": "m"}, "actor": {"dtype": "bf16"}}, overrides)


def test_training_state_costs_18_bytes_a_parameter_and_6_when_sharded():
    shape = shape_of("qwen2.5-7b")
    count = total_parameters(shape)
    for device, ranks, expected in (("cpu", 1, 18), ("cuda", 1, 18), ("cuda", 1000, 6.012), ("cpu", 1000, 18)):
        (stage,) = estimate_memory(config_of(), shape, ranks, device)
        state = sum(stage.parts[name] for name in ("weights", "gradients", "optimizer"))
        assert state / count == pytest.approx(expected, rel=1e-3)


def test_sgd_s_master_weights_are_divided_only_where_they_are_sharded():
    """`distributed_optimizer: auto` shards Adam only."""
    shape = shape_of("qwen2.5-7b")
    for name, a_parameter in (("adam", 12 / 8), ("sgd", 4)):
        (stage,) = estimate_memory(config_of(f"optimizer.name={name}"), shape, 8, "cuda")
        assert stage.parts["optimizer"] / total_parameters(shape) == pytest.approx(a_parameter, rel=1e-3)


def test_an_update_is_as_long_as_a_response_of_training():
    """Evaluation may allow longer ones: the engine's cache holds them, the update never sees one."""
    shape, dims = shape_of("qwen2.5-7b"), Dims.fit(2, tp=1, pp=1)
    short = config_of("rollout.max_tokens=1024", "model.max_context=32768")
    long = short.model_copy(update={"eval": short.eval.model_copy(update={"max_tokens": 30720})})
    assert activation_bytes(long, shape, dims, 0, "cuda") == activation_bytes(short, shape, dims, 0, "cuda")
    assert render_check(long, shape, 2).splitlines()[-4:] == render_check(short, shape, 2).splitlines()[-4:]
    assert long.longest_sequence == short.longest_sequence - 1024 + 30720


def test_fp32_on_cuda_keeps_keys_and_values_for_each_query_head():
    """Qwen2.5-7B, 28 heads of 128 in 28 layers: of a rank's rows, and of both ranks' 1.5 times."""
    for cp, times in ((1, 1), (2, 3)):
        plain = (f"actor.cp={cp}", "actor.layer_spec=local", "actor.recompute=none", "actor.micro_batch_tokens=8192")
        configs = [config_of(*plain, f"actor.dtype={dtype}") for dtype in ("bf16", "fp32")]
        dims, shape = Dims.fit(cp, 1, 1, cp), shape_of("qwen2.5-7b")
        half, whole = (activation_bytes(config, shape, dims, 0, "cuda") for config in configs)
        assert whole - 2 * half == 28 * micro_batch_tokens(configs[0]) * 4 * 2 * times * 28 * 128


def test_adapters_alone_have_gradients_and_optimizer_state():
    """PEFT counts 20,185,088 parameters of rank 8 on all linear layers of Qwen2.5-7B."""
    shape, lora = shape_of("qwen2.5-7b"), ("actor.lora.rank=8", "algorithm.kl_coef=0.1")
    (stage,) = estimate_memory(config_of(*lora), shape, 1, "cuda")
    sizes = [stage.parts[name] / 20_185_088 for name in ("adapters", "gradients", "optimizer", "reference")]
    assert sizes == [2, 4, 12, 0]
    assert stage.parts["dummy gradients"] == 0
    sparse, (one, other) = shape_of("qwen3-30b-a3b"), (("actor.ep=1",), ("actor.ep=8", "actor.tp=8"))
    experts = 48 * 128 * 3 * 8 * (2048 + 768)
    for overrides, ranks, parts in ((one, 1, 1), (other, 8, 8)):
        (stage,) = estimate_memory(config_of(*lora, *overrides), sparse, ranks, "cpu")
        attention = 48 * 8 * (4 * 2048 + (2 * 4096 + 2 * 512) // parts)
        assert stage.parts["adapters"] == 2 * (experts // parts + attention)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((), "none"),
        (("drafter=suffix", "draft_len=5"), "suffix, up to 5 tokens, cost_model"),
        (("drafter=eagle", "selector=beg_mab"), "eagle (new, from the policy), up to 6 tokens, beg_mab"),
        (("drafter=dspark", "drafter_path=d/x/y"), "dspark of d/x/y, up to 8 tokens, cost_model"),
    ],
)
def test_what_drafts_is_named(overrides, says):
    config = config_of(*(f"rollout.speculation.{text}" for text in overrides))
    assert f"\n  drafter: {says}\n" in render_check(config, shape_of("qwen2.5-7b"), 1)


def test_the_share_of_the_model_that_adapters_train_is_named():
    shape = shape_of("qwen2.5-7b")
    for overrides, is_named in (((), False), (("actor.lora.rank=8",), True)):
        assert ("2.02e+07 of 7.62e+09 parameters" in render_check(config_of(*overrides), shape, 1, "cuda")) == is_named


def test_transformer_engine_keeps_one_gradient_of_each_shape_of_a_weight():
    """Qwen2.5-7B in bf16 at TP 2, in MB: LM head 545, fc1 136, fc2 68, query, key, value and projection 29."""
    config = config_of("actor.tp=2")
    (stage,) = estimate_memory(config, shape_of("qwen2.5-7b"), 2, "cuda")
    assert stage.parts["dummy gradients"] / 1e6 == pytest.approx(545 + 136 + 68 + 29, abs=2)
    assert "dummy gradients" not in stage.only, "kept from the first update on"
    sparse = estimate_memory(config, shape_of("qwen3-30b-a3b"), 2, "cuda")[0].parts["dummy gradients"]
    assert sparse / 1e6 == pytest.approx((151936 * 2048 + 5120 * 2048 + 4096 * 2048) / 1e6, rel=1e-3), "no experts"
    first = estimate_memory(config_of("actor.pp=2"), shape_of("qwen2.5-7b"), 2, "cuda")[0]
    assert first.parts["dummy gradients"] / 1e6 == pytest.approx(2 * (136 + 68 + 29), abs=2), "no LM head"
    for overrides, device in ((["actor.layer_spec=local"], "cuda"), ([], "cpu")):
        assert not estimate_memory(config_of(*overrides), shape_of("qwen2.5-7b"), 1, device)[0].parts["dummy gradients"]


def test_drafters_are_counted():
    shape, at = shape_of("qwen2.5-7b"), "rollout.speculation"
    bf16 = "rollout.dtype=bf16"
    eagle = config_of(bf16, f"{at}.drafter=eagle", f"{at}.drafter_path=d")
    assert kv_bytes_per_token(eagle, shape) == 57344 * 29 // 28 + 2 * 3584  # a layer, and a hidden state
    found = {
        name: estimate_memory(config, shape, 1, "cuda")[0]
        for name, config in {
            "none": config_of(bf16),
            "suffix": config_of(bf16, f"{at}.drafter=suffix", f"{at}.suffix.history_mib=100"),
            "eagle": eagle,
        }.items()
    }
    weights = 2 * 3584**2 + 2 * (28 + 4) * 128 * 3584 + 3 * 3584 * 18944 + 2 * 3584
    assert {name: m.parts["drafter"] for name, m in found.items()} == {"none": 0, "suffix": 0, "eagle": 2 * weights}
    assert found["suffix"].host["suffix drafter"] == 200 * 2**20  # the host's memory, not the device's


TLT = ["rollout.speculation.drafter=eagle", "idle.train_drafter=true", "rollout.dtype=bf16"]


def test_the_kv_cache_is_what_remains_of_a_gpu():
    """At most what all running requests need, at least one request; elsewhere nothing changes."""
    shape = shape_of("qwen2.5-7b")
    sizes = ["rollout.max_running_requests=64", "model.max_context=8192", "optimizer.name=sgd"]
    config = config_of(*TLT, *sizes)
    need = (64 * 512 + 1) * 16 * kv_bytes_per_token(config, shape)
    found = {g: estimate_memory(config, shape, 2, "cuda", g)[0] for g in (500, 135, 125, 10)}
    assert found[500].parts[KV] == need
    for limit in (135, 125):
        assert found[limit].total == limit * GIB  # full, by the fullest phase that the cache is there in
    others = [{k: v for k, v in m.parts.items() if k not in (KV, "fragments")} for m in found.values()]
    assert all(parts == others[0] for parts in others)
    blocks = -(-config.longest_sequence // 16) + 1
    assert found[10].parts[KV] == blocks * 16 * kv_bytes_per_token(config, shape)  # one request: too much
    assert found[10].total > 10 * GIB
    released = config_of(*TLT, *sizes, "rollout.release_cache=true", "actor.offload_optimizer=true")
    more = estimate_memory(released, shape, 2, "cuda", 125)[0]
    assert more.parts[KV] > found[125].parts[KV] + found[125].parts["activations"]


def test_a_teacher_is_counted_in_its_own_shape() -> None:
    """Weights in the actor's layout and type, and, where it is much wider than the policy, what its forward takes."""
    shape, teacher = shape_of("qwen2.5-1.5b"), shape_of("qwen2.5-32b")
    distill = ["algorithm.name=distill", "algorithm.teacher=t", "actor.tp=2", "actor.pp=2"]

    def beside(*overrides: str) -> Config:
        config = config_of(*distill, *overrides)
        return config.model_copy(update={"algorithm": config.algorithm.with_teacher_shape(teacher)})

    stages = estimate_memory(beside(), shape, 4, "cuda")
    of_teacher = [stage.parts["weights"] for stage in estimate_memory(config_of(*distill[2:]), teacher, 4, "cuda")]
    assert [stage.parts["teacher"] for stage in stages] == of_teacher
    with_adapters = estimate_memory(beside("actor.lora.rank=8"), shape, 4, "cuda")[0].parts
    assert with_adapters["teacher"] == of_teacher[0]
    narrow = ["actor.recompute=full", "actor.micro_batch_tokens=16384", "rollout.max_tokens=1024"]
    configs = config_of(*distill[2:], *narrow), beside(*narrow)
    alone, both = (estimate_memory(config, shape, 4, "cuda")[0].parts for config in configs)
    assert both["activations"] > alone["activations"], "a layer of 27,648 is wider than the policy's head"
    assert both["rotations"] == 2 * alone["rotations"], "both have heads of 128"


def test_too_little_memory_is_a_problem_that_names_the_largest_parts():
    roomy = "cluster.host_memory_gib=2000"
    (problem,) = check_memory(config_of("cluster.memory_gib=80", roomy), shape_of("llama3.3-70b"), 1, "cuda")
    assert problem.path == "cluster.memory_gib"
    assert "optimizer 788." in problem.allowed
    assert check_memory(config_of(roomy), shape_of("llama3.3-70b"), 1, "cuda") == []


def test_the_report_shows_grid_memory_and_tokens():
    config = load_config(CONFIGS / "recipes/grpo-llama3.3-70b-32n8g.yaml")
    text = render_check(config, None, 256)
    assert "Ranks: 256 = tp 8 x pp 2 x cp 1 x dp 16" in text
    assert "  dp 1      8-15  136-143\n" in text
    assert "Rollout engines: 32 of 8 ranks: 0-7, 8-15, ..., 248-255" in text
    assert (
        "pre-rolls responses to the next two steps' prompts" in text
        and "256 MiB of drafts: 8,192 responses of 8192 tokens" in text
    )
    assert "512 prompts x 16 responses = 8192 sequences, at most 83886080 tokens" in text
    assert "a checkpoint 1,004 GB, up to 3 at once" in text and "rollout cache at most 137 GB" in text
    total = next(line for line in text.splitlines() if line.startswith("  at most"))
    worst = max(stage.total for stage in estimate_memory(config, config.model.architecture, 256))
    assert total.split()[-1] == f"{worst / GIB:.2f}"


def test_a_cache_for_few_of_the_running_requests_is_warned_of():
    recipe = CONFIGS / "recipes/grpo-qwen2.5-7b-1n8g.yaml"
    config = load_config(recipe)
    each = 8192 * kv_bytes_per_token(config, config.model.architecture) / 2**20
    for held, is_warned in ((63, True), (64, False)):
        text = render_check(load_config(recipe, [f"rollout.kv_cache_mib={int(each * held) + 1}"]), None, 8)
        assert f"holds {held} requests" in text and ("warning: fewer than a quarter" in text) == is_warned


def test_a_forward_and_the_cache_have_room_for_experts():
    shape = shape_of("qwen3-30b-a3b")
    cuda = ["distributed.device=cuda", "rollout.dtype=bf16", "cluster.host_memory_gib=999"]
    assert kv_bytes_per_token(config_of(*cuda), shape) == 48 * (2 * 4 * 128 * 2 + 8)
    many = shape.model_copy(update={"num_experts": 257})  # whose numbers take two bytes
    assert kv_bytes_per_token(config_of(*cuda), many) == 48 * (2 * 4 * 128 * 2 + 2 * 8)
    row = 151936 + 2048 + 3 * 2048 + 4 * 6144 + 8 * (2 * 2048 + 4 * 768)
    row += 48 * 8 * (1 + 2 * 8) / 2  # the experts' numbers, int64 until they are recorded
    least = int(-(-1536 * 2 * row // 2**20))
    paths = [
        {p.path for p in check_memory(config_of(*cuda, f"rollout.graph_memory_mib={mib}"), shape, 1)}
        for mib in (least, least - 1)
    ]
    assert paths == [set(), {"rollout.graph_memory_mib"}]


def test_what_is_given_back_is_there_in_its_phase_only():
    shape, rollout = shape_of("qwen2.5-7b"), ["rollout.kv_cache_mib=4096", "rollout.dtype=bf16"]
    kept = estimate_memory(config_of(*rollout), shape, 1, "cuda")[0]
    options = [*rollout, "rollout.release_cache=true", "actor.offload_optimizer=true"]
    freed = estimate_memory(config_of(*options), shape, 1, "cuda")[0]
    assert freed.parts == kept.parts
    gradients, optimizer = kept.parts["gradients"], kept.parts["optimizer"]
    assert kept.of_phase("rollout") - freed.of_phase("rollout") == gradients + optimizer
    assert kept.of_phase("update") - freed.of_phase("update") == 4096 * 2**20, "graphs stay where they are"
    assert kept.of_phase("weight_sync") - freed.of_phase("weight_sync") == gradients + optimizer + 4096 * 2**20
    assert kept.total == kept.of_phase("update") > freed.total == freed.of_phase("update")
    text = render_check(config_of(*options, "model.path=m"), shape, 1, "cuda")
    assert f"{freed.of_phase('rollout') / GIB:.2f}" in text and "in the rollout" in text


def test_graphs_are_planned_and_have_room_for_their_buffers():
    shape, cuda = shape_of("qwen2.5-7b"), ["distributed.device=cuda", "rollout.dtype=bf16"]
    stage = estimate_memory(config_of(*cuda), shape, 1)[0]
    assert stage.parts["graphs"] == 2048 * 2**20 and "graphs" not in stage.only
    for off in ("rollout.graph_memory_mib=0", "rollout.kernels=torch", "distributed.device=cpu"):
        assert not estimate_memory(config_of(*cuda, off), shape, 1)[0].parts["graphs"], off
    # Logits, hidden states, three rows of the residual stream and four of the MLP, of 1,536 rows in bf16.
    least = -(-1536 * 2 * (152064 + 3584 + 3 * 3584 + 4 * 18944) // 2**20)
    assert not check_memory(config_of(*cuda, f"rollout.graph_memory_mib={least}"), shape, 1)
    (problem,) = check_memory(config_of(*cuda, f"rollout.graph_memory_mib={least - 1}"), shape, 1)
    assert (problem.path, problem.value) == ("rollout.graph_memory_mib", least - 1)
    assert f">= {least}: buffers of 1536 rows" in problem.allowed
    wider = config_of(*cuda, "rollout.speculation.drafter=eagle3")
    states = least_graph_bytes(wider, shape) - least_graph_bytes(config_of(*cuda), shape)
    assert states == 1536 * 2 * 2 * 3 * 3584, "those of three layers, in the buffers and on their way there"


def test_the_longest_responses_hidden_states_are_counted_on_their_way_to_the_host():
    shape, long = shape_of("qwen2.5-7b"), "model.max_context=131072"
    plain, wide, off, actor = (
        estimate_memory(config_of(*TLT, long, *more), shape, 1, "cuda")[0]
        for more in (
            [],
            ["rollout.speculation.drafter=eagle3"],
            ["idle.train_drafter=false"],
            ["drafter.online.hidden_states=actor"],
        )
    )
    assert (plain.parts[engine.READ], plain.only[engine.READ]) == (131072 * 3584 * 2, ("rollout",))
    assert wide.parts[engine.READ] == 4 * plain.parts[engine.READ]
    assert off.parts[engine.READ] == actor.parts[engine.READ] == 0
    host = estimate_memory(config_of(*TLT, "model.max_context=4096"), shape, 1, "cuda")[0].host["hidden states"]
    assert plain.host["hidden states"] - host == 2 * (131072 - 4096) * 3584 * 2, "pinned, up to a power of two"


def test_hidden_states_of_the_actor_are_counted():
    shape = shape_of("qwen2.5-7b")
    options = [*TLT, "drafter.online.hidden_states=actor", "actor.micro_batch_tokens=16384", "actor.dtype=bf16"]
    engine, actor, split = (
        estimate_memory(config_of(*o, "model.max_context=4096"), shape, 2, "cuda")[0]
        for o in (TLT, options, [*options, "actor.tp=2", "actor.sequence_parallel=true"])
    )
    name = "actor's hidden states"
    assert (engine.parts[name], actor.parts[name]) == (0, 16384 * 3584 * 2)
    assert split.parts[name] == 2 * actor.parts[name], "gathered, and the rows"
    assert actor.only[name] == ("update",)
    buffer = engine.host["hidden states"] - 2 * engine.parts["a response's hidden states"]
    assert actor.host["hidden states"] == 2 * buffer, "a step's, and the buffer"


def test_a_node_whose_ranks_need_more_than_its_host_has_is_refused():
    recipe = CONFIGS / "recipes/grpo-qwen2.5-7b-1n8g.yaml"
    config = load_config(recipe)
    (stage,) = estimate_memory(config, config.model.architecture, 8)
    sft = SftConfig(model=config.model, actor=config.actor, sft={"train_path": "a", "out": "b"})
    (tuned,) = estimate_memory(sft, config.model.architecture, 8, "cuda")
    assert tuned.host == {name: stage.host[name] for name in ("optimizer", "checkpoint")}
    assert all(tuned.host.values())
    once = stage.host["drafter in a save (rank 0)"]  # by the first rank only
    node = (8 * (sum(stage.host.values()) - once) + once) / GIB
    assert 300 < node < config.cluster.host_gib == 8 * 256
    assert f"a node of 8: {node:.1f} of 2048 GiB" in render_check(config, None, 8)
    assert not find_problems(load_config(recipe, [f"cluster.host_memory_gib={node + 0.1}"]), None, 8)
    (problem,) = find_problems(load_config(recipe, [f"cluster.host_memory_gib={node - 0.1}"]), None, 8)
    assert problem.path == "cluster.host_memory_gib" and problem.value == pytest.approx(node - 0.1)
    assert f"8 ranks of a node need {node:.1f} GiB" in problem.allowed and "optimizer 21.3" in problem.allowed


SLEEPS = "rollout.release_cache=true"


def test_an_engine_in_another_process_is_planned_by_its_own_settings():
    shape = shape_of("qwen2.5-7b")
    sizes = ["rollout.max_running_requests=64", "model.max_context=8192", "optimizer.name=sgd"]
    vllm_of = config_of(*TLT, *sizes, "rollout.backend=vllm", "rollout.vllm.hidden_mib=512")
    ours, vllm = (estimate_memory(c, shape, 2, "cuda", 125)[0] for c in (config_of(*TLT, *sizes), vllm_of))
    assert ours.parts["graphs"] and not vllm.parts["graphs"]
    assert vllm.parts["rollout.vllm.hidden_mib"] == 512 * 2**20
    assert vllm.parts["embedding and LM head"] == 2 * 2 * 152064 * 3584  # not tied, bf16
    assert kv_bytes_per_token(vllm_of, shape) == 57344 * 29 // 28  # no hidden states
    assert vllm.total == 125 * GIB and vllm.parts["engine's process"] == 2 * GIB
    assert vllm.parts[engine.INPUTS] == 3 * 2048 * 3584 * 2, "embedded tokens of both models, states for the drafter"
    plain = estimate_memory(config_of(*sizes, "rollout.backend=vllm"), shape, 2, "cuda", 125)[0]
    assert plain.parts[engine.INPUTS] == 2048 * 3584 * 4 and engine.INPUTS not in plain.only | vllm.only
    experts = shape.model_copy(update={"num_experts": 128, "moe_intermediate_size": 768, "dense_layers": (0,)})
    (stage,) = estimate_memory(vllm_of, experts, 2, "cuda", 500)
    assert stage.parts[engine.LOADED] == 2 * 128 * 3 * 768 * 3584 * 2 and stage.only[engine.LOADED] == ("weight_sync",)
    asleep = estimate_memory(config_of(*TLT, *sizes, "rollout.backend=vllm", SLEEPS), shape, 2, "cuda", 125)[0]
    for name, phases in (
        (KV, {"rollout", "idle window"}),  # for pre-rollouts, of which no states are taken
        ("rollout.vllm.hidden_mib", {"rollout"}),
        ("engine weights", {"rollout", "idle window", "weight_sync"}),
        ("drafter", {"rollout", "idle window", "weight_sync"}),
    ):
        assert set(asleep.only[name]) == phases and name not in vllm.only
    assert asleep.parts[KV] > vllm.parts[KV] and asleep.of_phase("rollout") <= 125 * GIB
    on_cpu = estimate_memory(config_of(*TLT, *sizes, "rollout.backend=vllm", SLEEPS), shape, 2, "cpu")[0]
    assert not {KV, "engine weights"} & on_cpu.only.keys(), "vLLM sleeps on GPUs only"
    few = ["rollout.dtype=bf16", *sizes, "rollout.backend=trtllm", "rollout.trtllm.kv_cache_fraction=0.25"]
    for sleeps in (False, True):
        config = config_of(*few, f"rollout.release_cache={sleeps}".lower())
        (stage,) = estimate_memory(config, shape, 2, "cuda", 125)
        cache, held = stage.parts[KV], stage.of_phase("merge") - (not sleeps) * stage.parts[KV]
        assert cache == (125 * GIB - held) // 4 and not stage.parts["graphs"]
        assert ("merge" in stage.only.get(KV, PHASES)) == (not sleeps)
        assert "rollout.trtllm.kv_cache_fraction = 0.25" in render_check(config, shape, 2, "cuda")


def test_deterministic_attention_has_a_sum_for_each_processor():
    """On CUDA, where it is more than the gradients of the MLP; CPU ranks, deterministic as they are, have none."""
    shape, dims = shape_of("qwen2.5-0.5b"), Dims(pp=2)
    plain, sums = (config_of("actor.pp=2", f"train.deterministic={on}") for on in ("false", "true"))
    taken = [activation_bytes(config, shape, dims, 0, "cuda") for config in (plain, sums)]
    assert taken[1] - taken[0] == 4096 * (4 * 64 * (160 + 14) - 2 * 2 * (896 + 4864))
    assert len({activation_bytes(config, shape, dims, 0, "cpu") for config in (plain, sums)}) == 1


def test_layers_that_only_the_run_will_know_are_planned_as_the_larger_ones():
    shape, found = shape_of("qwen2.5-7b"), {}
    for spec in ("auto", "local", "transformer_engine"):
        config = config_of("actor.cp=8", "actor.micro_batch_tokens=32768", f"actor.layer_spec={spec}")
        found[spec] = estimate_memory(config, shape, 8, "cuda")[0].parts["activations"]
    assert found["auto"] == found["local"] > 1.05 * found["transformer_engine"]
    again = "actor.recompute=selective", "actor.recompute_modules=[layernorm,mlp]", "actor.layer_spec={}"
    for spec in found:
        config = config_of(*(override.format(spec) for override in again))
        found[spec] = estimate_memory(config, shape, 1, "cuda")[0].parts["activations"]
    norms = 28 * 2 * 2 * 3584 * 4096  # of each layer the outputs, in bf16
    assert found["auto"] == found["local"] > 0.9 * norms + found["transformer_engine"]


def test_invariant_numerics_plan_the_sums_of_their_splits():
    """Of each row, of the product or the attention that has most."""
    products = pytest.importorskip("megatron_tlt.models.decoders.torch.kernels.products")
    for tile in (products._TILE, products._TILE_FP32):
        assert products._PROGRAMS * tile[1] == engine._SPLIT_COLUMNS
    assert engine._SPLIT_HEADS == paged._INVARIANT_PROGRAMS
    cuda = ["distributed.device=cuda", "rollout.dtype=bf16"]
    for name, values in (("qwen2.5-7b", 8 * 28 * 130), ("qwen2.5-0.5b", 132 * 128)):
        shape = shape_of(name)
        rows = [engine.row_bytes(config_of(*cuda, *more), shape) for more in ([], ["rollout.numerics=invariant"])]
        assert rows[1] - rows[0] == 4 * values


def test_carried_responses_have_a_row_of_the_host_with_carry_over_only():
    """Every rank holds those of all ranks, as ids and log-probs."""
    shape, sizes = shape_of("qwen2.5-7b"), ("train.prompts_per_step=512", "rollout.samples_per_prompt=16")
    parts = [
        estimate_memory(config_of(*sizes, "rollout.max_tokens=32768", f"rollout.carry_over={most}"), shape, 8, "cuda")
        for most in ("null", "8192")
    ]
    (off,), (on,) = parts
    assert on.host.keys() - off.host.keys() == {"carried responses"}
    assert on.host["carried responses"] == 2 * GIB
    assert on.parts == off.parts
