import unittest

from mixins.model import PackedModelTesterMixin, PackedVariantTesterMixin
from mixins.padding import PackedPaddingTesterMixin
from mixins.shared_code import SharedModelTesterMixin
from mixins.vision import TEXT, TINY, PackedVisionTesterMixin, vision_config
from transformers import Qwen3_5Config, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as builtin

from transformers_packed.models.qwen3_5 import modeling_qwen3_5 as packed


def tiny_config(**kwargs) -> Qwen3_5TextConfig:
    sizes = TINY | {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
    return Qwen3_5TextConfig(**sizes | kwargs)


class Qwen3_5ModelTest(
    SharedModelTesterMixin,
    PackedPaddingTesterMixin,
    PackedModelTesterMixin,
    unittest.TestCase,
):
    builtin_class = builtin.Qwen3_5ForCausalLM
    packed_class = packed.Qwen3_5ForCausalLM
    get_config = staticmethod(tiny_config)


class Qwen3_5VisionTest(
    PackedPaddingTesterMixin, PackedVisionTesterMixin, PackedVariantTesterMixin, unittest.TestCase
):
    builtin_class = builtin.Qwen3_5ForConditionalGeneration
    packed_class = packed.Qwen3_5ForConditionalGeneration

    def get_config(self):
        return Qwen3_5Config(**vision_config(TEXT))
