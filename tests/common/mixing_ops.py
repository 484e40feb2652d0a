"""The ops that mix tokens, with inputs of the sizes that kernels take, for tests on a GPU."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention, eager_attention_forward

from transformers_packed.ops import attention, causal_conv1d, causal_conv1d_qkv, gated_delta_rule, kimi_delta_rule


KEY_HEADS, VALUE_HEADS, DIM, CHANNELS = 2, 4, 128, 512
HEADS, KEY_VALUE_HEADS, HEAD_DIM = 2, 1, 256
BARS = {torch.bfloat16: (2e-2, 5e-2), torch.float32: (1e-4, 1e-4)}


class RuleCase:
    """Inputs and call of the gated delta rule. The cases of other ops have the same methods."""

    name = "gated_delta_rule"
    output_shape = (VALUE_HEADS, DIM)

    def make(self, length):
        generator = torch.Generator().manual_seed(length)
        normal = lambda *shape: torch.randn(1, length, *shape, generator=generator)  # noqa: E731
        return [
            normal(KEY_HEADS, DIM),
            normal(KEY_HEADS, DIM),
            normal(VALUE_HEADS, DIM),
            -torch.nn.functional.softplus(normal(VALUE_HEADS) - 2),
            normal(VALUE_HEADS).sigmoid(),
        ]

    def cast(self, inputs, device, dtype):
        """Move to the device and the dtype, except the decay, which is float32 in every model."""
        return [x.to(device, torch.float32 if i == 3 else dtype) for i, x in enumerate(inputs)]

    def run(self, impl, inputs, boundaries):
        return gated_delta_rule(*inputs, boundaries=boundaries, use_qk_l2norm_in_kernel=True, impl=impl)[0]


class KimiCase(RuleCase):
    """The delta rule with a decay for each channel, from a projection and the parameters of the layer."""

    def __init__(self, lower_bound):
        self.lower_bound = lower_bound
        self.name = f"kimi_delta_rule ({'bounded' if lower_bound else 'unbounded'})"

    def make(self, length):
        q, k, v, _, beta = super().make(length)
        x, a_log, bias = (
            torch.randn(shape, generator=torch.Generator().manual_seed(length))
            for shape in ((1, length, VALUE_HEADS, DIM), (VALUE_HEADS,), (VALUE_HEADS * DIM,))
        )
        return [q, k, v, x - 2, beta, a_log / 2, bias / 2]

    def cast(self, inputs, device, dtype):
        """Move to the device and the dtype, except the parameters, which are float32 in every model."""
        return [x.to(device, torch.float32 if i >= 5 else dtype) for i, x in enumerate(inputs)]

    def run(self, impl, inputs, boundaries):
        *rows, a_log, bias = inputs
        gate = {"a_log": a_log, "dt_bias": bias, "lower_bound": self.lower_bound}
        options = {"boundaries": boundaries, "use_qk_l2norm_in_kernel": True, "impl": impl}
        return kimi_delta_rule(*rows, **gate, **options)[0]


class ConvCase(RuleCase):
    name = "causal_conv1d"
    output_shape = (CHANNELS,)

    def make(self, length):
        generator = torch.Generator().manual_seed(length)
        row = torch.randn(1, length, CHANNELS, generator=generator)
        return [row, torch.randn(CHANNELS, 4, generator=generator) / 2]

    def cast(self, inputs, device, dtype):
        return [x.to(device, dtype) for x in inputs]

    def run(self, impl, inputs, boundaries):
        return causal_conv1d(*inputs, None, "silu", boundaries=boundaries, impl=impl)


class QkvCase(ConvCase):
    """The convolution with the split to heads. The output has all heads side by side."""

    name = "causal_conv1d_qkv"
    output_shape = (2 * KEY_HEADS * DIM + VALUE_HEADS * DIM,)

    def make(self, length):
        generator = torch.Generator().manual_seed(length)
        row = torch.randn(1, length, *self.output_shape, generator=generator)
        return [row, torch.randn(*self.output_shape, 4, generator=generator) / 2]

    def run(self, impl, inputs, boundaries):
        heads = {"key_heads": KEY_HEADS, "key_dim": DIM, "value_dim": DIM}
        return torch.cat(
            [x.flatten(2) for x in causal_conv1d_qkv(*inputs, **heads, boundaries=boundaries, impl=impl)], 2
        )


class AttentionCase(ConvCase):
    output_shape = (HEADS, HEAD_DIM)

    def __init__(self, implementation):
        self.name = f"attention ({implementation})"
        config = Qwen3_5TextConfig(
            hidden_size=64, num_attention_heads=HEADS, num_key_value_heads=KEY_VALUE_HEADS, head_dim=HEAD_DIM
        )
        self.modules = {}
        for name in {implementation, "sdpa"}:
            self.modules[name] = Qwen3_5Attention(config, layer_idx=0)
            self.modules[name].config = SimpleNamespace(_attn_implementation=name)
        self.implementation = implementation

    def make(self, length):
        generator = torch.Generator().manual_seed(length)
        shapes = (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS)
        return [torch.randn(1, length, heads, HEAD_DIM, generator=generator) for heads in shapes]

    def run(self, impl, inputs, boundaries):
        name = "sdpa" if impl in ("reference", "per_document(sdpa)") else self.implementation
        impl = "per_document(sdpa)" if impl == "reference" else impl
        rows = (x.transpose(1, 2) for x in inputs)
        return attention(
            self.modules[name],
            *rows,
            None,
            eager=eager_attention_forward,
            scaling=HEAD_DIM**-0.5,
            boundaries=boundaries,
            impl=impl,
        )[0]


def run_with_gradients(case, impl, inputs, weight, boundaries):
    """Return the output, and the gradients of its sum weighted by `weight`."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = case.run(impl, leaves, boundaries)
    return [output.detach(), *torch.autograd.grad((output.float() * weight).sum(), leaves)]


def make_rule_inputs(length, batch=1, key_heads=2, value_heads=4, dtype=torch.float32, decay=0.2, by_channel=False):
    """Draw queries, keys of unit length, values, log decays in (-`decay`, 0) and learning rates in (0, 1).

    With `by_channel`, each channel of a key has a decay of its own, as in `kimi_delta_rule`.
    """
    inputs = [
        torch.randn(batch, length, key_heads, 8),
        F.normalize(torch.randn(batch, length, key_heads, 8), dim=-1),
        torch.randn(batch, length, value_heads, 6),
        -decay * torch.rand(batch, length, value_heads, *[8] * by_channel),
        torch.rand(batch, length, value_heads),
    ]
    return [x.to(dtype).requires_grad_() for x in inputs]
