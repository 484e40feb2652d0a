"""The plugin for Axolotl. `make test-integrations` runs all of these tests with Axolotl itself."""

import json
import random
import subprocess
import sys
import tempfile
import unittest
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from common import axolotl_parts
from common.frameworks import SCRIPTS, assert_same_training, environment, function_of
from common.records import make_tokenizer
from mixins.vision import TEXT
from packaging.version import Version
from parameterized import parameterized
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as builtin

from transformers_packed.audit.tiny import tiny_model
from transformers_packed.integrations.stock_methods import STOCK
from transformers_packed.models.registry import has_our_classes


HAS_AXOLOTL = find_spec("axolotl") is not None
# Axolotl 0.21 and later find the plugin by its entry point.
FINDS_PLUGINS = HAS_AXOLOTL and Version(version("axolotl")) >= Version("0.21")
axolotl_parts.install()
plugin_module = import_module("transformers_packed.integrations.axolotl")
PackedPlugin, PackedCollator = plugin_module.PackedPlugin, plugin_module.PackedCollator
NAME = "transformers_packed.integrations.axolotl.PackedPlugin"


class Cfg(dict):
    """Axolotl's configuration, which asks for the plugin: unknown options are `None`."""

    __getattr__ = dict.get

    def __init__(self, *options, **more):
        super().__init__(*options, **{"transformers_packed": True, **more})


def sample(*tokens, **more):
    return {"input_ids": list(tokens), "labels": list(tokens), "position_ids": list(range(len(tokens))), **more}


class CollatorTest(unittest.TestCase):
    def collator(self, side="right", multiple=4):
        tokenizer = make_tokenizer()
        tokenizer.padding_side = side
        return PackedCollator(tokenizer, pad_to_multiple_of=multiple)

    @parameterized.expand(["right", "left"])
    def test_rows_become_one_row_with_the_padding_last(self, side):
        rows = [[sample(5, 6, 7), sample(8, 9)], [sample(10), sample(11, 12, 13, 14)]]
        for with_mask in (False, True):
            if with_mask:
                rows = [[{**s, "attention_mask": [1] * len(s["input_ids"])} for s in row] for row in rows]
            batch = self.collator(side)(rows)
            self.assertEqual(
                set(batch), {"input_ids", "labels", "position_ids", "cu_seqlens", "padding_tokens"}, with_mask
            )
            self.assertEqual(batch["input_ids"].tolist(), [[*range(5, 15), *[0] * 6]])
            labels = [-100, 6, 7, -100, 9, -100, -100, 12, 13, 14, *[-100] * 6]
            self.assertEqual(batch["labels"].tolist(), [labels])
            self.assertEqual(batch["cu_seqlens"].tolist(), [0, 3, 5, 6, 10, 16])
            self.assertEqual(batch["position_ids"].tolist(), [[0, 1, 2, 0, 1, 0, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
            self.assertEqual(batch["padding_tokens"], 6)

    def test_a_row_of_samples_without_padding(self):
        batch = self.collator(multiple=1)([sample(5, 6, 7), sample(8, 9)])
        self.assertEqual(batch["cu_seqlens"].tolist(), [0, 3, 5])
        self.assertNotIn("padding_tokens", batch)

    def test_masked_tokens_are_padding(self):
        rows = [[sample(5, 6, 7, attention_mask=[1, 1, 0]), sample(8, 9, attention_mask=[1, 1])]]
        batch = self.collator()(rows)
        self.assertEqual(batch["input_ids"].tolist(), [[5, 6, 8, 9, 0, 0, 0, 0]])
        self.assertEqual(batch["cu_seqlens"].tolist(), [0, 2, 4, 8])


class PluginTest(unittest.TestCase):
    def setUp(self):
        for cls in (builtin.Qwen3_5GatedDeltaNet, builtin.Qwen3_5MLP):
            self.addCleanup(setattr, cls, "forward", cls.forward)

    def test_undoes_the_changes_whose_work_it_does(self):
        stock = builtin.Qwen3_5GatedDeltaNet.forward
        for module in plugin_module._AXOLOTL.undone:
            model = tiny_model("qwen3_5_text")
            builtin.Qwen3_5GatedDeltaNet.forward = function_of(module)
            PackedPlugin().post_model_build(Cfg(), model)
            self.assertIs(builtin.Qwen3_5GatedDeltaNet.forward, stock)
            self.assertTrue(has_our_classes(model))

    @parameterized.expand(
        [
            ("axolotl.monkeypatch.tiled_mlp.patch", "Set tiled_mlp: false."),
            ("axolotl.integrations.liger.models.qwen3_5", "Set liger_fused_linear_cross_entropy: false."),
            ("cut_cross_entropy.transformers.qwen3_5", "Set cut_cross_entropy: false."),
            ("axolotl.monkeypatch.models.qwen3_5.fused_attn", "Set fused_attn_kernel: false."),
            ("axolotl.monkeypatch.models.falcon_h1.modeling", "Set sample_packing: false, or remove PackedPlugin."),
            ("another", "Turn off what sets it, and train in a new process."),
        ]
    )
    def test_refuses_other_changes_by_their_option(self, module, fix):
        model = tiny_model("qwen3_5_text")
        builtin.Qwen3_5MLP.forward = function_of(module)
        with self.assertRaises(ValueError) as caught:
            PackedPlugin().post_model_build(Cfg(), model)
        self.assertIn(f"got Qwen3_5MLP.forward of {module}. {fix}", str(caught.exception))
        self.assertFalse(has_our_classes(model))

    def test_refuses_a_change_from_before_its_import(self):
        patched = function_of("axolotl.monkeypatch.models.qwen3_5.modeling")
        builtin.Qwen3_5GatedDeltaNet.forward = patched
        recorded = {builtin.Qwen3_5GatedDeltaNet: {"forward": patched}}
        with mock.patch.dict(STOCK, recorded), self.assertRaisesRegex(ValueError, "in a new process"):
            PackedPlugin().post_model_build(Cfg(), tiny_model("qwen3_5_text"))

    def compiled(self, name: str):
        """Replace a forward as Axolotl 0.21 does: by a changed source, compiled in a copy of the module."""
        namespace = dict(vars(builtin))
        exec(f"def {name}(self, hidden_states): pass", namespace)
        builtin.Qwen3_5MLP.forward = namespace[name]

    def test_undoes_a_changed_source_beside_its_mark(self):
        stock, model = builtin.Qwen3_5MLP.forward, tiny_model("qwen3_5_text")
        self.compiled("axolotl_forward")
        with self.assertRaisesRegex(ValueError, r"got Qwen3_5MLP.forward of a changed source \(axolotl_forward\)."):
            PackedPlugin().post_model_build(Cfg(), model)
        builtin.Qwen3_5MLP._original_forward = "the source"
        PackedPlugin().post_model_build(Cfg(), model)
        self.assertIs(builtin.Qwen3_5MLP.forward, stock)
        self.assertFalse(hasattr(builtin.Qwen3_5MLP, "_original_forward"))

    @parameterized.expand(
        [
            ("context_parallel_size", 2, "context_parallel_size"),
            ("context_parallel", {"size": 2}, "context_parallel.size"),
            ("use_pose", True, "use_pose"),
            ("pretraining_dataset", "corpus", "pretraining_dataset"),
            ("reward_model", True, "reward_model"),
        ]
    )
    def test_refuses_options_that_cut_or_move_rows(self, name, value, said):
        packed = {"sample_packing": True, name: value}
        with self.assertRaisesRegex(ValueError, rf"got {said}: \w+. Remove {said}, or set sample_packing: false."):
            PackedPlugin().pre_model_load(Cfg(packed))
        PackedPlugin().pre_model_load(Cfg({"sample_packing": False, name: value}))
        PackedPlugin().pre_model_load(Cfg(packed, transformers_packed=False))
        one = {"size": 1}
        PackedPlugin().pre_model_load(Cfg(sample_packing=True, context_parallel=one, use_pose=False))

    def test_does_nothing_that_the_configuration_does_not_ask_for(self):
        for wanted, cfg in (
            (False, Cfg(transformers_packed=None)),
            (False, Cfg(transformers_packed=None, plugins=["another.Plugin"])),
            (True, Cfg(transformers_packed=None, plugins=["another.Plugin", NAME])),
            (True, Cfg(transformers_packed=None, plugins=[NAME.replace(".PackedPlugin", ":PackedPlugin")])),
            (True, Cfg()),
        ):
            model = tiny_model("qwen3_5_text")
            PackedPlugin().post_model_build(cfg, model)
            self.assertEqual(has_our_classes(model), wanted, cfg)

    def test_a_plugin_derived_from_it(self):
        derived, model = type("Derived", (PackedPlugin,), {"__module__": "mine"})(), tiny_model("qwen3_5_text")
        derived.post_model_build(Cfg(transformers_packed=None, plugins=["mine.Derived"]), model)
        self.assertTrue(has_our_classes(model))

    def test_collates_packed_rows_of_patched_models_only(self):
        plugin = PackedPlugin()
        plugin.post_model_build(Cfg(), tiny_model("qwen3_5_text"))
        cfg = Cfg(sample_packing=True, eval_sample_packing=False)
        self.assertEqual(plugin.get_collator_cls_and_kwargs(cfg), (PackedCollator, {}))
        self.assertIsNone(plugin.get_collator_cls_and_kwargs(cfg, is_eval=True))
        self.assertIsNone(plugin.get_collator_cls_and_kwargs(Cfg(sample_packing=False)))
        with self.assertRaisesRegex(ValueError, "got object. List this plugin before others"):
            plugin.post_trainer_create(cfg, SimpleNamespace(data_collator=object()))
        plugin.post_trainer_create(cfg, SimpleNamespace(data_collator=PackedCollator(make_tokenizer())))

        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **sizes))
        plugin.post_model_build(Cfg(), model)
        self.assertIsNone(plugin.get_collator_cls_and_kwargs(cfg))
        plugin.post_trainer_create(cfg, SimpleNamespace(data_collator=object()))


# A run of `axolotl train` on a CPU. Its rows hold three samples each.
STEPS = 6
CONFIG = {
    "base_model": "model",
    "datasets": [{"path": "data.jsonl", "ds_type": "json", "type": None}],
    "val_set_size": 0,
    "sequence_len": 64,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_epochs": 1,
    "optimizer": "sgd",
    "lr_scheduler": "constant",
    "learning_rate": 0.01,
    "bf16": False,
    "tf32": False,
    "attn_implementation": "sdpa",
    "curriculum_sampling": True,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": STEPS,
}
PADDED = {"micro_batch_size": 3, "pad_to_sequence_len": False}
PACKED = {"sample_packing": True, "sample_packing_sequentially": True}
LORA = {"adapter": "lora", "lora_model_dir": "adapter", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
# On a CPU and for checkpoints without a vision tower, Axolotl does not support these options.
LORA |= {f"lora_{part}_kernel": False for part in ("qkv", "o", "mlp", "embedding")}
# The changes that Axolotl makes on a machine with CUDA, in the same places: immediately before and after these hooks.
CHANGES = """
from axolotl.integrations.base import BasePlugin
from axolotl.monkeypatch import lora_kernels
from axolotl.monkeypatch.models.qwen3_5.modeling import patch_qwen3_5_modeling_packing
from axolotl.utils.dict import DictDefault
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention

class Packing(BasePlugin):
    def pre_model_load(self, cfg):
        patch_qwen3_5_modeling_packing()

class Lora(Packing):
    def pre_model_load(self, cfg):
        super().pre_model_load(cfg)
        lora_kernels.get_attention_cls_from_config = lambda cfg: Qwen3_5Attention
        lora_kernels.patch_self_attn_lora(cfg)

    def post_model_load(self, cfg, model):
        lora_kernels.apply_lora_kernel_patches(model, DictDefault(lora_qkv_kernel=True, lora_o_kernel=True))
"""
# Calls this package's functions for FLA 0.5, with a function in place of its convolution.
CALL_KERNELS = """
import sys
from inspect import signature
from unittest import mock

import fla
import fla.modules.conv.causal_conv1d
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from transformers_packed.ops.backends import fla as ours

assert fla.__version__.startswith("0.5."), fla.__version__
assert ours._backward_problem() == ""
options = "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "scale", "cu_seqlens"
assert signature(chunk_gated_delta_rule).parameters.keys() >= set(options)
convolution = mock.Mock(return_value=("output", None))
with mock.patch.object(sys.modules["fla.modules.conv.causal_conv1d"], "causal_conv1d", convolution):
    assert ours.causal_conv1d("x", "weight", None, "silu", boundaries=None) == "output"
convolution.assert_called_once_with("x", "weight", None, activation="silu", backend="triton")
"""
# The stock classes would run the kernels of flash-linear-attention on a CPU.
HIDE_KERNELS = "import sys; sys.modules['fla'] = sys.modules['causal_conv1d'] = None"


@cache
def folder() -> Path:
    """Create a folder with a tiny Qwen3.5, samples, and the modules above."""
    root = Path(tempfile.mkdtemp(prefix="axolotl-"))
    tokenizer, draw = make_tokenizer(), random.Random(0)
    tokenizer.save_pretrained(root / "model")
    sizes = TEXT | {"vocab_size": len(tokenizer), "num_hidden_layers": 4, "initializer_range": 0.15}
    sizes |= {"layer_types": ["linear_attention", "full_attention"] * 2, "eos_token_id": 1}
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes))
    model.save_pretrained(root / "model")
    # Adapters that already change the output, and are the same in all runs.
    adapters = LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    get_peft_model(model, adapters).save_pretrained(root / "adapter")
    with open(root / "data.jsonl", "w") as file:
        for n in (30, 21, 11, 9, 35, 17) * (STEPS // 2):
            tokens = [draw.randrange(3, 97) for _ in range(n)]
            file.write(json.dumps({"input_ids": tokens, "labels": tokens, "attention_mask": [1] * n}) + "\n")
    (root / "changes.py").write_text(CHANGES)
    (root / "hidden").mkdir()
    (root / "hidden" / "sitecustomize.py").write_text(HIDE_KERNELS)
    return root


@cache
def train(name: str, plugins: tuple[str, ...] = (), stock: bool = False, **options) -> tuple[list, list, dict, str]:
    """Run `axolotl train`. Returns the losses and gradient norms of all steps, the trained weights and the output."""
    root, output = folder(), folder() / name
    config = CONFIG | options | {"output_dir": str(output), "dataset_prepared_path": str(output / "prepared")}
    if plugins:
        config["plugins"] = list(plugins)
    # JSON is YAML.
    (root / f"{name}.yml").write_text(json.dumps(config))
    paths = [root / "hidden"] * stock + [root]
    command = [str(SCRIPTS / "axolotl"), "train", f"{name}.yml"]
    options = {"env": environment(*paths), "capture_output": True, "text": True, "timeout": 600}
    result = subprocess.run(command, cwd=root, **options)
    text = result.stdout + result.stderr
    if result.returncode:
        raise RuntimeError(text[-5000:])
    (state,) = output.glob("checkpoint-*/trainer_state.json")
    log = [entry for entry in json.loads(state.read_text())["log_history"] if "grad_norm" in entry]
    (weights,) = output.glob("*.safetensors")
    return [entry["loss"] for entry in log], [entry["grad_norm"] for entry in log], load_file(weights), text


@pytest.mark.slow
@unittest.skipUnless(HAS_AXOLOTL, "make test-integrations has Axolotl")
class AxolotlTest(unittest.TestCase):
    """Compare `axolotl train` on packed rows with padded batches of the same samples in stock classes."""

    def test_packed_rows_train_like_padded_batches(self):
        padded = train("padded", stock=True, **PADDED)
        packed = train("packed", ("changes.Packing", NAME), **PACKED)
        assert_same_training(self, packed, padded, STEPS)
        for cls in ("Qwen3_5DecoderLayer", "Qwen3_5GatedDeltaNet"):
            self.assertIn(f"{cls}.forward of axolotl.monkeypatch.models.qwen3_5.modeling is not used", packed[3])

    def test_without_the_plugin_the_comparison_fails(self):
        if FINDS_PLUGINS:
            # This release does not train on packed rows without kernels that know where documents start.
            with self.assertRaisesRegex(RuntimeError, "Packed sequences require flash-linear-attention"):
                train("stock", stock=True, **PACKED)
            return
        stock = train("stock", stock=True, **PACKED)
        with self.assertRaises(AssertionError):
            assert_same_training(self, stock, train("padded", stock=True, **PADDED), STEPS)
        self.assertGreater(abs(stock[0][0] - train("padded", stock=True, **PADDED)[0][0]), 0.01)

    def test_lora_beside_the_kernels_that_axolotl_turns_on(self):
        plugin, option = ((), {"transformers_packed": True}) if FINDS_PLUGINS else ((NAME,), {})
        packed = train("lora", ("changes.Lora", *plugin), **PACKED | LORA | option)
        source = r"(axolotl.monkeypatch.lora_kernels|a changed source \(axolotl_attn_forward\))"
        self.assertRegex(packed[3], f"Qwen3_5Attention.forward of {source} is not used")
        self.assertGreater(len(packed[2]), 20)
        assert_same_training(self, packed, train("lora_padded", stock=True, **PADDED | LORA), STEPS)

    def test_the_flash_linear_attention_of_axolotl(self):
        # `conftest.py` hides the package in this process.
        result = subprocess.run(
            [sys.executable, "-c", CALL_KERNELS], env=environment(), capture_output=True, text=True
        )
        self.assertEqual(result.returncode, 0, result.stderr)
