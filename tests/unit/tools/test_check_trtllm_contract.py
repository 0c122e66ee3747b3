"""The comparison of an installation with a contract, on fake installations that differ in one name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from check_trtllm_contract import differences, unseen
from trtllm_signatures import source_differences

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


SOURCES = {
    "llmapi/llm_args.py": """
class Strict(BaseModel):
    pass
class Base(Strict):
    max_len: int = Field(default=3, validation_alias=AliasChoices("max_len", "longest"))
class TorchLlmArgs(Base):
    model: str
class KvCacheConfig(Strict):
    dtype: str = "auto"
""",
    "llmapi/llm.py": """
class LLM:
    def __init__(self, model: str, dtype: str = "auto", **kwargs): ...
    async def generate(self, inputs, *, seed=0): ...
class AsyncLLM(LLM):
    def release(self, tags): self.engine.free(tags)
""",
    "broken.py": "def (",
}


def test_sources_are_compared_without_an_import(tmp_path: Path) -> None:
    """Inherited fields and methods, aliases, keyword-only parameters, arguments that are passed on."""
    for name, text in SOURCES.items():
        path = tmp_path / "tensorrt_llm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    fields = {name: {} for name in ("model", "max_len", "longest", "dtype", "missing")}
    methods = {"release": {"tags": {}}, "generate": {"inputs": {}, "seed": {}, "n": {}}, "resume": {}}
    contract = {
        "classes": {
            "AsyncLLM": {
                "module": "m",
                "fields": fields,
                "methods": {name: {"params": params} for name, params in methods.items()},
            },
            "KvCacheConfig": {"module": "m", "fields": {"dtype": {}, "max_len": {}}},
            "Gone": {"module": "m"},
            "Engine": {"methods": {}},
        }
    }
    assert list(source_differences(contract, tmp_path)) == [
        "AsyncLLM.missing: no such field",
        "AsyncLLM.generate(n): no such parameter",
        "AsyncLLM.resume(): missing",
        "KvCacheConfig.max_len: no such field",
        "class Gone: in no file",
    ]
    (tmp_path / "c.json").write_text(json.dumps(contract))
    command = [sys.executable, str(ROOT / "tools/check_trtllm_contract.py"), str(tmp_path / "c.json")]
    done = subprocess.run([*command, "--sources", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "class Gone: in no file" in done.stdout


def test_a_contract_is_written_from_sources(tmp_path: Path) -> None:
    """What they lack goes, what they have comes with its default, and a fake of it has all that it says."""
    for name, text in (SOURCES | {"version.py": '__version__ = "1.4.0"'}).items():
        path = tmp_path / "tensorrt_llm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    known = Contract.load(FILES[0]).data
    (tmp_path / "old.json").write_text(json.dumps(known))
    command = [sys.executable, str(ROOT / "tools/check_trtllm_contract.py"), str(tmp_path / "old.json")]
    command += ["--sources", str(tmp_path), "--write", str(tmp_path / "new.json"), "--commit", "0" * 40]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "class SamplingParams: in no file" in done.stdout
    made = json.loads((tmp_path / "new.json").read_text())
    assert made["version"] == "1.4.0" and made["commit"] == "0" * 40
    assert list(source_differences(made, tmp_path)) == []
    of_engine, of_cache = made["classes"]["AsyncLLM"], made["classes"]["KvCacheConfig"]
    assert of_engine["methods"] == {"release": {"params": {"tags": {}}}}
    assert of_engine["fields"]["max_len"] == {"type": "any", "default": 3}
    assert of_engine["fields"]["model"] == {"type": "str", "required": True}
    assert of_cache["fields"].keys() == {"dtype"} and of_cache["fields"]["dtype"]["default"] == "auto"
    assert {"SamplingParams", "Eagle3DecodingConfig"}.isdisjoint(made["classes"]) and "RequestOutput" in made["classes"]
    fake = Contract(made)
    assert compared(fake, fake) == []


def test_a_record_has_signatures_and_no_code(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCES["llmapi/llm.py"])
    command = [sys.executable, str(ROOT / "tools/trtllm_signatures.py"), str(tmp_path), "a.py"]
    subprocess.run(
        [*command, "--commit", "0" * 40, "--out", str(tmp_path / "r.json")], check=True, timeout=60
    )
    classes = json.loads((tmp_path / "r.json").read_text())["files"]["a.py"]["classes"]
    assert classes["AsyncLLM"]["bases"] == ["LLM"] and classes["AsyncLLM"]["reached"] == [
        "engine",
        "engine.free",
    ]
    start = classes["LLM"]["methods"]["__init__"]
    assert start == {"params": {"model": None, "dtype": "'auto'"}, "decorators": [], "takes_more": True}
    assert classes["LLM"]["methods"]["generate"]["params"] == {"inputs": None, "seed": "0"}
