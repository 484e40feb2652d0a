"""The record of Qwen3.5-MoE. Qwen3.6 and Qwen3.8 have its classes and its model type."""

from ..family import Family, Own
from ..sizes import qwen_sizes


QWEN3_5_MOE = Family(
    "qwen3_5_moe",
    Own(),
    title="Qwen3.5/3.6/3.8-MoE",
    experts="Qwen3_5MoeExperts",
    # Those of Qwen3.5, and the gate of the shared expert.
    sensitive=("in_proj_a", "in_proj_b", "shared_expert_gate"),
    takes_images=True,
    has_mtp=True,
    has_graphs=True,
    has_float8=True,
    sizes=qwen_sizes,
)
