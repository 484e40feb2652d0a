"""Training PEFT's adapters with fused layers: precision, checkpointing, dropout, saved files and whole trainings."""

import contextlib
import copy
import json
import tempfile
import unittest
from pathlib import Path

import pytest
import torch
from mixins.configure import UPDATE_BAR, ConfigureTestCase, said
from mixins.lora import (
    BAR,
    LoraTestCase,
    TorchFormsTestCase,
    all_linear,
    documents,
    lora,
    randomized,
    recorded,
    unfused,
)
from mixins.model import relative_error, total_relative_error
from mixins.patch import COMPOSITE, CONFIGS, OTHERS, builtin_model
from mixins.triton import InterpretedKernelsTest
from parameterized import parameterized
from peft import AutoPeftModel, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from scripts.configured_arms import configure
from scripts.trainer_arms import updates_and_log
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from transformers_packed import audit_model, patch_model, registered
from transformers_packed.models import installed


CHECKPOINTING = (None, True, False)
# Linear layers of Qwen4-Exp that run as modules.
CALLED = ("shared_expert_gate", "ple.key_proj", "ple.value_proj")


def bf16_errors(test: LoraTestCase, family: str, autocast: bool) -> dict[str, list[float]]:
    """Errors of logits and of the adapters' gradients against float32: of PEFT on the built-in model, and of ours."""
    config = copy.deepcopy(CONFIGS[family])
    if family == "qwen3_next":
        # A token that goes to another expert would hide all other errors.
        config.mlp_only_layers = [0, 1]
    model = builtin_model(family, config=config)
    exact = randomized(get_peft_model(model, lora(target_modules="all-linear")), 0.03)
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            if "lora_" not in name:
                parameter.copy_(parameter.bfloat16())
    half = copy.deepcopy(exact)
    for name, parameter in half.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    features = documents(lengths=(9, 1, 24, 16))
    logits, _, gradients = test.result(exact, features, False)
    errors = {}
    for arm, model in (("builtin", half), ("ours", patch_model(copy.deepcopy(half)))):
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            got, _, slopes = test.result(model, features, arm == "ours")
        test.assertEqual({x.dtype for x in slopes.values()}, {torch.float32})
        errors[arm] = [
            relative_error(torch.cat(got).float(), torch.cat(logits)),
            total_relative_error(slopes, gradients),
        ]
    return errors


class TrainingTests:
    def checkpointed(self, model, reentrant: bool | None):
        if reentrant is None:
            model.gradient_checkpointing_disable()
        else:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(5)
        with recorded(model) as (fused, called):
            result = self.result(model, documents(), True)
        self.assertTrue(fused)
        self.assertEqual({name for name in called if not name.endswith(CALLED)}, set())
        return result

    def test_dropout_of_several_adapters(self):
        """Each has its own probability and its own mask. Each column of an adapter's gradient is that of a few draws."""
        model = get_peft_model(builtin_model(), lora(lora_dropout=0.3))
        model.add_adapter("wide", lora(r=6))
        model.add_adapter("more", lora(r=2, lora_dropout=0.6))
        model.base_model.set_adapter(["default", "wide", "more"])
        model = patch_model(randomized(model))
        results = [self.checkpointed(model, reentrant) for reentrant in (None, True)]
        self.assertLess(self.error(results[1], results[0]), BAR)
        # With all elements kept, the fused layers equal those of the built-in model.
        exact = self.result(model.eval(), documents(), True)
        self.assertGreater(self.error(exact, results[0]), 1e-4)
        with unfused():
            self.assertLess(self.error(exact, self.result(model, documents(), True)), 3 * BAR)


class TorchFormsTest(TrainingTests, TorchFormsTestCase):
    @parameterized.expand([("qwen3_5", 0.4), *((family, 0.0) for family in OTHERS[:2])])
    def test_checkpointing(self, family, dropout):
        builtin = get_peft_model(builtin_model(family), lora(target_modules="all-linear", lora_dropout=dropout))
        model = patch_model(randomized(builtin))
        # The choices of an indexer have no gradient.
        trained = {name for name, x in model.named_parameters() if x.requires_grad and "indexer" not in name}
        results = [self.checkpointed(model, reentrant) for reentrant in CHECKPOINTING]
        for result in results:
            self.assertEqual(result[2].keys(), trained)
            self.assertLess(self.error(result, results[0]), BAR)
        # Another seed has another mask, and evaluation has none.
        torch.manual_seed(6)
        other = self.result(model, documents(), True)
        self.assertEqual(self.error(other, results[0]) > 1e-4, dropout > 0)
        model.eval()
        error = relative_error(torch.cat(self.result(model, documents(), True)[0]), torch.cat(results[0][0]))
        self.assertEqual(error > 1e-4, dropout > 0)

    @parameterized.expand([("qwen3_5", True), ("qwen3_next", False)])
    def test_precision_in_bfloat16(self, family, autocast):
        """Weights in bfloat16 and adapters in float32, as PEFT makes them."""
        errors = bf16_errors(self, family, autocast)
        for got, expected in zip(errors["ours"], errors["builtin"], strict=True):
            self.assertGreater(expected, 1e-3)
            self.assertLess(got, 6 * expected)

    def test_audit(self):
        model = patch_model(all_linear("qwen3_5_moe"))
        with recorded(model) as (fused, called):
            report = audit_model(model, inputs=("all",), lengths=[20, 1, 9])
        self.assertTrue(fused)
        self.assertEqual((report.ok, report.leaks), (True, []), str(report))


@pytest.mark.slow
class KernelsTest(TrainingTests, LoraTestCase, InterpretedKernelsTest):
    """The masks of dropout, drawn again for backward by the interpreted kernels."""


class SavedAdaptersTest(TorchFormsTestCase):
    def test_files(self):
        """Of a few steps with an adapter, a second one and a trained head."""
        results = []
        for packed in (False, True):
            model = builtin_model()
            model.config.name_or_path = "base"
            torch.manual_seed(0)
            model = get_peft_model(patch_model(model) if packed else model, lora(modules_to_save=["lm_head"]))
            model.add_adapter("second", lora(r=2))
            model.base_model.set_adapter(["default", "second"])
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)
            for _ in range(2):
                self.result(model, documents(), packed)
                optimizer.step()
            folder = self.enterContext(tempfile.TemporaryDirectory())
            model.save_pretrained(folder)
            results.append((Path(folder), model))
        (want, builtin), (got, ours) = results
        names = [sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) for folder, _ in results]
        self.assertEqual(names[1], names[0])
        self.assertIn("second/adapter_model.safetensors", names[0])
        for name in names[0]:
            if name.endswith(".safetensors"):
                tensors, expected = load_file(got / name), load_file(want / name)
                self.assertEqual(tensors.keys(), expected.keys())
                self.assertLess(total_relative_error(tensors, expected), BAR)
            elif name.endswith(".json"):
                saved, expected = (json.loads((folder / name).read_text()) for folder in (got, want))
                self.assertEqual(saved, expected)
            else:
                self.assertEqual((got / name).read_text(), (want / name).read_text())
        loaded = PeftModel.from_pretrained(builtin_model(), got)
        loaded.load_adapter(got / "second", "second")
        loaded.base_model.set_adapter(["default", "second"])
        with torch.no_grad():
            batch = torch.arange(1, 12)[None]
            torch.testing.assert_close(loaded(batch).logits, builtin.eval()(batch).logits, rtol=1e-4, atol=1e-5)


class SameTrainingTest(TorchFormsTestCase, ConfigureTestCase):
    def setUp(self):
        TorchFormsTestCase.setUp(self)
        ConfigureTestCase.setUp(self)

    @parameterized.expand([("trainer", "padding_free"), ("sft", "pack")])
    def test_the_padded_runs_updates(self, kind, mode):
        """Steps of SGD in float32 on the same samples per step."""
        trainers = [self.build(kind, "lora", 2, max_steps=4) for _ in range(2)]
        want, log = updates_and_log(configure(trainers[0], "padded", mode))
        _, packed = said(configure, trainers[1], "packed", mode)
        with recorded(packed.model) as (fused, called):
            _, (got, packed_log) = said(updates_and_log, packed)
        self.assertTrue(fused and not called)
        for entry, padded in zip(packed_log, log, strict=True):
            self.assertLess(abs(entry["loss"] - padded["loss"]) / padded["loss"], 1e-5)
        self.assertEqual(len(log), 4)
        self.assertLess(total_relative_error(got, want), UPDATE_BAR)
        self.assertGreater(min(update.abs().max() for update in want.values()), 0)


class SavedWithoutTaskTypeTest(unittest.TestCase):
    """An adapter from a configuration without a task type names Transformers' class, which loads everywhere."""

    @parameterized.expand(
        [
            ("qwen3_5_moe", "patched"),
            ("qwen3_5", "adapted first"),
            ("composite", "registered"),
        ]
    )
    def test_the_class_of_the_base_model(self, name, how):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        auto = AutoModelForCausalLM
        if name == "composite":
            stock = builtin_model("qwen3_5", "Qwen3_5ForConditionalGeneration", COMPOSITE["qwen3_5"])
            auto = AutoModelForImageTextToText
        else:
            stock = builtin_model(name)
        stock.save_pretrained(f"{folder}/base")
        with registered() if how == "registered" else contextlib.nullcontext():
            model = auto.from_pretrained(f"{folder}/base")
        model = patch_model(model) if how == "patched" else model
        if how == "adapted first":
            # As by TRL. Models of ours that are alive let PEFT name stock classes before.
            installed.FOR_ADAPTERS.uninstall()
        adapted = randomized(get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "out_proj"])), 0.3)
        patch_model(adapted)
        self.assertTrue(type(adapted.get_base_model()).__module__.startswith("transformers_packed."))
        adapted.save_pretrained(f"{folder}/adapter")
        saved = json.loads(Path(f"{folder}/adapter/adapter_config.json").read_text())["auto_mapping"]
        expected = {"base_model_class": type(stock).__name__, "parent_library": type(stock).__module__}
        self.assertEqual(saved, expected)
        loaded = AutoPeftModel.from_pretrained(f"{folder}/adapter")
        self.assertIs(type(loaded.get_base_model()), type(stock))
        row = {"input_ids": torch.arange(1, 8)[None], "use_cache": False}
        with torch.no_grad():
            self.assertLess(relative_error(adapted.eval()(**row).logits, loaded.eval()(**row).logits), 1e-5)

    def test_a_class_of_the_user(self):
        """It is named as PEFT names it, as for any other model."""

        class Own(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = torch.nn.Linear(3, 3)

        get_peft_model(patch_model(builtin_model("qwen3_5")), LoraConfig(target_modules=["q_proj"]))
        model = get_peft_model(Own(), LoraConfig(target_modules=["inner"]))
        self.assertIs(model._get_base_model_class(), Own)
