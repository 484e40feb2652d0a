"""Every way to save and to load a head beside adapters keeps it bit for bit."""

import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch
from parameterized import parameterized
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from scripts.trainer_arms import TINY, Samples
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig, set_seed
from transformers.integrations import peft as integration

from transformers_packed import PackedTrainer, PackedTrainingArguments, add_mtp, patch_model, registered
from transformers_packed.models.mtp_head import head_of


# How a head trains beside adapters: whole, or as PEFT's copy for the adapter.
WAYS = "whole", "modules_to_save"
KINDS = ("whole", "sft"), ("modules_to_save", "default")


def lora(way="whole"):
    options = {"modules_to_save": ["mtp"]} if way == "modules_to_save" else {}
    return LoraConfig(r=2, target_modules=["q_proj"], exclude_modules=r".*mtp\..*", **options)


def change(model, amount=1.0):
    """Change the head, and return its tensors."""
    head = head_of(model)
    with torch.no_grad():
        for x in head.parameters():
            x.add_(amount)
    return {name: x.clone() for name, x in head.state_dict().items()}


class BesideTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        set_seed(0)
        model = patch_model(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TINY, mtp_num_hidden_layers=1)))
        add_mtp(model)
        model.save_pretrained(self.folder / "base")

    def base(self, head=True):
        with registered():
            model = AutoModelForCausalLM.from_pretrained(self.folder / "base")
        if head:
            add_mtp(model)
        return model

    def adapted(self, way="whole", name="default"):
        return get_peft_model(self.base(), lora(way), adapter_name=name)

    def check(self, model, expected):
        found = head_of(model).state_dict()
        self.assertEqual(found.keys(), expected.keys())
        for name, x in expected.items():
            self.assertTrue(torch.equal(found[name], x), name)

    def of_adapter(self, name, folder="adapter"):
        return self.folder / folder / ("" if name == "default" else name)

    def trainer(self, model, **options):
        args = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "mtp_loss_weight": 0.5, "verify": False}
        args |= {"learning_rate": 1e-2, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1}
        args |= {"per_device_train_batch_size": 2, "padding_free": True, "bf16": False}
        arguments = PackedTrainingArguments(str(self.folder / "run"), **(args | options))
        return PackedTrainer(model, arguments, train_dataset=Samples(), eval_dataset=Samples(4))

    @parameterized.expand(KINDS)
    def test_peft_model(self, way, name):
        model = self.adapted(way, name)
        expected = change(model)
        model.save_pretrained(self.folder / "adapter")
        source = self.of_adapter(name)
        kept = load_file(source / "mtp.safetensors")
        self.assertEqual(kept.keys(), {f"mtp.{x}" for x in expected})
        with self.subTest("PeftModel.from_pretrained"):
            self.check(PeftModel.from_pretrained(self.base(), source), expected)
        with self.subTest("another name"):
            self.check(PeftModel.from_pretrained(self.base(), source, adapter_name="other"), expected)
        with self.subTest("load_adapter"):
            again = self.adapted(way, name)
            again.load_adapter(source, name)
            self.check(again, expected)
        with self.subTest("state_dict"):
            # As FSDP and DeepSpeed pass it.
            state = {key: x.clone() for key, x in model.state_dict().items()}
            change(model)
            model.save_pretrained(self.folder / "state", state_dict=state)
            self.check(PeftModel.from_pretrained(self.base(), self.of_adapter(name, "state")), expected)
        with self.subTest("add_mtp"):
            plain = self.base(head=False)
            add_mtp(plain, source)
            self.check(plain, expected)

    @parameterized.expand(KINDS)
    def test_merged(self, way, name):
        model = self.adapted(way, name)
        expected = change(model)
        merged = model.merge_and_unload()
        self.check(merged, expected)
        merged.save_pretrained(self.folder / "merged")
        with registered():
            again = AutoModelForCausalLM.from_pretrained(self.folder / "merged")
        add_mtp(again)
        self.check(again, expected)

    @parameterized.expand(WAYS)
    def test_several_adapters(self, way):
        """Each folder has the head of its adapter, which is the same without PEFT's copies."""
        model = self.adapted(way, "first")
        model.add_adapter("second", lora(way))
        expected = {}
        for amount, name in enumerate(("first", "second"), start=1):
            model.set_adapter(name)
            expected[name] = change(model, amount)
        if way == "whole":
            expected["first"] = expected["second"]
        model.save_pretrained(self.folder / "adapter", selected_adapters=["first"])
        self.assertFalse(self.of_adapter("second").exists())
        model.save_pretrained(self.folder / "adapter")
        for name, tensors in expected.items():
            self.check(PeftModel.from_pretrained(self.base(), self.of_adapter(name)), tensors)
        again = PeftModel.from_pretrained(self.base(), self.of_adapter("first"), adapter_name="first")
        again.load_adapter(self.of_adapter("second"), "second")
        for name, tensors in expected.items():
            again.set_adapter(name)
            self.check(again, tensors)

    @parameterized.expand(KINDS[1:])
    def test_trainer(self, way, name):
        """A resumed run ends as one that was not interrupted, and `save_model` saves the same head."""
        whole = self.trainer(self.adapted(way, name))
        before = change(whole.model, 0)
        whole.train()
        expected = {key: x.clone() for key, x in head_of(whole.model).state_dict().items()}
        self.assertFalse(torch.equal(before["fc.weight"], expected["fc.weight"]))
        resumed = self.trainer(self.adapted(way, name))
        resumed.train(resume_from_checkpoint=str(self.folder / "run" / "checkpoint-2"))
        self.check(resumed.model, expected)
        resumed.save_model(str(self.folder / "adapter"))
        self.check(PeftModel.from_pretrained(self.base(), self.of_adapter(name)), expected)

    def test_best_model(self):
        options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
        # The loss only grows, so the first checkpoint is the best one.
        trainer = self.trainer(
            self.adapted("modules_to_save"), learning_rate=10.0, max_grad_norm=0.0, optim="sgd", **options
        )
        trainer.train()
        best = Path(trainer.state.best_model_checkpoint)
        kept = load_file(best / "mtp.safetensors")
        self.check(trainer.model, {key.removeprefix("mtp."): x for key, x in kept.items()})

    @parameterized.expand(KINDS[1:])
    def test_adapters_of_transformers(self, way, name):
        """`add_adapter`, `save_pretrained`, `load_adapter` and `from_pretrained` of the model itself."""
        self.enterContext(mock.patch.object(integration, "MIN_PEFT_VERSION", "0.18.0"))
        model = self.base()
        model.add_adapter(lora(way), name)
        expected = change(model)
        model.save_pretrained(self.folder / "adapter")
        again = self.base()
        again.load_adapter(str(self.folder / "adapter"), name)
        self.check(again, expected)
        self.check(PeftModel.from_pretrained(self.base(), self.folder / "adapter"), expected)
