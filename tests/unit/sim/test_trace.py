import json

import numpy as np
import pytest

from megatron_tlt.errors import ConfigError
from megatron_tlt.sim.trace import Lengths, quantiles_of
from tests.helpers.sim import sim_config

BIG = {"steps": 1, "prompts_per_step": 2000, "lengths": {"median": 400, "sigma": 0.7, "prompt_share": 0.5}}


def drawn(*overrides, **lengths):
    workload = BIG | {"lengths": BIG["lengths"] | lengths}
    return Lengths(sim_config("rollout.samples_per_prompt=8", *overrides, workload=workload)).of(0)


def test_lognormal_lengths_have_the_median_the_spread_and_the_cap():
    lengths = drawn("rollout.max_tokens=100000")
    logs = np.log(lengths)
    assert lengths.shape == (2000, 8)
    assert np.median(lengths) == pytest.approx(400, rel=0.05)
    assert logs.std() == pytest.approx(0.7, rel=0.05)
    assert drawn("rollout.max_tokens=500").max() == 500


def test_responses_to_one_prompt_are_as_alike_as_asked():
    for share in (0.0, 0.5, 0.9):
        logs = np.log(drawn("rollout.max_tokens=100000", prompt_share=share))
        between = np.corrcoef(logs[:, 0], logs[:, 1])[0, 1]
        assert between == pytest.approx(share, abs=0.07)


def test_lengths_depend_on_seed_and_step_only():
    config = sim_config()
    lengths = Lengths(config)
    assert (lengths.of(1) == Lengths(sim_config("cluster.nodes=4")).of(1)).all()
    assert not (lengths.of(0) == lengths.of(1)).all()
    assert not (lengths.of(0) == Lengths(sim_config("workload.seed=1")).of(0)).all()


def test_empirical_lengths_are_distributed_like_their_values():
    values = np.random.default_rng(0).integers(5, 400, 500)
    lengths = drawn(values=tuple(values.tolist()))
    for q in (0.1, 0.5, 0.9):
        assert np.quantile(lengths, q) == pytest.approx(np.quantile(values, q), rel=0.06)
    assert lengths.min() >= values.min() and lengths.max() <= values.max()


def test_lengths_come_from_files(tmp_path):
    plain, rows = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("5\n7\n\n6\n")
    first = '{"token_ids": [1, 2, 3], "text": "a\u2028b\u0085c"}'  # two line ends of Unicode, none of the file
    rows.write_text(first + '\n{"tokens": 9}\n{"tokens": [4, 8]}\n', encoding="utf-8")
    section = sim_config().workload.lengths

    def of(path):
        return quantiles_of(section.model_copy(update={"path": str(path)}))

    assert of(plain).tolist() == [5, 6, 7]
    assert of(rows).tolist() == [2, 3, 9]


def test_lengths_come_from_a_run(tmp_path):
    row = {"length/median": 50.0, "length/p95": 220.0, "length/max": 448.0, "rollout/samples": 256.0}
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps({"step": i, **row}) for i in range(3)) + "\n")
    section = sim_config().workload.lengths.model_copy(update={"path": str(tmp_path)})
    lengths = quantiles_of(section)
    assert np.median(lengths) == pytest.approx(50, rel=0.02)
    assert np.quantile(lengths, 0.95) == pytest.approx(220, rel=0.03)
    assert lengths.max() <= 448


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no lengths"),
        ("x\n", ":1"),
        ("NaN\n", ":1"),
        ("5\n-3\n", ":2"),
        ('{"tokens": Infinity}\n', ":1"),
        ('5\n{"lengths": [4, 8]}\n', ":2"),
    ],
)
def test_files_without_lengths_are_refused(tmp_path, text, said):
    path = tmp_path / "l.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"workload\.lengths\.path") as caught:
        quantiles_of(sim_config().workload.lengths.model_copy(update={"path": str(path)}))
    assert said in str(caught.value)


def test_a_file_that_is_not_there_is_named_without_a_line(tmp_path):
    path = str(tmp_path / "none.txt")
    with pytest.raises(ConfigError, match=f"'{path}': cannot be read"):
        quantiles_of(sim_config().workload.lengths.model_copy(update={"path": path}))
