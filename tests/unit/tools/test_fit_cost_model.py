"""Step costs are measured on the run's own prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import fit_cost_model
import pytest
from huggingface_hub import constants

from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.sim.cost_model import MeasuredCosts
from tests.helpers.chat_models import DEMO_POLICY, chat_model
from tests.helpers.mpi import ROOT


def test_names_on_the_hub_and_the_template_s_settings_are_those_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, commit = tmp_path / "models--a--policy", "1" * 40
    (cache / "refs").mkdir(parents=True)
    (cache / "refs/main").write_text(commit)
    template = (DEMO_POLICY / "chat_template.jinja").read_text()
    here = chat_model(cache / "snapshots" / commit, "{{ greeting }}{{ strftime_now('%Y') }}" + template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found: list[Any] = []

    def measure(config: Any, kind: str, stream: Any, *_: Any) -> None:
        found.extend([config, stream])
        raise SystemExit

    monkeypatch.setattr(fit_cost_model, "measure", measure)
    settings = ["data.chat_template_kwargs={greeting: 7}", "data.chat_template_date=2031-02-03"]
    settings += ["model.path=a/policy", "rollout.speculation.drafter=suffix"]
    command = ["fit", str(ROOT / "configs/quickstart.yaml"), *settings, "--drafters", "suffix"]
    command += ["--out", str(tmp_path / "costs.json")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        fit_cost_model.main()
    config, stream = found
    assert config.model.path == str(here)
    (prompt,) = stream.next_batch(1)
    assert HFTokenizer(here).decode(prompt.token_ids).startswith("72031")


def test_a_table_names_what_it_was_measured_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, raw = tmp_path / "costs.json", tmp_path / "raw.json"
    command = ["fit", str(ROOT / "configs/quickstart.yaml"), "train.prompts_per_step=8", "--seconds", "0"]
    monkeypatch.setattr(sys, "argv", [*command, "--drafters", "suffix", "--raw", str(raw), "--out", str(out)])
    fit_cost_model.main()
    steps = json.loads(raw.read_text())["suffix"]
    costs = MeasuredCosts.load(str(out))
    found, shape = costs.measured, ModelConfig.from_hf(DEMO_POLICY).architecture
    assert (found.model, found.device, found.tp) == (shape, "cpu", 1)
    assert (found.requests, found.cached_tokens) == (max(s[1] for s in steps), int(max(s[3] for s in steps)))
    assert costs.step(4, 12, 400.0, True) > 0 and costs.draft("suffix", 4, 0, 8) > 0


@pytest.mark.parametrize(
    ("drafters", "setting", "words"),
    [
        (["eagle"], "eval.every=0", "invalid choice: 'eagle' (choose from"),
        (["none"], "eval.every=0", "--drafters none: verification is not measured"),
        (["trained"], "rollout.speculation.drafter=suffix", "rollout.speculation.drafter = 'suffix': must be"),
        (["suffix"], "rollout.backend=vllm", "rollout.backend = 'vllm': must be embedded"),
        (["suffix"], "rollout.backend=vlm", "rollout.backend = 'vlm'"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    drafters: list[str], setting: str, words: str,
) -> None:  # fmt: skip
    """Drafts of the suffix drafter were recorded as those of the trained one."""
    monkeypatch.setattr(fit_cost_model, "measure", lambda *_: pytest.fail("measured"))
    command = ["fit", str(ROOT / "configs/quickstart.yaml"), setting, "--out", str(tmp_path / "o.json")]
    monkeypatch.setattr(sys, "argv", [*command, "--drafters", *drafters])
    try:
        status = fit_cost_model.main()
    except SystemExit as end:  # of the command line's parser
        status = end.code
    assert status == 2
    assert words in capsys.readouterr().err
