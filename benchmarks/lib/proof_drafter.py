"""`proof.py`'s part drafter: accepted length by RL step of a drafter that starts from nothing, on the proof's workload.

It is made from a layer of the policy and trained in idle time, with default settings; what it should reach is the demo
drafter, which knows these tasks and is left as it is. Both always draft the same number of tokens, and responses never
depend on the drafter, so in one step both draft the same responses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lib.idle_keepup import DEMO_START, FROM_NOTHING, RANDOM_STEPS, drafting_options, picture
from lib.training_runs import Rows, train

if TYPE_CHECKING:
    from proof import Bench

HIDDEN = 256  # 9.5M parameters: eleven steps of it take two minutes
GOAL = 0.95  # of the demo drafter's accepted length, after ten times of training


def from_nothing(bench: Bench) -> tuple[Rows, dict[str, float]]:
    """A row a curve, and the share that is reached after each step; writes the picture beside that of `main`."""
    policy, *_ = bench.policy(HIDDEN)
    drafter = bench.work / f"drafter-{HIDDEN}"
    rows, lengths = [], {}
    for name, path in ((FROM_NOTHING, None), (DEMO_START, drafter)):
        options = [policy, *drafting_options(path, trained=path is None), *bench.args.options]
        timed = train(bench.work / "from-nothing", bench.config, RANDOM_STEPS, bench.args.ranks, options)
        lengths[name] = [row["spec/accept_length"] for row in timed]
        kept = {key: [row.get(key, 0.0) for row in timed] for key in ("drafter/steps", "idle/recovered_seconds")}
        rows.append({"part": "drafter", "drafter": name, "hidden": HIDDEN, "accept_length": lengths[name], **kept})
    share = lengths[FROM_NOTHING][-1] / lengths[DEMO_START][-1]
    outcome = "met" if share >= GOAL else "MISSED"
    print(f"drafter from nothing, share of the demo drafter: {share:.3f}  goal {GOAL}: {outcome}", flush=True)
    if bench.args.picture is not None:
        bench.args.picture.parent.mkdir(parents=True, exist_ok=True)
        bench.args.picture.with_name(f"{bench.args.picture.stem}-drafter.svg").write_text(picture(lengths))
    return rows, {"from_nothing_share": share, "from_nothing_micro_steps": sum(rows[0]["drafter/steps"])}
