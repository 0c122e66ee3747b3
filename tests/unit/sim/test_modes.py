import re

import pytest

from megatron_tlt.errors import ConfigError
from megatron_tlt.sim.modes import assumptions, in_mode
from tests.helpers.sim import sim_config


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"rollout\.speculation\.drafter"):
        in_mode(sim_config(), "tlt")
    with pytest.raises(ConfigError, match="must divide the 8 GPUs"):
        in_mode(sim_config("rollout.tp=3"), "off")


def test_truncated_responses_are_reported(tmp_path):
    path = tmp_path / "l.txt"
    path.write_text("100\n" * 3 + "9000\n")
    empirical = (f"workload.lengths.path={path}", "workload.lengths.median=1")
    said = assumptions(sim_config(*empirical, "rollout.max_tokens=8000"))[0]
    cut, count = (int(part) for part in re.findall(r"(\d+) of the (\d+) simulated are cut", said)[0])
    assert str(path) in said and said.endswith("rollout.max_tokens, 8000") and count == 256
    assert 0.1 < cut / count < 0.4
    assert "none of the 256" in assumptions(sim_config(*empirical, "rollout.max_tokens=9000"))[0]
    assert "none of the 256" in assumptions(sim_config("rollout.max_tokens=100000"))[0]


def test_what_a_plain_simulation_s_engine_is_is_said():
    said = assumptions(sim_config("rollout.dtype=fp32", "rollout.backend=vllm"))
    assert any("engine steps are the embedded engine's in bf16" in text for text in said)
