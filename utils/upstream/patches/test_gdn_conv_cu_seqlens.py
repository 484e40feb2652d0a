import inspect
import sys
import types
import unittest
from unittest import mock

import torch
import torch.nn.functional as F
from parameterized import parameterized
from transformers import DataCollatorWithFlattening, Lfm2Config, Lfm2ForCausalLM
from transformers.integrations import hub_kernels
from transformers.models.lfm2 import modeling_lfm2


LENGTHS = (3, 1, 9)


def fla_causal_conv1d(
    x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False, activation=None,
    backend="triton", cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs,
):  # fmt: skip
    """Convolve each sequence separately: the contract of FLA's convolution. `x` is `[batch, sequence, channels]`."""
    lengths = [x.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    pieces = []
    for piece in x.split(lengths, dim=1):
        padded = F.pad(piece.transpose(1, 2), (weight.shape[-1] - 1, 0))
        pieces.append(F.conv1d(padded, weight[:, None], bias, groups=weight.shape[0]).transpose(1, 2))
    output = torch.cat(pieces, dim=1)
    return (F.silu(output) if activation in ("silu", "swish") else output), None


class FlaConvolutionTest(unittest.TestCase):
    def setUp(self):
        self.fla = mock.Mock(side_effect=fla_causal_conv1d)
        modules = {"fla": types.ModuleType("fla"), "causal_conv1d": None}
        modules["fla.modules.causal_conv1d"] = types.SimpleNamespace(causal_conv1d=self.fla)
        reference = inspect.unwrap(modeling_lfm2.causal_conv1d_fn)
        with mock.patch.dict(sys.modules, modules):
            decorator = hub_kernels.use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "causal_conv1d")
            self.convolution = decorator(reference)
        self.reference = reference

    def on_accelerator(self, answer=True):
        return mock.patch.object(hub_kernels, "_on_accelerator", lambda *values: answer, create=True)

    def arguments(self):
        torch.manual_seed(0)
        return torch.randn(1, 6, sum(LENGTHS)), torch.randn(6, 4), torch.randn(6)

    def boundaries(self):
        cu_seqlens = F.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0)).to(torch.int32)
        return cu_seqlens, torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]

    @parameterized.expand([("cu_seqlens",), ("cu_seq_lens_q",)])
    def test_packed(self, name):
        x, weight, bias = self.arguments()
        cu_seqlens, seq_idx = self.boundaries()
        leaf = x.clone().requires_grad_()
        with self.on_accelerator():
            packed = self.convolution(leaf, weight, bias, activation="silu", seq_idx=seq_idx, **{name: cu_seqlens})
        self.assertEqual(self.fla.call_count, 1)
        alone = [self.reference(piece, weight, bias, activation="silu") for piece in x.split(LENGTHS, dim=-1)]
        torch.testing.assert_close(packed, torch.cat(alone, dim=-1))
        (gradient,) = torch.autograd.grad(packed.split(LENGTHS, dim=-1)[1].sum(), leaf)
        self.assertEqual([bool(g.any()) for g in gradient.split(LENGTHS, dim=-1)], [False, True, False])

    def test_not_packed(self):
        x, weight, bias = self.arguments()
        with self.on_accelerator():
            got = self.convolution(x, weight, bias, activation=None)
        self.assertEqual(self.fla.call_count, 1)
        torch.testing.assert_close(got, self.reference(x, weight, bias))

    def test_model(self):
        config = Lfm2Config(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, layer_types=["conv", "full_attention"],
        )  # fmt: skip
        torch.manual_seed(0)
        model = Lfm2ForCausalLM(config)
        sequences = [torch.randint(1, 64, (n,)) for n in LENGTHS]
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
        with torch.no_grad():
            alone = [model(x[None], use_cache=False).logits[0] for x in sequences]
            with mock.patch.object(modeling_lfm2, "causal_conv1d_fn", self.convolution), self.on_accelerator():
                packed = model(**collator([{"input_ids": x} for x in sequences]), use_cache=False).logits[0]
        self.assertEqual(self.fla.call_count, 1)
        torch.testing.assert_close(packed, torch.cat(alone))

    @parameterized.expand([("cpu", {"activation": "silu"}, False), ("gelu", {"activation": "gelu"}, True)])
    def test_unchanged_torch_function(self, _, options, on_accelerator):
        x, weight, bias = self.arguments()
        with self.on_accelerator(on_accelerator):
            got = self.convolution(x, weight, bias, **options)
        self.assertFalse(self.fla.called)
        self.assertTrue(torch.equal(got, self.reference(x, weight, bias, **options)))

    def test_unchanged_seq_idx_alone(self):
        x, weight, bias = self.arguments()
        with self.on_accelerator():
            try:
                # Another patch may support this call, but must not run a kernel without boundaries
                self.convolution(x, weight, bias, seq_idx=self.boundaries()[1])
            except ValueError as error:
                self.assertIn("packed sequences", str(error))
        for call in self.fla.call_args_list:
            self.assertLess(call.args[0].shape[1], sum(LENGTHS))

    def test_unchanged_causal_conv1d(self):
        kernel = mock.Mock(side_effect=lambda x, weight, bias=None, seq_idx=None, activation=None: x)
        kernel.__signature__ = inspect.signature(lambda x, weight, bias=None, seq_idx=None, activation=None: x)
        with mock.patch.dict(sys.modules, {"causal_conv1d": types.SimpleNamespace(causal_conv1d_fn=kernel)}):
            decorator = hub_kernels.use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "causal_conv1d")
            convolution = decorator(self.reference)
        with self.on_accelerator():
            convolution(*self.arguments(), seq_idx=self.boundaries()[1])
        self.assertTrue(kernel.called)
        self.assertFalse(self.fla.called)


if __name__ == "__main__":
    unittest.main()
