import inspect
import unittest
from unittest import mock

import numpy as np
import torch
from parameterized import parameterized
from transformers import DataCollatorWithFlattening, OlmoHybridConfig, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen4_exp import modeling_qwen4_exp
from transformers.utils.generic import TransformersKwargs, accepts_precomputed_kwargs


SEQUENCES = [{"input_ids": [1, 2, 3]}, {"input_ids": torch.tensor([4])}, {"input_ids": np.array([5, 6])}]


class CollatorCuSeqlensTest(unittest.TestCase):
    @parameterized.expand([("pt", torch.int32), ("np", np.int32)])
    def test_cu_seqlens(self, return_tensors, dtype):
        collator = DataCollatorWithFlattening(return_cu_seqlens=True, return_tensors=return_tensors)
        batch = collator(SEQUENCES)
        self.assertEqual(batch["cu_seqlens"].tolist(), [0, 3, 4, 6])
        self.assertEqual(batch["cu_seqlens"].dtype, dtype)
        self.assertEqual(set(batch), {"input_ids", "labels", "position_ids", "cu_seqlens"})

    def test_same_boundaries_as_flash_attention(self):
        batch = DataCollatorWithFlattening(return_cu_seqlens=True, return_flash_attn_kwargs=True)(SEQUENCES)
        self.assertEqual(batch["cu_seqlens"].tolist(), batch["cu_seq_lens_q"].tolist())

    def test_named_in_transformers_kwargs(self):
        self.assertIn("cu_seqlens", TransformersKwargs.__annotations__)

    def test_text_boundaries_stay_out_of_vision_towers(self):
        class Model:
            @accepts_precomputed_kwargs("image")
            def get_image_features(self, pixel_values, **kwargs):
                return kwargs

        kwargs = Model().get_image_features(None, cu_seqlens="text", cu_seq_lens_q="text", other=1)
        self.assertEqual(kwargs, {"other": 1})

    def test_unchanged_default(self):
        batch = DataCollatorWithFlattening()(SEQUENCES)
        self.assertEqual(set(batch), {"input_ids", "labels", "position_ids"})

    def test_unchanged_prefixed_vision_kwargs(self):
        class Model:
            @accepts_precomputed_kwargs("image")
            def get_image_features(self, pixel_values, **kwargs):
                return kwargs

        self.assertEqual(Model().get_image_features(None, image_cu_seqlens="image"), {"cu_seqlens": "image"})


TINY = {"hidden_size": 32, "num_hidden_layers": 1, "layer_types": ["linear_attention"]}
OLMO = {"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
OLMO["layer_types"] = ["linear_attention", "full_attention"]
BLOCKS = [
    ("qwen3_next", modeling_qwen3_next, "Qwen3NextGatedDeltaNet", Qwen3NextConfig),
    ("qwen3_5", modeling_qwen3_5, "Qwen3_5GatedDeltaNet", Qwen3_5TextConfig),
    ("qwen3_5_moe", modeling_qwen3_5_moe, "Qwen3_5MoeGatedDeltaNet", modeling_qwen3_5_moe.Qwen3_5MoeTextConfig),
    ("qwen4_exp", modeling_qwen4_exp, "Qwen4ExpTextGatedDeltaNet", modeling_qwen4_exp.Qwen4ExpTextConfig),
    ("olmo_hybrid", modeling_olmo_hybrid, "OlmoHybridGatedDeltaNet", lambda **tiny: OlmoHybridConfig(**tiny | OLMO)),
]


class GatedDeltaNetArgumentsTest(unittest.TestCase):
    def run_block(self, modeling, name, config_class, **boundaries):
        """Return the boundaries that reach the convolution and the delta rule of a block."""
        torch.manual_seed(0)
        block = getattr(modeling, name)(config_class(**TINY), layer_idx=0)
        told = {}

        def recorder(function):
            reference = inspect.unwrap(function)

            def record(*args, **kwargs):
                told[reference.__name__] = {n: kwargs.get(n) for n in ("seq_idx", "cu_seqlens")}
                return reference(*args, **kwargs)

            return record

        names = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
        with mock.patch.multiple(modeling, **{name: recorder(getattr(modeling, name)) for name in names}):
            output = block(torch.randn(1, 7, 32), **boundaries)
        self.assertEqual(output.shape, (1, 7, 32))
        return [told[name] for name in names]

    @parameterized.expand(BLOCKS)
    def test_block_takes_boundaries(self, _, modeling, name, config_class):
        signature = inspect.signature(getattr(modeling, name).forward).parameters
        self.assertTrue({"seq_idx", "cu_seqlens"} <= set(signature))
        seq_idx = torch.tensor([[0, 0, 0, 1, 1, 1, 1]], dtype=torch.int32)
        cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
        for function in self.run_block(modeling, name, config_class, seq_idx=seq_idx, cu_seqlens=cu_seqlens):
            self.assertIs(function["seq_idx"], seq_idx)
            self.assertIs(function["cu_seqlens"], cu_seqlens)

    @parameterized.expand(BLOCKS)
    def test_block_prefers_its_own_argument(self, _, modeling, name, config_class):
        own, flash = (torch.tensor([0, n, 7], dtype=torch.int32) for n in (3, 4))
        _, rule = self.run_block(modeling, name, config_class, cu_seqlens=own, cu_seq_lens_q=flash)
        self.assertIs(rule["cu_seqlens"], own)

    @parameterized.expand(BLOCKS)
    def test_unchanged_flash_attention_kwargs(self, _, modeling, name, config_class):
        seq_idx = torch.tensor([[0, 0, 0, 1, 1, 1, 1]], dtype=torch.int32)
        flash = torch.tensor([0, 3, 7], dtype=torch.int32)
        convolution, rule = self.run_block(modeling, name, config_class, seq_idx=seq_idx, cu_seq_lens_q=flash)
        self.assertIs(convolution["seq_idx"], seq_idx)
        self.assertIs(rule["cu_seqlens"], flash)

    @parameterized.expand(BLOCKS)
    def test_unchanged_without_boundaries(self, _, modeling, name, config_class):
        for function in self.run_block(modeling, name, config_class):
            self.assertEqual(function, {"seq_idx": None, "cu_seqlens": None})


if __name__ == "__main__":
    unittest.main()
