"""The record of Qwen3.5. Qwen3.6 and Qwen3.8 have its classes and its model type."""

from ..family import Family, Own
from ..sizes import qwen_sizes


QWEN3_5 = Family(
    "qwen3_5",
    Own(also=(("AutoModelForTokenClassification", "Qwen3_5TextConfig", "Qwen3_5ForTokenClassification"),)),
    title="Qwen3.5/3.6/3.8",
    methods=(
        "Qwen3_5Model.compute_3d_position_ids",
        "Qwen3_5Model.get_image_features",
        "Qwen3_5Model.get_rope_index",
        "Qwen3_5Model.get_video_features",
    ),
    # The projections to the decay and the write strength of the delta rule.
    sensitive=("in_proj_a", "in_proj_b"),
    takes_images=True,
    has_mtp=True,
    has_graphs=True,
    has_float8=True,
    sizes=qwen_sizes,
)
