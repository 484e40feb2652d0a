"""The record of Qwen4-Exp, the architecture of Qwen3.8-Flash-Next."""

from ..family import Family, Own


QWEN4_EXP = Family(
    "qwen4_exp",
    Own(),
    since="5.20",
    title="Qwen4-Exp",
    experts="Qwen4ExpTextExperts",
    # The projections to the decay and the write strength of the delta rule, and the gate of the shared expert.
    sensitive=("in_proj_a", "in_proj_b", "shared_expert_gate"),
    takes_images=True,
    has_indexer=True,
)
