"""What a family is, and what sizes its layers have, is known in `models/` alone: all others ask the record."""

import ast
import re
import unittest
from pathlib import Path

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from transformers_packed.models.families import FAMILIES, OWN, family_of


ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "transformers_packed"
SIZES = set(
    """
    hidden_size intermediate_size moe_intermediate_size shared_expert_intermediate_size num_hidden_layers layer_types
    num_attention_heads num_key_value_heads head_dim linear_num_key_heads linear_num_value_heads linear_key_head_dim
    linear_value_head_dim linear_conv_kernel_dim num_experts num_experts_per_tok num_local_experts mlp_only_layers
    decoder_sparse_step
    """.split()
)
# Model types that are also words of another meaning.
WORDS = {"git", "mamba"}
TYPES = {*CONFIG_MAPPING_NAMES, *FAMILIES} - WORDS
# Prefixes of the names of classes, such as `Qwen3Next` and `Qwen3_5Moe`.
CONFIGS = [name for model_type, name in CONFIG_MAPPING_NAMES.items() if family_of(model_type) in OWN]
CLASSES = {re.sub("(Text|Vision)?Config$", "", name) for name in CONFIGS}
EXCEPTIONS = {
    "audit/tiny.py",  # settings of tiny models, by model type
    "cli/demo_arms.py",  # the small model of the demo
    "integrations/axolotl.py",  # modules of Axolotl that patch a family
}


def knowledge(source: str, sizes: set[str] = SIZES) -> set[str]:
    """Return the names of families, their classes and layer sizes that code uses, without docstrings."""
    tree, found, known, prefixes = ast.parse(source), set(), sizes | TYPES, tuple(CLASSES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            words = {node.attr} - TYPES
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = set(re.split(r"[^\w-]+", node.value))
            if " " in node.value:
                # Prose may speak of a size, but not of a class.
                words -= known
        elif isinstance(node, ast.Name | ast.alias):
            words = {getattr(node, "id", None) or node.name} - known
        else:
            continue
        found |= {word for word in words if word in known or word.startswith(prefixes)}
    return found


class RecordsTest(unittest.TestCase):
    def test_nobody_else_knows_families_or_layer_sizes(self):
        for path in sorted(SRC.rglob("*.py")):
            name = str(path.relative_to(SRC))
            if not name.startswith("models/") and name not in EXCEPTIONS:
                with self.subTest(name):
                    # Ops take sizes as arguments.
                    sizes = set() if name.startswith("ops/") else SIZES
                    self.assertEqual(knowledge(path.read_text(encoding="utf-8"), sizes), set())

    def test_each_exception_needs_to_be_one(self):
        for name in EXCEPTIONS:
            self.assertTrue(knowledge((SRC / name).read_text(encoding="utf-8")), name)
