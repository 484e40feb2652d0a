"""The record of OLMo-Hybrid."""

from ..family import Family, Own
from ..sizes import olmo_sizes


OLMO_HYBRID = Family(
    "olmo_hybrid",
    Own(),
    since="5.20",
    title="OLMo-Hybrid",
    # The projections to the decay and the write strength of the delta rule.
    sensitive=("a_proj", "b_proj"),
    has_graphs=True,
    # Those of attention are of stock classes.
    has_host_layers=False,
    sizes=olmo_sizes,
)
