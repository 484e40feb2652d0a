import importlib
import inspect
import sys
import types
import unittest
from unittest import mock

import torch
from parameterized import parameterized
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    DataCollatorWithFlattening,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2Config,
    OlmoHybridConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    ZambaConfig,
)
from transformers.integrations import hub_kernels


LENGTHS = (3, 1, 70, 64)
FORMS = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")


def boundaries(form, lengths=LENGTHS):
    if form == "seq_idx":
        return {form: torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))[None]}
    return {form: torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)}


def function(family, name):
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


def delta_rule_arguments(length, heads=2, size=8, per_channel=False):
    query, key, value = (torch.randn(1, length, heads, size) for _ in range(3))
    decay = -torch.rand(1, length, heads, size) if per_channel else -torch.rand(1, length, heads)
    return {"query": query, "key": key, "value": value, "g": decay, "beta": torch.rand(1, length, heads)}


FUNCTIONS = [
    (family, name)
    for name, families in {
        "causal_conv1d_fn": ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "lfm2", "kimi_linear", "mamba2"),
        "torch_chunk_gated_delta_rule": ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"),
        "chunk_kimi_delta_attention": ("kimi_linear", "bailing_hybrid"),
        "mamba2_chunk_scan": ("mamba2", "bamba"),
        "mamba_selective_scan": ("mamba", "jamba"),
    }.items()
    for family in families
]


def call(name, length):
    """Return the row for a function, its other arguments, and the sequence dimension."""
    torch.manual_seed(0)
    if name == "causal_conv1d_fn":
        row = {"hidden_states": torch.randn(1, 6, length)}
        return row, {"weight": torch.randn(6, 4), "bias": torch.randn(6), "activation": "silu"}, -1
    if name == "mamba2_chunk_scan":
        row = {"hidden_states": torch.randn(1, length, 2, 4), "dt": torch.rand(1, length, 2)}
        row |= {"B": torch.randn(1, length, 1, 8), "C": torch.randn(1, length, 1, 8)}
        return row, {"A": -torch.rand(2), "D": torch.rand(2), "chunk_size": 16}, 1
    if name == "mamba_selective_scan":
        row = {n: torch.randn(1, 6, length) for n in ("hidden_states", "dt", "z")}
        row |= {n: torch.randn(1, 4, length) for n in ("B", "C")}
        return row, {"A": -torch.rand(6, 4), "D": torch.rand(6), "delta_softplus": True}, -1
    row = delta_rule_arguments(length, per_channel=name == "chunk_kimi_delta_attention")
    return row, {"use_qk_l2norm_in_kernel": True}, 1


class PackedTorchFunctionsTest(unittest.TestCase):
    @parameterized.expand([(*pair, form) for pair in FUNCTIONS for form in FORMS])
    def test_each_sequence_as_if_alone(self, family, name, form):
        run = function(family, name)
        row, other, dim = call(name, sum(LENGTHS))
        # Some models pass the first argument by position.
        order = [n for n in inspect.signature(inspect.unwrap(run)).parameters if n in row][:1]
        leaves = {n: x.clone().requires_grad_() for n, x in row.items()}
        arguments = {n: x for n, x in leaves.items() if n not in order} | other | boundaries(form)
        output = run(*(leaves[n] for n in order), **arguments)
        output = output[0] if isinstance(output, tuple) else output
        pieces = {n: x.split(LENGTHS, dim) for n, x in row.items()}
        for i, got in enumerate(output.split(LENGTHS, dim)):
            alone = run(**{n: x[i] for n, x in pieces.items()}, **other)
            alone = alone[0] if isinstance(alone, tuple) else alone
            self.assertTrue(torch.equal(got, alone), f"sequence {i}")
        gradients = torch.autograd.grad(output.split(LENGTHS, dim)[2].square().sum(), list(leaves.values()))
        for gradient in gradients:
            reached = [bool(x.any()) for x in gradient.split(LENGTHS, dim)]
            self.assertEqual(reached, [False, False, True, False])

    @parameterized.expand(FUNCTIONS)
    def test_empty_sequences(self, family, name):
        run = function(family, name)
        row, other, dim = call(name, 6)
        outputs = [
            run(**row, **other, cu_seqlens=torch.tensor(cu_seqlens)) for cu_seqlens in ([0, 2, 6], [0, 0, 2, 2, 6, 6])
        ]
        want, got = (x[0] if isinstance(x, tuple) else x for x in outputs)
        self.assertTrue(torch.equal(got, want))

    def test_cache_is_refused(self):
        run = function("qwen3_next", "torch_chunk_gated_delta_rule")
        with self.assertRaisesRegex(ValueError, "use_cache=False"):
            run(**delta_rule_arguments(6), cu_seqlens=torch.tensor([0, 2, 6]), output_final_state=True)

    def test_wrong_length_is_refused(self):
        run = function("qwen3_next", "causal_conv1d_fn")
        with self.assertRaisesRegex(ValueError, "batch size 1"):
            run(torch.randn(1, 6, 7), torch.randn(6, 4), seq_idx=boundaries("seq_idx", (3, 3))["seq_idx"])
        with self.assertRaisesRegex(ValueError, "batch size 1"):
            run(torch.randn(2, 6, 6), torch.randn(6, 4), seq_idx=boundaries("seq_idx", (3, 3))["seq_idx"])

    @parameterized.expand(["qwen4_exp", "glm5_next"])
    def test_unchanged_refusal_of_models_that_mix_elsewhere(self, family):
        run = function(family, "causal_conv1d_fn")
        with self.assertRaisesRegex(ValueError, "packed sequences"):
            run(torch.randn(1, 6, 6), torch.randn(6, 4), seq_idx=boundaries("seq_idx", (3, 3))["seq_idx"])

    def test_unchanged_refusal_of_other_functions(self):
        run = function("qwen3_next", "torch_recurrent_gated_delta_rule")
        with self.assertRaisesRegex(ValueError, "packed sequences"):
            run(**delta_rule_arguments(6), cu_seqlens=torch.tensor([0, 2, 6]))

    @parameterized.expand(FUNCTIONS)
    def test_unchanged_without_boundaries(self, family, name):
        """This includes the undecorated functions, which ignore boundaries."""
        run = function(family, name)
        row, other, _ = call(name, 70)
        want = inspect.unwrap(run)(**row, **other)
        for got in (run(**row, **other), inspect.unwrap(run)(**row, **other, **boundaries("cu_seqlens", (3, 67)))):
            got, expected = (x[0] if isinstance(x, tuple) else x for x in (got, want))
            self.assertTrue(torch.equal(got, expected))


def causal_conv1d_fn(hidden_states, weight, **kwargs):
    raise AssertionError("the kernel is there")


class PackedKernelsTest(unittest.TestCase):
    """Kernels without support for the given boundaries do not run across sequences either."""

    def setUp(self):
        # If kernels are restricted to accelerators, these fake kernels count as running on one
        patch = mock.patch.object(hub_kernels, "_on_accelerator", lambda *values: True, create=True)
        patch.start()
        self.addCleanup(patch.stop)

    def decorated(self, kernel):
        with mock.patch.dict(sys.modules, {"made_up": types.SimpleNamespace(causal_conv1d_fn=kernel)}):
            return hub_kernels.use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "made_up")(causal_conv1d_fn)

    def test_kernel_that_is_not_told(self):
        run = self.decorated(lambda x, weight: x.cumsum(-1))
        got = run(torch.ones(1, 1, 5), torch.ones(1, 4), **boundaries("seq_idx", (2, 3)))
        self.assertEqual(got.flatten().tolist(), [1, 2, 1, 2, 3])

    def test_kernel_that_takes_other_boundaries(self):
        run = self.decorated(lambda x, weight, seq_idx=None: x.cumsum(-1))
        got = run(torch.ones(1, 1, 5), torch.ones(1, 4), **boundaries("cu_seq_lens_q", (2, 3)))
        self.assertEqual(got.flatten().tolist(), [1, 2, 1, 2, 3])

    def test_unchanged_kernel_that_is_told(self):
        told = []
        run = self.decorated(lambda x, weight, seq_idx=None: told.append(seq_idx) or x)
        given = boundaries("seq_idx", (2, 3)) | boundaries("cu_seq_lens_q", (2, 3))
        run(torch.ones(1, 1, 5), torch.ones(1, 4), **given)
        self.assertEqual(len(told), 1)
        self.assertIs(told[0], given["seq_idx"])


TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 2}
HYBRID = {**TINY, "layer_types": ["linear_attention", "full_attention"]}
GDN = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
KDA = {"linear_head_dim": 8, "linear_num_heads": 2, "mlp_layer_types": ["dense", "dense"]}
KDA |= {"q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
MODELS = [
    ("qwen3_next", Qwen3NextConfig(**HYBRID, **GDN, head_dim=16, mlp_only_layers=[0, 1])),
    ("qwen3_5", Qwen3_5TextConfig(**HYBRID, **GDN, head_dim=16)),
    ("olmo_hybrid", OlmoHybridConfig(**HYBRID, **GDN)),
    ("lfm2", Lfm2Config(**TINY, layer_types=["conv", "full_attention"])),
    ("bamba", BambaConfig(**TINY, **MAMBA, attn_layer_indices=[1], mamba_n_groups=1)),
    ("kimi_linear", KimiLinearConfig(**HYBRID, **KDA)),
]
ZAMBA_LAYERS = ["linear_attention", "hybrid"] * 2 + ["linear_attention"]
MIXING = [
    (
        "granitemoehybrid",
        GraniteMoeHybridConfig(**HYBRID, **MAMBA, shared_intermediate_size=32, num_local_experts=0),
    ),
    ("zamba", ZambaConfig(**TINY | {"num_hidden_layers": 5}, layers_block_type=ZAMBA_LAYERS)),
]
COLLATORS = {
    "all": {"return_flash_attn_kwargs": True, "return_seq_idx": True},
    "seq_idx": {"return_seq_idx": True},
    "cu_seq_lens": {"return_flash_attn_kwargs": True},
}


class PackedModelsTest(unittest.TestCase):
    @parameterized.expand([(f"{name}_{form}", config, form) for name, config in MODELS for form in COLLATORS])
    def test_model(self, _, config, form):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).train()
        sequences = [torch.randint(1, 64, (n,)) for n in LENGTHS]
        collator = DataCollatorWithFlattening(**COLLATORS[form])

        def packed():
            batch = collator([{"input_ids": x} for x in sequences])
            with torch.no_grad():
                return model(**batch, use_cache=False).logits[0].split(LENGTHS)

        before = packed()
        for logits, sequence in zip(before, sequences, strict=True):
            with torch.no_grad():
                alone = model(sequence[None], use_cache=False).logits[0]
            torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-5)
        sequences[0] = (sequences[0] + 1) % 64
        after = packed()
        self.assertFalse(torch.equal(after[0], before[0]))
        for i in range(1, len(LENGTHS)):
            self.assertTrue(torch.equal(after[i], before[i]), f"sequence {i}")

    @parameterized.expand(MIXING)
    def test_unchanged_no_leak_in_models_that_mix_elsewhere(self, _, config):
        """These models refuse packed sequences unless they keep them apart."""
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Initial weights are too small to show leaks
                if parameter.ndim > 1 and not name.endswith(("A_log", "dt_proj_weight", "dt_proj_bias", "D")):
                    parameter.normal_(std=0.3)
        collator = DataCollatorWithFlattening(**COLLATORS["all"])
        logits = []
        for first in ([1, 2, 3], [4, 5, 6]):
            batch = collator([{"input_ids": first}, {"input_ids": [7, 8, 9, 10]}])
            try:
                with torch.no_grad():
                    logits.append(model(**batch, use_cache=False).logits[0, 3:])
            except ValueError as error:
                self.assertIn("packed sequences", str(error))
        self.assertIn(len(logits), (0, 2))
        if logits:
            self.assertTrue(torch.equal(*logits))


if __name__ == "__main__":
    unittest.main()
