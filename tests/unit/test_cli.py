"""What the command line makes of its arguments."""

import pytest

from megatron_tlt.cli import _parse


def test_overrides_stand_before_and_behind_options():
    args = _parse(["check", "c.yaml", "a.b=1", "--ranks", "4", "c.d=[1, 2]"])
    assert (args.ranks, args.overrides) == (4, ["a.b=1", "c.d=[1, 2]"])


@pytest.mark.parametrize("rest", [["--rank", "4"], ["stray"], ["--raks=4"], ["a.b=1", "--x"]], ids=" ".join)
def test_what_is_neither_option_nor_override_is_refused(rest, capsys):
    with pytest.raises(SystemExit) as caught:
        _parse(["eval", "c.yaml", "--out", "x.json", *rest])
    assert caught.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


def test_generate_takes_no_overrides(capsys):
    with pytest.raises(SystemExit):
        _parse(["generate", "--model", "m", "--prompts", "p", "--out", "o", "a.b=1"])
    assert "unrecognized arguments: a.b=1" in capsys.readouterr().err
