"""The same bits in every row on a GPU: `make test-gpu`."""

import unittest

import torch
from common.blocks import LAYERS, mixture
from common.gpu import needs_gpu
from common.invariance import logps_in_places
from mixins.lora import randomized
from parameterized import parameterized
from peft import LoraConfig, get_peft_model
from transformers import Qwen3_5TextConfig

from transformers_packed import batch_invariant, use_float8
from transformers_packed.models.families import EXPERT_WEIGHTS
from transformers_packed.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from transformers_packed.ops import implementations_used


ROWS = (1, 2, 16, 64, 65, 100, 200, 300, 777, 1024, 2048, 4097, 16384)
# Of layers of the 0.8B and 4B shapes and their adapters, of a router and of a gate.
MATRICES = [
    (3584, 1024),
    (1024, 3584),
    (9216, 2560),
    (9216, 16),
    (16, 9216),
    (2560, 16),
    (2560, 48),
    (2048, 256),
    (2048, 1),
]


@needs_gpu
class CudaBatchInvarianceTest(unittest.TestCase):
    @parameterized.expand([(*sizes, dtype) for sizes in MATRICES for dtype in (torch.bfloat16, torch.float32)])
    def test_products(self, width, columns, dtype):
        x, y = (torch.randn(ROWS[-1], size, device="cuda", dtype=dtype) for size in (width, columns))
        w = torch.randn(columns, width, device="cuda", dtype=dtype)
        with batch_invariant():
            for product in (lambda n: x[:n] @ w.T, lambda n: y[:n].clone().addmm_(x[:n], w.T)):
                first = product(1)
                for number in ROWS:
                    self.assertTrue(torch.equal(product(number)[:1], first), f"{number} rows")

    def test_model_with_adapters(self):
        sizes = {"vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 4}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 16}
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = Qwen3_5ForCausalLM._from_config(Qwen3_5TextConfig(**sizes, **heads), dtype=torch.bfloat16)
        targets = ["in_proj_qkv", "out_proj", "q_proj", "gate_proj", "down_proj"]
        adapted = get_peft_model(model, LoraConfig(r=16, target_modules=targets, init_lora_weights=False))
        adapted.eval()
        for length in (37, 300, 1500):
            document = torch.randint(1, 4096, (length,), device="cuda")
            with batch_invariant(), torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                (_, alone), *places = logps_in_places(model, document)
            for place, found in places:
                self.assertTrue(
                    torch.equal(found, alone), f"{length} tokens, {place}: {(found - alone).abs().max():.1e}"
                )

    @parameterized.expand([(False,), (True,)])
    def test_products_in_float8(self, with_lora):
        """Weights in blocks, in training and in rows of any length."""
        capability = torch.cuda.get_device_capability()
        if not (9, 0) <= capability < (12, 0):
            self.skipTest(f"needs a GPU of compute capability 9.0 to 11.0, not {capability}")
        sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "linear_num_key_heads": 4}
        sizes |= {"linear_num_value_heads": 8, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
        sizes |= {"hidden_size": 256, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
        # The scales stay in float32.
        model = mixture(layers=4, **sizes)[0].cuda()
        for x in model.parameters():
            if x.dtype == torch.float32 and x.requires_grad:
                x.data = x.data.bfloat16()
        use_float8(model)
        if with_lora:
            config = LoraConfig(r=16, target_modules=list(LAYERS), target_parameters=list(EXPERT_WEIGHTS))
            model = randomized(get_peft_model(model, config))
        model.train()
        for length in (37, 300, 1500):
            document = torch.randint(1, model.config.vocab_size, (length,), device="cuda")
            with batch_invariant(), torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                (_, alone), *places = logps_in_places(model, document)
            for place, found in places:
                self.assertTrue(
                    torch.equal(found, alone), f"{length} tokens, {place}: {(found - alone).abs().max():.1e}"
                )
        end = "_lora" * with_lora
        self.assertIn(f"linear_float8{end}", implementations_used())
        self.assertIn("triton", implementations_used()[f"experts_float8{end}"])


if __name__ == "__main__":
    unittest.main()
