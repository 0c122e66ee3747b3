"""What the command line makes of its arguments."""

import argparse
import io
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megatron_tlt.cli import exit_codes
from megatron_tlt.cli.generate import argument_problems
from megatron_tlt.cli.main import _parse, _parser, main
from tests.helpers.synthetic_run import write_run


@pytest.mark.parametrize("rest", [["--rank", "4"], ["stray"], ["--raks=4"], ["a.b=1", "--x"]], ids=" ".join)
def test_what_is_neither_option_nor_override_is_refused(rest, capsys):
    with pytest.raises(SystemExit) as caught:
        _parse(["eval", "c.yaml", "--out", "x.json", *rest])
    assert caught.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "noted"),
    [(["x.yaml", "--resume"], "2"), (["--train.num_steps=3"], "2"), ([], "2"), (["--help"], None)],
    ids=str,
)
def test_wrong_words_are_noted_for_the_batch_script(words, noted, tmp_path, monkeypatch):
    """Where it gets srun's 137 in their place, it requeues the job."""
    monkeypatch.setenv("MEGATRON_TLT_ATTEMPT", str(tmp_path))
    with pytest.raises(SystemExit):
        main(["train", *words])
    assert [file.read_text().strip() for file in tmp_path.iterdir()] == ([] if noted is None else [noted])


@pytest.mark.parametrize("words", [["c.yaml", "--train.num_steps=3"], ["--train.num_steps=3"]])
def test_a_setting_that_is_written_as_an_option_is_explained(words, capsys):
    with pytest.raises(SystemExit) as caught:
        _parse(["train", *words])
    said = "megatron-tlt: --train.num_steps=3: settings are written train.num_steps=3, without --\n"
    assert (caught.value.code, capsys.readouterr().err) == (2, said)


def options_of(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.Action]]:
    """Every option of a command and of those within it, with the words before it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                yield from options_of(command, f"{name} {word}".strip())
        else:
            yield f"{name} {action.dest}", action


def test_help_has_the_exit_codes_and_each_default():
    parser = _parser()
    said = " ".join(parser.format_help().split())
    codes = [value for name, value in vars(exit_codes).items() if name.isupper()]
    assert "Runs one command" not in said and len(codes) == 5 and all(f" {code} " in said for code in codes)
    options = dict(options_of(parser))
    valued = {name: option for name, option in options.items() if isinstance(option.default, int | float | str)}
    silent = [name for name, option in valued.items() if "default" not in (option.help or "") and option.nargs != 0]
    assert "generate seed" in valued and silent == []


def test_generate_takes_engine_settings_only(capsys):
    command = ["generate", "--model", "m", "--prompts", "p", "--out", "o"]
    args = _parse([*command, "rollout.numerics=invariant", "--n", "2", "rollout.speculation.drafter=suffix"])
    assert args.overrides == ["rollout.numerics=invariant", "rollout.speculation.drafter=suffix"]
    assert main([*command, "train.num_steps=1"]) == 2
    assert "must look like rollout.key=value" in capsys.readouterr().err
    unread = ["temperature=0", "tp=2", "carry_over=8", "schedule=static"]
    assert main([*command, *(f"rollout.{setting}" for setting in unread)]) == 2
    said = capsys.readouterr().err
    assert said.count("not read by generate") == len(unread)
    assert main([*command, "rollout.speculation.drafter=eagle"]) == 2
    assert "rollout.speculation.drafter_path" in capsys.readouterr().err


def test_several_greedy_responses_to_one_prompt_need_an_environment():
    command = ["generate", "--model", "m", "--prompts", "p", "--out", "o", "--temperature", "0"]
    found = {n: [p.path for p in argument_problems(_parse([*command, "--n", n]))] for n in ("1", "2")}
    assert found == {"1": [], "2": ["--n"]}
    assert argument_problems(_parse([*command, "--n", "2", "--env", "calculator"])) == []


def test_a_file_is_replaced_only_where_it_is_asked_to(tmp_path, capsys):
    out, stats = tmp_path / "o.jsonl", tmp_path / "s.json"
    command = ["generate", "--model", "m", "--prompts", "p", "--out", str(out), "--stats", str(stats)]
    for file in (out, stats):
        file.write_text("dear")
        assert main(command) == 2
        assert f"= '{file}': exists: --overwrite replaces it" in capsys.readouterr().err
    assert main(["eval", "configs/quickstart.yaml", "--out", str(out)]) == 2
    assert f"--out = '{out}': exists: --overwrite replaces it" in capsys.readouterr().err
    assert out.read_text() == stats.read_text() == "dear"
    problems = argument_problems(_parse([*command, "--overwrite"]))
    assert [p.path for p in problems] == ["--out", "--stats"], "neither is an output of generate"
    out.write_text('{"prompt_index": 0, "sample_index": 0, "text": "a"}\n')
    stats.write_text('{\n "steps": 3,\n "prefill_steps": 1}\n')
    assert argument_problems(_parse([*command, "--overwrite"])) == []


def test_check_reports_and_shows_the_configuration_where_it_is_asked_to(capsys, monkeypatch):
    assert main(["check", "configs/quickstart.yaml"]) == 0
    report = capsys.readouterr().out
    assert report.startswith("Ranks: 2 =") and "micro_batch_tokens" not in report
    assert main(["check", "configs/quickstart.yaml", "--show-config"]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith(report) and "  micro_batch_tokens: 4096" in shown
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    assert main(["check", "configs/quickstart.yaml"]) == 0
    assert capsys.readouterr().out == "", "rank 0 prints it"


def test_two_runs_are_printed_and_have_no_page(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1, "time/step": 2.0}\n')
    command = ["report", str(tmp_path), str(tmp_path)]
    assert main(command) == 0 and "They are equally fast: 2 s" in capsys.readouterr().out
    assert main([*command, "-o", str(tmp_path / "r.html")]) == 2
    assert "a comparison is printed" in capsys.readouterr().err and not (tmp_path / "r.html").exists()


def test_characters_that_the_output_lacks_end_no_command(tmp_path, monkeypatch):
    runs = [str(write_run(tmp_path / name, pace=pace)) for name, pace in (("slow", 2.0), ("fast", 1.0))]
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert main(["report", *runs]) == 0
    sys.stdout.seek(0)
    assert "? as fast (" in sys.stdout.read()


def test_a_timeline_reads_no_responses(tmp_path, capsys):
    run, out = write_run(tmp_path / "r"), tmp_path / "t.json.gz"
    for name in ("samples.jsonl", "rollouts.jsonl"):
        (run / name).write_text("[1]\n")
    assert main(["timeline", str(run), "-o", str(out)]) == 0
    assert out.exists() and capsys.readouterr().err == ""


def test_a_closed_pipe_prints_no_error(tmp_path):
    (tmp_path / "status").mkdir()
    command = f"'{sys.executable}' -m megatron_tlt status '{tmp_path}' --json"
    shell = f"{{ sleep 0.1; exec {command}; }} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report", "RUN/nowhere"], "must be a directory"),
        (["timeline", "RUN", "--steps", "²"], "must look like 4 or 3-5"),
        (["timeline", "RUN"], "has no event logs"),
        (["status", "RUN/nowhere"], "must be the directory of a run"),
        (["status", "RUN/metrics.jsonl"], "must be the directory of a run"),
    ],
)
def test_those_who_look_at_runs_name_what_is_wrong(tmp_path, capsys, arguments, said):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert main([text.replace("RUN", str(tmp_path)) for text in arguments]) == 2
    assert said in capsys.readouterr().err


INTERRUPTED = """
import os, runpy, signal, sys
class Finder:
    def find_spec(name, path, target=None, stop=sys.argv[1]):
        if name == stop:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
sys.argv = ["megatron-tlt", "eval", "configs/quickstart.yaml"]
runpy.run_module("megatron_tlt", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "rank", "said"),
    [
        ("torch", "0", "megatron-tlt: ended by Ctrl-C\n"),
        ("torch", "1", ""),
        ("megatron_tlt.cli.export", "0", ""),  # before there is a command
    ],
)
def test_ctrl_c_in_an_import_is_one_line(module, rank, said):
    """Of the first rank, and without tearing down an interpreter that has half of torch."""
    command, environment = [sys.executable, "-c", INTERRUPTED, module], os.environ | {"PMI_SIZE": "2", "PMI_RANK": rank}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said)
