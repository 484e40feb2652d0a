"""Models with PEFT's adapters, and the comparison of ours with the built-in ones, for tests of LoRA.

The layers choose what they fuse on a GPU. Torch forms run in place of the kernels.
"""

import contextlib
import copy
import unittest
import warnings
from unittest import mock

import peft
import torch
from mixins.model import alone, packed_batch, relative_error, total_relative_error
from mixins.patch import COMPOSITE, CONFIGS, OTHERS, builtin_model, on_a_gpu
from mixins.vision import alone_batch, document
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer

from transformers_packed.models import experts, projections


LINEARS = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "in_proj_qkv",
    "in_proj_a",
    "out_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
]


def lora(**options) -> LoraConfig:
    return LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "target_modules": LINEARS, **options})


def tuner(kind: str, **options) -> peft.PeftConfig:
    """The configuration of one of PEFT's types of adapters, on linear layers unless `TUNERS` or `options` differ."""
    cls = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)]
    options = {"task_type": "CAUSAL_LM", "target_modules": LINEARS, **TUNERS.get(kind, {}), **options}
    return cls(**{name: value for name, value in options.items() if name in cls.__dataclass_fields__})


BAR = 4e-6
BUILTINS = {
    "qwen3_next": ("qwen3_next", None, None),
    "qwen3_5": ("qwen3_5", None, None),
    "qwen3_5_moe": ("qwen3_5_moe", None, None),
    "qwen3_5_vision": ("qwen3_5", "Qwen3_5ForConditionalGeneration", COMPOSITE["qwen3_5"]),
    "qwen3_5_moe_vision": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", COMPOSITE["qwen3_5_moe"]),
    **{name: (name, None, None) for name in OTHERS},
}
# Linear layers of our classes whose modules compute them without a call.
OURS = ("in_proj_", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Those of latent attention, of Kimi delta attention, of OLMo-Hybrid's delta rule and of several residual streams.
OURS += ("q_a_proj", "q_b_proj", "kv_", "g_", "f_", "b_proj", "a_proj", "input_mix_weight", "block_inject_weight")

# Variants of LoRA, whose layers run PEFT's own forward.
VARIANTS = {
    "dora": {"use_dora": True},
    "activated": {"alora_invocation_tokens": [5, 6]},
    "velora": {"velora_config": peft.tuners.lora.config.VeloraConfig(num_groups=4, init_type="random")},
    "block_diagonal": {
        "use_bdlora": peft.tuners.lora.config.BdLoraConfig(
            target_modules_bd_a=["o_proj", "down_proj"], target_modules_bd_b=["q_proj"], nblocks=2, match_strict=False
        )
    },
    "kasa": {"r": 3, "kasa_config": peft.tuners.lora.config.KasaConfig()},
    "mica": {"init_lora_weights": "mica"},
    "montecarlo": {"monteclora_config": peft.tuners.lora.config.MontecloraConfig()},
}
# What other tuners need to adapt these layers. A new type is tried with its defaults.
TUNERS = {
    "ADALORA": {"total_step": 10},
    "C3A": {"block_size": 4},
    "FOURIERFT": {"n_frequency": 20},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["q_norm", "norm", "post_attention_layernorm"]},
    "MISS": {"r": 4},
    "PSOFT": {"r": 2},
    "ROAD": {"group_size": 4},
    "SHIRA": {"r": 1},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [3, 40]},
    "VBLORA": {"vector_length": 4, "num_vectors": 8},
    "WAVEFT": {"n_frequency": 20},
}
NEEDED = {"ADAMSS": "sklearn"}


def biased_model() -> torch.nn.Module:
    """A model with biases in attention, random ones."""
    config = copy.deepcopy(CONFIGS["qwen3_5"])
    config.attention_bias = True
    model = builtin_model(config=config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj.bias"):
                parameter.normal_(std=0.2)
    return model


def randomized(model: torch.nn.Module, noise: float = 0.02, seed: int = 1) -> torch.nn.Module:
    """Add noise to all that is trained, so that no factor of an adapter is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.device) * noise)
    return model


def documents(name: str = "", lengths: tuple = (9, 1, 4)) -> list[dict]:
    images = [((1, 4, 4),), (), ((1, 4, 8),)] if name.endswith("vision") else [()] * len(lengths)
    features = [document(n, i, image) for i, (n, image) in enumerate(zip(lengths, images, strict=True))]
    return features if name.endswith("vision") else [{"input_ids": d["input_ids"]} for d in features]


@contextlib.contextmanager
def unfused():
    """Call all linear layers and experts, so that PEFT's own forward runs for each of them."""
    with (
        mock.patch.object(projections, "terms_of", lambda *args: None),
        mock.patch.object(experts, "_adapters_of", lambda module: (module, None)),
    ):
        yield


@contextlib.contextmanager
def recorded(model: torch.nn.Module):
    """Record the adapted layers of a model that a fused op computes, and those that are called: two sets of names."""
    names = {module: name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    fused, called = set(), set()
    terms_of, adapters_of = projections.terms_of, experts._adapters_of

    def read(layer, hidden_states):
        terms = terms_of(layer, hidden_states)
        if terms is not None and layer in names:
            fused.add(names[layer])
        return terms

    def read_experts(module):
        base, adapters = adapters_of(module)
        while adapters and module is not base:
            fused.add(names[module])
            module = module.base_layer
        return base, adapters

    def call(module, *args, original=torch.nn.Module.__call__, **kwargs):
        if module in names:
            called.add(names[module])
        return original(module, *args, **kwargs)

    with (
        mock.patch.object(projections, "terms_of", read),
        mock.patch.object(experts, "_adapters_of", read_experts),
        mock.patch.object(torch.nn.Module, "__call__", call),
    ):
        yield fused, called


class LoraTestCase(unittest.TestCase):
    bar = BAR

    def result(self, model, features, packed: bool, **kwargs) -> tuple[list, torch.Tensor, dict]:
        """Logits of each document, the loss over all targets and the gradients; packed, or each document alone."""
        lengths = [len(feature["input_ids"]) for feature in features]
        model.zero_grad()
        if packed:
            output = model(**packed_batch(features, model=model), skip_logits=False, use_cache=False, **kwargs)
            logits, loss = output.logits[0].split(lengths), output.loss
        else:
            logits, loss = alone(model, [alone_batch(feature) | kwargs for feature in features])
        gradients = {}
        if loss.requires_grad:
            loss.backward()
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return [x.detach() for x in logits], loss.detach(), gradients

    def check_equal(self, builtin, ours, features=None, **kwargs) -> tuple[set, set, tuple]:
        """A packed row through `ours` is each document through `builtin`, and each adapted layer is fused or called.

        Returns the names of the fused and of the called layers, and the built-in's result.
        """
        features = documents() if features is None else features
        expected = self.result(builtin, features, False, **kwargs)
        with recorded(ours) as (fused, called):
            got = self.result(ours, features, True, **kwargs)
        self.assertEqual(got[2].keys(), expected[2].keys())
        error, bar = self.error(got, expected), self.bar
        if error > bar:
            # The decay magnifies rounding, in PEFT's own forward of each layer of a packed row too.
            with unfused():
                bar = max(bar, 2 * self.error(self.result(ours, features, True, **kwargs), expected))
        self.assertLess(error, bar)
        self.assertFalse(fused & called)
        # Short documents need no indexer.
        modules = ((name, module) for name, module in ours.named_modules() if "indexer" not in name)
        self.assertEqual(fused | called, {name for name, module in modules if isinstance(module, BaseTunerLayer)})
        return fused, called, expected

    def error(self, got: tuple, expected: tuple) -> float:
        """The largest relative error of the logits, of the loss and of all gradients together."""
        errors = [relative_error(torch.cat(got[0]), torch.cat(expected[0])), relative_error(got[1], expected[1])]
        return max([*errors, total_relative_error(got[2], expected[2])] if expected[2] else errors)


class TorchFormsTestCase(LoraTestCase):
    def setUp(self):
        self.enterContext(on_a_gpu())
        self.enterContext(warnings.catch_warnings())
        warnings.simplefilter("ignore")


def fusible(name: str) -> bool:
    return "visual" not in name and name.rpartition(".")[2].startswith(OURS)


def all_linear(name: str) -> torch.nn.Module:
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules="all-linear")
    return randomized(get_peft_model(builtin_model(*BUILTINS[name]), config))
