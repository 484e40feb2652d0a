"""The verdict on a model, from the measurements of the audit and the model's cache setting."""

import unittest
from unittest import mock

import torch
from mixins.patch import COMPOSITE, builtin_model
from parameterized import parameterized
from scripts.trainer_arms import CONFIGS
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig

from transformers_packed import DataCollatorWithFlattening
from transformers_packed.audit.tiny import tiny_config
from transformers_packed.models import verdict


ALL = {"return_seq_idx": True, "return_flash_attn_kwargs": True}


def build(model_type: str = "qwen3_5"):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=61, **sizes) if model_type == "llama" else CONFIGS[model_type]()
    return AutoModelForCausalLM.from_config(config)


class CacheTest(unittest.TestCase):
    """The verdict on a cache matches the effect of a changed first document on the second."""

    @parameterized.expand(
        [
            (model_type, outer, inner)
            for model_type in ("llama", "gpt_neo", "mllama")
            for outer in (True, False)
            for inner in (True, False)
        ]
    )
    def test_documents_leak_exactly_where_said(self, model_type, outer, inner):
        config = tiny_config(model_type)
        composite = config.get_text_config() is not config
        torch.manual_seed(0)
        model = (AutoModelForImageTextToText if composite else AutoModelForCausalLM).from_config(config).eval()
        config = model.config
        config.get_text_config().use_cache = inner
        config.use_cache = outer
        rows = torch.randint(5, 20, (2, 24))
        rows[1, 12:] = rows[0, 12:]
        with torch.no_grad():
            first, second = (
                model(input_ids=row[None], position_ids=torch.arange(12).repeat(2)[None]).logits[0, 12:]
                for row in rows
            )
        leaks = bool((first - second).abs().max() > 1e-6)
        self.assertEqual(verdict.cache_setting(model) is not None, leaks)

    def test_flash_attention_needs_no_mask(self):
        model = build("llama")
        self.assertIsNotNone(verdict.cache_setting(model))
        model.config._attn_implementation_internal = "flash_attention_2"
        self.assertIsNone(verdict.cache_setting(model))


class JudgeTest(unittest.TestCase):
    """The verdict from an entry of the matrix, for a Qwen3.5 model."""

    def judge(self, builtin: dict, *, options=ALL, ours="isolated", model=None, model_type="qwen3_5_text"):
        entry = {
            "class": "Qwen3_5ForCausalLM",
            "attention": "sdpa",
            "builtin": builtin,
            "ours": {"position_ids": {"verdict": ours}, "all": {"verdict": ours}},
        }
        model = model or build()
        collator = DataCollatorWithFlattening(**options, on_leak="ignore")
        with mock.patch.object(verdict, "measurements", return_value={model_type: entry}):
            leak, doubt = verdict.judge(model, **collator.given())
        return str(leak or ""), doubt or ""

    leaks = {"verdict": "leaks", "module": "Qwen3_5Attention", "kind": "attention"}
    isolated = {"verdict": "isolated"}

    def test_a_flag_of_the_collator_is_enough(self):
        builtin = {"position_ids": self.leaks, "all": self.isolated, "position_ids+seq_idx": self.leaks}
        self.assertEqual(self.judge(builtin), ("", ""))
        leak, _ = self.judge(builtin, options={"return_seq_idx": True}, ours="refused")
        self.assertIn("if it receives position_ids and seq_idx", leak)
        self.assertIn("Pass return_flash_attn_kwargs=True and return_seq_idx=True to the collator.", leak)
        self.assertNotIn("patch_model", leak)

    def test_cu_seqlens_for_a_vision_tower(self):
        """The tower would read them as image boundaries. Under Transformers' own names they do not reach it."""
        isolated = {"position_ids": self.isolated, "all": self.isolated}
        model = builtin_model("qwen3_5", "Qwen3_5ForConditionalGeneration", COMPOSITE["qwen3_5"])
        leak, _ = self.judge(isolated, options={**ALL, "return_cu_seqlens": True}, model=model)
        self.assertIn("whose vision tower reads them as image boundaries", leak)
        self.assertNotIn("vision tower", "".join(self.judge(isolated, model=model)))

    def test_nothing_helps(self):
        leak, _ = self.judge({"position_ids": self.leaks, "all": self.leaks}, ours="refused")
        self.assertIn("Train on padded batches.", leak)

    def test_sources_between_isolated_ends(self):
        builtin = {"position_ids": self.isolated, "all": self.isolated}
        self.assertEqual(self.judge(builtin, options={"return_seq_idx": True}), ("", ""))

    def test_not_causal(self):
        refused = {"verdict": "refused", "reason": "not causal: later tokens change earlier ones"}
        leak, _ = self.judge({"position_ids": refused, "all": refused}, ours="refused")
        self.assertIn("in which later tokens change earlier ones", leak)

    def test_doubts(self):
        refused = {"verdict": "refused", "reason": "ValueError: no kernel"}
        ends = {"position_ids": self.leaks, "all": self.leaks}
        for expected, judged in (
            ("the audit of its type failed with ValueError: no kernel", self.judge({**ends, "all": refused})),
            ("no model of type qwen3_5_text", self.judge(ends, model_type="llama")),
            (
                "returns no position_ids",
                self.judge(ends, options={"return_position_ids": False, "return_seq_idx": True}),
            ),
            (
                "leaks in Mamba2Mixer, but this model has no such module",
                self.judge({**ends, "all": {**self.leaks, "module": "Mamba2Mixer"}}),
            ),
        ):
            self.assertEqual(judged[0], "")
            self.assertIn(expected, judged[1])

    def test_another_attention_implementation(self):
        model = build()
        ends = {"position_ids": self.leaks, "all": self.leaks}
        model.set_attn_implementation("eager")
        self.assertIn("Qwen3_5Attention", self.judge(ends, model=model)[0])
        # Set only if it is installed.
        model.config._attn_implementation_internal = "flash_attention_2"
        self.assertIn("not audited with flash_attention_2", self.judge(ends, model=model)[1])
        states = {**self.leaks, "module": "Qwen3_5GatedDeltaNet", "kind": "state"}
        self.assertIn("carries its state", self.judge({"position_ids": states, "all": states}, model=model)[0])

    def test_a_model_around_one_that_is_isolated_alone(self):
        model = AutoModelForImageTextToText.from_config(tiny_config("qwen3_5"))
        ends = {"position_ids": self.isolated, "all": self.isolated}
        self.assertEqual(self.judge(ends, model=model)[1], "its type was not audited, only qwen3_5_text")

    def test_every_leak_in_the_matrix_names_a_module(self):
        for name, entry in verdict.measurements().items():
            for found in entry.get("builtin", {}).values():
                if found["verdict"] == "leaks":
                    self.assertNotEqual(found["module"], "not found", name)
