"""Arguments that describe a model to Megatron-LM; those of other checkpoints in tests/unit/checkpoint/convert."""

from argparse import Namespace
from dataclasses import replace
from http import HTTPStatus

import torch

from megatron_tlt.actor.megatron_arguments import (
    argument_problems,
    flags_to_give,
    megatron_arguments,
    read_arguments,
    without_a_flag,
)
from megatron_tlt.models.hf.config import RopeScaling
from tests.helpers.tiny_models import TINY


def test_every_argument_of_the_model_is_in_the_file_or_a_flag_to_give():
    plain = replace(TINY, qk_norm=False)
    assert flags_to_give(plain) == [f"--norm-epsilon {TINY.rms_norm_eps}"]
    assert "rope_scaling_factor" not in megatron_arguments(plain), "Megatron-LM's default"
    scaled = replace(TINY, qk_norm=True, shared_expert_intermediate_size=8, rope_scaling=RopeScaling(32.0, 1, 4, 8192))
    more = ["--qk-layernorm", "--moe-shared-expert-gate", "--use-rope-scaling --rope-scaling-factor 32.0"]
    assert flags_to_give(scaled)[1:] == more
    assert megatron_arguments(scaled)["rope_scaling_factor"] == 32.0


def test_rotary_numbers_that_megatron_has_in_its_code_are_compared():
    """The defaults of its RotaryEmbedding, which has no arguments for them."""
    same = replace(TINY, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192))
    other = replace(TINY, rope_scaling=RopeScaling(8.0, 1.0, 2.0, 128))
    for config in (same, TINY):
        assert without_a_flag(config) == argument_problems(megatron_arguments(config), config) == []
    said = ["high_freq_factor is 2, for which Megatron-LM", "original_max_position_embeddings is 128, for which"]
    found = without_a_flag(other)
    assert [text.startswith(words) for text, words in zip(found, said, strict=True)] == [True, True]
    wrong = ["high_freq_factor is 4 in Megatron-LM, not 2"]
    wrong.append("original_max_position_embeddings is 8192 in Megatron-LM, not 128")
    assert argument_problems(megatron_arguments(other), other) == wrong


def test_a_base_that_is_not_whole_stays_so():
    config = replace(TINY, rope_theta=10000.5)
    assert megatron_arguments(config)["rotary_base"] == 10000.5 and type(megatron_arguments(TINY)["rotary_base"]) is int
    assert argument_problems({"rotary_base": 10000}, config) == ["rotary_base is 10000, not 10000.5"]


def test_what_others_have_registered_as_safe_stays(tmp_path):
    """megatron-core registers `Namespace` when it is imported, and reads the same file after us."""
    torch.save({"args": Namespace(norm_epsilon=1e-6, status=HTTPStatus.OK)}, tmp_path / "common.pt")
    torch.serialization.add_safe_globals([Namespace])
    registered = set(torch.serialization.get_safe_globals())
    assert read_arguments(tmp_path)["norm_epsilon"] == 1e-6
    assert set(torch.serialization.get_safe_globals()) == registered
