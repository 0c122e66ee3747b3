"""`python -m megatron_tlt`; ranks start as `python -m mpi4py -m megatron_tlt`."""

import os
import sys

try:
    from megatron_tlt.cli.main import main
except KeyboardInterrupt:
    os._exit(130)  # `exit_codes.INTERRUPTED`, as from `main`

sys.exit(main())
