"""Whole models through this package's Triton kernels, interpreted: all ops except attention and the rule."""

import copy
from unittest import mock

import torch
from mixins import vision
from mixins.model import gradients, total_relative_error
from mixins.triton import InterpretedKernelsTest
from mixins.vision import ROPE, TINY
from parameterized import parameterized
from transformers import Qwen3_5TextConfig, Qwen3NextConfig, Qwen4ExpTextConfig, set_seed

from transformers_packed.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from transformers_packed.models.qwen3_next.modeling_qwen3_next import Qwen3NextForCausalLM
from transformers_packed.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM
from transformers_packed.ops import dispatch, implementations_used


SIZES = TINY | {"vocab_size": 61, "num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False}
SIZES |= {"linear_key_head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2}
# Each kind of layer precedes and follows the other one.
LAYERS = ["linear_attention", "full_attention", "linear_attention"]
EXPERTS = vision.EXPERTS | {"num_experts": 2}
# The longest document has more tokens than the budget of the indexer.
QWEN4_EXP = EXPERTS | {
    "output_gate_type": "sigmoid",
    "hc_lowrank": 8,
    "ple_layer_ids": [1],
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 64,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1,
    "eos_token_id": 2,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "rope_parameters": ROPE,
}
FAMILIES = {
    "qwen3_5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, {}),
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig, EXPERTS),
    "qwen4_exp": (Qwen4ExpForCausalLM, Qwen4ExpTextConfig, QWEN4_EXP),
}


HOWS = ("hooked", "hooked_norm")


class FusedLayersTest(InterpretedKernelsTest):
    @parameterized.expand([*((family, "plain") for family in FAMILIES), *(("qwen3_5", how) for how in HOWS)])
    def test_gradients_equal_those_of_the_torch_forms(self, family, how):
        cls, config_class, options = FAMILIES[family]
        seen = []
        set_seed(0)
        # The first model tests the order of layers.
        layers = LAYERS if family == "qwen3_5" and how == "plain" else LAYERS[:2]
        config = config_class(**SIZES | options | {"num_hidden_layers": len(layers), "layer_types": layers})
        model = cls._from_config(config, attn_implementation="sdpa").train()
        ids = torch.randint(1, 61, (1, 12), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": ids, "labels": ids, "cu_seqlens": torch.tensor([0, 3, 4, 12])}
        with mock.patch("transformers_packed.ops.backends.triton.on_gpu", lambda tensor: False):
            plain = copy.deepcopy(model)
            expected = gradients(plain, plain(**batch).loss)
        if how == "hooked":
            for module in model.model.modules():
                if isinstance(module, torch.nn.Linear):
                    module.register_forward_hook(lambda *args: None)
        elif how == "hooked_norm":
            norm = model.model.layers[0].linear_attn.norm
            norm.register_forward_hook(lambda *args: seen.append(norm))
        dispatch._used.clear()
        got = gradients(model, model(**batch).loss)
        self.assertEqual(len(seen), how == "hooked_norm")
        self.assertLess(total_relative_error(got, expected), 1e-5)
        ran = {op for op, names in implementations_used().items() if "triton" in names}
        shared = {"causal_conv1d_qkv", "gated_delta_gates", "linear_cross_entropy", "qk_norm_rope", "rms_norm"}
        streams = {"add_to_streams", "mix_streams", "stream_gates"} if family == "qwen4_exp" else set()
        self.assertLessEqual(shared | streams, ran)
        with_a_layer = {"gated_rms_norm_linear", "sigmoid_gate_linear", "swiglu_linear"}
        without = {"gated_rms_norm", "sigmoid_gate", "swiglu"}
        wanted, unwanted = (without, with_a_layer) if how == "hooked" else (with_a_layer, without)
        if how == "hooked_norm":
            wanted, unwanted = wanted - {"gated_rms_norm_linear"}, unwanted - {"gated_rms_norm"}
        self.assertLessEqual(wanted, ran)
        self.assertFalse(unwanted & ran)
