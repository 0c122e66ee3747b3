"""Problems of inputs are found together with those of the layout."""

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_tlt.checkpoint.convert.to_megatron import MegatronConversion
from megatron_tlt.cli.drafter import _read_part
from megatron_tlt.config.checks.commands import check_base
from megatron_tlt.config.checks.pre_rollouts import takes_drafts
from megatron_tlt.config.checks.run import find_problems
from megatron_tlt.config.load import build_config, load_config
from megatron_tlt.config.root import Config, SftConfig
from megatron_tlt.data.hub import names_of
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.drafters.checkpoint import save_drafter
from megatron_tlt.drafters.dspark.config import BlockConfig
from megatron_tlt.drafters.eagle.config import Eagle3Config, EagleConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.writer import save_hf
from megatron_tlt.trainer import preflight
from megatron_tlt.trainer.preflight import (
    _problems_of_large_files,
    check_on,
    check_report,
    input_problems,
    missing_files,
    tokenizer_problems,
    without_training,
)
from tests.helpers.chat_models import edit_json, remove_tokenizer, save_letters
from tests.helpers.checked_configs import ARCHITECTURE, make, world_of
from tests.helpers.mpi import ROOT
from tests.helpers.tiny_drafters import DEEP, random_drafter
from tests.helpers.tiny_models import random_weights


def test_a_sound_config_reports_without_its_files():
    report = check_report(make(), 4)
    assert "Ranks: 4" in report
    assert f": model.path = not/here (is no path from {Path.cwd()}, and no whole model in" in report
    assert "\nwarning: the plan is of model.architecture, not compared with model.path\n" in report
    last = report.splitlines()[-1]
    assert last.startswith("Fits: not known without cluster.memory_gib; the plan takes ")


@pytest.mark.parametrize("path", ["assets/demo-polcy", "./assets/demo-polcy"])
def test_a_misspelt_path_of_a_model_is_named_with_the_one_beside_it(path, monkeypatch):
    """Also where it could be a name on the hub."""
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as caught:
        check_report(make(model={"path": path}), 1)
    assert "did you mean demo-policy?" in str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "split"), [("aabb", ()), ("abab", ("actor.tp", "rollout.tp")), ("aaab", ("rollout.tp",))]
)
def test_tensor_parallel_ranks_on_several_hosts_are_refused_whatever_the_cluster_section_says(hosts, split):
    """As Slurm's cyclic distribution places them, or more ranks than a node has."""
    world = world_of(size=4, is_main=False, all_gather_object=lambda _: list(hosts))
    actor_tp = 1 if hosts == "aaab" else 2
    with pytest.raises(ConfigError) as refused:  # the model is not there
        check_on(make(rollout={"tp": 2}, actor={"tp": actor_tp}), world)
    found = [p.path for p in refused.value.problems if "inside a node" in str(p)]
    assert tuple(found) == split


def test_weights_by_handles_of_expandable_segments_are_refused_where_a_command_has_an_engine(monkeypatch):
    """`eval`, too, pushes weights."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    given = make(rollout={"backend": "vllm"}, sync={"transport": "cuda_ipc"})
    with pytest.raises(ConfigError, match="remove expandable_segments"):
        check_on(without_training(given, reads_prompts=False), world_of())


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("model.path", "model.layers.1.mlp.down_proj.weight"),
        ("algorithm.teacher", "model.embed_tokens.weight"),
        ("actor.lora.adapter_path", None),
        ("data.train.path", None),
        (None, None),
    ],
)
def test_hosts_with_different_weights_or_prompts_are_refused(tmp_path, monkeypatch, field, changed):
    """Each rank loads its own host's, as fetched from the hub at a path of its own; `elsewhere`: the second host's."""
    names = {"model.path": "model", "algorithm.teacher": "teacher", "actor.lora.adapter_path": "adapter"}
    names["data.train.path"] = "rows.jsonl"
    for host in ("here", "elsewhere"):
        for name in ("model", "teacher"):
            is_other = host == "elsewhere" and name == names.get(field)
            weights = ((n, w + 0.1 * (is_other and n == changed)) for n, w in random_weights(EAGLE))
            save_hf(tmp_path / host / name, EAGLE, weights)
        (tmp_path / host / "adapter").mkdir()
        text = b"other factors" if host == "elsewhere" and field == "actor.lora.adapter_path" else b"factors"
        (tmp_path / host / "adapter/adapter_model.safetensors").write_bytes(text)
        is_other = host == "elsewhere" and field == "data.train.path"
        (tmp_path / host / "rows.jsonl").write_text(json.dumps({"prompt": "p", "answer": str(is_other)}))
    monkeypatch.setattr(preflight, "_problems", lambda *_: [])
    monkeypatch.setattr(preflight, "_problems_of_large_files", lambda *_: [])

    def at_host(host):
        given = ["algorithm.name=distill", *(f"{at}={tmp_path / host / name}" for at, name in names.items())]
        return build_config({"data": {"train": {"kind": "jsonl"}}}, given, Config)

    config, other = at_host("here"), at_host("elsewhere")
    there = {"weights": preflight.weight_fingerprints(other), "rows": preflight._row_fingerprints(other)}

    def gathered(mine):
        if mine == socket.gethostname():
            return ["a", "a", "b"]
        return [mine, {}, there] if isinstance(mine, dict) else [mine] * 3

    world = world_of(size=3, is_main=False, all_gather_object=gathered)
    if field is None:
        check_on(config, world)
        return
    what = "rows" if field == "data.train.path" else "weights"
    words = f"{field} = '{tmp_path}/here/{names[field]}': hosts a and b hold different {what}"
    with pytest.raises(ConfigError, match=f"^{words}.*$"):
        check_on(config, world)


def test_hosts_with_different_records_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "weight_fingerprints", lambda _: {})

    def at_host(host, completion):
        path = tmp_path / f"{host}.jsonl"
        path.write_text(json.dumps({"prompt": "p", "completion": completion}))
        tree = {"model": {"path": "m"}, "sft": {"train_path": str(path), "out": "o"}}
        return SftConfig.model_validate(tree)

    for completion, fields in (("a", []), ("b", ["sft.train_path"])):
        there = {"weights": {}, "rows": preflight._row_fingerprints(at_host("elsewhere", completion))}
        world = SimpleNamespace(
            rank=0, wait_for_all=lambda: None,
            all_gather_object=lambda mine, there=there: [mine, there if isinstance(mine, dict) else mine],
        )  # fmt: skip
        found = preflight._problems_of_copies(at_host("here", "a"), world, ["a", "b"])  # type: ignore[arg-type]
        assert [problem.path for problem in found] == fields
        assert all("hosts a and b hold different rows" in problem.allowed for problem in found)


@pytest.mark.parametrize(
    ("ranks", "overrides", "problem"),
    [
        *((ranks, [], None) for ranks in (1, 2, 6)),
        (2, ["optimizer.schedule=cosine", "optimizer.warmup_steps=99999"], None),
        (2, ["algorithm.name=distill"], None),
        (2, ["actor.router_replay=rollout"], None),
        (2, ["rollout.samples_per_prompt=1", "rollout.temperature=0", "algorithm.overlong_buffer=99999"], None),
        (2, ["data.train={kind: jsonl, path: null, answer_pattern: '('}"], None),
        (6, ["rollout.tp=4"], "rollout.tp"),
        (2, ["rollout.kv_cache_mib=1"], "rollout.kv_cache_mib"),
        (2, ["rollout.graph_memory_mib=1"], "rollout.graph_memory_mib"),
        (2, ["idle.train_drafter=false"], "rollout.speculation.drafter_path"),
        (2, ["idle.train_drafter=false", "rollout.speculation.drafter_path=d"], None),
    ],
)
def test_an_evaluation_has_no_rules_of_training(ranks, overrides, problem):
    """On a recipe's GPU, too, which is not filled by an update; the engine's own rules hold."""
    recipe = load_config(ROOT / "configs/recipes/grpo-qwen2.5-7b-1n8g.yaml", overrides)
    found = find_problems(without_training(recipe, reads_prompts=False), None, ranks, "cuda")
    assert [p.path for p in found] == ([] if problem is None else [problem])


def test_an_evaluation_fetches_neither_teacher_nor_training_prompts_and_refuses_an_adapter():
    distill = ["algorithm.name=distill", "algorithm.teacher=a/teacher", "actor.lora.adapter_path=adapter"]
    recipe = load_config(ROOT / "configs/recipes/grpo-qwen2.5-7b-1n8g.yaml", distill)
    read = {prompts: without_training(recipe, reads_prompts=prompts) for prompts in (True, False)}
    fields = {prompts: [named.field for named in names_of(config)] for prompts, config in read.items()}
    assert fields == {
        True: ["model.path", "data.train.path", "data.eval.path"],
        False: ["model.path", "data.eval.path"],
    }
    assert [problem.path for problem in check_base(recipe)] == ["actor.lora.adapter_path"]
    assert not list(check_base(build_config({"model": {"path": "m"}}, ["actor.lora.rank=8"])))


def test_a_training_of_a_drafter_reads_no_rewards_and_prompts_only_to_generate():
    overrides = ["rewards.functions=[]", "rollout.speculation.drafter_path=a/drafter"]
    for more, action, generates in (
        ([], "train", True),
        ([], "eval", False),
        (["drafter.responses_path=responses.jsonl"], "train", False),
    ):
        recipe = load_config(ROOT / "configs/recipes/grpo-qwen2.5-7b-1n8g.yaml", [*overrides, *more])
        read = _read_part(recipe, SimpleNamespace(action=action))
        assert not find_problems(read, None, 1, "cuda")
        assert takes_drafts(recipe, 8) and not takes_drafts(read, 8)
        assert [named.field for named in names_of(read)] == [
            "model.path", *["data.train.path"] * generates, "data.eval.path",
        ]  # fmt: skip


def test_what_is_not_on_this_machine_is_a_problem_unless_it_is_elsewhere():
    """The job would fail behind the queue. All problems come in one pass, those of the memory plan last."""
    rows = {"train": {"kind": "jsonl", "path": "nowhere/rows.jsonl", "tasks": []}}
    vllm = {"backend": "vllm", "vllm": {"python": "no/vllm/python"}}
    config = make(data=rows, rollout=vllm, rewards={"functions": [{"name": "exact", "pattern": "(.*)"}]})
    with pytest.raises(ConfigError) as caught:
        check_report(config, 4)
    assert {"data.train.path", "rollout.vllm.python"} <= {p.path for p in caught.value.problems}
    assert f"counts from {Path.cwd()}); --elsewhere where it is on another machine" in str(caught.value)
    report = check_report(config, 4, elsewhere=True)
    assert "warning: not on this machine: data.train.path = nowhere/rows.jsonl" in report
    here = make(data=rows, model={"path": str(ROOT / "assets/demo-policy")}, rewards=config.rewards.model_dump())
    with pytest.raises(ConfigError, match=r"data\.train\.path = 'nowhere/rows.jsonl'.*no such file"):
        check_report(here, 4)
    small = config.model_copy(update={"cluster": config.cluster.model_copy(update={"memory_gib": 0.1})})
    with pytest.raises(ConfigError) as caught:
        check_report(small, 4)
    assert [p.path for p in caught.value.problems][-1] == "cluster.memory_gib"
    assert " too many (" in caught.value.problems[-1].allowed


def test_a_drafter_that_is_not_here_says_which_vocabulary_is_planned():
    def warning(**more: object) -> str:
        speculation = {"drafter": "eagle3", "drafter_path": "/no/drafter", **more}
        report = check_report(make(rollout={"speculation": speculation}), 4, elsewhere=True)
        return next(line for line in report.splitlines() if "the plan assumes" in line)

    assert "the plan assumes 288 tokens (the policy's vocabulary; rollout.speculation.draft_vocab_size" in warning()
    assert warning(draft_vocab_size=64).endswith("assumes 64 tokens (rollout.speculation.draft_vocab_size)")


def test_what_two_checks_find_is_said_once():
    config = make(
        data={"train": {"kind": "jsonl", "tasks": []}},
        rewards={"functions": [{"name": "python", "path": "my_reward.py"}]},
    )
    with pytest.raises(ConfigError) as caught:
        check_report(config, 4)
    assert sorted(p.path for p in caught.value.problems) == ["data.train.path", "rewards.functions.0.path"]


EAGLE = ModelConfig("qwen3", 64, 32, 2, 2, 1, 16, 48, qk_norm=True, max_position_embeddings=256)


def starting_from(folder, speculation=None, **model) -> Config:
    """A run of a model in several shards."""
    if not (folder / "model").exists():
        save_hf(folder / "model", EAGLE, random_weights(EAGLE), max_shard_bytes=16 << 10)
        save_letters(folder / "model")
    return make(
        model={"path": str(folder / "model"), "max_context": 256, **model},
        data={"train": {"tasks": [{"name": "chain_sum"}]}, "max_prompt_tokens": 128},
        rollout={"max_tokens": 128, "speculation": speculation or {}},
    )


def test_an_attention_that_vllm_alone_computes_is_found_before_a_run(tmp_path):
    config = starting_from(tmp_path)
    edit_json(tmp_path / "model/config.json", dual_chunk_attention_config={"chunk_size": 8})
    assert "not read: dual_chunk_attention_config" in check_report(config, 1), "the embedded engine is as the actor"
    rollout = config.rollout.model_copy(update={"backend": "vllm"})
    with pytest.raises(ConfigError) as caught:  # vLLM is not here, either
        check_report(config.model_copy(update={"rollout": rollout}), 1)
    assert "rollout.backend = 'vllm': must be 'embedded', or dual_chunk_attention_config removed" in str(caught.value)


def test_a_drafter_of_another_policy_is_found_before_a_run(tmp_path):
    config = starting_from(tmp_path, {"drafter": "eagle", "drafter_path": str(tmp_path / "drafter")})
    save_drafter(tmp_path / "drafter", EagleConfig.of(EAGLE), random_drafter(EAGLE))
    assert missing_files(config) == []
    assert "Ranks: 1" in check_report(config, 1)
    save_drafter(tmp_path / "drafter", EagleConfig.of(EAGLE), random_drafter(EAGLE), fingerprint="0123")
    with pytest.raises(ConfigError, match=r"drafter_path.*was made for a policy with another embedding"):
        check_report(config, 1)
    in_megatron = config.model.model_copy(update={"megatron_path": str(tmp_path / "tuned")})  # other weights
    report = check_report(config.model_copy(update={"model": in_megatron}), 1, elsewhere=True)
    assert "drafter: not checked: the policy starts from model.megatron_path" in report
    wider = replace(EAGLE, intermediate_size=64)
    save_drafter(tmp_path / "drafter", EagleConfig.of(wider), random_drafter(wider))
    with pytest.raises(ConfigError, match=r"drafter_path.*layer\.mlp\.up_proj\.weight has shape \(64, 32\)"):
        check_report(config, 1)
    (tmp_path / "drafter" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"drafter_path.*config\.json cannot be read"):
        check_report(config, 1)


BLOCKS = BlockConfig.fresh(DEEP["llama"], (0, 2, 6))
NORMED = Eagle3Config.of(DEEP["llama"], (0, 2, 6), norm_before_residual=True)
DFLASH2 = replace(BLOCKS, sample_from_anchor=False, markov_rank=0, selector_rank=12)


@pytest.mark.parametrize(
    ("backend", "drafter", "says"),
    [
        ("trtllm", NORMED, "TensorRT-LLM has no EAGLE-3 drafter with norm_before_residual"),
        ("vllm", replace(BLOCKS, layer=DEEP["llama"]), "vLLM runs block drafters with layers of Qwen3's form only"),
        ("vllm", DFLASH2, "vLLM's first model runner has no DFlash 2 and no sliding windows"),
        ("vllm", replace(BLOCKS, windows=(9, 0)), "vLLM's first model runner has no DFlash 2 and no sliding windows"),
        ("vllm", NORMED, None),
        ("vllm", BLOCKS, None),
        ("embedded", DFLASH2, None),
    ],
)
def test_a_form_of_drafter_that_the_engine_lacks_is_found_before_a_run(tmp_path, backend, drafter, says):
    save_hf(tmp_path / "model", DEEP["llama"], random_weights(DEEP["llama"]))
    save_drafter(tmp_path / "drafter", drafter, random_drafter(drafter))
    speculation = {"drafter": drafter.kind, "drafter_path": str(tmp_path / "drafter"), "allow_other_policy": True}
    rollout = {"backend": backend, "speculation": speculation}
    with pytest.raises(ConfigError) as caught:  # the model has no tokenizer
        check_report(make(model={"path": str(tmp_path / "model")}, rollout=rollout), 1)
    found = [problem.allowed for problem in caught.value.problems if problem.path.endswith("drafter_path")]
    instead = f": rollout.backend must be 'embedded' with it, not {backend!r}"
    assert found == ([] if says is None else [says + instead])


def test_a_model_without_a_tokenizer_is_found_before_a_run(tmp_path):
    config = starting_from(tmp_path)
    remove_tokenizer(tmp_path / "model")
    assert [p.path for p in tokenizer_problems(config)] == ["model.path"]
    (tmp_path / "tokenizer").mkdir()
    model = {"path": str(tmp_path / "model"), "tokenizer": str(tmp_path / "tokenizer")}
    config = make(model=model)
    assert [p.path for p in tokenizer_problems(config)] == ["model.tokenizer"]
    save_letters(tmp_path / "tokenizer")
    assert tokenizer_problems(config) == []


def test_missing_and_truncated_shards_are_found_before_a_run(tmp_path):
    config = starting_from(tmp_path)
    assert "Ranks: 1" in check_report(config, 1)
    shard = sorted((tmp_path / "model").glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match=rf"^model\.path = .*{shard.name} is truncated"):
        check_report(config, 1)
    shard.unlink()
    with pytest.raises(ConfigError, match=rf"^model\.path = .*index\.json names .* missing: {shard.name}$"):
        check_report(config, 1)
    sft = {"train_path": "no.jsonl", "out": "o", "tokens_per_step": 4096}
    tree = {"model": config.model.model_dump(exclude_none=True), "sft": sft}
    with pytest.raises(ConfigError, match=r"model\.path"):
        check_report(SftConfig.model_validate(tree), 1)


def test_a_megatron_checkpoint_is_looked_at_before_a_run(tmp_path):
    starting_from(tmp_path)
    mg, other = tmp_path / "mg", replace(EAGLE, family="qwen2", qk_norm=False, qkv_bias=True)
    MegatronConversion.plan(tmp_path / "model", None).write(mg, SingleProcess())
    for shard in (tmp_path / "model").glob("*.safetensors"):
        shard.unlink()  # the run does not start from them
    config = starting_from(tmp_path, megatron_path=str(mg))
    about = tmp_path / "model/config.json"
    about.write_text(about.read_text().replace("{", '{"unheard_of": 3, ', 1))
    report = check_report(config, 1)
    assert "Ranks: 1" in report and f"warning: {about} sets fields that are not known" in report
    assert "norms were not compared" not in report
    foreign = shutil.copytree(mg, tmp_path / "foreign")
    for name in ("manifest.json", "common.pt"):
        (foreign / "release" / name).unlink()
    assert "norms were not compared" in check_report(starting_from(tmp_path, megatron_path=str(foreign)), 1)
    assert "not on this machine: model.megatron_path" in check_report(
        starting_from(tmp_path, megatron_path="not/here"), 1, elsewhere=True
    )
    served = config.model_copy(update={"rollout": config.rollout.model_copy(update={"backend": "trtllm"})})
    found = _problems_of_large_files(served, "cuda")
    assert [p.path for p in found] == ["model.path"] and "names files that are missing" in str(found[0])
    save_hf(tmp_path / "qwen2", other, random_weights(other))
    save_letters(tmp_path / "qwen2")
    wrong = starting_from(tmp_path, path=str(tmp_path / "qwen2"), megatron_path=str(mg))
    with pytest.raises(ConfigError, match=r"^model\.megatron_path = .*family is 'qwen3', not 'qwen2'$"):
        check_report(wrong, 1)
    (mg / "release" / "__0_0.distcp").unlink()
    with pytest.raises(ConfigError, match=r"^model\.megatron_path = .*__0_0\.distcp is missing$"):
        check_report(config, 1)


def fine_tuning(folder, **sft) -> SftConfig:
    sft = {"train_path": "no.jsonl", "out": str(folder / "out"), "tokens_per_step": 4096, **sft}
    model = {"path": "not/here", "architecture": ARCHITECTURE}
    return SftConfig.model_validate({"model": model, "sft": sft})


def test_records_of_a_fine_tuning_are_read_before_a_run(tmp_path):
    (tmp_path / "f").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}')
    for field in ("train_path", "eval_path"):
        with pytest.raises(ConfigError, match=rf"^sft\.{field} = .*f:2: field 'completion' must be a string"):
            check_report(fine_tuning(tmp_path, **{field: str(tmp_path / "f")}), 1)


def test_missing_files_are_named_by_their_fields():
    source = {"kind": "jsonl", "path": "no/prompts.jsonl"}
    config = make(data={"train": source, "eval": {**source, "path": "no/held-out.jsonl"}})
    assert [p.path for p in missing_files(config)] == ["model.path", "data.train.path", "data.eval.path"]
    assert input_problems(config) == []


def test_a_machine_that_triton_can_compile_nothing_on_is_named_on_cuda(monkeypatch, tmp_path):
    """Before a rank's first kernel fails; what neither trains nor has kernels needs no compiler."""
    monkeypatch.setattr("megatron_tlt.models.decoders.native.build.missing_for_triton", lambda: "no gcc on PATH")
    plain = make(rollout={"kernels": "torch"})
    for config in (make(), plain, make(rollout={"backend": "vllm"}), fine_tuning(tmp_path)):
        assert not [p for p in input_problems(config, "cpu") if p.path == "distributed.device"]
        (problem,) = [p for p in input_problems(config, "cuda") if p.path == "distributed.device"]
        assert problem.value == "auto" and problem.allowed.endswith("Python's headers, for Triton: no gcc on PATH")
    assert not input_problems(without_training(plain, reads_prompts=False), "cuda")


def test_a_machine_without_a_compiler_is_named_before_cpu_ranks_get_another_decoder(monkeypatch):
    """Whose bits depend on TLT, in place of the native one; `torch` asks for it, and a GPU has no native one."""
    monkeypatch.setattr("megatron_tlt.models.decoders.native.build.find_compiler", lambda: None)
    for kernels, device in (("auto", "cpu"), ("native", "cpu"), ("auto", None)):
        config = make(rollout={"kernels": kernels}, distributed={"device": "cpu"})
        (problem,) = [p for p in input_problems(config, device) if p.path == "rollout.kernels"]
        assert problem.value == kernels and "on every node: no cc, gcc or clang on PATH; 'torch'" in problem.allowed
    for config, device in ((make(rollout={"kernels": "torch"}), "cpu"), (make(), "cuda")):
        assert not [p for p in input_problems(config, device) if p.path == "rollout.kernels"]


def test_a_task_of_which_each_rank_would_draw_other_items_is_refused(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    task = {"kind": "tasks", "tasks": [{"name": "ransom_note"}]}
    with pytest.raises(ConfigError, match=r"data\.train\.tasks\.0\.name = 'ransom_note': .*PYTHONHASHSEED=0"):
        check_on(make(data={"train": task}), world_of(is_main=False))


def test_a_named_checkpoint_is_looked_at_before_a_run(tmp_path):
    config = make(checkpoint={"resume": str(tmp_path / "step-000003")})
    assert [p.path for p in missing_files(config)] == ["model.path", "checkpoint.resume"]
    (tmp_path / "step-000003").mkdir()
    with pytest.raises(ConfigError, match=r"^checkpoint\.resume = .*never completed"):
        check_report(config, 4)
