"""Whatever touches a part of a LoRA layer has the effect that it has on the built-in model.

`test_touched_modules.py` has all ways to touch a module. Here, one of them touches each part.
"""

import copy

import torch
from mixins.lora import BAR, TorchFormsTestCase, biased_model, documents, lora, randomized
from parameterized import parameterized
from peft import get_peft_model

from transformers_packed import patch_model


PARTS = ("lora_A.default", "lora_B.default", "lora_dropout.default", "base_layer", "")
# Some layers, each of another block, and others of the same blocks.
LAYERS = (
    ("layers.0.linear_attn.in_proj_z", "layers.1.self_attn.k_proj", "layers.1.mlp.up_proj"),
    ("layers.0.linear_attn.out_proj", "layers.1.self_attn.o_proj", "layers.1.mlp.down_proj"),
)
DOCUMENTS = documents(lengths=(9, 4))


def stretched(x: torch.Tensor) -> torch.Tensor:
    """Other values in each channel."""
    return x * torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype)


class TouchedPartsTest(TorchFormsTestCase):
    bar = 3 * BAR

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        config = lora(target_modules="all-linear", lora_bias=True)
        cls.built = randomized(get_peft_model(biased_model(), config), 0.05)
        cls.plain = cls("result").result(cls.built, DOCUMENTS, False)

    def setUp(self):
        super().setUp()
        self.builtin = copy.deepcopy(self.built)
        self.ours = patch_model(copy.deepcopy(self.built))

    def check_touched(self, part: str, touch):
        """`touch(module)` returns a function that undoes it, and makes the layers run PEFT's own forward."""
        for layers in LAYERS:
            names = [f"base_model.model.model.{layer}" for layer in layers]
            paths = [f"{name}.{part}".rstrip(".") for name in names]
            undo = [touch(model.get_submodule(path)) for model in (self.builtin, self.ours) for path in paths]
            _, called, expected = self.check_equal(self.builtin, self.ours, DOCUMENTS)
            self.assertEqual(called, set(names), part)
            # A weight that is no parameter has no gradient.
            same_names = expected[2].keys() == self.plain[2].keys()
            changed, plain = (result if same_names else (*result[:2], {}) for result in (expected, self.plain))
            self.assertGreater(self.error(changed, plain), 1e-5, (layers, part))
            for function in undo:
                function()

    @parameterized.expand(PARTS)
    def test_a_forward_of_its_own(self, part):
        def touch(module):
            module.forward = lambda *args, **kwargs: stretched(type(module).forward(module, *args, **kwargs))
            return lambda: delattr(module, "forward")

        self.check_touched(part, touch)

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

        self.check_touched(part, touch)

    def test_a_bias_of_the_first_matrix(self):
        def touch(module):
            module.bias = torch.nn.Parameter(torch.linspace(-1, 1, module.out_features), requires_grad=False)
            return lambda: setattr(module, "bias", None)

        self.check_touched("lora_A.default", touch)

    def test_a_dropout_that_drops_all(self):
        def touch(module):
            module.lora_dropout["default"] = torch.nn.Dropout(1.0)
            return lambda: module.lora_dropout.update({"default": torch.nn.Identity()})

        self.check_touched("", touch)
