"""The torch-free set of docs/design/architecture.md imports where importing torch raises."""

import subprocess
import sys

# Of a package every module.
TORCH_FREE = """\
errors types interfaces config data idle sim cli.status cli.simulate
observe.attempt observe.curves observe.events observe.log observe.progress observe.report observe.report_compare
observe.rollouts observe.summary observe.timeline
distributed.launch distributed.mpi resilience.signals resilience.heartbeat resilience.watchdog models.hf.files
rollout.request rollout.scheduler rollout.block_manager rollout.speculation.selector
"""

SCRIPT = """
import importlib, pkgutil, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "megatron", "transformers"):
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, NoTorch())
for name in sys.argv[1:]:
    module = importlib.import_module(f"megatron_tlt.{name}")
    for inside in pkgutil.walk_packages(getattr(module, "__path__", []), f"{module.__name__}."):
        importlib.import_module(inside.name)
"""


def test_the_set_imports_without_torch():
    command = [sys.executable, "-c", SCRIPT, *TORCH_FREE.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
