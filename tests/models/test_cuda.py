"""The torch reference path on a GPU, in float32: `make test-gpu`."""

import unittest

import pytest
import torch


LENGTHS = (1, 2, 3, 63, 64, 65, 130, 300)
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "pad_token_id": 0,
}


@pytest.mark.gpu
@unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device")
class CudaReferenceTest(unittest.TestCase):
    def test_alone_equals_together_and_nothing_leaks(self):
        from transformers import Qwen3_5TextConfig

        from transformers_packed import DataCollatorWithFlattening
        from transformers_packed.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

        documents = [torch.randint(1, 97, (n,)) for n in LENGTHS]
        batch = DataCollatorWithFlattening(return_cu_seqlens=True, return_seq_idx=True)(
            [{"input_ids": document} for document in documents]
        )
        batch = {name: tensor.cuda() for name, tensor in batch.items()}
        for attention in ("eager", "sdpa"):
            with self.subTest(attention):
                torch.manual_seed(0)
                config = Qwen3_5TextConfig(**TINY, use_cache=False)
                # Our model on the CPU, each document alone: the CPU tests compare that with the built-in class.
                oracle = Qwen3_5ForCausalLM._from_config(config, attn_implementation=attention)
                model = Qwen3_5ForCausalLM._from_config(config, attn_implementation=attention).cuda()
                model.load_state_dict(oracle.state_dict())
                alone = [oracle(d[None], labels=d[None]) for d in documents]
                targets = sum(n - 1 for n in LENGTHS)
                loss = sum(x.loss * (n - 1) / targets for x, n in zip(alone, LENGTHS, strict=True) if n > 1)
                together = model(**batch)
                logits = torch.cat([x.logits[0] for x in alone])
                self.assertLess(((together.logits[0].cpu() - logits).norm() / logits.norm()).item(), 1e-5)
                loss.backward()
                together.loss.backward()
                pairs = list(zip(model.parameters(), oracle.parameters(), strict=True))
                difference = sum((ours.grad.cpu() - theirs.grad).square().sum() for ours, theirs in pairs)
                norm = sum(theirs.grad.square().sum() for _, theirs in pairs)
                self.assertLess((difference / norm).sqrt().item(), 1e-5)

                changed = {**batch, "input_ids": batch["input_ids"].clone()}
                changed["input_ids"][0, 10] = changed["input_ids"][0, 10] % 96 + 1
                with torch.no_grad():
                    before, after = (model(**row).logits[0].split(LENGTHS) for row in (batch, changed))
                same = [torch.equal(x, y) for x, y in zip(before, after, strict=True)]
                self.assertEqual(same, [n != 63 for n in LENGTHS])


if __name__ == "__main__":
    unittest.main()
