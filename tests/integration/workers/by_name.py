"""`megatron-tlt ARGV`, or a script with its arguments, in a fork whose huggingface_hub reads the environment."""

import importlib
import runpy
import sys

from huggingface_hub import constants

importlib.reload(constants)  # imported by the process that was forked
if sys.argv[1].endswith(".py"):
    sys.argv = sys.argv[1:]
    sys.path.insert(0, "tools")
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    from megatron_tlt.cli.main import main

    sys.exit(main(sys.argv[1:]))
