"""The head of multi-token prediction stays in every saved checkpoint, byte for byte."""

import contextlib
import json
import shutil
from unittest import mock

import peft
import torch
from mixins.configure import said
from mixins.kept_head import KINDS, KeptHeadMixin, saved_in
from mixins.vision import TINY
from parameterized import parameterized
from safetensors.torch import load_file
from scripts.trainer_arms import Samples
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3_5TextConfig,
    Trainer,
    TrainingArguments,
)

from transformers_packed import DataCollatorWithFlattening, patch_model, registered
from transformers_packed.models.mtp import declares_head


class KeptTest(KeptHeadMixin):
    @parameterized.expand([(*kind, number % 2 > 0) for number, kind in enumerate(KINDS)])
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

    @parameterized.expand([("composite", "dense", False), ("composite experts", "split", True)])
    def test_images_and_text(self, kind, layout, patched):
        """The whole model, not only its language model, which the other tests of these checkpoints load."""
        source = self.checkpoint(kind, layout)
        with registered() if not patched else contextlib.nullcontext():
            model = AutoModelForImageTextToText.from_pretrained(source)
        model = patch_model(model) if patched else model
        self.assertRegex(type(model).__name__, "^Qwen3_5.*ForConditionalGeneration$")
        model.save_pretrained(self.folder / "target")
        self.check(self.folder / "target", layout)
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

    def test_a_resumed_run(self):
        source = self.checkpoint("experts", "split")

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
        self.check(self.folder / "run/checkpoint-1", "split")
        with self.assertNoLogs("transformers", "WARNING"):
            trainer = train(2, resume_from_checkpoint=True)
        trainer.save_model(self.folder / "target")
        self.check(self.folder / "target", "split")

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
        """Nothing is added, and nothing is said."""
        with registered():
            model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**TINY))
        with mock.patch("transformers_packed.models.mtp.logger.warning", side_effect=AssertionError):
            model.save_pretrained(self.folder / "target")
        self.assertNotIn("mtp", (self.folder / "target/config.json").read_text())

    def test_only_one_process_writes(self):
        model = self.load(self.checkpoint())
        with mock.patch("transformers_packed.models.mtp.find_head", side_effect=AssertionError):
            model.save_pretrained(self.folder / "target", is_main_process=False)
