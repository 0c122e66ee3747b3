"""The torch-free set of docs/architecture.md imports where importing torch raises."""

import subprocess
import sys

TORCH_FREE = [
    "megatron_tlt.errors",
    "megatron_tlt.types",
    "megatron_tlt.interfaces",
    "megatron_tlt.config.load",
    "megatron_tlt.config.planning.report",
    "megatron_tlt.observe.events",
    "megatron_tlt.observe.jsonl",
    "megatron_tlt.observe.log",
    "megatron_tlt.observe.progress",
    "megatron_tlt.observe.samples",
    "megatron_tlt.observe.rollouts",
    "megatron_tlt.observe.curves",
    "megatron_tlt.observe.report",
    "megatron_tlt.observe.report_compare",
    "megatron_tlt.observe.timeline",
    "megatron_tlt.observe.summary",
    "megatron_tlt.config.dims",
    "megatron_tlt.distributed.launch",
    "megatron_tlt.resilience.signals",
    "megatron_tlt.observe.attempt",
    "megatron_tlt.data.packing",
    "megatron_tlt.models.hf_files",
    "megatron_tlt.rollout.request",
    "megatron_tlt.rollout.scheduler",
    "megatron_tlt.rollout.block_manager",
    "megatron_tlt.rollout.spec.selector",
    "megatron_tlt.idle.state",
    "megatron_tlt.idle.policy",
    "megatron_tlt.idle.coordinator",
    "megatron_tlt.idle.window",
    "megatron_tlt.resilience.watchdog_client",
    "megatron_tlt.resilience.watchdog",
    "megatron_tlt.cli.status",
    "megatron_tlt.sim.modes",
    "megatron_tlt.sim.report",
    "megatron_tlt.sim.tables",
    "megatron_tlt.cli.simulate",
]

SCRIPT = """
import importlib, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "megatron", "transformers"):
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, NoTorch())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_the_set_imports_without_torch():
    command = [sys.executable, "-c", SCRIPT, *TORCH_FREE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
