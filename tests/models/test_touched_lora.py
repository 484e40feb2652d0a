"""Whatever touches a part of a LoRA layer has the effect that it has on the built-in model."""

import copy
from unittest import main

import torch
from mixins.lora import BAR, TorchFormsTestCase, biased_model, documents, fused_without_reason, lora, randomized
from parameterized import parameterized
from peft import get_peft_model
from torch.nn.utils import parametrize, prune, remove_spectral_norm, spectral_norm

from transformers_packed import patch_model


KINDS = ("forward_pre", "forward", "full_backward_pre", "full_backward")
PARTS = ("lora_A.default", "lora_B.default", "lora_dropout.default", "base_layer", "")
LAYERS = (
    "layers.0.linear_attn.in_proj_z",
    "layers.0.linear_attn.out_proj",
    "layers.1.self_attn.k_proj",
    "layers.1.self_attn.o_proj",
    "layers.1.mlp.up_proj",
    "layers.1.mlp.down_proj",
)


def stretched(x: torch.Tensor) -> torch.Tensor:
    """Other values in each channel."""
    return x * torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype)


def stretch_all(module, *values):
    """A hook of any kind: the last value is what the hook may replace."""
    changed = values[-1] if isinstance(values[-1], torch.Tensor) else None
    if changed is not None:
        return stretched(changed)
    # The first argument of a backward hook is replaced, and a forward pre-hook has no other.
    return tuple(None if x is None else stretched(x) for x in values[0])


class Stretched(torch.nn.Module):
    def forward(self, weight):
        return stretched(weight)


class TouchedPartsTest(TorchFormsTestCase):
    bar = 3 * BAR

    def setUp(self):
        super().setUp()
        config = lora(target_modules="all-linear", lora_bias=True)
        self.builtin = randomized(get_peft_model(biased_model(), config), 0.05)
        self.ours = patch_model(copy.deepcopy(self.builtin))
        self.plain = self.check_equal(self.builtin, self.ours)[2]

    def check_touched(self, layer: str, part: str, touch, effect=True):
        """`touch(module)` returns a function that undoes it, and makes the layer run PEFT's own forward."""
        name = f"base_model.model.model.{layer}"
        undo = [touch(model.get_submodule(f"{name}.{part}".rstrip("."))) for model in (self.builtin, self.ours)]
        fused, called, expected = self.check_equal(self.builtin, self.ours)
        self.assertEqual((called, name in fused), ({name}, False), (layer, part))
        if effect:
            # A parametrization changes names.
            same_names = expected[2].keys() == self.plain[2].keys()
            changed, plain = (result if same_names else (*result[:2], {}) for result in (expected, self.plain))
            self.assertGreater(self.error(changed, plain), 1e-5, (layer, part))
        for function in undo:
            function()

    @parameterized.expand([(kind, part) for kind in KINDS for part in PARTS])
    def test_a_hook(self, kind, part):
        for layer in LAYERS:
            # No adapter comes before the first layer's projections, so gradients of their input have no effect.
            self.check_touched(
                layer,
                part,
                lambda module: getattr(module, f"register_{kind}_hook")(stretch_all).remove,
                effect=kind.startswith("forward") or "in_proj" not in layer,
            )

    @parameterized.expand(PARTS)
    def test_a_forward_of_its_own(self, part):
        def touch(module):
            module.forward = lambda *args, **kwargs: stretched(type(module).forward(module, *args, **kwargs))
            return lambda: delattr(module, "forward")

        for layer in LAYERS:
            self.check_touched(layer, part, touch)

    @parameterized.expand(PARTS)
    def test_a_compiled_call(self, part):
        calls = []

        def touch(module):
            module._compiled_call_impl = lambda *args, **kwargs: calls.append(1) or module.forward(*args, **kwargs)
            return lambda: setattr(module, "_compiled_call_impl", None)

        for layer in LAYERS:
            calls.clear()
            self.check_touched(layer, part, touch, effect=False)
            self.assertEqual(len(calls), len(documents()) + 1)

    @parameterized.expand(["lora_A.default", "lora_B.default", "base_layer"])
    def test_a_parametrization(self, part):
        def touch(module):
            parametrize.register_parametrization(module, "weight", Stretched())
            return lambda: parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)

        for layer in LAYERS:
            self.check_touched(layer, part, touch)

    @parameterized.expand(PARTS[:2])
    def test_a_weight_that_is_no_parameter(self, part):
        """Nor computed by a hook, as in a network that generates weights."""

        def touch(module):
            original = module._parameters.pop("weight")
            module.weight = stretched(original)

            def undo():
                del module.weight
                module.weight = original

            return undo

        for layer in LAYERS[::2]:
            self.check_touched(layer, part, touch)

    @parameterized.expand([(part, utility) for part in (*PARTS[:2], PARTS[3]) for utility in ("prune", "norm")])
    def test_a_utility_of_torch(self, part, utility):
        """The weight is computed from parameters of other names, by a hook."""

        def touch(module):
            if utility == "norm":
                spectral_norm(module)
                return lambda: remove_spectral_norm(module)
            original = module.weight
            prune.l1_unstructured(module, "weight", 0.3)

            def undo():
                prune.remove(module, "weight")
                module.weight = original

            return undo

        for layer in LAYERS[::2]:
            self.check_touched(layer, part, touch)

    @parameterized.expand(PARTS[:3])
    def test_a_replaced_part(self, part):
        """By a module of a user's own class, such as a subclass of what PEFT has there."""

        def touch(module):
            original = type(module)
            module.__class__ = type("Own", (original,), {"forward": lambda s, x: stretched(original.forward(s, x))})
            return lambda: setattr(module, "__class__", original)

        for layer in LAYERS:
            self.check_touched(layer, part, touch)

    def test_a_bias_of_the_first_matrix(self):
        def touch(module):
            module.bias = torch.nn.Parameter(torch.linspace(-1, 1, module.out_features), requires_grad=False)
            return lambda: setattr(module, "bias", None)

        for layer in LAYERS:
            self.check_touched(layer, "lora_A.default", touch)

    def test_a_dropout_that_drops_all(self):
        def touch(module):
            module.lora_dropout["default"] = torch.nn.Dropout(1.0)
            return lambda: module.lora_dropout.update({"default": torch.nn.Identity()})

        for layer in LAYERS:
            self.check_touched(layer, "", touch)

    def test_hooks_for_all_modules(self):
        handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
        self.addCleanup(handle.remove)
        self.assertFalse(self.check_equal(self.builtin, self.ours)[0])

    def test_the_comparison_can_fail(self):
        with fused_without_reason():
            result = type(self)("test_a_hook_00_forward_pre").run()
        self.assertTrue(result.failures)


if __name__ == "__main__":
    main()
