"""The record of Bailing-Hybrid, the architecture of Ling 3."""

from functools import partial

from ..family import Family, Own
from ..sizes import latent_sizes


BAILING_HYBRID = Family(
    "bailing_hybrid",
    Own(),
    since="5.20",
    title="Bailing-Hybrid",
    experts="BailingHybridExperts",
    # The projections to the decay and the write strength of the delta rule.
    sensitive=("f_proj", "b_proj"),
    rule="kimi_delta_rule",
    has_graphs=True,
    sizes=partial(latent_sizes, low_rank_gates=False, has_gate=True),
)
