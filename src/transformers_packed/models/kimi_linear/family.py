"""The record of Kimi Linear."""

from ..family import Family, Own


KIMI_LINEAR = Family(
    "kimi_linear",
    Own(),
    since="5.20",
    title="Kimi-Linear",
    required=("KimiLinearForgetGate", "apply_mask_to_padding_states", "eager_attention_forward"),
    experts="KimiLinearExperts",
    # The projections to the decay and the write strength of the delta rule.
    sensitive=("f_a_proj", "f_b_proj", "b_proj"),
    rule="kimi_delta_rule",
)
