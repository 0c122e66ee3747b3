"""What a signal to end does to a run."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat

from megatron_tlt.config.base import Section


class ShutdownSection(Section):
    """SIGUSR1 (a warning) and SIGTERM: the step is finished or dropped, a checkpoint written, exit code 75."""

    warning_s: PositiveFloat = 150.0
    """Seconds from SIGUSR1 until every rank must be gone; less than the lead time of `sbatch --signal`."""
    term_s: PositiveFloat = 20.0
    """Seconds from SIGTERM until every rank must be gone; less than the site's KillWait (30 by default)."""
    save_s: NonNegativeFloat = 10.0
    """Seconds to allow for the checkpoint: a step that would leave less is dropped."""
