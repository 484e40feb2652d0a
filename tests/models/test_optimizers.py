"""The bytes that optimizers keep per weight, against real states after a step on the CPU, and the table of the page."""

import importlib
import unittest
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch
from common.optimizers import state_bytes
from common.sizes import SIZES
from parameterized import parameterized
from transformers import Qwen3_5TextConfig

from transformers_packed.data.planning.step_memory import Parameters
from transformers_packed.models.optimizers import DEFAULT, OPTIMIZERS, optimizer_named


ROOT = Path(__file__).parents[2]
WIDTHS = {"float32": 4, "bfloat16": 2}
# Classes with the same states. Those of flashoptim need a GPU: tests/gpu/test_optimizers.py.
CLASSES = {
    "torch": {DEFAULT: ("torch.optim", "AdamW", {}), "muon": ("torch.optim", "Muon", {})},
    "torchao": {
        f"adamw_torch_{bits}bit": ("torchao.optim", f"AdamW{bits}bit", {"block_size": 256}) for bits in (8, 4)
    },
    "bitsandbytes": {
        "adamw_8bit": ("bitsandbytes.optim", "AdamW8bit", {}),
        "paged_adamw_8bit": ("bitsandbytes.optim", "PagedAdamW8bit", {}),
    },
}
BUILT = [(name, *found) for names in CLASSES.values() for name, found in names.items()]


class BytesTest(unittest.TestCase):
    def setUp(self):
        if find_spec("bitsandbytes"):
            # It keeps which weights Trainer left in float32, by their numbers in any optimizer of the process.
            importlib.import_module("bitsandbytes.optim").GlobalOptimManager.get_instance().initialize()

    @parameterized.expand([(*found, dtype) for found in BUILT for dtype in WIDTHS])
    def test_states_after_a_step(self, name, module, cls, options, dtype):
        optimizer = OPTIMIZERS[name]
        if find_spec(optimizer.package) is None:
            self.skipTest(f"needs {optimizer.package}")
        weight = torch.nn.Parameter(torch.ones(96, 128, dtype=getattr(torch, dtype)))
        weight.grad = torch.ones_like(weight)
        stepped = getattr(importlib.import_module(module), cls)([weight], **options)
        # A compiled step has the same states.
        with mock.patch.object(torch, "compile", lambda function, **kwargs: function):
            stepped.step()
        number = weight.numel()
        self.assertEqual(state_bytes(stepped), optimizer.states(WIDTHS[dtype], number, matrices=number))

    def test_every_optimizer_is_looked_at(self):
        elsewhere = {name for name, optimizer in OPTIMIZERS.items() if optimizer.package == "flashoptim"}
        self.assertEqual({name for name, *_ in BUILT} | elsewhere, set(OPTIMIZERS))

    def test_another_name(self):
        with self.assertRaisesRegex(ValueError, "expected an optimizer of adamw_torch_fused, .*, got 'adam'"):
            optimizer_named("adam")

    def test_the_page_has_these_bytes(self):
        page = (ROOT / "docs" / "how_to" / "low_memory.md").read_text(encoding="utf-8")
        models = []
        for size in ("9B", "27B"):
            config = Qwen3_5TextConfig(**SIZES[size])
            parameters = Parameters.of(config)
            models.append((parameters.total, config.vocab_size * config.hidden_size, parameters.matrices))
        for name, optimizer in OPTIMIZERS.items():
            width = WIDTHS[optimizer.weights]
            kept = width * (1 if optimizer.releases else 2)
            each = kept + optimizer.states(width, 1)
            told = f"{each:.3f}".rstrip("0").rstrip(".") if optimizer.package != "torchao" else f"{each:.2f}"
            if optimizer.embedding_moment is not None:
                told = f"{each:.2f}, embeddings {kept + optimizer.states(width, 1, 1):g}"
            if optimizer.orthogonalizes:
                told = f"{kept + optimizer.states(width, 1, 0, 1):g}, others {told}"
            sizes = [f"{(kept * n + optimizer.states(width, n, *some)) / 2**30:.1f} GiB" for n, *some in models]
            row = f" | {optimizer.weights} | {told} | {' | '.join(sizes)} |"
            lines = [line for line in page.splitlines() if line.startswith(f"| `{name}`")]
            self.assertEqual(len(lines), 1)
            self.assertTrue(row in lines[0], row)
