"""What the decoders promise besides numbers: strict weights, cache copies, tensor parallelism, errors, building."""

from __future__ import annotations

import errno
import math
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_tlt.config.checks.rollout import NATIVE_HEAD_DIM
from megatron_tlt.errors import BackendError, CheckpointError, ConfigError
from megatron_tlt.models.decoders import factory
from megatron_tlt.models.decoders.base import Shard
from megatron_tlt.models.decoders.factory import build_decoder
from megatron_tlt.models.decoders.inputs import DecoderInput
from megatron_tlt.models.decoders.native import abi, build
from megatron_tlt.models.hf.config import ModelConfig
from tests.helpers.mpi import run_one, start_one
from tests.helpers.thread_ranks import ThreadRank, on_ranks
from tests.helpers.tiny_models import Driver, moe_config, random_weights, rows_input

CONFIG = ModelConfig("qwen2", 101, 64, 2, 4, 2, 16, 96, qkv_bias=True, max_position_embeddings=128)
EXPERTS, NORMED = (moe_config(family, 101) for family in ("qwen2_moe", "qwen3_moe"))
KERNELS = ("native", "torch")
FORMS = [(kernels, dtype) for kernels in KERNELS for dtype in (torch.float32, torch.bfloat16)]


def loaded(kernels: str, config: ModelConfig = CONFIG, **kwargs):
    decoder = build_decoder(config, kernels=kernels, **kwargs)
    decoder.load_weights(random_weights(config))
    return decoder


@pytest.mark.parametrize(("name", "kib", "refused"), [("L40S", 100, True), ("A100", 164, False), ("H100", 228, False)])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_a_head_dimension_whose_tiles_do_not_fit_is_refused(
    name: str, kib: int, refused: bool, head_dim: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the GPU's name, before the kernel fails to start in the first rollout. The decoder is never made here."""
    gpu = SimpleNamespace(name=name, shared_memory_per_multiprocessor=kib << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(factory, "_has_triton", lambda kernels, device: True)
    monkeypatch.setattr(factory, "missing_for_triton", lambda: None)
    monkeypatch.setattr(factory, "TorchDecoder", lambda *args, **kwargs: "made")
    config = replace(CONFIG, head_dim=head_dim)
    if refused and head_dim == 256:
        with pytest.raises(ConfigError, match=rf"rollout\.kernels.*256.*{name}.*'torch'"):
            build_decoder(config, "cuda", torch.bfloat16)
    else:
        with caplog.at_level("INFO", "megatron_tlt"):
            assert build_decoder(config, "cuda", torch.bfloat16) == "made"
        assert "Triton compiles" in caplog.text, "a first start takes minutes without another sign"


def test_without_a_compiler_a_cpu_gets_no_other_decoder_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in commands that no configuration of a run was checked for."""
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    with pytest.raises(ConfigError, match=r"rollout\.kernels = 'auto': needs a C compiler .* on every node.*'torch'"):
        build_decoder(CONFIG)
    assert build_decoder(CONFIG, kernels="torch").kind == "torch"


def test_triton_without_a_compiler_is_refused_before_its_first_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by commands that no configuration of a run was checked for."""
    monkeypatch.setattr(factory, "_has_triton", lambda kernels, device: True)
    monkeypatch.setattr(factory, "missing_for_triton", lambda: "no gcc on PATH")
    with pytest.raises(ConfigError, match=r"rollout\.kernels = 'auto': .*no gcc on PATH; 'torch'"):
        build_decoder(CONFIG, "cuda", torch.bfloat16)


@pytest.mark.parametrize("kernels", KERNELS)
def test_weights_are_checked_strictly(kernels: str) -> None:
    decoder, weights = build_decoder(CONFIG, kernels=kernels), random_weights(CONFIG)
    with pytest.raises(CheckpointError, match="not part of"):
        decoder.load_weights([("model.layers.9.mlp.up_proj.weight", torch.zeros(1))])
    with pytest.raises(CheckpointError, match="shape"):
        decoder.load_weights([("model.norm.weight", torch.zeros(1))])
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        decoder.load_weights(weights[:-1])
    with pytest.raises(BackendError, match="before all weights"):
        Driver(decoder).step([(0, [1])])
    decoder.load_weights(weights[-1:], partial=True)
    assert Driver(decoder).step([(0, [1])]).logits.shape == (1, 101)


@pytest.mark.parametrize(("kernels", "dtype"), FORMS)
def test_a_push_replaces_every_weight(kernels: str, dtype: torch.dtype) -> None:
    """Old weights leave no trace, whatever the pushed tensors' type and strides."""
    new = random_weights(CONFIG, seed=9)
    decoder = loaded(kernels, dtype=dtype)
    decoder.load_weights((n, w.t().contiguous().t() if w.ndim == 2 else w.double()) for n, w in new)
    fresh = build_decoder(CONFIG, kernels=kernels, dtype=dtype)
    fresh.load_weights(new)
    a, b = (Driver(d).step([(0, list(range(20)))]).logits for d in (decoder, fresh))
    assert torch.equal(a, b)


@pytest.mark.parametrize(("kernels", "dtype"), FORMS)
@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_are_shown_and_copied_only_where_packed(
    kernels: str, dtype: torch.dtype, tied: bool
) -> None:
    config = replace(CONFIG, tie_word_embeddings=tied)
    decoder, weights = loaded(kernels, config, dtype=dtype), dict(random_weights(config))
    embed, head = decoder.lookup_tables()
    wanted = weights["model.embed_tokens.weight"].to(dtype)
    assert torch.equal(embed, wanted)
    assert torch.equal(head, wanted if tied else weights["lm_head.weight"].to(dtype))
    decoder.load_weights(random_weights(config, seed=9))
    assert not torch.equal(embed, wanted), "the decoder's own memory"
    assert torch.equal(head, decoder.lookup_tables()[1]) == (tied or kernels == "torch")


def test_a_sharded_head_is_put_together() -> None:
    weights = dict(random_weights(CONFIG))

    def work(rank: ThreadRank):
        decoder = build_decoder(CONFIG, kernels="torch", tp=rank)
        decoder.load_weights(weights.items())
        return decoder.lookup_tables()

    for embed, head in on_ranks(2, work):  # 101 rows: the second shard is padded
        assert torch.equal(embed, weights["model.embed_tokens.weight"])
        assert torch.equal(head, weights["lm_head.weight"])


@pytest.mark.parametrize(("kernels", "dtype"), FORMS)
def test_copied_blocks_serve_a_forked_sequence(kernels: str, dtype: torch.dtype) -> None:
    decoder = loaded(kernels, dtype=dtype)
    driver = Driver(decoder)
    driver.step([(0, list(range(40)))])
    driver.tables[1] = [driver.free.pop() for _ in driver.tables[0]]
    decoder.copy_blocks(driver.kv, driver.tables[0], driver.tables[1])
    driver.done[1] = 40
    out = driver.step([(0, [5]), (1, [5])]).logits
    assert torch.equal(out[0], out[1])


def test_more_experts_than_a_byte_numbers() -> None:
    """And than rows are computed together."""
    config, rows, found = replace(NORMED, num_experts=300), rows_input([list(range(90))], [0], [range(6)]), []
    rows.all_routed_experts = True
    for kernels in KERNELS:
        decoder = loaded(kernels, config)
        found.append(decoder.forward(rows, decoder.new_kv_cache(6, 16)))
    native, torchs = (out.routed_experts for out in found)
    assert native.dtype == torch.int16 and native.max() > 255 and torch.equal(native, torchs)
    torch.testing.assert_close(*(out.logits for out in found), atol=1e-4, rtol=1e-4)


def test_positions_beyond_the_first_rotary_table() -> None:
    config = ModelConfig("llama", 50, 32, 1, 2, 1, 16, 32, max_position_embeddings=9000)
    ids = torch.randint(0, 50, (4110,), generator=torch.Generator().manual_seed(0)).tolist()
    got = []
    for kernels in KERNELS:
        driver = Driver(loaded(kernels, config), num_blocks=260)
        driver.step([(0, ids[:4090])], all_rows=False)
        got.append(driver.step([(0, ids[4090:])]).logits)
    torch.testing.assert_close(*got, atol=1e-4, rtol=1e-4)


def test_strongly_closed_gates_are_closed() -> None:
    """silu(x) for x far below -88, where e^-x does not fit float32, is 0 and not x."""
    weights = [(n, w * (400 if "gate_proj" in n else 1)) for n, w in random_weights(CONFIG)]
    got = []
    for kernels in KERNELS:
        decoder = build_decoder(CONFIG, kernels=kernels)
        decoder.load_weights(weights)
        got.append(Driver(decoder).step([(0, list(range(40)))]).logits)
    torch.testing.assert_close(*got, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("config", "name"),
    [
        (CONFIG, "layers.0.self_attn.q_proj"),
        (CONFIG, "layers.0.self_attn.k_proj"),
        (NORMED, "layers.0.self_attn.q_norm"),
        (EXPERTS, "layers.1.mlp.gate"),
        (NORMED, "layers.1.mlp.gate"),  # renormalised
    ],
)
@pytest.mark.parametrize(("kernels", "dtype"), FORMS)
def test_a_weight_that_is_not_finite_shows_in_the_logits(
    kernels: str, dtype: torch.dtype, config: ModelConfig, name: str, value: float
) -> None:
    """Through softmax, too, of attention and of the router: the engine looks for it in the logits only."""
    weights = dict(random_weights(config))
    weights[f"model.{name}.weight"].view(-1)[0] = value
    decoder = build_decoder(config, kernels=kernels, dtype=dtype)
    decoder.load_weights(weights.items())
    assert not Driver(decoder).step([(0, list(range(20)))]).logits.isfinite().all()


@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_torch_tensor_parallel_equals_one_rank(config: ModelConfig) -> None:
    """101 tokens do not divide: the last shard is short."""
    batch = [(0, list(range(30)))]
    want = Driver(loaded("torch", config)).step(batch).logits
    got = on_ranks(2, lambda rank: Driver(loaded("torch", config, tp=rank)).step(batch).logits)
    for logits in got:
        torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-5)
        assert torch.equal(logits, got[0])


NATIVE_RANK = """
import sys, torch, torch.distributed as dist
from megatron_tlt.models.decoders.factory import build_decoder
from tests.helpers.tiny_models import Driver, random_weights
from tests.unit.models.decoders.test_decoders import CONFIG, EXPERTS
rank, size, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=size)
class Group:
    def all_reduce(self, t): dist.all_reduce(t)
    def all_gather(self, t):
        out = torch.empty(size, *t.shape); dist.all_gather(list(out.unbind()), t); return out
tp = Group(); tp.rank, tp.size = rank, size
def run(config, tp):
    d = build_decoder(config, kernels="native", threads=2, tp=tp)
    d.load_weights(random_weights(config))
    driver = Driver(d)
    return torch.cat([driver.step([(0, list(range(30))), (1, [4])]).logits, driver.step([(1, [3])]).logits])
for config in CONFIG, EXPERTS:
    torch.testing.assert_close(run(config, tp), run(config, None), atol=1e-5, rtol=1e-5)
"""


def test_native_tensor_parallel_over_processes(tmp_path) -> None:
    ranks = [start_one("-c", NATIVE_RANK, rank, 2, tmp_path / "store") for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stdout


class Reducing:
    """One of two tensor-parallel ranks, whose all-reduce raises `error`; None: which sums nothing."""

    rank, size, calls = 0, 2, 0

    def __init__(self, error: BaseException | None = None):
        self.error = error

    def all_reduce(self, tensor):
        self.calls += 1
        if self.error is not None:
            raise self.error

    def all_gather(self, tensor):
        return torch.stack([tensor, tensor])


def test_a_failing_all_reduce_is_reported_with_its_cause() -> None:
    decoder = loaded("native", tp=Reducing(RuntimeError("peer is gone")))
    with pytest.raises(BackendError, match="all-reduce failed") as caught:
        Driver(decoder).step([(0, [1, 2])])
    assert "peer is gone" in str(caught.value.__cause__)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("is_at_entry", [False, True])
def test_ctrl_c_in_an_all_reduce_is_not_lost(is_at_entry: bool) -> None:
    """At the entry of the function that C calls, before its `try`, ctypes drops the exception."""
    tp = Reducing(None if is_at_entry else KeyboardInterrupt())
    driver = Driver(loaded("native", tp=tp))

    def interrupt(frame, event, argument) -> None:
        if event == "call" and frame.f_code.co_name == "_reduce" and tp.calls == 1:
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            driver.step([(0, [1, 2])])
    finally:
        sys.setprofile(None)
    assert tp.calls == 1, "no layer goes on without its sum"
    tp.error = None
    assert driver.step([(1, [1, 2])]).logits.isfinite().all()


def test_shapes_that_cannot_be_sharded_are_refused() -> None:
    with pytest.raises(ConfigError, match="must divide the model's query heads 4"):
        Shard(CONFIG, 0, 3)
    with pytest.raises(ConfigError, match="key/value heads 3"):
        Shard(ModelConfig("llama", 10, 24, 1, 12, 3, 2, 24), 0, 2)
    with pytest.raises(ConfigError, match="shared expert's width 71, experts' width 41"):
        Shard(replace(EXPERTS, moe_intermediate_size=41, shared_expert_intermediate_size=71), 0, 2)


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("token_ids", [1, 101], "token id"),
        ("token_ids", [-1, 1], "token id"),
        ("positions", [0, 128], "position"),
        ("slot_mapping", [0, 32], "slot"),
        ("block_tables", [[2]], "block table"),
        ("block_tables", [[-1]], "block table"),
        ("positions", [0, 16], "block table"),
        ("logit_rows", [2], "logit row"),
        ("query_start", [0, 1], "query_start"),
    ],
)
def test_input_that_would_leave_memory_is_refused(field: str, value: list, word: str) -> None:
    fields = {
        "token_ids": [1, 2],
        "positions": [0, 1],
        "slot_mapping": [0, 1],
        "query_start": [0, 2],
        "context_lens": [2],
        "block_tables": [[0]],
        "logit_rows": [1],
    }
    decoder = loaded("native")
    tensors = {k: torch.tensor(v, dtype=torch.int32) for k, v in (fields | {field: value}).items()}
    batch = DecoderInput(**tensors)
    with pytest.raises(BackendError, match=word):
        decoder.forward(batch, decoder.new_kv_cache(2, 16))


def test_what_the_native_decoder_cannot_run_is_refused() -> None:
    decoder = loaded("native")
    with pytest.raises(AssertionError, match="multiple of 16"):
        decoder.new_kv_cache(4, 8)
    ints = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(AssertionError):
        decoder.forward(DecoderInput(ints, ints, ints, ints, ints, ints[None], ints), decoder.new_kv_cache(4, 16))
    with pytest.raises(ConfigError, match="CPU only"):
        build_decoder(CONFIG, "cuda", kernels="native")
    with pytest.raises(ConfigError, match="head_dim = 258: must be at most 256"):
        build_decoder(replace(CONFIG, head_dim=258), kernels="native")
    assert f"#define TLT_MAX_HEAD_DIM {NATIVE_HEAD_DIM}\n" in (build.SOURCE_DIR / "tlt.h").read_text()


def test_many_processes_build_once(tmp_path) -> None:
    code = "from megatron_tlt.models.decoders.native import abi, build as b; "
    code += "b.FLAGS = ('-O0', *b.FLAGS[2:]); abi.library()"
    ranks = [start_one("-c", code, MEGATRON_TLT_CACHE=str(tmp_path)) for _ in range(3)]
    assert [rank.wait() for rank in ranks] == [0] * 3, ranks[0].stdout
    assert len(list(tmp_path.glob("*.so"))) == 1 and not list(tmp_path.glob("*.tmp"))


def test_a_home_without_locks_or_no_home_at_all_ends_no_build(tmp_path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    def unknown() -> None:
        raise RuntimeError("Could not determine home directory.")

    for name in (build.CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build.fcntl, "flock", refuse)
    monkeypatch.setattr(build.Path, "home", unknown)
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(build, "_compile", lambda compiler, options, target: target.touch())
    assert build.library_path.__wrapped__().parent.parent == tmp_path


def test_a_full_disk_and_a_damaged_library_say_what_to_do(tmp_path, monkeypatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(build.tempfile, "mkstemp", refuse)
    with pytest.raises(BackendError, match=r"Disk quota exceeded; set MEGATRON_TLT_CACHE"):
        build.library_path.__wrapped__()
    (tmp_path / "empty.so").touch()
    monkeypatch.setattr(abi, "library_path", lambda options: tmp_path / "empty.so")
    with pytest.raises(BackendError, match=r"empty\.so: file too short; delete that file"):
        abi.library.__wrapped__()


@pytest.mark.ci
def test_builds_for_other_instruction_sets_compute_the_same(tmp_path) -> None:
    """Those of this CPU below its own, which every other test has."""
    code = (
        "import sys, torch; from megatron_tlt.models.decoders.native import build as b; b.flags = "
        "lambda: (*sys.argv[1:], *b.FLAGS[2:]);"
        "from tests.unit.models.decoders.test_decoders import *;"
        "of = lambda d: (Driver(loaded(k, dtype=d)).step([(0, list(range(60)))]).logits for k in ('native', 'torch'));"
        "off = lambda n, t: float((n - t).abs().mean() / t.abs().mean());"
        "found = off(*of(torch.float32)), off(*of(torch.bfloat16));"
        "assert found[0] <= 1e-5 and found[1] <= 2e-2, found"
    )
    if os.uname().machine != "x86_64":
        pytest.skip("instruction sets of x86")
    sets = {"haswell": "avx2", "skylake-avx512": "avx512bw", "cooperlake": "avx512_bf16"}
    has = Path("/proc/cpuinfo").read_text().split()
    for arch in ["x86-64", *(arch for arch, flag in sets.items() if flag in has)]:
        run_one("-c", code, "-std=gnu99", "-O1", f"-march={arch}", MEGATRON_TLT_CACHE=str(tmp_path))


@pytest.mark.ci
@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="takes GCC for aarch64")
@pytest.mark.parametrize("options", [(), build.BF16])
@pytest.mark.parametrize("compiler", ["aarch64-linux-gnu-gcc", "clang"])
def test_it_compiles_for_arm(compiler: str, options: tuple[str, ...], tmp_path, monkeypatch) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"takes {compiler}")
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    options = ("--target=aarch64-linux-gnu", *options) if compiler == "clang" else options
    build._compile(compiler, options, tmp_path / "native.so")
    assert (tmp_path / "native.so").read_bytes()[18] == 183  # e_machine: AArch64


@pytest.mark.ci
@pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("clang")), reason="takes gcc and clang")
def test_gcc_and_clang_compute_the_same_bits(tmp_path) -> None:
    code = (
        "import hashlib; from megatron_tlt.models.decoders.native.decoder import keyed_sample;"
        "from tests.unit.models.decoders.test_decoders import *;"
        "steps = [Driver(loaded('native', c, dtype=d)).step([(0, list(range(60)))]) for c in (CONFIG, EXPERTS)"
        " for d in (torch.float32, torch.bfloat16)];"
        "logits = torch.cat([step.logits for step in steps]);"
        "drawn = keyed_sample(logits, torch.ones(len(logits)), torch.arange(len(logits)));"
        "print(*(hashlib.sha256(t.numpy().tobytes()).hexdigest() for t in (logits, *drawn)))"
    )
    said = [run_one("-c", code, CC=cc, MEGATRON_TLT_CACHE=str(tmp_path))[1].split()[-3:] for cc in ("gcc", "clang")]
    assert said[0] == said[1] and len(list(tmp_path.glob("*.so"))) >= 4
