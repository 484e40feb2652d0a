"""Mixers that compute a whole packed row with the ops. The oracle is the stock model on each document alone."""

import copy
import unittest
from importlib.util import find_spec
from unittest import mock

import torch
from common.families import documents, tiny_model
from mixins.model import alone, gradients, packed_batch, relative_error, total_relative_error
from mixins.triton import InterpretedKernelsTest
from parameterized import parameterized
from peft import LoraConfig, get_peft_model

from transformers_packed import patch_model
from transformers_packed.models import mixers
from transformers_packed.models.families import FAMILIES
from transformers_packed.ops import dispatch, implementations_used, selective_scan, ssd


LENGTHS = (9, 1, 20, 5)
# The recurrent or convolutional mixer of each family.
ROWS = {
    name: cls
    for name, family in FAMILIES.items()
    if find_spec(f"transformers.models.{name}")
    for cls, mixer in family.mixers.items()
    if mixer.row not in ("", "causal_attention")
}
ATTENTION = {name: cls for name in ROWS for cls, mixer in FAMILIES[name].mixers.items() if "Attention" in cls}
NORMED = {"mamba_rms_norm": True, "mamba_n_groups": 2}
# Each kind of row: Mamba-2 with and without a gated norm, a short convolution, and Mamba with and without norms.
TOUCHED = ["bamba", "falcon_h1", "lfm2", "jamba", "zamba"]
VARIANTS = [
    ("bamba", {"mamba_n_groups": 2, "time_step_limit": (0.25, 1.0), "mamba_proj_bias": True}),
    ("bamba", {"mamba_conv_bias": False}),
    ("falcon_h1", NORMED | {"mamba_norm_before_gate": False}),
    ("falcon_h1", NORMED | {"mamba_norm_before_gate": True}),
    ("falcon_h1", {"ssm_multipliers": [0.5, 2.0, 0.75, 1.5, 3.0], "ssm_in_multiplier": 1.25, "key_multiplier": 2.5}),
    ("granitemoehybrid", {"position_embedding_type": "rope"}),
    ("nemotron_h", {"n_groups": 4}),
    ("zamba2", {"mamba_ngroups": 2, "add_bias_linear": True}),
    ("lfm2", {"conv_bias": True}),
    ("jamba", {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_state": 5}),
    ("mamba", {"use_bias": True, "use_conv_bias": False}),
    ("falcon_mamba", {"use_bias": True}),
    ("zamba", {"n_mamba_heads": 4, "mamba_proj_bias": True}),
]
VARIANTS += [(family, {}) for family in ROWS if family not in dict(VARIANTS)]


def mixers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module).__name__ in ROWS.values()]


class MixersTest(unittest.TestCase):
    def setUp(self):
        dispatch._used.clear()

    def check(self, model, rows, before=lambda model: None, bar=1e-5):
        """Compare a packed row with the stock model on each document, after `before` has changed both."""
        stock = copy.deepcopy(model)
        before(stock)
        logits, loss = alone(stock, rows)
        expected = gradients(stock, loss)
        patch_model(model)
        before(model)
        output = model(**packed_batch(rows))
        self.assertLess(relative_error(output.logits[0], torch.cat(logits)), bar)
        self.assertLess(total_relative_error(gradients(model, output.loss), expected), 10 * bar)

    @parameterized.expand([(f"{family}_{i}", family, options) for i, (family, options) in enumerate(VARIANTS)])
    def test_equals_documents_alone(self, _, family, options):
        self.check(tiny_model(family, **options), documents(LENGTHS))
        self.assertEqual(implementations_used()[ROWS[family]], ["row"])

    @parameterized.expand([("bamba", {"mamba_n_groups": 2}), ("falcon_h1", NORMED)])
    def test_a_norm_with_groups_of_its_own(self, family, options):
        """Bamba's norm has groups since Transformers 5.23."""

        def change(model):
            for module in mixers_of(model):
                module.norm.n_groups, module.norm.group_size = 1, module.intermediate_size

        self.check(tiny_model(family, **options), documents(LENGTHS), change)

    @parameterized.expand(TOUCHED)
    def test_hooks_and_adapters_have_their_effect(self, family):
        seen = []

        def touch(model):
            for module in mixers_of(model):
                for name in ("in_proj", "norm", "x_proj", "dt_layernorm", "b_layernorm", "c_layernorm", "out_proj"):
                    if hasattr(module, name) and not isinstance(getattr(module, name), torch.nn.Identity):
                        hook = lambda layer, args, output: seen.append(layer) or output * 1.5  # noqa: E731
                        getattr(module, name).register_forward_hook(hook)

        self.check(tiny_model(family), documents(LENGTHS), touch)
        per_model = len(seen) // (len(LENGTHS) + 1)
        self.assertEqual(len(seen), per_model * (len(LENGTHS) + 1))
        self.assertGreaterEqual(per_model, 2)

    @parameterized.expand(TOUCHED)
    def test_lora(self, family):
        # PEFT refuses the output layer of some families.
        targets = {"bamba": ["in_proj", "out_proj"], "lfm2": ["in_proj", "out_proj"]}.get(family, ["in_proj"])
        targets += ["x_proj"] * hasattr(mixers_of(tiny_model(family))[0], "x_proj")
        config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        torch.manual_seed(0)
        stock = get_peft_model(tiny_model(family), config)
        model = patch_model(copy.deepcopy(stock))
        logits, loss = alone(stock, documents(LENGTHS))
        output = model(**packed_batch(documents(LENGTHS)))
        self.assertLess(relative_error(output.logits[0], torch.cat(logits)), 1e-5)
        got, expected = gradients(model, output.loss), gradients(stock, loss)
        self.assertEqual(set(got), set(expected))
        self.assertLess(total_relative_error(got, expected), 1e-4)

    @parameterized.expand([("bamba", "conv1d"), ("lfm2", "conv"), ("jamba", "dt_proj"), ("zamba", "conv1d")])
    def test_a_module_that_accelerate_moves(self, family, name):
        """Its weights are read directly, so its hook is told."""
        hooks = []

        def offload(model):
            for module in mixers_of(model):
                hooks.append(mock.Mock())
                getattr(module, name)._hf_hook = hooks[-1]

        self.check(tiny_model(family), documents(LENGTHS), offload)
        self.assertEqual(implementations_used()[ROWS[family]], ["row"])
        for hook in hooks[len(hooks) // 2 :]:
            self.assertEqual((hook.pre_forward.call_count, hook.post_forward.call_count), (1, 1))

    @parameterized.expand(["bamba", "jamba", "zamba"])
    def test_a_convolution_of_another_class(self, family):
        def replace(model):
            for module in mixers_of(model):
                module.conv1d.__class__ = type("Other", (torch.nn.Module,), {})

        self.check(tiny_model(family), documents(LENGTHS), replace)
        self.assertEqual(implementations_used()[ROWS[family]], ["per_document"])

    @parameterized.expand(["jamba", "falcon_mamba"])
    def test_a_quantized_model_calls_the_layer_of_the_step(self, family):
        """Its weight may be of another shape then. Hooks of the layer run as in the stock class."""
        seen = []

        def touch(model):
            model.config._is_quantized = True
            for module in mixers_of(model):
                module.dt_proj.register_forward_hook(lambda layer, args, output: seen.append(layer) or output * 1.5)

        self.check(tiny_model(family), documents(LENGTHS), touch)
        self.assertEqual(implementations_used()[ROWS[family]], ["row"])
        self.assertEqual(len(seen) % (len(LENGTHS) + 1), 0)
        self.assertGreater(len(seen), 0)

    @parameterized.expand(ATTENTION)
    def test_attention_runs_on_the_documents(self, family):
        """No mask over the row is read. With another implementation, the stock forward runs."""
        for attention, found in (("sdpa", ["row"]), ("eager", {"granitemoehybrid": ["per_document"]}.get(family))):
            dispatch._used.clear()
            self.check(tiny_model(family, attention), documents(LENGTHS))
            used = implementations_used()
            self.assertEqual(used.get(ATTENTION[family]), found)
            self.assertEqual(used.get("attention"), ["per_document(sdpa)"] if attention == "sdpa" else None)

    @parameterized.expand([("bamba", ssd, False), ("zamba", selective_scan, False), ("falcon_h1", ssd, True),
                           ("mamba", selective_scan, True)])  # fmt: skip
    def test_bfloat16(self, family, op, autocast):
        """Of the model or by autocast. Steps are computed in float32, other than by the stock class."""
        model, rows, seen = tiny_model(family), documents(LENGTHS), []
        model = model if autocast else model.bfloat16()
        logits, _ = alone(copy.deepcopy(model).float(), rows)
        scan = lambda x, *args, **options: seen.append(x.dtype) or op(x, *args, **options)  # noqa: E731
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), mock.patch.object(mixers, op.__name__, scan):
            output = patch_model(model)(**packed_batch(rows))
        self.assertEqual(set(seen), {torch.bfloat16})
        self.assertLess(relative_error(output.logits[0].float(), torch.cat(logits)), 5e-2)


class InterpretedMixersTest(InterpretedKernelsTest):
    @parameterized.expand(
        [
            ("bamba", {"mamba_n_groups": 2}, "ssd", "gated_rms_norm_linear"),
            ("falcon_h1", {}, "ssd", "swiglu_linear"),
            ("jamba", {}, "selective_scan", "swiglu_linear"),
            ("zamba", {}, "selective_scan", "swiglu_linear"),
        ]
    )
    def test_kernels(self, family, options, scan, layer):
        """A packed row equals its documents alone."""
        model, rows = tiny_model(family, **options), documents((5, 1, 3))
        logits, loss = alone(model, rows)
        expected = gradients(model, loss)
        dispatch._used.clear()
        output = patch_model(model)(**packed_batch(rows))
        self.assertLess(relative_error(output.logits[0], torch.cat(logits)), 1e-5)
        self.assertLess(total_relative_error(gradients(model, output.loss), expected), 1e-4)
        used = implementations_used()
        self.assertEqual([used[scan], used[layer]], [["triton"]] * 2)
