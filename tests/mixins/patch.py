"""Live models for the tests of `patch_model`. The oracle is the same model before patching."""

import copy
import unittest
from unittest import mock

import torch
from common.families import tiny_model
from mixins import vision
from mixins.model import alone, gradients, packed_batch, relative_error, total_relative_error
from mixins.vision import TEXT, vision_config
from transformers import (
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    set_seed,
)
from transformers.models.qwen3_5 import modeling_qwen3_5 as builtin_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as builtin_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next as builtin_qwen3_next
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from transformers_packed import patch_model
from transformers_packed.models.families import OWN
from transformers_packed.models.registry import check_patch
from transformers_packed.models.replacements import FAST_PATHS, REPLACEMENTS


EXPERTS = vision.EXPERTS | {"num_experts": 8}
OPTIONS = {"initializer_range": 0.1, "num_labels": 3, "classifier_dropout": 0.0}
CONFIGS = {
    "qwen3_next": Qwen3NextConfig(**{**TEXT, **EXPERTS, **OPTIONS}),
    "qwen3_5": Qwen3_5TextConfig(**TEXT, **OPTIONS),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**TEXT, **EXPERTS, **OPTIONS),
}
COMPOSITE = {
    "qwen3_5": Qwen3_5Config(**vision_config({**TEXT, **OPTIONS}), **OPTIONS),
    "qwen3_5_moe": Qwen3_5MoeConfig(**vision_config({**TEXT, **EXPERTS, **OPTIONS}), **OPTIONS),
}
BUILTINS = {"qwen3_next": builtin_qwen3_next, "qwen3_5": builtin_qwen3_5, "qwen3_5_moe": builtin_qwen3_5_moe}
# The other families with classes of this package, of which `builtin_model` builds a causal language model.
OTHERS = tuple(family.name for family in OWN if family.name not in CONFIGS)
LENGTHS = (1, 5, 64, 70)


def builtin_model(family: str = "qwen3_5", head: str | None = None, config=None) -> torch.nn.Module:
    """Build a model of the stock class with random norms and biases."""
    if family in OTHERS:
        return tiny_model(family)
    set_seed(0)
    if head is None:
        head = {"qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[family] + "ForCausalLM"
    model = getattr(BUILTINS[family], head)._from_config(copy.deepcopy(config or CONFIGS[family]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "dt_bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.train()


def on_a_gpu():
    """Layers choose what they fuse on a GPU, whose kernels leave the work to the torch forms."""
    triton = "transformers_packed.ops.backends.triton"
    return mock.patch.multiple(triton, on_gpu=lambda tensor: True, problem=lambda: "are left out here")


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 90, (n,), generator=generator) for n in LENGTHS]


def ours(model: torch.nn.Module) -> set[str]:
    """List the names of modules of our classes, except classes that only add speed."""
    classes = set(REPLACEMENTS.values()) - FAST_PATHS
    return {name for name, module in model.named_modules() if type(module) in classes}


def snapshot(model: torch.nn.Module) -> dict:
    """Record everything that patching must not change, and the classes that it changes."""
    return {
        "classes": [type(module) for module in model.modules()],
        "tensors": [(name, id(x), x.data_ptr()) for name, x in [*model.named_parameters(), *model.named_buffers()]],
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "attributes": [set(vars(module)) for module in model.modules()],
        "recorders": dict(_CAN_RECORD_REGISTRY),
    }


class PatchTestCase(unittest.TestCase):
    def check_packed_is_alone(self, model, expected, gradient_bar=2e-6):
        """Compare a packed row through `model` with the stock (logits, loss, gradients) of documents alone."""
        logits, loss, grads = expected
        packed = model(**packed_batch(documents()))
        self.assertLess(relative_error(packed.logits[0], torch.cat(logits)), 1e-5)
        self.assertLess(relative_error(packed.loss, loss), 1e-5)
        actual = gradients(model, packed.loss)
        self.assertEqual(set(actual), set(grads))
        self.assertLess(total_relative_error(actual, grads), gradient_bar)

    def expected(self, model):
        logits, loss = alone(model, documents())
        return [x.detach() for x in logits], loss.detach(), gradients(model, loss)

    def assert_refused(self, call, model, pattern: str):
        """Check that the call raises a matching `ValueError` and leaves the model unchanged.

        `check_patch` raises whatever `patch_model` raises.
        """
        before = snapshot(model)
        forwards = [vars(module).get("forward") for module in model.modules()]
        for each in (check_patch, call) if call is patch_model else (call,):
            with self.assertRaisesRegex(ValueError, f"(?s)^expected .*{pattern}"):
                each(model)
            self.assertEqual(snapshot(model), before)
            for module, forward in zip(model.modules(), forwards, strict=True):
                self.assertIs(vars(module).get("forward"), forward)
