"""The head of multi-token prediction stays in every saved checkpoint, byte for byte."""

import contextlib
import json
import shutil
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import peft
import torch
from mixins.configure import said
from mixins.vision import TINY, vision_config
from parameterized import parameterized
from safetensors.torch import load_file, save_file
from scripts.trainer_arms import Samples
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from transformers_packed import DataCollatorWithFlattening, patch_model, registered
from transformers_packed.models.mtp import declares_head, find_head


EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
STOCK = {
    "dense": (Qwen3_5ForCausalLM, lambda: Qwen3_5TextConfig(**TINY, mtp_num_hidden_layers=1)),
    "experts": (Qwen3_5MoeForCausalLM, lambda: Qwen3_5MoeTextConfig(**TINY, **EXPERTS, mtp_num_hidden_layers=1)),
    "qwen3_next": (Qwen3NextForCausalLM, lambda: Qwen3NextConfig(**TINY, **EXPERTS, num_nextn_predict_layers=1)),
    "composite": (
        Qwen3_5ForConditionalGeneration,
        lambda: Qwen3_5Config(**vision_config({**TINY, "mtp_num_hidden_layers": 1})),
    ),
}
HEADS = {
    "dense": ["layers.0.mlp.gate_proj.weight", "layers.0.mlp.down_proj.weight"],
    "split": [f"layers.0.mlp.experts.{i}.{name}_proj.weight" for i in range(4) for name in ("gate", "up", "down")],
    "stacked": ["layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"],
}
KINDS = [
    ("dense", "dense"),
    ("experts", "split"),
    ("experts", "stacked"),
    ("qwen3_next", "split"),
    ("composite", "dense"),
]


def head_of(kind):
    """The tensors of a head, of several dtypes and sizes. Their sizes matter to nobody here."""
    names = ["fc.weight", "norm.weight", "layers.0.self_attn.q_proj.weight", *HEADS[kind]]
    generator = torch.Generator().manual_seed(1)
    tensors = {f"mtp.{name}": torch.randn(3, i + 1, generator=generator) for i, name in enumerate(names)}
    return {name: x.bfloat16() if "norm" not in name else x for name, x in tensors.items()}


def saved_in(folder):
    """All tensors of a checkpoint, by its index or from its only file, as servers read them."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    names = json.loads(index.read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in set(names.values())}
    for name, file in names.items():
        assert name in files[file], name
    return {name: files[file][name] for name, file in names.items()}


class KeptTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def checkpoint(self, kind="dense", layout="dense", sharded=False):
        """A stock checkpoint with a head."""
        cls, config = STOCK[kind]
        set_seed(0)
        source = self.folder / "source"
        cls(config()).save_pretrained(source, max_shard_size="30KB" if sharded else "5GB")
        head = head_of(layout)
        if sharded:
            save_file(head, source / "other.safetensors")
            path = source / "model.safetensors.index.json"
            index = json.loads(path.read_text())
            index["weight_map"] |= dict.fromkeys(head, "other.safetensors")
            path.write_text(json.dumps(index))
        else:
            save_file(load_file(source / "model.safetensors") | head, source / "model.safetensors", {"format": "pt"})
        return source

    def load(self, source, patched=False, **options):
        with registered():
            if not patched:
                return AutoModelForCausalLM.from_pretrained(source, **options)
        return patch_model(AutoModelForCausalLM.from_pretrained(source, **options))

    def check(self, folder, layout="dense"):
        """The head is there, the configuration declares it, and the stock class loads the rest as before."""
        saved, head = saved_in(folder), head_of(layout)
        self.assertEqual({name for name in saved if name.startswith("mtp.")}, set(head))
        for name, x in head.items():
            self.assertEqual(saved[name].dtype, x.dtype)
            self.assertTrue(torch.equal(saved[name].view(torch.uint8), x.view(torch.uint8)), name)
        model, about = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        self.assertEqual((set(about["missing_keys"]), set(about["unexpected_keys"])), (set(), set()))
        self.assertTrue(declares_head(model.config))
        self.assertEqual(set(find_head(model.config)), set(head))
        return model

    @parameterized.expand([(*kind, patched) for kind in KINDS for patched in (False, True)])
    def test_saved(self, kind, layout, patched):
        model = self.load(self.checkpoint(kind, layout), patched)
        model.save_pretrained(self.folder / "target")
        again = self.check(self.folder / "target", layout)
        for name, x in model.state_dict().items():
            self.assertTrue(torch.equal(again.state_dict()[name], x), name)

    @parameterized.expand([("source", True, "5GB"), ("target", False, "30KB"), ("both", True, "30KB")])
    def test_shards(self, _, sharded, size):
        self.load(self.checkpoint(sharded=sharded)).save_pretrained(self.folder / "target", max_shard_size=size)
        self.check(self.folder / "target")
        # A file of another kind of save stays there.
        self.load(self.folder / "target").save_pretrained(self.folder / "again", max_shard_size="5GB")
        self.check(self.folder / "again")

    @parameterized.expand([("5GB",), ("30KB",)])
    def test_into_the_folder_of_the_source(self, size):
        source = self.checkpoint()
        model = self.load(source)
        with torch.no_grad():
            model.model.norm.weight.add_(1)
        model.save_pretrained(source, max_shard_size=size)
        if size == "30KB":
            (source / "model.safetensors").unlink()
        again = self.check(source)
        self.assertTrue(torch.equal(again.model.norm.weight, model.model.norm.weight))
        self.assertEqual([path.name for path in self.folder.iterdir()], ["source"])

    @parameterized.expand([(False,), (True,)])
    def test_images_and_text(self, patched):
        """The whole model, not only its language model, which the other tests of this checkpoint load."""
        source = self.checkpoint("composite")
        with registered() if not patched else contextlib.nullcontext():
            model = AutoModelForImageTextToText.from_pretrained(source)
        model = patch_model(model) if patched else model
        self.assertEqual(type(model).__name__, "Qwen3_5ForConditionalGeneration")
        model.save_pretrained(self.folder / "target")
        self.check(self.folder / "target")
        saved, before = saved_in(self.folder / "target"), saved_in(source)
        self.assertEqual(saved.keys(), before.keys())

    def test_adapters(self):
        model = self.load(self.checkpoint())
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
        model.save_pretrained(self.folder / "adapter")
        self.assertFalse(
            any(name.startswith("mtp") for name in load_file(self.folder / "adapter/adapter_model.safetensors"))
        )
        model.merge_and_unload().save_pretrained(self.folder / "merged")
        self.check(self.folder / "merged")

    @parameterized.expand([("dense", "dense"), ("experts", "split")])
    def test_a_resumed_run(self, kind, layout):
        source = self.checkpoint(kind, layout)

        def train(steps, **options):
            args = TrainingArguments(
                str(self.folder / "run"),
                max_steps=steps,
                save_steps=1,
                use_cpu=True,
                report_to="none",
                disable_tqdm=True,
            )
            trainer = Trainer(self.load(source), args, DataCollatorWithFlattening(on_leak="ignore"), Samples(8))
            output, _ = said(trainer.train, **options)
            self.assertNotIn("mtp", output)
            return trainer

        train(1)
        self.check(self.folder / "run/checkpoint-1", layout)
        with self.assertNoLogs("transformers", "WARNING"):
            trainer = train(2, resume_from_checkpoint=True)
        trainer.save_model(self.folder / "target")
        self.check(self.folder / "target", layout)

    def test_a_source_that_is_gone(self):
        for kind, where in (("dense", ()), ("composite", ("text_config",)), ("qwen3_next", ())):
            source, target = self.checkpoint(kind), self.folder / kind
            model = self.load(source)
            shutil.rmtree(source)
            with mock.patch("transformers_packed.models.mtp.logger.warning") as warning:
                model.save_pretrained(target)
            self.assertIn("no longer declares it", warning.call_args.args[0])
            config = json.loads((target / "config.json").read_text())
            for part in (config, config.get("text_config", {})):
                self.assertFalse(
                    part.get("mtp_num_hidden_layers") or part.get("num_nextn_predict_layers"), (kind, where)
                )
            self.assertFalse(declares_head(AutoModelForCausalLM.from_pretrained(target).config))

    def test_an_index_that_an_earlier_save_left(self):
        source = self.checkpoint()
        index = {"metadata": {}, "weight_map": {"mtp.fc.weight": "gone.safetensors"}}
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
        self.load(source).save_pretrained(self.folder / "target")
        self.check(self.folder / "target")

    def test_models_without_a_head(self):
        """Nothing is looked for, and nothing is said."""
        with registered():
            model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**TINY))
        with mock.patch("transformers_packed.models.mtp.find_head", side_effect=AssertionError):
            model.save_pretrained(self.folder / "target")
        self.assertNotIn("mtp", (self.folder / "target/config.json").read_text())

    def test_only_one_process_writes(self):
        model = self.load(self.checkpoint())
        with mock.patch("transformers_packed.models.mtp.find_head", side_effect=AssertionError):
            model.save_pretrained(self.folder / "target", is_main_process=False)


if __name__ == "__main__":
    unittest.main()
