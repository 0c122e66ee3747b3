"""Arguments that describe a model to Megatron-LM; those of other checkpoints in tests/unit/checkpoint/convert."""

from argparse import Namespace
from dataclasses import replace
from http import HTTPStatus

import torch

from megatron_tlt.actor.megatron_arguments import flags_to_give, megatron_arguments, read_arguments
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


def test_what_others_have_registered_as_safe_stays(tmp_path):
    """megatron-core registers `Namespace` when it is imported, and reads the same file after us."""
    torch.save({"args": Namespace(norm_epsilon=1e-6, status=HTTPStatus.OK)}, tmp_path / "common.pt")
    torch.serialization.add_safe_globals([Namespace])
    registered = set(torch.serialization.get_safe_globals())
    assert read_arguments(tmp_path)["norm_epsilon"] == 1e-6
    assert set(torch.serialization.get_safe_globals()) == registered
