import unittest

from common.families import tiny_config
from mixins.model import PackedModelTesterMixin, PackedVariantTesterMixin
from mixins.padding import PackedPaddingTesterMixin
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as builtin

from transformers_packed.models.olmo_hybrid import modeling_olmo_hybrid as packed


class OlmoHybridVariantTest(PackedPaddingTesterMixin, PackedVariantTesterMixin, unittest.TestCase):
    """Keys and values of the delta rule differ in size."""

    builtin_class = builtin.OlmoHybridForCausalLM
    packed_class = packed.OlmoHybridForCausalLM
    # Rounding: in float32, the gradients of the stock class are 4e-7 from those in float64, and more of a short row.
    gradient_bar = 5e-6
    options = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "linear_allow_neg_eigval": False}

    def get_config(self):
        sizes = {"linear_value_head_dim": 16, "linear_num_key_heads": 4, "initializer_range": 0.02}
        return tiny_config("olmo_hybrid", **sizes, **self.options)


class OlmoHybridModelTest(OlmoHybridVariantTest, PackedModelTesterMixin):
    """Released checkpoints have no rotary embedding."""

    options = {}
