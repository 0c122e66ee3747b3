"""What cannot be converted is refused by name before anything is written; an interruption leaves nothing whole."""

from __future__ import annotations

import json
import pickle
import shutil
import signal
import subprocess
import time
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_tlt.actor.torch_dist_reader import TorchDistReader
from megatron_tlt.checkpoint import atomic
from megatron_tlt.checkpoint.convert.hf_dir import HfDir
from megatron_tlt.checkpoint.convert.to_hf import HfConversion
from megatron_tlt.checkpoint.convert.to_megatron import MegatronConversion
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.errors import CheckpointError, ConfigError
from tests.helpers.chat_models import edit_json
from tests.helpers.converted import make_model, naive_megatron, save_foreign
from tests.helpers.disk import files_of_at_most
from tests.helpers.mpi import ROOT, fork_command, rank_environment


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """(Hugging Face directory in several shards, its model, its Megatron checkpoint)."""
    place = tmp_path_factory.mktemp("refusals")
    model = make_model("qwen2", place / "hf", max_shard_size="100KB")
    MegatronConversion.plan(place / "hf", None).write(place / "mg", SingleProcess())
    return place / "hf", model, place / "mg"


@pytest.fixture
def hf(source, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(source[0], tmp_path / "hf")


@pytest.fixture
def mg(source, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(source[2], tmp_path / "mg")


def rewrite(directory, change):
    """Applies `change` to the tensors of one shard and to the index."""
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = content["weight_map"]["model.norm.weight"]
    tensors = load_file(directory / file)
    change(tensors)
    save_file(tensors, directory / file)
    kept = {n: f for n, f in content["weight_map"].items() if f != file}
    index.write_text(json.dumps({**content, "weight_map": kept | dict.fromkeys(tensors, file)}))


def test_types_that_leave_a_choice_or_none(hf):
    rewrite(hf, lambda tensors: tensors.update({"model.norm.weight": torch.ones(96).half()}))
    stored = "must be given, fp32 or bf16: the weights are stored as float16, float32"
    with pytest.raises(ConfigError, match=f"--dtype.*{stored}"):
        MegatronConversion.plan(hf, None)
    assert MegatronConversion.plan(hf, "fp32").dtype is torch.float32
    rewrite(hf, lambda tensors: tensors.update({"model.norm.weight": torch.ones(96).to(torch.int8)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is stored as I8"):
        MegatronConversion.plan(hf, "fp32")


# ---- Megatron checkpoints


def not_read(directory, *words, config=None, error=CheckpointError):
    with pytest.raises(error) as caught:
        HfConversion.plan(directory, None, config=config)
    assert all(word in str(caught.value) for word in words), caught.value


def _finds_damage(directory, **share):
    try:
        HfConversion.plan(directory, None, **share)
    except CheckpointError:
        return True
    return False


def test_missing_torn_and_altered_shards_are_named(mg):
    shard = mg / "release" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    not_read(mg, "__0_0.distcp was altered")
    assert [_finds_damage(mg, part=part, parts=3) for part in range(3)].count(True) == 1, "ranks share the files"
    shard.write_bytes(content[:-100])
    not_read(mg, "__0_0.distcp is torn")
    shard.unlink()
    not_read(mg, "__0_0.distcp is missing")


def test_a_config_that_contradicts_the_checkpoint_is_refused(source, mg):
    edit_json(mg / "config.json", num_hidden_layers=6)
    not_read(mg, "num_layers is 3, not 6")
    with pytest.raises(CheckpointError, match="of another model: family is 'qwen2', not 'qwen3'") as caught:
        TorchDistReader(mg).check(replace(HfDir(source[0]).config, family="qwen3", qk_norm=True, qkv_bias=False))
    assert "layernorm" not in str(caught.value)
    (mg / "release" / "manifest.json").unlink()  # without a manifest the tensors are compared
    not_read(mg, "has 3 layers, the configuration says 6")
    edit_json(mg / "config.json", num_hidden_layers=3, vocab_size=133)
    not_read(mg, "embedding.word_embeddings.weight has shape (131, 96)")
    edit_json(mg / "config.json", vocab_size=131, tie_word_embeddings=False)
    not_read(mg, "missing: output_layer.weight")
    (mg / "config.json").unlink()
    not_read(mg, "--config")
    assert HfConversion.plan(mg, None, config=source[0]).config == HfConversion.plan(source[2], None).config


def test_foreign_tensors_that_would_be_lost_are_refused(source, tmp_path):
    tensors = naive_megatron(source[1], 131)
    tensors["decoder.layers.mlp.router.weight"] = torch.ones(3, 4)
    save_foreign(tmp_path / "mg", tensors)
    not_read(tmp_path / "mg", "unexpected: decoder.layers.mlp.router.weight", config=source[0])


def test_what_is_no_distributed_checkpoint_is_refused(tmp_path, mg):
    not_read(tmp_path / "mgg", "no such file or directory; did you mean mg?")
    not_read(mg / "latest_checkpointed_iteration.txt", "is no directory")
    with pytest.raises(CheckpointError, match=r"is no Megatron checkpoint: it has neither .*iteration\.txt$"):
        TorchDistReader(tmp_path)
    shutil.copytree(mg, tmp_path / "run" / "checkpoints")
    not_read(tmp_path / "run", "is no Megatron checkpoint", f"(did you mean {tmp_path}/run/checkpoints?)")
    (tmp_path / "old" / "iter_0000005" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "old" / "latest_checkpointed_iteration.txt").write_text("5\n")
    not_read(tmp_path / "old", "old format (mp_rank_*)", "torch_dist")
    (mg / "release" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    not_read(mg, "'zarr'", "only 'torch_dist'")
    (mg / "release" / "metadata.json").unlink()
    not_read(mg, "torch_dcp or fsdp_dtensor; only torch_dist is read: save again with --ckpt-format torch_dist")


class _Evil:
    def __reduce__(self):
        return (pickle.loads, (b"",))  # any function would do


def test_metadata_runs_no_code(mg):
    imported = b"\x80\x04ctorch.distributed.checkpoint.filesystem\ndataclass\n)R."  # a function of another module there
    for content in (pickle.dumps(_Evil()), imported):
        (mg / "release" / ".metadata").write_bytes(content)
        not_read(mg, "is not allowed in a checkpoint's metadata")
    (mg / "release" / ".metadata").write_bytes(b"rubbish")
    not_read(mg, ".metadata cannot be read")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, None),
        ({"norm_epsilon": 1e-5}, "norm_epsilon is 1e-05, not 1e-06"),
        ({"rotary_base": 500000}, "rotary_base is 500000, not 10000"),
        ({"rope_scaling_factor": 8.0}, None),  # of no scaling: Megatron-LM's default
        ({"use_rope_scaling": True}, "use_rope_scaling is True, not False"),
        ({"rotary_percent": 0.5}, "rotary_percent is 0.5, not 1.0"),
        ({"rotary_interleaved": True}, "rotary_interleaved is True, not False"),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p is True, not False"),
        ({"moe_router_group_topk": 2, "moe_router_num_groups": 4}, "moe_router_group_topk is 2, not None"),
        ({"moe_router_num_groups": 4}, None),  # it has no effect alone
        ({"moe_router_load_balancing_type": ["sinkhorn"]}, "moe_router_load_balancing_type is 'sinkhorn'"),
        ({"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input is True, not False"),
        ({"qk_l2_norm": True}, "qk_l2_norm is True, not False"),
        ({"glu_linear_offset": 1.0}, "glu_linear_offset is 1.0, not 0.0"),
        ({"add_bias_linear": True}, "add_bias_linear is True, not False"),
        ({"num_query_groups": 1, "group_query_attention": False}, "num_query_groups is 6, not 2"),
        ({"vocab_size": 130, "padded_vocab_size": 256}, None),
        ({"vocab_size": 200, "padded_vocab_size": 256}, "vocab_size is 200, above 131: rows of tokens would be lost"),
    ],
)
def test_arguments_of_another_model_are_refused(source, tmp_path, more, words):
    """Two of the checkpoint's arguments are instances of classes that are not known here: of nothing its code runs."""
    hf, model, mg = source
    own = vars(torch.load(mg / "release" / "common.pt", weights_only=False)["args"])
    arguments = own | {"attention_backend": signal.SIGTERM, "spoiled": _Evil()} | more
    save_foreign(tmp_path / "mg", naive_megatron(model, 256), iteration=7, arguments=arguments)
    if words is not None:
        not_read(tmp_path / "mg", f"arguments in common.pt: {words}", config=hf)
    else:
        assert not HfConversion.plan(tmp_path / "mg", None, config=hf).source.warnings()


@pytest.mark.parametrize("content", [None, b"rubbish", pickle.dumps({"args": 3})], ids=["none", "rubbish", "other"])
def test_arguments_that_cannot_be_read_are_a_warning(source, tmp_path, content):
    save_foreign(tmp_path / "mg", naive_megatron(source[1], 131))
    if content is not None:
        (tmp_path / "mg" / "common.pt").write_bytes(content)
    (warning,) = HfConversion.plan(tmp_path / "mg", None, config=source[0]).source.warnings()
    assert "common.pt has no arguments" in warning and "epsilon and kind of norms were not compared" in warning


# ---- output


def test_an_output_that_does_not_fit_is_refused(source, tmp_path, monkeypatch):
    for todo in (MegatronConversion.plan(source[0], None), HfConversion.plan(source[2], None)):
        with pytest.raises(CheckpointError, match="not-here does not exist"):
            todo.write(tmp_path / "not-here" / "out", SingleProcess())
        usage = namedtuple("usage", "total used free")(1 << 40, 1 << 40, todo.num_bytes + 1000)
        with monkeypatch.context() as patch:
            patch.setattr(atomic.shutil, "disk_usage", lambda path, usage=usage: usage)
            with pytest.raises(CheckpointError, match=r"needs .* but only .* are free"):
                todo.write(tmp_path / "out", SingleProcess())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["__0_0.distcp", "model.safetensors"])
def test_a_disk_that_is_full_behind_the_check_is_named(source, tmp_path, file):
    there, back = MegatronConversion.plan(source[0], None), HfConversion.plan(source[2], None)
    with files_of_at_most(20_000), pytest.raises(CheckpointError, match=rf"File too large: '.*/{file}'$"):
        (there if file == "__0_0.distcp" else back).write(tmp_path / "out", SingleProcess())
    assert list(tmp_path.iterdir()) == []


SLOW = """
import sys, time
sys.path.insert(0, "tools")
from megatron_tlt.checkpoint.convert import to_megatron
import convert_hf_to_megatron
true = to_megatron.shard
def slow(*arguments):
    print("CHUNK", flush=True)
    time.sleep(0.2)
    return true(*arguments)
to_megatron.shard = slow
raise SystemExit(convert_hf_to_megatron.main())
"""


@pytest.mark.parametrize(("number", "left"), [(signal.SIGTERM, 0), (signal.SIGKILL, 1)])
def test_an_interrupted_conversion_never_looks_whole(source, tmp_path, number, left):
    arguments = ["--hf", str(source[0]), "--out", str(tmp_path / "out")]
    command = [*fork_command(), "-c", SLOW, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=rank_environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(5):
        assert process.stdout.readline() == "CHUNK\n"
    process.send_signal(number)
    process.wait(60)
    time.sleep(0.1)
    assert process.returncode == (128 + number if left == 0 else -number)
    remains = list(tmp_path.iterdir())
    assert len(remains) == left and not (tmp_path / "out").exists()
    for path in remains:
        assert path.name.startswith(".out.unfinished-")
        with pytest.raises(CheckpointError):
            TorchDistReader(path)
        with pytest.raises(CheckpointError):
            TorchDistReader(path / "release")
