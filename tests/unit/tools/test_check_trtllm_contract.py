"""The comparison of an installation with a contract, on fake installations that differ in one name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from check_trtllm_contract import differences, unseen

from tests.helpers.mpi import ROOT
from tests.helpers.trtllm_engines import CONTRACTS, fake_python
from tests.helpers.trtllm_fake.contract import Contract
from tests.helpers.trtllm_fake.package import install, uninstall

FILES = sorted(CONTRACTS.glob("*.json"))


def compared(contract: Contract, installed: Contract) -> list[str]:
    try:
        install(installed, {})
        return list(differences(contract.data))
    finally:
        uninstall()


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_an_installation_of_the_contract_has_everything(path: Path) -> None:
    contract = Contract.load(path)
    assert compared(contract, contract) == []
    assert {"RequestOutput", "stats", "attributes of WorkerExtension"} <= set(unseen(contract.data))


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("classes", "KvCacheConfig"), "class tensorrt_llm.llmapi.KvCacheConfig: missing"),
        (("classes", "AsyncLLM", "fields", "max_input_len"), "AsyncLLM.max_input_len: no such field"),
        (("classes", "SamplingParams", "fields", "min_p"), "SamplingParams.min_p: no such field"),
        (("classes", "AsyncLLM", "methods", "release"), "AsyncLLM.release(): missing"),
        (
            ("classes", "AsyncLLM", "methods", "generate_async", "params", "inputs"),
            "AsyncLLM.generate_async(inputs): no such parameter",
        ),
        (
            ("functions", "get_device_uuid"),
            "function tensorrt_llm._torch.utils.get_device_uuid: missing",
        ),
    ],
)
def test_a_missing_name_is_listed(path: tuple[str, ...], line: str) -> None:
    contract = Contract.load(FILES[0])
    assert compared(contract, contract.renamed(path)) == [line]


def test_a_python_without_tensorrt_llm_is_one_line_of_error() -> None:
    command = [sys.executable, "-S", str(ROOT / "tools/check_trtllm_contract.py"), str(FILES[0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "cannot import tensorrt_llm" in done.stderr


def test_the_command(tmp_path: Path) -> None:
    def run(contract: Path) -> subprocess.CompletedProcess[str]:
        command = [fake_python(tmp_path), str(ROOT / "tools" / "check_trtllm_contract.py"), str(contract)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    good, other = run(FILES[0]), run(FILES[1])
    assert good.returncode == 0
    assert "all recorded names of 1.2.1 are there" in good.stdout
    assert other.returncode == 1
    assert "version: 1.2.1 is installed, the contract is of 1.3.0rc27" in other.stdout
    assert "class tensorrt_llm.llmapi.Eagle3DecodingConfig: missing" in other.stdout
