"""The record of Qwen3-Next."""

from functools import partial

from ..family import Family, Own
from ..sizes import qwen_sizes


QWEN3_NEXT = Family(
    "qwen3_next",
    Own(),
    title="Qwen3-Next",
    methods=("Qwen3NextGatedDeltaNet.fix_query_key_value_ordering",),
    experts="Qwen3NextExperts",
    # Those of the shared expert.
    taken_for_experts=("gate_proj", "up_proj", "down_proj"),
    # The projection to the decay and the write strength of the delta rule, and the gate of the shared expert.
    sensitive=("in_proj_ba", "shared_expert_gate"),
    implies_head=True,
    has_mtp=True,
    has_graphs=True,
    has_float8=True,
    sizes=partial(qwen_sizes, together=True, mlp_linear_layers=0),
)
