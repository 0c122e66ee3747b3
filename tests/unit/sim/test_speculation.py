import numpy as np

from tests.helpers.sim import ExactReplica, sim_config


class CountingCosts:
    """A second for every step, nothing for drafts."""

    def step(self, B, T, C, speculating):
        return 1.0

    def draft(self, kind, B, passes, nodes):
        return 0.0

    def prefill(self, tokens):
        return 0.0


def test_plain_decoding_takes_a_step_for_every_token_of_the_longest():
    config = sim_config("rollout.speculation.drafter=none")
    rollout = ExactReplica(config, CountingCosts(), (0,)).run([np.array([5, 9]), np.array([3])])
    assert rollout.seconds == 8.0  # the first token comes with the prompt
    assert rollout.lengths.sum() == 17


def test_a_drafter_that_is_always_right_divides_the_steps():
    config = sim_config(
        "rollout.speculation.drafter=eagle",
        "rollout.speculation.selector=fixed",
        "rollout.speculation.draft_len=3",
        "drafters.trained.rates=[0.999999999]",
    )
    rollout = ExactReplica(config, CountingCosts(), (0,)).run([np.array([41])])
    assert rollout.seconds == 10.0  # 40 tokens, 4 at a time
