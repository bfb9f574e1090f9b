"""Right loops of every kind are judged by all rules: none may warn."""

from __future__ import annotations

import pytest

from tests.rules.loops import everyday
from tests.rules.support import findings, loud

K4 = {"accumulation_steps": 4}

LOOPS = {
    "vae": (everyday.vae(), {}),
    "vae, four": (everyday.vae(4), K4),
    "truncated, one step": (everyday.truncated(False), {}),
    "distilled": (everyday.distilled(), K4),
    "distilled only": (everyday.distilled_only(), K4),
    "clipped by hand": (everyday.clipped_by_hand(), K4),
    "calibration skips": (everyday.calibration_skips(), K4),
    **{
        make.__name__: (make(), {})
        for make in (
            everyday.actor_critic,
            everyday.actor_and_critic,
            everyday.soft_actor_critic,
            everyday.ppo,
            everyday.truncated,
            everyday.gradient_penalty,
            everyday.critic_by_gradients,
            everyday.three_networks,
            everyday.half_weights,
            everyday.per_sample,
            everyday.cached_representations,
            everyday.combined_tasks,
            everyday.adversarial_examples,
            everyday.sparse_embedding,
            everyday.learned_weights,
            everyday.saliency_afterwards,
            everyday.mean_of_losses,
        )
    },
}


@pytest.mark.parametrize("name", LOOPS)
def test_no_rule_warns_of_a_right_loop(name: str) -> None:
    loop, declared = LOOPS[name]
    assert loud(findings(loop, declared)) == {}
