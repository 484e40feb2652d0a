"""Rows whose largest tensors have more than 2^31 elements, the limit of 32-bit indices: `make test-gpu`."""

import gc
import unittest

import torch
from common.gpu import needs_gpu, report
from common.real_heads import SIZES_OF_4B
from mixins.model import gradients, packed_batch, relative_error, total_relative_error
from parameterized import parameterized
from transformers import Qwen3_5TextConfig, set_seed

from transformers_packed.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from transformers_packed.ops import implementations_used


CONFIG = SIZES_OF_4B | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
# Queries and their gate have 8,192 numbers per token, gate and up of the MLP 18,432.
TOKENS, LAST = 280_000, 1000


@needs_gpu
class LongRowsTest(unittest.TestCase):
    @parameterized.expand([("one long document", [TOKENS - LAST]), ("many", [8192] * 34 + [472])])
    def test_the_last_document_of_a_long_row(self, name, before):
        """Its loss and gradients are those of the document alone, and wrong ones are found."""
        self.assertEqual(sum(before) + LAST, TOKENS)
        set_seed(0)
        model = Qwen3_5ForCausalLM._from_config(Qwen3_5TextConfig(**CONFIG), dtype=torch.bfloat16).cuda().train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        generator = torch.Generator().manual_seed(0)
        documents = [torch.randint(1, 97, (n,), generator=generator) for n in (*before, LAST)]
        results = {}
        for case, chosen in (("alone", documents[-1:]), ("row", documents), ("other", documents[:-1])):
            batch = {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in packed_batch(chosen).items()}
            if case == "row":
                batch["labels"][:, :-LAST] = -100
            loss = model(**batch).loss
            results[case] = loss.detach(), {k: x.clone() for k, x in gradients(model, loss).items()}
            gc.collect()
        (loss, expected), (actual_loss, actual) = results["alone"], results["row"]
        figures = {"loss": relative_error(actual_loss, loss), "gradients": total_relative_error(actual, expected)}
        report(f"the last document behind {TOKENS - LAST:,} tokens, {name}", **figures)
        self.assertIn("attention", implementations_used())
        self.assertLess(figures["loss"], 1e-3)
        self.assertLess(figures["gradients"], 2e-2)
        self.assertGreater(total_relative_error(results["other"][1], expected), 0.1)
