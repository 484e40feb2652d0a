"""The head of multi-token prediction in checkpoints that are quantized, sharded, resumed or of a revision."""

import copy
import json
import shutil
import unittest
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common.processes import FSDP_ON_CPU, run_processes, run_script
from common.shown import shows
from mixins.kept_head import KeptHeadMixin, head_of
from parameterized import parameterized
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from scripts import trainer_arms
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig

from transformers_packed import registered
from transformers_packed.models.mtp import DECLARED


try:
    from transformers.distributed import DistributedConfig, consolidate_distributed_checkpoint
except ImportError:
    DistributedConfig = None


FAMILIES = [("dense", "dense"), ("experts", "split"), ("experts", "stacked")]
LAYERS = {"dense": "Qwen3_5DecoderLayer", "experts": "Qwen3_5MoeDecoderLayer"}


@pytest.mark.slow
class FsdpTest(KeptHeadMixin):
    """Two processes that shard the weights, as `accelerate launch` starts them."""

    def run_step(self, source, kind, state, patched=False, steps=1, full=False):
        path = Path(trainer_arms.__file__).with_name("kept_head_run.py")
        variables = {
            **FSDP_ON_CPU,
            "FSDP_TRANSFORMER_CLS_TO_WRAP": LAYERS[kind],
            "FSDP_STATE_DICT_TYPE": state,
        }
        arguments = (str(source), str(self.folder / "run"), str(int(patched)), str(steps), str(int(full)))
        for process in run_script(path, *arguments, processes=2, **variables):
            self.assertEqual(process.status, 0, process.stderr[-3000:])

    @parameterized.expand([(*family, patched) for family in FAMILIES for patched in (False, True)])
    def test_full_state(self, kind, layout, patched):
        source = self.checkpoint(kind, layout)
        self.run_step(source, kind, "FULL_STATE_DICT", patched)
        self.check(self.folder / "run/checkpoint-1", layout)
        self.run_step(source, kind, "FULL_STATE_DICT", patched, steps=2, full=True)
        self.check(self.folder / "run/checkpoint-2", layout)
        self.check(self.folder / "run/full", layout)

    @parameterized.expand(FAMILIES)
    def test_sharded_state(self, kind, layout):
        """The state of a run has no head. The full checkpoint that is made of it has."""
        source = self.checkpoint(kind, layout)
        self.run_step(source, kind, "SHARDED_STATE_DICT")
        self.assertTrue((self.folder / "run/checkpoint-1/pytorch_model_fsdp_0").is_dir())
        self.assertFalse((self.folder / "run/checkpoint-1/model.safetensors").exists())
        self.run_step(source, kind, "SHARDED_STATE_DICT", steps=2, full=True)
        self.check(self.folder / "run/full", layout)


def save_sharded(source, folder):
    """Save a model that Transformers itself shards, in the shards of processes and whole, and make these shards whole."""
    with registered():
        model = AutoModelForCausalLM.from_pretrained(source, distributed_config=DistributedConfig(fsdp_size=2))
        model.save_pretrained(folder / "shards", distributed_checkpoint=True)
        model.save_pretrained(folder / "whole")
        dist.barrier()
        options = {"distributed_config": DistributedConfig(fsdp_size=2)}
        AutoModelForCausalLM.from_pretrained(folder / "shards", **options).save_pretrained(folder / "again")
    if not dist.get_rank():
        consolidate_distributed_checkpoint(folder / "shards", folder / "consolidated")
        shutil.copy(folder / "shards/config.json", folder / "consolidated")
    return type(next(model.parameters())).__name__


def save_without_source(source, folder):
    """Return how many layers the configuration of the saved shards declares."""
    with registered():
        model = AutoModelForCausalLM.from_pretrained(source, distributed_config=DistributedConfig(fsdp_size=2))
    dist.barrier()
    shutil.rmtree(source, ignore_errors=True)
    dist.barrier()
    model.save_pretrained(folder / "shards", distributed_checkpoint=True)
    dist.barrier()
    return json.loads((folder / "shards/config.json").read_text())["mtp_num_hidden_layers"]


@unittest.skipIf(DistributedConfig is None, "Transformers does not shard models")
class DistributedCheckpointTest(KeptHeadMixin):
    @parameterized.expand(FAMILIES[::2])
    def test_shards_of_processes(self, kind, layout):
        self.assertEqual(run_processes(save_sharded, 2, self.checkpoint(kind, layout), self.folder), ["DTensor"] * 2)
        for folder in ("whole", "again", "consolidated"):
            self.check(self.folder / folder, layout)

    def test_a_source_that_is_gone(self):
        source = self.checkpoint()
        self.assertEqual(run_processes(save_without_source, 2, source, self.folder), [0, 0])


@unittest.skipUnless(find_spec("bitsandbytes"), "needs bitsandbytes")
class QuantizedTest(KeptHeadMixin):
    """A base in 4 bits with an adapter. The head stays in the dtypes of the checkpoint."""

    def merged(self, kind, layout, patched=False):
        four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
        model = self.load(self.checkpoint(kind, layout), patched, quantization_config=four_bit, dtype=torch.bfloat16)
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
        model.save_pretrained(self.folder / "adapter")
        return model.merge_and_unload()

    @parameterized.expand([("dense", "dense", True), ("experts", "split", False), ("experts", "stacked", True)])
    @shows("fp4", "a head of multi-token prediction is kept")
    def test_merged(self, kind, layout, patched):
        self.merged(kind, layout, patched).save_pretrained(self.folder / "target")
        model = self.check(self.folder / "target", layout)
        self.assertEqual(model.config.quantization_config.quant_method, "bitsandbytes")
        if not patched:
            # A reader of the quantized checkpoint must not take the head for quantized.
            self.assertIn("mtp", model.config.quantization_config.llm_int8_skip_modules)

    def test_dequantized(self):
        self.merged("experts", "split").dequantize().save_pretrained(self.folder / "target")
        model = self.check(self.folder / "target", "split")
        self.assertEqual({x.dtype for x in model.parameters()}, {torch.bfloat16})

    def test_merged_into_the_base_in_full_precision(self):
        """What `train --qlora` and PEFT recommend: the adapter on the base that was not quantized."""
        self.merged("experts", "stacked")
        model = PeftModel.from_pretrained(self.load(self.folder / "source"), self.folder / "adapter")
        model.merge_and_unload().save_pretrained(self.folder / "target")
        self.check(self.folder / "target", "stacked")


class DeclaredTest(KeptHeadMixin):
    @parameterized.expand([("dense", "dense"), ("composite", "dense"), ("qwen3_next", "split")])
    def test_a_release_that_declares_no_head_that_it_leaves_out(self, kind, layout):
        """As the patch `mtp-config-on-save` for Transformers does."""
        save = PreTrainedConfig.save_pretrained

        def save_without(config, *args, **kwargs):
            config = copy.deepcopy(config)
            for name in DECLARED:
                if getattr(config.get_text_config(), name, None):
                    setattr(config.get_text_config(), name, 0)
            save(config, *args, **kwargs)

        model = self.load(self.checkpoint(kind, layout))
        with mock.patch.object(PreTrainedConfig, "save_pretrained", save_without):
            model.save_pretrained(self.folder / "target")
        self.check(self.folder / "target", layout)


class UndeclaredTest(KeptHeadMixin):
    """Released configurations of Qwen3-Next do not declare their head, and servers take that for one layer."""

    def source(self):
        source = self.checkpoint("qwen3_next", "split")
        config = json.loads((source / "config.json").read_text())
        del config["num_nextn_predict_layers"]
        (source / "config.json").write_text(json.dumps(config))
        return source

    @parameterized.expand([(False,), (True,)])
    def test_kept(self, patched):
        self.load(self.source(), patched).save_pretrained(self.folder / "target")
        self.check(self.folder / "target", "split", declared=False)

    def test_no_head(self):
        source = self.source()
        model = self.load(source)
        shutil.rmtree(source)
        with mock.patch("transformers_packed.models.mtp.logger.warning", side_effect=AssertionError):
            model.save_pretrained(self.folder / "target")


class RevisionTest(KeptHeadMixin):
    """A repository in the cache of the Hub with two revisions, whose heads differ."""

    def cached(self, kind="dense", layout="dense"):
        first = self.checkpoint(kind, layout)
        snapshots = self.folder / "hub/models--some--model/snapshots"
        snapshots.mkdir(parents=True)
        self.other = {name: x + 1 for name, x in head_of(layout).items()}
        path = first / "model.safetensors"
        for name, head in (("a" * 40, head_of(layout)), ("b" * 40, self.other)):
            save_file(load_file(path) | head, path, {"format": "pt"})
            shutil.copytree(first, snapshots / name)
        shutil.rmtree(first)
        refs = snapshots.parent / "refs"
        refs.mkdir()
        (refs / "main").write_text("b" * 40)
        (refs / "old").write_text("a" * 40)
        self.enterContext(mock.patch("huggingface_hub.constants.HF_HUB_CACHE", str(self.folder / "hub")))
        self.enterContext(mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True))

    @parameterized.expand([("old",), ("a" * 40,)])
    def test_the_head_of_the_revision(self, revision):
        self.cached()
        self.load("some/model", revision=revision).save_pretrained(self.folder / "target")
        self.check(self.folder / "target")
        self.assertNotIn("a" * 40, (self.folder / "target/config.json").read_text())

    @parameterized.expand([(False,), (True,)])
    def test_main(self, patched):
        self.cached()
        model = self.load("some/model", patched)
        # Nothing says of a patched model which revision it was loaded from.
        with mock.patch("transformers_packed.models.mtp.logger.warning_once") as warn:
            model.save_pretrained(self.folder / "target")
        self.assertEqual(["from revision main" in call.args[0] for call in warn.call_args_list], [True] * patched)
        saved = load_file(self.folder / "target/model.safetensors")
        for name, x in self.other.items():
            self.assertTrue(torch.equal(saved[name], x), name)
