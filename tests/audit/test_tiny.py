"""Tiny models have the sizes of tiny models, under whatever name their configuration takes them."""

import unittest

from parameterized import parameterized

from transformers_packed.audit.tiny import tiny_config, tiny_model


class TinyTest(unittest.TestCase):
    @parameterized.expand(["kimi_linear", "bailing_hybrid", "qwen3_moe", "kolibri1", "mellum"])
    def test_experts(self, model_type):
        """The signature has the common name of their number, and the configuration keeps it under another one."""
        config = tiny_config(model_type)
        self.assertLessEqual(config.num_local_experts, 8)
        self.assertEqual(config.num_experts_per_tok, 2)

    def test_groups_of_experts(self):
        """A router that chooses among groups has more than one."""
        self.assertEqual((tiny_config("bailing_hybrid").n_group, tiny_config("bailing_hybrid").topk_group), (2, 1))
        self.assertLess(sum(x.numel() for x in tiny_model("bailing_hybrid").parameters()), 500_000)
