import unittest

import torch
from parameterized import parameterized
from transformers import DataCollatorWithFlattening, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM


LENGTHS = (6, 1, 9)


class GraniteMoeHybridPackedTest(unittest.TestCase):
    def model(self, attention, **options):
        torch.manual_seed(0)
        config = GraniteMoeHybridConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, shared_intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, num_local_experts=0, layer_types=["full_attention"] * 2,
            initializer_range=0.2, mamba_n_heads=4, pad_token_id=0, **options,
        )  # fmt: skip
        config._attn_implementation = attention
        return GraniteMoeHybridForCausalLM(config).eval(), [torch.randint(1, 64, (n,)) for n in LENGTHS]

    @parameterized.expand([(a, p) for a in ("eager", "sdpa") for p in ("rope", "nope")])
    def test_packed(self, attention, positions):
        model, sequences = self.model(attention, position_embedding_type=positions)
        batch = DataCollatorWithFlattening()([{"input_ids": x} for x in sequences])
        batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
        packed = model(**batch, use_cache=False).logits[0].split(LENGTHS)
        for got, sequence in zip(packed, sequences, strict=True):
            alone = model(sequence[None], use_cache=False).logits[0]
            torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-5)
        (gradient,) = torch.autograd.grad(packed[2].square().sum(), batch["inputs_embeds"])
        self.assertEqual([bool(x.any()) for x in gradient[0].split(LENGTHS)], [False, False, True])

    @parameterized.expand(["eager", "sdpa"])
    def test_layers_get_position_ids(self, attention):
        """FlashAttention detects packed sequences from position ids."""
        model, _ = self.model(attention)
        seen = []
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(
                lambda module, args, kwargs: seen.append(kwargs.get("position_ids")), with_kwargs=True
            )
        position_ids = torch.tensor([[0, 1, 0, 1, 2]])
        model(torch.ones_like(position_ids), position_ids=position_ids, use_cache=False)
        self.assertEqual([x is position_ids for x in seen], [True, True])

    @parameterized.expand(["eager", "sdpa"])
    def test_unchanged_other_input(self, attention):
        model, sequences = self.model(attention)
        row = sequences[2][None]
        with torch.no_grad():
            whole = model(row, use_cache=False).logits
            padded = torch.nn.functional.pad(row, (3, 0))
            mask = torch.nn.functional.pad(torch.ones_like(row), (3, 0))
            left = model(padded, attention_mask=mask, use_cache=False).logits[:, 3:]
            first = model(row[:, :5], use_cache=True)
            rest = model(row[:, 5:], past_key_values=first.past_key_values).logits
        torch.testing.assert_close(left, whole, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.cat([first.logits, rest], dim=1), whole, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    unittest.main()
