import contextlib
import inspect
import unittest
from unittest import mock

import torch
from parameterized import parameterized
from transformers import DataCollatorWithFlattening, KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.bailing_hybrid import modeling_bailing_hybrid
from transformers.models.bailing_hybrid.configuration_bailing_hybrid import BailingHybridConfig
from transformers.models.glm5_next import modeling_glm5_next
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.kimi_linear import modeling_kimi_linear


LENGTHS = (3, 1, 66)
SIZES = {"hidden_size": 32, "linear_head_dim": 8, "linear_num_heads": 2}
BLOCKS = [
    ("kimi_linear", modeling_kimi_linear, "KimiLinearDeltaAttention", lambda: KimiLinearConfig(**SIZES)),
    ("bailing_hybrid", modeling_bailing_hybrid, "BailingHybridDeltaAttention", lambda: BailingHybridConfig(**SIZES)),
    ("glm5_next", modeling_glm5_next, "Glm5NextTextLinearAttention", lambda: Glm5NextTextConfig(**SIZES)),
]


def kernels(modeling, told):
    """Patch in CPU stand-ins for causal-conv1d and FLA, each with the boundary arguments of the real kernel."""
    convolution = inspect.unwrap(modeling.causal_conv1d_fn)
    rule = inspect.unwrap(modeling.chunk_kimi_delta_attention)

    def causal_conv1d_fn(hidden_states, seq_idx=None, **kwargs):
        if seq_idx is None:
            return convolution(hidden_states, **kwargs)
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        return torch.cat([convolution(x, **kwargs) for x in hidden_states.split(lengths, dim=-1)], dim=-1)

    def chunk_kda(query, key, value, g, beta, cu_seqlens=None, **kwargs):
        told.append(cu_seqlens)
        if cu_seqlens is None:
            return rule(query, key, value, g, beta, **kwargs)
        row = [x.split(cu_seqlens.diff().tolist(), dim=1) for x in (query, key, value, g, beta)]
        return torch.cat([rule(*sequence, **kwargs)[0] for sequence in zip(*row, strict=True)], dim=1), None

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(modeling, "causal_conv1d_fn", causal_conv1d_fn))
    stack.enter_context(mock.patch.object(modeling, "chunk_kimi_delta_attention", chunk_kda))
    return stack


def boundaries():
    lengths = torch.tensor(LENGTHS)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return cu_seqlens, torch.arange(len(LENGTHS)).repeat_interleave(lengths)[None]


class KimiDeltaAttentionPackedTest(unittest.TestCase):
    def block(self, modeling, name, config):
        torch.manual_seed(0)
        block = getattr(modeling, name)(config(), layer_idx=0)
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return block, torch.randn(1, sum(LENGTHS), 32)

    @parameterized.expand([(*block, "cu_seq_lens_q") for block in BLOCKS])
    def test_block(self, _, modeling, name, config, argument):
        self.check_block(modeling, name, config, argument)

    @parameterized.expand([(*block, "cu_seqlens") for block in BLOCKS])
    def test_unchanged_block_with_cu_seqlens(self, _, modeling, name, config, argument):
        self.check_block(modeling, name, config, argument)

    def check_block(self, modeling, name, config, argument):
        block, row = self.block(modeling, name, config)
        cu_seqlens, seq_idx = boundaries()
        row.requires_grad_()
        with kernels(modeling, []):
            packed = block(row, seq_idx=seq_idx, **{argument: cu_seqlens})
            alone = [block(x) for x in row.split(LENGTHS, dim=1)]
        torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-5)
        (gradient,) = torch.autograd.grad(packed.split(LENGTHS, dim=1)[2].square().sum(), row)
        self.assertEqual([bool(x.any()) for x in gradient.split(LENGTHS, dim=1)], [False, False, True])

    @parameterized.expand(BLOCKS)
    def test_both_arguments(self, _, modeling, name, config):
        block, row = self.block(modeling, name, config)
        own, told = boundaries()[0], []
        with kernels(modeling, told):
            block(row, cu_seqlens=own, cu_seq_lens_q=own.clone(), seq_idx=boundaries()[1])
            block(row, cu_seqlens=None, cu_seq_lens_q=own, seq_idx=boundaries()[1])
        self.assertEqual([x is own for x in told], [True, True])

    def tiny_model(self):
        torch.manual_seed(0)
        config = KimiLinearConfig(
            **SIZES, vocab_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, kv_lora_rank=8,
            num_key_value_heads=2, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, pad_token_id=0,
            layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense", "dense"],
        )  # fmt: skip
        return KimiLinearForCausalLM(config).eval()

    def test_model(self):
        model = self.tiny_model()
        sequences = [torch.randint(1, 64, (n,)) for n in LENGTHS]
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
        batch = collator([{"input_ids": x} for x in sequences])
        with torch.no_grad(), kernels(modeling_kimi_linear, []):
            packed = model(**batch, use_cache=False).logits[0]
            alone = [model(x[None], use_cache=False).logits[0] for x in sequences]
        torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-5)

    def test_unchanged_without_boundaries(self):
        model, told = self.tiny_model(), []
        row = torch.randint(1, 64, (1, 9))
        with torch.no_grad(), kernels(modeling_kimi_linear, told):
            whole = model(row).logits
            first = model(row[:, :8])
            last = model(row[:, 8:], past_key_values=first.past_key_values).logits
        self.assertEqual(told, [None, None])
        torch.testing.assert_close(torch.cat([first.logits, last], dim=1), whole, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    unittest.main()
