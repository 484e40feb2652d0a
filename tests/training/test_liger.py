"""`use_liger_kernel=True` with our models: Liger's replacements, their limits, and unchanged training.

Liger's own patching runs, with torch in place of its Triton kernels, which need a GPU.
"""

import importlib
import subprocess
import sys
import unittest
from importlib.util import find_spec
from types import MethodType
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from mixins.configure import ConfigureTestCase, said
from mixins.model import total_relative_error
from mixins.vision import TEXT, vision_config
from parameterized import parameterized
from scripts.configured_arms import build
from scripts.trainer_arms import CONFIGS, OPTIONS, Samples, updates_and_log
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3_5Config,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from transformers_packed import DataCollatorWithFlattening, configure_packing, patch_model, registered
from transformers_packed.audit.tiny import tiny_config
from transformers_packed.models import packed_model


HAS_LIGER = find_spec("liger_kernel") is not None
MODELS = {
    "qwen3_5": (modeling_qwen3_5, ("ForCausalLM", "ForConditionalGeneration", "RMSNorm", "MLP"), "Qwen3_5"),
    "qwen3_next": (modeling_qwen3_next, ("ForCausalLM", "RMSNorm", "MLP", "Experts"), "Qwen3Next"),
    "falcon_h1": (modeling_falcon_h1, ("ForCausalLM", "RMSNorm", "MLP"), "FalconH1"),
    "gpt_oss": (modeling_gpt_oss, ("ForCausalLM", "RMSNorm"), "GptOss"),
}


class RMSNormInTorch:
    @staticmethod
    def apply(hidden_states, weight, eps, offset, casting_mode, in_place, row_mode):
        x = hidden_states.float()
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + weight.float())).type_as(
            hidden_states
        )


class ExpertsInTorch:
    @staticmethod
    def apply(hidden_states, gate_up, down, chosen, weights):
        result = torch.zeros_like(hidden_states)
        for i in range(len(gate_up)):
            token, place = (chosen == i).nonzero(as_tuple=True)
            gate, up = F.linear(hidden_states[token], gate_up[i]).chunk(2, dim=-1)
            result = result.index_add(0, token, F.linear(F.silu(gate) * up, down[i]) * weights[token, place, None])
        return result


def swiglu_in_torch(gate, up, gate_multiplier=1.0, down_multiplier=1.0):
    return F.silu(gate * gate_multiplier) * up * down_multiplier


def loss_in_torch(
    input, weight, target, reduction="mean", ignore_index=-100, softcap=None, accum_dtype=None, **kwargs
):
    return F.cross_entropy(input @ weight.T, target, reduction=reduction, ignore_index=ignore_index)


def lce_forward(self, *args, **kwargs):
    """Stands in for Liger's function, by its module, if the package is not installed."""
    raise AssertionError("Liger's forward ran")


lce_forward.__module__ = "liger_kernel.transformers.model.qwen3_5"


class LigerTestCase(ConfigureTestCase):
    def build(self, family="qwen3_5", ours=True) -> torch.nn.Module:
        set_seed(0)
        if not ours:
            return AutoModelForCausalLM.from_config(CONFIGS[family]())
        with registered():
            return AutoModelForCausalLM.from_config(CONFIGS[family]())

    def trainer(self, model, liger=True, collator=True, **options) -> Trainer:
        options = {"max_steps": 3, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, **options}
        options |= {"use_liger_kernel": liger, "prediction_loss_only": True, "per_device_eval_batch_size": 2}
        collator = (
            DataCollatorWithFlattening(return_cu_seqlens=True, return_seq_idx=True, model=model) if collator else None
        )
        args = TrainingArguments(self.directory, **OPTIONS, **options)
        return Trainer(model, args, train_dataset=Samples(), eval_dataset=Samples(7), data_collator=collator)


class KeptTest(LigerTestCase):
    """Without the package: the parts of our classes that stay in place."""

    def test_forward_stays(self):
        model = self.build()
        with mock.patch.object(packed_model.logger, "warning_once") as warned:
            model.forward = MethodType(lce_forward, model)
        (message,) = warned.call_args.args
        self.assertIn("Qwen3_5ForCausalLM keeps its forward: Liger's fused_linear", message)
        self.assertNotIn("forward", vars(model))
        # Others may set a forward, as accelerate and TRL do.
        other = MethodType(lambda self: "other", model)
        model.forward = other
        self.assertEqual(model.forward(), "other")

    def test_a_model_that_has_it_already_is_refused(self):
        # Elsewhere: a model is patched twice.
        model = self.build(ours=False)
        model.forward = MethodType(lce_forward, model)
        with self.assertRaisesRegex(ValueError, "its own forward. Convert it before .*Liger"):
            patch_model(model)
        output = self.configured(self.trainer(model, collator=False))
        self.assertRegex(output, "^Packing off, training is unchanged: .*its own forward")

    def configured(self, trainer) -> str:
        output, _ = said(configure_packing, trainer)
        self.assertEqual(output.count("\n"), 1)
        return output

    def test_configure_packing_turns_off_what_is_ours(self):
        trainer = self.trainer(self.build(ours=False), collator=False, liger_kernel_config={"cross_entropy": False})
        output = self.configured(trainer)
        self.assertRegex(output, r"^Padding-free on: .*; Liger leaves fused_linear_cross_entropy.* to this package\n$")
        config = trainer.args.liger_kernel_config
        self.assertEqual([config["cross_entropy"], config["fused_linear_cross_entropy"]], [False, False])


@unittest.skipUnless(HAS_LIGER, 'needs liger-kernel: pip install -e ".[dev]"; written for 0.8.5')
class LigerTest(LigerTestCase):
    def setUp(self):
        super().setUp()
        for module, attributes, prefix in MODELS.values():
            # Liger leaves its classes in the stock modules.
            for attribute in attributes:
                cls = getattr(module, prefix + attribute)
                self.enterContext(mock.patch.object(module, prefix + attribute, cls))
                self.enterContext(mock.patch.object(cls, "forward", cls.forward))
        self.liger = importlib.import_module("liger_kernel.transformers.monkey_patch")
        for module, name, stand_in in (
            ("rms_norm", "LigerRMSNormFunction", RMSNormInTorch),
            ("swiglu", "_swiglu_dispatch", swiglu_in_torch),
            ("swiglu", "LigerFusedMoEFunction", ExpertsInTorch),
            ("functional", "liger_fused_linear_cross_entropy", loss_in_torch),
        ):
            module = importlib.import_module(f"liger_kernel.transformers.{module}")
            self.enterContext(mock.patch.object(module, name, stand_in))

    def check_updates(self, results, bar):
        (got, log), (want, expected) = results
        for entry, other in zip(log, expected, strict=True):
            self.assertLess(abs(entry["loss"] - other["loss"]) / other["loss"], 1e-5)
        self.assertLess(total_relative_error(got, want), bar)

    @parameterized.expand([("qwen3_next_moe", 1e-4)])
    def test_the_same_training(self, family, bar):
        """A registered model in the stock Trainer: Liger's norms, MLPs and experts run without changing the result."""
        results, losses = [], []
        for liger in (True, False):
            trainer = self.trainer(self.build(family), liger)
            results.append(updates_and_log(trainer))
            losses.append(trainer.evaluate()["eval_loss"])
            layer = trainer.model.model.layers[0]
            modules = [layer.input_layernorm, layer.mlp if family != "qwen3_next_moe" else layer.mlp.experts]
            for module in modules:
                self.assertEqual("forward" in vars(module), liger, type(module))
            self.assertNotIn("forward", vars(trainer.model))
        self.check_updates(results, bar)
        self.assertLess(abs(losses[0] - losses[1]) / losses[1], 1e-5)

    def test_configured(self):
        """Configured by `configure_packing`, with our fused parts kept."""
        results = []
        for liger in (True, False):
            trainer = build("sft", directory=self.directory, use_liger_kernel=liger)
            said(configure_packing, trainer)
            results.append(said(updates_and_log, trainer)[1])
        self.assertTrue(trainer.args.padding_free)
        self.check_updates(results, 1e-6)

    @parameterized.expand(["qwen3_5", "vision_language", "gpt_oss"])
    def test_targets_stay_within_their_documents(self, kind):
        """Handmade labels of a row have targets at the first tokens of documents, which Liger's forward would use."""
        # Elsewhere: a model behind another library's patches leaks.
        torch.manual_seed(1)
        row = {"input_ids": torch.randint(1, 61, (1, 20)), "cu_seqlens": torch.tensor([0, 7, 20], dtype=torch.int32)}
        row["labels"] = row["input_ids"]
        with registered():
            if kind == "qwen3_5":
                model = self.build()
            elif kind == "vision_language":
                model = AutoModelForImageTextToText.from_config(Qwen3_5Config(**vision_config(TEXT)))
            else:
                model = AutoModelForCausalLM.from_config(tiny_config(kind))
        model.train()
        want = model(**row).loss
        self.liger._apply_liger_kernel_to_instance(model, rope=False)
        text = model.model.language_model if kind == "vision_language" else model.model
        self.assertIn("forward", vars(text.layers[0].input_layernorm))
        self.assertLess((model(**row).loss - want).abs(), 1e-5)
        if kind == "qwen3_5":
            theirs = importlib.import_module("liger_kernel.transformers.model.qwen3_5").lce_forward
            self.assertGreater((theirs(model, **row).loss - want).abs(), 1e-3)

    def test_applied_before_the_model_is_built(self):
        """As in AutoLigerKernelForCausalLM: with Liger's classes inside, documents give the same as alone."""
        want = self.build("qwen3_next_moe")
        self.liger._apply_liger_kernel("qwen3_next")
        model = self.build("qwen3_next_moe")
        self.assertTrue(type(model.model.norm).__module__.startswith("liger_kernel"))
        model.load_state_dict(want.state_dict())
        documents = [torch.tensor([row["input_ids"]]) for row in Samples(5).rows]
        lengths = torch.tensor([0, *(d.shape[1] for d in documents)]).cumsum(0).int()
        with torch.no_grad():
            got = model(input_ids=torch.cat(documents, 1), cu_seqlens=lengths).logits
            alone = torch.cat([want(input_ids=d).logits for d in documents], 1)
        self.assertLess((got - alone).norm() / alone.norm(), 1e-5)

    @pytest.mark.slow
    def test_applied_before_this_package_is_imported(self):
        code = (
            "from liger_kernel.transformers.monkey_patch import _apply_liger_kernel\n"
            "for name in ('qwen3_5_text', 'qwen3_next', 'falcon_h1', 'gpt_oss'):\n"
            "    _apply_liger_kernel(name)\n"
            "import transformers_packed\n"
            "from transformers import AutoModelForCausalLM, Qwen3_5TextConfig\n"
            "transformers_packed.register()\n"
            "config = Qwen3_5TextConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4)\n"
            "model = AutoModelForCausalLM.from_config(config)\n"
            "assert type(model).__module__.startswith('transformers_packed.')\n"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr[-3000:])
