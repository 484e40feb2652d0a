"""The record of Kimi Linear."""

from functools import partial

from ..family import Family, Own
from ..sizes import latent_sizes


KIMI_LINEAR = Family(
    "kimi_linear",
    Own(),
    since="5.20",
    title="Kimi-Linear",
    experts="KimiLinearExperts",
    # The projections to the decay and the write strength of the delta rule.
    sensitive=("f_a_proj", "f_b_proj", "b_proj"),
    rule="kimi_delta_rule",
    has_graphs=True,
    sizes=partial(latent_sizes, low_rank_gates=True, has_gate=False),
)
