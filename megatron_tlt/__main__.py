"""`python -m megatron_tlt`; ranks start as `python -m mpi4py -m megatron_tlt`."""

import sys

from megatron_tlt.cli.main import main

sys.exit(main())
