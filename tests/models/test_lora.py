"""PEFT's adapters on our models: outputs and gradients are those of PEFT on the built-in model, for each document alone."""

import copy
import tempfile
from unittest import mock, skipIf

import peft
import torch
from common.releases import NEEDS_NEWER_PEFT, RELEASE
from mixins.lora import (
    BAR,
    BUILTINS,
    LINEARS,
    LoraTestCase,
    TorchFormsTestCase,
    all_linear,
    biased_model,
    documents,
    fusible,
    lora,
    randomized,
    recorded,
)
from mixins.model import packed_batch, padded_batch, relative_error, total_relative_error
from mixins.patch import OTHERS, builtin_model
from mixins.triton import InterpretedKernelsTest
from parameterized import parameterized
from peft import get_peft_model
from peft.tuners.lora import LoraLayer, create_arrow_model
from peft.utils.hotswap import prepare_model_for_compiled_hotswap

from transformers_packed import patch_model
from transformers_packed.models import projections


class AllLinearTest(TorchFormsTestCase):
    """Adapters on all linear layers that PEFT picks."""

    @parameterized.expand([name for name in BUILTINS if name != "qwen3_5_vision"])
    def test_packed_is_alone(self, name):
        builtin = all_linear(name)
        ours = patch_model(copy.deepcopy(builtin))
        with mock.patch.object(projections, "fused_linears", wraps=projections.fused_linears) as shared:
            fused, called, (_, _, gradients) = self.check_equal(builtin, ours, documents(name))
        modules = ((path, module) for path, module in ours.named_modules() if "indexer" not in path)
        adapted = {path for path, module in modules if isinstance(module, LoraLayer)}
        # PEFT adapts the experts of Qwen3-Next too, as parameters.
        self.assertEqual(fused, {path for path in adapted if fusible(path) or "experts" in path})
        self.assertEqual(called, adapted - fused)
        if name not in OTHERS:
            # One call for each mixer, and one for each MLP.
            blocks = {path.rpartition(".")[0] for path, _ in ours.named_modules() if fusible(path)}
            self.assertEqual(shared.call_count, len(blocks))
        self.assertTrue(gradients and all("lora_" in path for path in gradients))
        # Frozen weights have no gradient.
        for path, parameter in ours.named_parameters():
            self.assertEqual(parameter.grad is not None, path in gradients, path)


class AllLinearInKernelsTest(LoraTestCase, InterpretedKernelsTest):
    def test_packed_is_alone(self):
        builtin = all_linear("qwen3_5")
        fused, _, _ = self.check_equal(builtin, patch_model(copy.deepcopy(builtin)))
        self.assertEqual(
            fused, {path for path, m in builtin.named_modules() if isinstance(m, LoraLayer) and fusible(path)}
        )


# Options of LoRA whose layers the fused ops compute.
FUSED = {
    "patterns": {"rank_pattern": {"q_proj": 1, "down_proj": 6}, "alpha_pattern": {"k_proj": 3, "out_proj": 1}},
    "rank_stabilized": {"use_rslora": True},
    "biases": {"lora_bias": True, "bias": "all"},
    "expression": {"target_modules": r".*(q_proj|up_proj|out_proj)"},
    "head_and_norms": {"modules_to_save": ["lm_head", "q_norm", "k_norm"]},
    "module_beside": {"target_modules": ["q_proj", "gate_proj"], "modules_to_save": ["v_proj", "up_proj", "o_proj"]},
    "tokens": {"trainable_token_indices": [3, 40]},
    "pissa": {"init_lora_weights": "pissa"},
    "dropout_in_evaluation": {"lora_dropout": 0.5},
}


class LoraOptionsTest(TorchFormsTestCase):
    bar = 10 * BAR

    @parameterized.expand(FUSED)
    def test_an_option(self, name):
        builtin = randomized(get_peft_model(biased_model(), lora(**FUSED[name])))
        ours = patch_model(copy.deepcopy(builtin))
        if name.endswith("evaluation"):
            builtin, ours = builtin.eval(), ours.eval()
        fused, called, _ = self.check_equal(builtin, ours)
        self.assertTrue(fused)
        self.assertFalse({path for path in called if fusible(path)})


class AdapterStatesTest(TorchFormsTestCase):
    """What PEFT does to adapters that exist, on both models."""

    bar = 10 * BAR

    def check_states(self, builtin, ours, *changes, fused=True):
        """Each change has its effect on the result of both models, which stay equal."""
        previous = self.check_equal(builtin, ours)[2][0]
        for change in changes:
            for model in (builtin, ours):
                change(model)
            found, called, expected = self.check_equal(builtin, ours)
            self.assertEqual(bool(found), fused)
            self.assertFalse(fused and {path for path in called if fusible(path)})
            self.assertGreater(relative_error(torch.cat(expected[0]), torch.cat(previous)), 1e-4)
            previous = expected[0]

    def models(self, *options: dict) -> tuple:
        """Models with an adapter of each of these options: "default", "1", "2", ..."""
        builtin = get_peft_model(biased_model(), lora(**options[0]))
        for number, option in enumerate(options[1:], start=1):
            builtin.add_adapter(str(number), lora(**option))
        for name, parameter in builtin.named_parameters():
            parameter.requires_grad_("lora_" in name)
        randomized(builtin, 0.05)
        builtin.set_adapter("default")
        return builtin, patch_model(copy.deepcopy(builtin))

    def test_several_adapters(self):
        builtin, ours = self.models({}, {"r": 2}, {"target_modules": ["k_proj", "out_proj"], "lora_alpha": 9})
        self.check_states(
            builtin,
            ours,
            lambda model: model.set_adapter("1"),
            lambda model: model.base_model.set_adapter(["default", "1"]),
            lambda model: model.base_model.set_adapter(["2", "1", "default"]),
            lambda model: model.set_adapter("2"),
            lambda model: (model.set_adapter("default"), model.delete_adapter("1")),
        )

    def test_weighted_and_scaled_adapters(self):
        builtin, ours = self.models({}, {})

        def combine(model):
            model.add_weighted_adapter(["default", "1"], [0.7, 0.6], "sum", combination_type="linear")
            model.set_adapter("sum")

        def scale(model):
            for module in model.modules():
                if isinstance(module, LoraLayer):
                    module.scale_layer(3.0)

        self.check_states(builtin, ours, combine, scale)

    def test_an_adapter_with_another_that_is_a_variant(self):
        """Layers with an active variant run PEFT's own forward, for all their adapters."""
        builtin, ours = self.models({}, {"use_dora": True, "target_modules": ["q_proj", "down_proj"]})
        for model in (builtin, ours):
            model.base_model.set_adapter(["default", "1"])
        fused, called, _ = self.check_equal(builtin, ours)
        variants = ("q_proj", "down_proj")
        self.assertEqual(
            {path for path in called if fusible(path)}, {p for p in called | fused if p.endswith(variants)}
        )

    def test_disabled_adapters(self):
        builtin, ours = self.models({"target_modules": ["q_proj", "k_proj", "in_proj_z", "down_proj"], "bias": "all"})
        logits = self.check_equal(builtin, ours)[2][0]
        with builtin.disable_adapter(), ours.disable_adapter():
            fused, called, (disabled, _, _) = self.check_equal(builtin, ours)
        self.assertEqual((len(fused), called), (5, set()))
        self.assertGreater(relative_error(torch.cat(disabled), torch.cat(logits)), 1e-4)
        fused, _, (again, _, _) = self.check_equal(builtin, ours)
        torch.testing.assert_close(again, logits)

    def test_merged_adapters(self):
        builtin, ours = self.models({}, {"r": 2})
        logits = self.check_equal(builtin, ours)[2][0]
        for state in ("merge_adapter", "unmerge_adapter", "merge_adapter"):
            for model in (builtin, ours):
                getattr(model, state)()
            fused, called, (same, _, gradients) = self.check_equal(builtin, ours)
            self.assertFalse({path for path in called if fusible(path)})
            self.assertEqual(bool(gradients), state == "unmerge_adapter")
            torch.testing.assert_close(same, logits, rtol=1e-3, atol=1e-4)
        # Layers that were merged unmerge themselves where adapters are disabled.
        with builtin.disable_adapter(), ours.disable_adapter():
            fused, called, (disabled, _, _) = self.check_equal(builtin, ours)
            self.assertFalse(fused)
            self.assertTrue(self.check_equal(builtin, ours)[0])
        self.assertGreater(relative_error(torch.cat(disabled), torch.cat(logits)), 1e-4)
        for model in (builtin, ours):
            for module in model.modules():
                self.assertFalse(isinstance(module, LoraLayer) and module.merged)

    @skipIf(NEEDS_NEWER_PEFT, f"Transformers {RELEASE} adds adapters with a newer PEFT only")
    def test_an_adapter_that_is_added_later(self):
        """To the model itself, as Transformers does it, and to a patched model."""
        builtin = biased_model()
        ours = patch_model(copy.deepcopy(builtin))
        for model in (builtin, ours):
            torch.manual_seed(0)
            model.add_adapter(lora(init_lora_weights=False), "first")
            model.add_adapter(lora(init_lora_weights=False, r=2), "second")
            model.set_adapter("first")
        self.check_states(builtin, ours, lambda model: model.set_adapter(["first", "second"]))

    def test_a_scale_that_is_a_tensor(self):
        """PEFT's preparation for adapters that are swapped while a compiled model runs, and another adapter."""
        builtin, ours = self.models({})
        for model in (builtin, ours):
            prepare_model_for_compiled_hotswap(model, target_rank=6)
            model.add_adapter("later", lora(target_modules=["q_proj"]))
            model.base_model.set_adapter(["default", "later"])
        self.assertFalse(self.check_equal(builtin, ours)[0])

    def test_expert_weights(self):
        config = lora(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
        builtin = randomized(get_peft_model(builtin_model("qwen3_5_moe"), config))
        fused, called, _ = self.check_equal(builtin, patch_model(copy.deepcopy(builtin)))
        self.assertTrue(fused)
        self.assertEqual(len([path for path in fused if "experts" in path]), 4)
        self.assertEqual(called, set())

    def test_parts_that_are_frozen_or_trained(self):
        """A frozen A as in LoRA-FA, a frozen B, and base weights that are trained too."""
        for part in ("lora_A", "lora_B", "base_layer"):
            builtin, ours = self.models({}, {"r": 2})
            for model in (builtin, ours):
                model.base_model.set_adapter(["default", "1"])
                for name, parameter in model.named_parameters():
                    if part in name:
                        parameter.requires_grad_(part == "base_layer")
            fused, _, (_, _, gradients) = self.check_equal(builtin, ours)
            self.assertTrue(fused)
            self.assertEqual(any(part in name for name in gradients), part == "base_layer")

    @parameterized.expand(["lm_head", "embed_tokens"])
    def test_an_adapter_of_the_head_or_of_the_embedding(self, target):
        builtin = randomized(get_peft_model(biased_model(), lora(target_modules=[*LINEARS, target])), 0.05)
        ours = patch_model(copy.deepcopy(builtin))
        _, called, (_, loss, gradients) = self.check_equal(builtin, ours)
        self.assertEqual({path.rpartition(".")[2] for path in called}, {target})
        # A loss that computes no logits must not skip the head's adapter either.
        ours.zero_grad()
        output = ours(**packed_batch(documents()), use_cache=False)
        output.loss.backward()
        own = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
        self.assertLess(relative_error(output.loss.detach(), loss), self.bar)
        self.assertEqual(own.keys(), gradients.keys())
        self.assertLess(total_relative_error(own, gradients), self.bar)

    @parameterized.expand(["arrow", "xlora"])
    def test_adapters_that_a_router_mixes(self, name):
        folders = []
        for seed in (1, 2):
            folders.append(self.enterContext(tempfile.TemporaryDirectory()))
            randomized(get_peft_model(biased_model(), lora()), 0.05, seed).save_pretrained(folders[-1])
        if name == "arrow":
            config = peft.tuners.lora.config.ArrowConfig(top_k=1)
            builtin = create_arrow_model(biased_model(), folders, config)
        else:
            base = biased_model()
            base.config.use_cache = False
            adapters = {str(i): folder for i, folder in enumerate(folders)}
            config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, adapters=adapters, xlora_dropout_p=0.0)
            builtin = randomized(get_peft_model(base, config))
        ours = patch_model(copy.deepcopy(builtin))
        fused, called, _ = self.check_equal(builtin, ours)
        self.assertTrue(called and not fused)

    def test_padded_rows(self):
        builtin, ours = self.models({}, {"r": 2})
        self.check_padded(builtin, ours, fused_layers=True)

    def check_padded(self, builtin, ours, fused_layers=False, **kwargs):
        """Padded rows through both models. Returns the built-in's logits of real tokens."""
        batch = padded_batch(
            [torch.tensor([3, 5, 6, 5, 9]), torch.tensor([5, 6]), torch.tensor([7, 5, 6, 8])], "right"
        )
        real = batch["attention_mask"].bool()
        expected = builtin(**batch, **kwargs, use_cache=False)
        with recorded(ours) as (fused, called):
            got = ours(**batch, **kwargs, use_cache=False, skip_logits=False)
        self.assertEqual((bool(fused), bool(called)), (fused_layers, not fused_layers))
        self.assertLess(relative_error(got.logits[real], expected.logits[real]), BAR)
        if got.loss.requires_grad:
            results = []
            for model, output in ((builtin, expected), (ours, got)):
                model.zero_grad()
                output.loss.backward()
                results.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
            self.assertEqual(*(result.keys() for result in results))
            self.assertLess(total_relative_error(results[1], results[0]), self.bar)
        return expected.logits[real]

    def test_an_adapter_for_each_row_of_a_padded_batch(self):
        builtin, ours = self.models({}, {"r": 2})
        builtin, ours = builtin.eval(), ours.eval()
        first = self.check_padded(builtin, ours, adapter_names=["1", "default", "__base__"])
        second = self.check_padded(builtin, ours, adapter_names=["__base__", "1", "default"])
        self.assertGreater(relative_error(second, first), 1e-4)
        with self.assertRaisesRegex(ValueError, "adapter_names"):
            ours(**packed_batch(documents()), adapter_names=["1", "default", "1", "1"])

    def test_activated_adapters_of_a_padded_batch(self):
        builtin = randomized(get_peft_model(biased_model(), lora(alora_invocation_tokens=[5, 6])), 0.05)
        ours = patch_model(copy.deepcopy(builtin))
        active = self.check_padded(builtin, ours)
        with builtin.disable_adapter(), ours.disable_adapter():
            self.assertTrue(self.check_equal(builtin, ours)[0])
        for model in (builtin, ours):
            model.peft_config["default"].alora_invocation_tokens = [6, 5]
        self.assertGreater(relative_error(self.check_padded(builtin, ours), active), 1e-4)
