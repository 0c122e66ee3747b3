"""All kinds of trained drafters by name. A new kind is a folder beside this file, a line here, and its facts."""

from __future__ import annotations

from typing import Any

from megatron_tlt.drafters.base import DrafterKind
from megatron_tlt.drafters.dspark.kind import DSparkKind
from megatron_tlt.drafters.eagle.kind import EagleKind
from megatron_tlt.drafters.eagle3.kind import Eagle3Kind

_ALL: tuple[DrafterKind[Any, Any], ...] = EagleKind(), Eagle3Kind(), DSparkKind()
KINDS = {kind.facts.name: kind for kind in _ALL}
