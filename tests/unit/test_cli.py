"""What the command line makes of its arguments."""

import pytest

from megatron_tlt.cli import _parse, main


def test_overrides_stand_before_and_behind_options():
    args = _parse(["check", "c.yaml", "a.b=1", "--ranks", "4", "c.d=[1, 2]"])
    assert (args.ranks, args.overrides) == (4, ["a.b=1", "c.d=[1, 2]"])


@pytest.mark.parametrize("rest", [["--rank", "4"], ["stray"], ["--raks=4"], ["a.b=1", "--x"]], ids=" ".join)
def test_what_is_neither_option_nor_override_is_refused(rest, capsys):
    with pytest.raises(SystemExit) as caught:
        _parse(["eval", "c.yaml", "--out", "x.json", *rest])
    assert caught.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


def test_generate_takes_engine_settings_only(capsys):
    command = ["generate", "--model", "m", "--prompts", "p", "--out", "o"]
    args = _parse([*command, "rollout.numerics=invariant", "--n", "2", "rollout.speculation.drafter=suffix"])
    assert args.overrides == ["rollout.numerics=invariant", "rollout.speculation.drafter=suffix"]
    assert main([*command, "train.num_steps=1"]) == 2
    assert "must look like rollout.key=value" in capsys.readouterr().err
    assert main([*command, "rollout.temperature=0", "rollout.tp=2"]) == 2
    said = capsys.readouterr().err
    assert "not read by generate: use --temperature" in said and "all ranks are one engine" in said
    assert main([*command, "rollout.speculation.drafter=eagle"]) == 2
    assert "rollout.speculation.drafter_path" in capsys.readouterr().err
