"""Tests of stock classes in a copy of Transformers with all patches. `utils/upstream_patch.py --together` runs them.

These are the tests of this package's model classes with a stock class in their place, all boundaries of the collator,
and no cache, as in `Trainer`. They exclude the test with NaNs, which spread through attention with a mask.
"""

import importlib
import re
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

import torch
from common.families import documents, tiny_model
from mixins.model import alone, gradients, packed_batch, relative_error, total_relative_error
from mixins.vision import TEXT, vision_config
from parameterized import parameterized
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from transformers_packed import audit_model
from transformers_packed.audit import tiny


# The test classes of this package's models.
MODELS = {
    "qwen3_next": ("Qwen3NextModelTest", "Qwen3NextMoeModelTest"),
    "qwen3_5": ("Qwen3_5ModelTest",),
    "qwen3_5_moe": ("Qwen3_5MoeModelTest",),
}
WANTED = re.compile(
    "test_(alone_equals_together_.*_all$|no_leak_(for|back)ward$|base_model$|padded_equals_builtin_and_packed)"
)


def with_builtin(ours: type) -> type:
    """Derive a test class with the stock model in place of ours, limited to the tests that it has to pass."""

    def get_config(self):
        config = ours.get_config(self)
        config.use_cache = False
        return config

    unwanted = {name: None for name in dir(ours) if name.startswith("test_") and not WANTED.match(name)}
    members = {"packed_class": ours.builtin_class, "get_config": get_config, "__module__": __name__, **unwanted}
    # The stock class sums in another order than each document alone. A change of the weights by one unit of rounding
    # changes the gradients of the decay by up to 7e-4. The tests of leaks are exact.
    members["decay_bar"] = 2e-3
    return type(f"Builtin{ours.__name__}", (ours,), members)


for family, names in MODELS.items():
    sys.path.insert(0, str(Path(__file__).parents[1] / "models" / family))
    for name in names:
        test = with_builtin(getattr(importlib.import_module(f"test_modeling_{family}"), name))
        globals()[test.__name__] = test
del test


# The model types that the patches support, and those still refused because other layers mix documents.
FAMILIES = (
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2"),
    *("lfm2_moe", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "zamba", "zamba2"),
)
TYPES = (*FAMILIES, "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
REFUSED = ("qwen4_exp", "qwen4_exp_text")


class FamiliesTest(unittest.TestCase):
    @parameterized.expand(FAMILIES)
    def test_loss_and_gradients_are_those_of_documents_alone(self, family):
        model, rows = tiny_model(family), documents((9, 1, 20, 5))
        with mock.patch.object(model.config.get_text_config(), "use_cache", False, create=True):
            logits, loss = alone(model, rows)
            expected = gradients(model, loss)
            output = model(**packed_batch(rows))
        self.assertLess(relative_error(output.logits[0], torch.cat(logits)), 1e-5)
        self.assertLess(abs(output.loss.item() - loss.item()), 1e-5 * loss.item())
        actual = gradients(model, output.loss)
        self.assertEqual(set(actual), set(expected))
        self.assertLess(total_relative_error(actual, expected), 1e-4)

    @parameterized.expand(TYPES)
    def test_audit_isolated(self, model_type):
        report = audit_model(tiny.tiny_model(model_type), lengths=[65, 1, 130, 3, 64], inputs=("all",))
        self.assertEqual(report.sources["all"].verdict, "isolated", report.table())

    @parameterized.expand(REFUSED)
    def test_audit_refused(self, model_type):
        report = audit_model(tiny.tiny_model(model_type), lengths=[65, 1, 130, 3, 64], inputs=("all",))
        self.assertEqual(report.sources["all"].verdict, "refused", report.table())


class VisionTest(unittest.TestCase):
    def test_row_of_texts(self):
        torch.manual_seed(0)
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**vision_config(TEXT))).train()
        model.config.text_config.use_cache = False
        rows = documents((9, 1, 70, 5))
        logits, loss = alone(model, rows)
        expected = gradients(model.model.language_model, loss)
        output = model(**packed_batch(rows))
        self.assertLess(relative_error(output.logits[0], torch.cat(logits)), 1e-5)
        actual = gradients(model.model.language_model, output.loss)
        self.assertLess(total_relative_error(actual, expected), 1e-5)


class VisibleKernelsTest(unittest.TestCase):
    @unittest.skipIf(torch.cuda.is_available(), "the kernels run there")
    def test_a_model_on_the_cpu_runs_with_kernels_installed(self):
        """Runs with flash-linear-attention and triton visible, if they are installed."""
        code = (
            "import torch; from mixins.model import packed_batch\n"
            "from transformers import Qwen3_5TextConfig, Qwen3_5ForCausalLM\n"
            f"model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{TEXT}))\n"
            "model(**packed_batch([torch.arange(3), torch.arange(70)]), use_cache=False).loss.backward()\n"
            "model.eval().generate(torch.arange(5)[None], max_new_tokens=2)\n"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr[-2000:])
