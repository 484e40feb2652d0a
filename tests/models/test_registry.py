import ast
import copy
import pickle
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch
import transformers
from common.families import tiny_model
from common.releases import RELEASE
from mixins.model import VOCAB_SIZE, relative_error
from mixins.patch import COMPOSITE, CONFIGS
from packaging.version import Version
from parameterized import parameterized
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.models.qwen3_5 import modeling_qwen3_5

import transformers_packed
from transformers_packed.models import releases, versions
from transformers_packed.models.families import family_of
from transformers_packed.models.family import Own
from transformers_packed.models.generic import auto_entries


BY_NAME = {type(config).__name__: config for config in (*CONFIGS.values(), *COMPOSITE.values())}
REGISTERED = [
    (f"{config.__name__}_{auto.__name__}", family_of(ours).name, config.__name__, auto.__name__, ours.__name__)
    for auto, config, ours in auto_entries(Own)
]
# Tests of checkpoints load these.
ELSEWHERE = {"AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText"}
ONE_EACH = {entry[3]: entry for entry in REGISTERED if entry[1] in CONFIGS and entry[3] not in ELSEWHERE}


def builtin_class(family: str, class_name: str) -> type:
    module = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=[class_name])
    return getattr(module, class_name)


class RegisterTest(unittest.TestCase):
    def tearDown(self):
        transformers_packed.unregister()

    @parameterized.expand(ONE_EACH.values())
    def test_checkpoints_go_both_ways(self, _, family, config_name, auto_name, class_name):
        """Stock checkpoints load into our classes and vice versa, with all keys matched and equal results."""
        auto_class = getattr(transformers, auto_name)
        torch.manual_seed(0)
        builtin = builtin_class(family, class_name)(BY_NAME[config_name]).eval()
        input_ids = torch.randint(1, VOCAB_SIZE, (2, 20))
        with tempfile.TemporaryDirectory() as directory, torch.no_grad():
            builtin.save_pretrained(directory)
            with transformers_packed.registered():
                ours, report = auto_class.from_pretrained(directory, output_loading_info=True)
            self.assertFalse(report["missing_keys"] | report["unexpected_keys"] | report["mismatched_keys"])
            self.assertEqual(type(ours).__name__, class_name)
            self.assertTrue(type(ours).__module__.startswith("transformers_packed."))
            self.assertLess(relative_error(ours.eval()(input_ids)[0], builtin(input_ids)[0]), 1e-5)
            # Use a separate directory, because the tensors of `ours` may still be mapped from the first one.
            ours.save_pretrained(f"{directory}/ours")
            # Pass the configuration, because the token classification class of Qwen3.5 expects the composite one by
            # default.
            back, report = builtin_class(family, class_name).from_pretrained(
                f"{directory}/ours", config=ours.config, output_loading_info=True
            )
            self.assertFalse(report["missing_keys"] | report["unexpected_keys"] | report["mismatched_keys"])
            # The configuration also names our op for experts, which rounds otherwise.
            back.config._experts_implementation = builtin.config._experts_implementation
            self.assertTrue(torch.equal(back.eval()(input_ids)[0], builtin(input_ids)[0]))

    def test_every_auto_class_has_ours(self):
        with transformers_packed.registered():
            for _, _, config_name, auto_name, class_name in REGISTERED:
                cls = getattr(transformers, auto_name)._model_mapping[getattr(transformers, config_name)]
                self.assertEqual(cls.__name__, class_name)
                self.assertTrue(cls.__module__.startswith("transformers_packed."))

    @parameterized.expand(CONFIGS)
    def test_what_trainers_read_is_the_builtins(self, family):
        builtin = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family]))
        with transformers_packed.registered():
            ours = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family]))
        # As in Trainer, accelerate and torch.save.
        self.assertEqual(ours._no_split_modules, builtin._no_split_modules)
        self.assertIs(type(pickle.loads(pickle.dumps(ours))), type(ours))
        self.assertTrue(ours.can_generate())
        self.assertEqual(ours.loss_type, builtin.loss_type)

    @unittest.skipIf(RELEASE < Version("5.20"), "this release registers no class for its own configurations")
    def test_another_class_is_not_overwritten(self):
        class Qwen3_5ForCausalLM(builtin_class("qwen3_5", "Qwen3_5ForCausalLM")):
            pass

        AutoModelForCausalLM.register(Qwen3_5TextConfig, Qwen3_5ForCausalLM, exist_ok=True)
        try:
            with self.assertRaisesRegex(ValueError, "expected no other class .* Qwen3_5TextConfig, got .*"):
                transformers_packed.register()
            # Nothing was registered partially, and unregister keeps the foreign class.
            self.assertTrue(
                type(AutoModel.from_config(copy.deepcopy(CONFIGS["qwen3_5"]))).__module__.startswith("transformers.")
            )
            transformers_packed.unregister()
            self.assertIs(
                type(AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["qwen3_5"]))), Qwen3_5ForCausalLM
            )
        finally:
            del AutoModelForCausalLM._model_mapping._extra_content[Qwen3_5TextConfig]

    def test_other_transformers_releases_are_refused_clearly(self):
        with mock.patch.object(releases, "_REQUIRED", ("transformers.cache_utils:Cache.no_such_method",)):
            with self.assertRaisesRegex(
                ImportError, "lacks transformers.cache_utils.Cache.no_such_method.*pip install"
            ):
                transformers_packed.register()

    def test_new_arguments_of_stock_methods_are_refused(self):
        """Our methods would ignore them, because their `**kwargs` take every name."""

        def forward(self, hidden_states, attention_mask=None, window=None, **kwargs):
            raise AssertionError

        forward.__module__ = modeling_qwen3_5.__name__
        with mock.patch.object(modeling_qwen3_5.Qwen3_5GatedDeltaNet, "forward", forward):
            expected = (
                "has the new argument window of Qwen3_5GatedDeltaNet.forward, which .* would ignore.*pip install"
            )
            with self.assertRaisesRegex(ImportError, expected):
                transformers_packed.register()
            with self.assertRaisesRegex(ImportError, "argument window"):
                transformers_packed.patch_model(modeling_qwen3_5.Qwen3_5ForCausalLM(copy.deepcopy(CONFIGS["qwen3_5"])))
        # A method that another package has put there says nothing about the release.
        forward.__module__ = "another_package"
        with mock.patch.object(modeling_qwen3_5.Qwen3_5GatedDeltaNet, "forward", forward):
            transformers_packed.register()

    def test_other_families_need_a_release_that_they_are_tested_with(self):
        model, registered = tiny_model("mamba"), AutoModelForCausalLM._model_mapping._extra_content
        with mock.patch.object(versions, "OTHER_FAMILIES", "99"):
            transformers_packed.register()
            self.assertIn(Qwen3_5TextConfig, registered)
            self.assertNotIn(transformers.MambaConfig, registered)
            with self.assertRaisesRegex(ValueError, "expected transformers >= 99 for packed rows of mamba, got"):
                transformers_packed.patch_model(model)
        if versions.supports_other_families():
            transformers_packed.patch_model(model)

    def test_a_class_of_another_package_is_named(self):
        """flash-linear-attention registers classes for Mamba and Mamba-2 that have the names of Transformers."""
        other = type("Mamba2ForCausalLM", (transformers.PreTrainedModel,), {"__module__": "fla.models.mamba2"})
        model = other(transformers.PreTrainedConfig())
        # If Transformers' module was imported, the class counts as a copy of its class.
        with self.assertRaisesRegex(
            ValueError, "fla.models.mamba2.Mamba2ForCausalLM. Load (it with transformers.Mamba2|the)"
        ):
            transformers_packed.patch_model(model)


class ModularTest(unittest.TestCase):
    def test_importing_a_modular_file_replaces_nothing(self):
        from transformers_packed.models.qwen3_next import modeling_qwen3_next
        from transformers_packed.models.replacements import REPLACEMENTS

        before = dict(REPLACEMENTS)
        from transformers_packed.models.qwen3_next import modular_qwen3_next

        self.assertIsNot(modular_qwen3_next.Qwen3NextModel, modeling_qwen3_next.Qwen3NextModel)
        self.assertEqual(REPLACEMENTS, before)


class ImportTest(unittest.TestCase):
    def test_in_a_fresh_process(self):
        script = Path(__file__).parents[1] / "scripts" / "fresh_process.py"
        with tempfile.TemporaryDirectory() as folder:
            result = subprocess.run([sys.executable, script, folder], capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_every_public_name_is_there(self):
        tree = ast.parse(Path(transformers_packed.__file__).read_text(encoding="utf-8"))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
        self.assertEqual({x.asname: node.module for node in imports for x in node.names}, transformers_packed._HOMES)
        for name in transformers_packed.__all__:
            self.assertEqual(getattr(transformers_packed, name).__name__, name)
