"""Which of PEFT's adapters act on each token alone, measured for every type and variant that PEFT has.

The gradient of one document's last hidden states with respect to the embeddings of another must be exactly 0.
"""

import copy
import tempfile
from importlib.util import find_spec

import peft
import pytest
import torch
from common.families import tiny_model
from mixins.lora import (
    NEEDED,
    TUNERS,
    VARIANTS,
    TorchFormsTestCase,
    lora,
    randomized,
    tuner,
)
from mixins.model import gradients, relative_error, total_relative_error
from mixins.patch import builtin_model
from parameterized import parameterized
from peft import get_peft_model, inject_adapter_in_model
from peft.tuners.lora import LoraLayer, create_arrow_model
from transformers import LlamaConfig, LlamaForCausalLM

from transformers_packed import patch_model
from transformers_packed.models.adapters import PER_TOKEN, VARIANTS_PER_TOKEN, acts_per_token, adapter_per_row
from transformers_packed.models.padding import why_padded
from transformers_packed.models.registry import transformers_model
from transformers_packed.models.verdict import judge


# The types that do not act on each token alone. A type that PEFT adds belongs here or into `PER_TOKEN`.
PER_ROW = {
    "CARTRIDGE": "prepends keys and values",
    "CPT": "prepends tokens",
    "LILY": "averages its router over all tokens",
    "MULTITASK_PROMPT_TUNING": "prepends tokens",
    "POLY": "takes the task of each row",
    "PREFIX_TUNING": "prepends keys and values",
    "PROMPT_TUNING": "prepends tokens",
    "P_TUNING": "prepends tokens",
    "SHADOW": "runs a second model beside the layers",
    "XLORA": "lays its scales out like the row, and other families lay documents out apart",
}
KINDS = sorted(kind.value for kind in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING)
# In a family that lays documents out apart, by shared code.
SOME = ("LILY", "LN_TUNING", "LORA", "POLY", "PREFIX_TUNING", "XLORA")
# Of each family of methods one, which `make test` measures.
USUAL = ("ADAPTION_PROMPT", "BOFT", "IA3", "LILY", "LN_TUNING", "LOHA", "LORA", "OFT", "POLY", "PREFIX_TUNING")
USUAL += ("PROMPT_TUNING", "SHADOW", "TRAINABLE_TOKENS", "VERA", "XLORA")
LENGTHS = (5, 3, 4)
# What these need to be created.
PROMPTS = {"num_virtual_tokens": 3, "encoder_hidden_size": 8}
OPTIONS = {
    "ADAPTION_PROMPT": {"target_modules": None, "adapter_len": 3, "adapter_layers": 2},
    "CARTRIDGE": PROMPTS,
    "MULTITASK_PROMPT_TUNING": {**PROMPTS, "num_tasks": 1},
    "PREFIX_TUNING": PROMPTS,
    "PROMPT_TUNING": PROMPTS,
    "P_TUNING": PROMPTS,
    "SHADOW": {"target_modules": None},
    "XLORA": {"hidden_size": 32, "xlora_dropout_p": 0.0},
}


def model_of(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if family != "llama":
        model = builtin_model(family) if family == "qwen3_5" else tiny_model(family)
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes))
    model.config.use_cache = False
    return model


class AdaptersPerTokenTest(TorchFormsTestCase):
    def adapted(self, kind: str, family: str) -> peft.PeftModel:
        options = dict(OPTIONS.get(kind, {}))
        if family == "lfm2" and "target_modules" not in {**TUNERS.get(kind, {}), **options}:
            options["target_modules"] = "all-linear"
        if (kind, family) == ("LN_TUNING", "lfm2"):
            options["target_modules"] = ["operator_norm", "ffn_norm", "q_layernorm"]
        if kind == "XLORA":
            options["adapters"] = {str(number): self.saved_lora(family, number) for number in range(2)}
        return get_peft_model(model_of(family), tuner(kind, **options))

    def saved_lora(self, family: str, seed: int) -> str:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        model = get_peft_model(model_of(family), lora(target_modules=["q_proj", "out_proj"]))
        randomized(model, 0.3, seed).save_pretrained(folder)
        return folder

    def hidden(self, model, embeds: torch.Tensor, lengths: tuple) -> torch.Tensor:
        """Last hidden states of a packed row. Random adapters draw the same numbers in each call."""
        torch.manual_seed(0)
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        seen = []
        head = transformers_model(model).get_output_embeddings()
        handle = head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        model(inputs_embeds=embeds, position_ids=positions, use_cache=False)
        handle.remove()
        return seen[-1]

    @parameterized.expand([("LORA", True), ("LILY", False)])
    def test_padded_batches(self, kind, packs):
        """An adapter that mixes the tokens of a row has to see the rows of the batch."""
        stock = randomized(self.adapted(kind, "qwen3_5"), 0.3)
        model = patch_model(copy.deepcopy(stock))
        self.assertEqual(why_padded(model.get_base_model().model, {"use_cache": False}) == "", packs)
        mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
        batch = {"input_ids": torch.arange(1, 19).view(2, 9), "attention_mask": mask, "use_cache": False}
        with torch.no_grad():
            self.assertLess(relative_error(model(**batch).logits[mask == 1], stock(**batch).logits[mask == 1]), 1e-5)

    def check(self, model, per_token: bool):
        """The verdict on a model, and its correctness: the leak, and each document alone in the stock model."""
        embeds = torch.randn(1, sum(LENGTHS), 32)
        randomized(model, 0.3).eval()
        expected = self.trained(model, embeds.split(LENGTHS, 1)) if per_token else None
        patch_model(model)
        reason, (leak, _) = adapter_per_row(model), judge(model, "position_ids")
        self.assertEqual((reason is None, leak is None), (per_token, per_token), (reason, leak))
        if per_token:
            hidden, got = self.trained(model, [embeds])
            self.assertLess(relative_error(hidden, expected[0]), 1e-5)
            self.assertEqual(got.keys(), expected[1].keys())
            self.assertTrue(not expected[1] or total_relative_error(got, expected[1]) < 1e-4)
            self.assertEqual(self.leak(model.train()), 0)

    def trained(self, model, rows) -> tuple[torch.Tensor, dict]:
        """The hidden states of packed rows, or of each document alone, and the gradients of what is trained."""
        hidden = torch.cat([self.hidden(model, x, LENGTHS if len(rows) == 1 else (x.shape[1],)) for x in rows], 1)
        weights = torch.linspace(-1, 1, hidden.numel()).sin().view_as(hidden)
        # Some adapters are frozen, and some change the embedding of tokens alone.
        return hidden.detach(), gradients(model, (hidden * weights).sum()) if hidden.requires_grad else {}

    def leak(self, model) -> float:
        """The largest gradient across documents, relative to the smallest one within a document."""
        embeds = torch.randn(1, sum(LENGTHS), 32).requires_grad_()
        hidden = self.hidden(model, embeds, LENGTHS)
        inside, across = [], []
        for weights, part in zip(*(x.split(LENGTHS, 1) for x in (torch.randn(hidden.shape), hidden)), strict=True):
            (gradient,) = torch.autograd.grad((part * weights).sum(), embeds, retain_graph=True)
            largest = [x.abs().max().item() for x in gradient.split(LENGTHS, 1)]
            inside.append(largest.pop(len(inside)))
            across += largest
        return max(across) / min(inside)

    def test_every_type_is_classified(self):
        self.assertEqual({*KINDS} - {*PER_TOKEN}, {*PER_ROW})

    @parameterized.expand([*((kind, "qwen3_5") for kind in USUAL), *((kind, "lfm2") for kind in SOME)])
    def test_a_type(self, kind, family):
        self.check_type(kind, family)

    @parameterized.expand([kind for kind in KINDS if kind not in USUAL])
    @pytest.mark.slow
    def test_another_type(self, kind):
        self.check_type(kind, "qwen3_5")

    def check_type(self, kind, family):
        if kind in NEEDED and find_spec(NEEDED[kind]) is None:
            self.skipTest(f"{kind} needs {NEEDED[kind]}")
        model = self.adapted(kind, "llama" if kind == "ADAPTION_PROMPT" else family)
        layers = [x for x in transformers_model(model).modules() if type(x).__module__.startswith("peft.tuners.")]
        # X-LoRA changes the layers of LoRA.
        expected = [kind in {*PER_TOKEN, "XLORA"} for _ in layers[:1]]
        self.assertEqual([acts_per_token(x) for x in layers[:1]], expected)
        self.check(model, kind in PER_TOKEN)

    @parameterized.expand([*((name, "qwen3_5") for name in VARIANTS), ("activated", "lfm2"), ("dora", "lfm2")])
    def test_a_variant_of_lora(self, name, family):
        options = {"target_modules": ["q_proj", "out_proj"]} if family == "lfm2" else {}
        self.check(get_peft_model(model_of(family), lora(**VARIANTS[name], **options)), name != "activated")

    def test_arrow(self):
        folders = [self.saved_lora("qwen3_5", seed) for seed in (1, 2)]
        self.check(create_arrow_model(model_of("qwen3_5"), folders, peft.ArrowConfig(top_k=1)), True)

    def test_every_variant_is_classified(self):
        """Of all of PEFT's kinds of LoRA layers."""
        classes = {
            x for x in vars(peft.tuners.lora.layer).values() if isinstance(x, type) and issubclass(x, LoraLayer)
        }
        found = {variant.__name__ for x in classes for variant in x.lora_variants.fget(None).values() if variant}
        self.assertGreater(len(found), 8)
        self.assertEqual({name for name in found if not name.startswith(VARIANTS_PER_TOKEN)}, {"ALoraLinearVariant"})

    @parameterized.expand(
        [
            ("peft", get_peft_model),
            ("injection", lambda model, config: inject_adapter_in_model(config, model)),
            ("inside", lambda model, config: torch.nn.ModuleDict({"policy": get_peft_model(model, config)})),
        ]
    )
    def test_every_way_to_add_an_adapter(self, _, add):
        self.assertIsNone(adapter_per_row(add(model_of("qwen3_5"), tuner("LORA"))))
        model = add(model_of("qwen3_5"), tuner("LILY"))
        self.assertIn("PEFT's LILY, which is not known to act on each token alone", adapter_per_row(model))
        self.assertIn("adapters that support packed rows", str(judge(model, "position_ids")[0]))

    def test_an_inactive_adapter(self):
        """Trainers of preferences switch between adapters."""
        model = get_peft_model(model_of("qwen3_5"), lora())
        model.add_adapter("other", lora(alora_invocation_tokens=[5, 6]))
        self.assertIn("an activated LoRA", adapter_per_row(model))

    def test_a_method_of_another_package(self):
        model = get_peft_model(model_of("qwen3_5"), tuner("LORA"))
        model.peft_config["default"].peft_type = "OTHER"
        self.assertIn("PEFT's OTHER, which is not known", adapter_per_row(model))
