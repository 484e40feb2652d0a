import contextlib
import inspect
import unittest
from unittest import mock

import torch
from parameterized import parameterized
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    FalconMambaConfig,
    JambaConfig,
    Mamba2Config,
    MambaConfig,
    ZambaConfig,
)
from transformers.models.falcon_mamba import modeling_falcon_mamba
from transformers.models.jamba import modeling_jamba
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.zamba import modeling_zamba


LENGTHS = (3, 1, 20)
TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
ATTENTION = {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_dt_rank": 4}
ZAMBA = {"num_hidden_layers": 5, "layers_block_type": ["linear_attention", "hybrid"] * 2 + ["linear_attention"]}
MODELS = [
    ("mamba2", modeling_mamba2, lambda: Mamba2Config(**TINY, num_heads=8, head_dim=8, n_groups=1, state_size=8)),
    ("jamba", modeling_jamba, lambda: JambaConfig(**TINY, **ATTENTION, **JAMBA)),
    ("mamba", modeling_mamba, lambda: MambaConfig(**TINY, state_size=8)),
    ("falcon_mamba", modeling_falcon_mamba, lambda: FalconMambaConfig(**TINY, state_size=8)),
    ("zamba", modeling_zamba, lambda: ZambaConfig(**TINY | ATTENTION | ZAMBA)),
]
# The functions that mix along the sequence, with the sequence dimension.
MIXING = {"causal_conv1d_fn": -1, "mamba2_chunk_scan": 1, "mamba_selective_scan": -1}
FUSED = ("mamba_inner_fn", "mamba2_split_conv1d_scan_combined")


def told(function, dim):
    """Create a stand-in for a kernel that keeps sequences apart if it gets `seq_idx`."""
    reference = inspect.unwrap(function)

    def kernel(*args, seq_idx=None, **kwargs):
        if seq_idx is None:
            return reference(*args, **kwargs)
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()

        def pieces(value):
            row = isinstance(value, torch.Tensor) and value.ndim > 2 and value.shape[dim] == sum(lengths)
            return value.split(lengths, dim) if row else [value] * len(lengths)

        args, kwargs = [pieces(x) for x in args], {name: pieces(x) for name, x in kwargs.items()}
        outputs = [
            reference(*(x[i] for x in args), **{name: x[i] for name, x in kwargs.items()}) for i in range(len(lengths))
        ]
        return torch.cat(outputs, dim)

    return kernel


def kernels(modeling):
    stack = contextlib.ExitStack()
    for name, dim in MIXING.items():
        if hasattr(modeling, name):
            stack.enter_context(mock.patch.object(modeling, name, told(getattr(modeling, name), dim)))
    return stack


def fused_kernels(modeling, calls):
    """Patch in stand-ins for fused kernels that only record their calls."""
    stack = contextlib.ExitStack()
    for name in FUSED:
        if hasattr(modeling, name):
            stack.enter_context(
                mock.patch.object(modeling, name, lambda *args, name=name, **kwargs: calls.append(name))
            )
    return stack


class ForwardKwargsTest(unittest.TestCase):
    def model(self, config):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Initial weights are too small to show leaks
                if parameter.ndim > 1 and not name.endswith(("A_log", "dt_proj_weight", "dt_proj_bias", "D")):
                    parameter.normal_(std=0.3)
        return model, [torch.randint(1, 64, (n,)) for n in LENGTHS]

    def packed(self, sequences, **options):
        options = {"return_seq_idx": True, **options}
        return DataCollatorWithFlattening(**options)([{"input_ids": x} for x in sequences])

    @parameterized.expand([(*model, training) for model in MODELS for training in (True, False)])
    def test_packed(self, _, modeling, config, training):
        model, sequences = self.model(config)
        model.train(training)
        batch = self.packed(sequences)
        with torch.no_grad(), kernels(modeling), fused_kernels(modeling, []):
            packed = model(**batch, use_cache=False)
            alone = [model(x[None], use_cache=False).logits[0] for x in sequences]
        torch.testing.assert_close(packed.logits[0], torch.cat(alone), rtol=1e-4, atol=1e-5)
        self.assertTrue(packed.loss.isfinite())

    @parameterized.expand([model for model in MODELS if model[0] != "zamba"])
    def test_gradient_checkpointing(self, _, modeling, config):
        model, sequences = self.model(config)
        batch, gradients = self.packed(sequences), []
        with kernels(modeling), fused_kernels(modeling, []):
            for checkpointing in (False, True):
                if checkpointing:
                    model.gradient_checkpointing_enable()
                embeds = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
                inputs = {**batch, "input_ids": None, "inputs_embeds": embeds, "labels": None}
                logits = model(**inputs, use_cache=False).logits[0].split(LENGTHS)
                gradients += torch.autograd.grad(logits[2].square().sum(), embeds)
        torch.testing.assert_close(*gradients)
        reached = [bool(x.any()) for x in gradients[1][0].split(LENGTHS)]
        self.assertEqual(reached, [False, False, True])

    @parameterized.expand([model for model in MODELS if model[0] in ("mamba", "falcon_mamba")])
    def test_fused_kernel_is_for_what_is_not_packed(self, _, modeling, config):
        model, sequences = self.model(config)
        calls = []
        with torch.no_grad(), kernels(modeling), fused_kernels(modeling, calls):
            model(sequences[2][None], use_cache=False)
            self.assertEqual(calls, ["mamba_inner_fn"] * 2)
            for options in ({}, {"return_seq_idx": False, "return_flash_attn_kwargs": True}):
                model(**self.packed(sequences, **options), use_cache=False)
                self.assertEqual(calls, ["mamba_inner_fn"] * 2)

    @parameterized.expand([model for model in MODELS if model[0] != "zamba"])
    def test_unchanged_other_input(self, _, modeling, config):
        """Covers labels with `num_items_in_batch`, a cache, left padding, and generation."""
        model, sequences = self.model(config)
        model.eval()
        row = sequences[2][None]
        with torch.no_grad():
            whole = model(row, labels=row, num_items_in_batch=torch.tensor(19), use_cache=False)
            self.assertTrue(whole.loss.isfinite())
            mask = torch.nn.functional.pad(torch.ones_like(row), (3, 0))
            padded = torch.nn.functional.pad(row, (3, 0))
            left = model(padded, attention_mask=mask, use_cache=False).logits[:, 3:]
            torch.testing.assert_close(left, whole.logits, rtol=1e-4, atol=1e-5)
            cached = model.generate(row[:, :5], max_new_tokens=4, do_sample=False)
            without = model.generate(row[:, :5], max_new_tokens=4, do_sample=False, use_cache=False)
        self.assertEqual(cached.tolist(), without.tolist())


if __name__ == "__main__":
    unittest.main()
