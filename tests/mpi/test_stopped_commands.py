"""`generate` and `eval` on two ranks that were killed: the same command goes on from the finished responses."""

import json
import os

import pytest

from tests.helpers.mpi import run_ranks
from tests.helpers.runs import FAULTS, write_config

KILLED = [FAULTS, json.dumps({"cached": [0, 1, 3]})]  # by rank 0's third response


@pytest.mark.parametrize("name", ["generate", "eval"])
def test_a_command_that_was_killed_goes_on(name, tmp_path):
    config, folder = write_config(tmp_path), tmp_path / "results"
    files = ["--model", tmp_path / "model", "--prompts", tmp_path / "heldout.jsonl"]
    command = {"generate": [*files, "--max-tokens", 12, "--chat", "--n", 2], "eval": [config]}[name]

    def run(program, out, **options):
        words = [*program[1:], name, *command, "--out", folder / out]
        return run_ranks(2, program[0], *map(str, words), **options)

    run([["-m", "megatron_tlt"]], "whole")
    assert run(KILLED, "out", check=False).returncode != 0
    assert os.listdir(folder / "out.unfinished") == ["step-000001"] and not (folder / "out").exists()
    said = run([["-m", "megatron_tlt"]], "out").stdout
    (reused,) = (int(line.split()[1]) for line in said.splitlines() if line.startswith("reuses "))
    assert 3 <= reused < 16 and f" of 16 responses, which earlier starts have left in {folder}/out.unf" in said
    assert (folder / "out").read_bytes() == (folder / "whole").read_bytes()
    assert sorted(os.listdir(folder)) == ["out", "whole"]
