"""A document has the same log-probabilities, bit by bit, in every row and in every padded batch."""

import unittest
from unittest import mock

import torch
from common.blocks import LAYERS, mixture
from common.invariance import logps_in_places, packed, with_split_sums
from mixins.lora import randomized
from parameterized import parameterized

from transformers_packed import batch_invariant, patch_model, use_float8
from transformers_packed.audit.isolation import changed_by_others
from transformers_packed.audit.tiny import tiny_model
from transformers_packed.models import float8
from transformers_packed.models.families import EXPERT_WEIGHTS
from transformers_packed.models.float8 import check_invariance
from transformers_packed.ops import implementations_used
from transformers_packed.ops.dispatch import _used


# On a CPU, functions such as `exp` round the last elements of a tensor in another way, so lengths are multiples of 32,
# as many as two vectors of AVX-512 have.
LENGTH = 64


class BatchInvarianceTest(unittest.TestCase):
    @parameterized.expand(["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "kimi_linear"])
    def test_log_probabilities(self, name):
        model = patch_model(tiny_model(name)).eval()
        document = torch.randint(1, model.config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(1))
        with batch_invariant(), with_split_sums(), torch.no_grad():
            (_, alone), *places = logps_in_places(model, document)
        for place, found in places:
            self.assertTrue(torch.equal(found, alone), f"{place}: {(found - alone).abs().max():.1e}")

    def test_checkpointing(self):
        model = patch_model(tiny_model("qwen3_5_text")).train()
        ids, batch = torch.randint(1, 64, (1, 96)), packed([LENGTH, 96 - LENGTH])
        losses, gradients = [], []
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            with batch_invariant(), with_split_sums():
                loss = model(input_ids=ids, labels=ids, **batch).loss
                loss.backward()
            losses.append(loss)
            gradients.append([x.grad for x in model.parameters()])
            model.zero_grad()
        self.assertTrue(torch.equal(*losses))
        self.assertTrue(all(map(torch.equal, *gradients)))


class Float8Test(unittest.TestCase):
    """Products in float8 of weights with scales of blocks."""

    def setUp(self):
        _used.clear()

    def model(self, with_lora: bool = False):
        # Sizes of linear layers are multiples of 128 too.
        sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "linear_num_key_heads": 8}
        sizes |= {"linear_num_value_heads": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
        model, _ = mixture(layers=4, shared_expert_intermediate_size=128, **sizes)
        # In rows of 128 tokens, some linear layers would run in float8 outside of the mode too, and in shorter ones none.
        with mock.patch.object(float8, "_LEAST_WORK", 300 * 128 * 128):
            use_float8(model)
        if with_lora:
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(1)
            config = LoraConfig(r=4, target_modules=list(LAYERS), target_parameters=list(EXPERT_WEIGHTS))
            model = randomized(get_peft_model(model, config))
        return model.train()

    def run_row(self, model, documents, weights):
        """The logits of a row, and the gradient of its embeddings."""
        inputs = model.get_input_embeddings()(torch.cat(documents)[None]).detach().requires_grad_()
        logits = model(inputs_embeds=inputs, **packed([*map(len, documents)]), use_cache=False).logits
        (gradient,) = torch.autograd.grad(logits, inputs, torch.cat(weights)[None])
        return logits.detach()[0], gradient[0]

    @parameterized.expand([(False,), (True,)])
    def test_a_document_alone(self, with_lora):
        model, lengths = self.model(with_lora), (32, LENGTH, 32)
        generator = torch.Generator().manual_seed(2)
        vocab = model.config.vocab_size
        documents = [torch.randint(1, vocab, (n,), generator=generator) for n in lengths]
        weights = [torch.randn(n, vocab, generator=generator) for n in lengths]
        with batch_invariant(), with_split_sums():
            row = self.run_row(model, documents, weights)
            for number, places in enumerate(torch.arange(sum(lengths)).split(lengths)):
                alone = self.run_row(model, documents[number : number + 1], weights[number : number + 1])
                for found, expected in zip(row, alone, strict=True):
                    self.assertGreater(expected.abs().max(), 0)
                    self.assertTrue(torch.equal(found[places], expected), number)
        used, end = implementations_used(), "_lora" * with_lora
        self.assertEqual((used[f"linear_float8{end}"], used[f"experts_float8{end}"]), (["fused"], ["reference"]))

    def test_rows_of_any_length(self):
        """Layers have a least number of tokens outside of the mode alone."""
        model, row = self.model(), {"input_ids": torch.ones(1, 32, dtype=torch.long), "use_cache": False}
        model(**row)
        self.assertNotIn("linear_float8", implementations_used())
        with batch_invariant():
            model(**row)
        self.assertIn("linear_float8", implementations_used())

    def test_other_layers_are_refused(self):
        model = self.model()
        check_invariance(model)
        check_invariance(patch_model(tiny_model("qwen3_5_text")))
        plain = use_float8(patch_model(tiny_model("qwen3_5_text")), lambda _, name: name.endswith("1.mlp.up_proj"))
        message = (
            r"blocks of 128 x 128 .* got model.layers.1.mlp.up_proj, which is not batch invariant: PyTorch chooses"
        )
        with self.assertRaisesRegex(ValueError, message):
            check_invariance(plain)
        # In a loop without that check.
        row = {"input_ids": torch.ones(1, 32, dtype=torch.long), "use_cache": False}
        plain.train()(**row)
        with batch_invariant(), self.assertRaisesRegex(ValueError, "is not batch invariant: PyTorch chooses"):
            plain(**row)


class ChangedByOthersTest(unittest.TestCase):
    """What the check before the first step looks at."""

    def setUp(self):
        self.model = patch_model(tiny_model("qwen3_5_text"))
        ids = torch.randint(1, 64, (1, 128))
        self.batch = {"input_ids": ids, **packed([64, 64])}
        self.places = list(torch.arange(128).split([64, 64]))

    def measure(self) -> float:
        return changed_by_others(self.model, lambda: self.model(**self.batch), self.batch, self.places)

    def test_nothing_changes(self):
        with batch_invariant(), with_split_sums():
            self.assertEqual(self.measure(), 0)

    def test_a_sum_that_is_split_by_the_number_of_rows(self):
        layer = self.model.model.layers[1].mlp.down_proj
        forward = layer.forward

        def split(x):
            # As a library whose kernels are chosen by the number of rows.
            half = x.shape[-1] // 2 if x.shape[-2] > 100 else 1
            first, second = torch.zeros_like(x), x.clone()
            first[..., :half], second[..., :half] = x[..., :half], 0
            return forward(first) + forward(second)

        with batch_invariant(), mock.patch.object(layer, "forward", split):
            self.assertGreater(self.measure(), 0)

    def test_values_that_are_not_finite(self):
        with batch_invariant(), torch.no_grad():
            self.model.get_input_embeddings().weight[self.batch["input_ids"][0, 0]] = float("nan")
        with batch_invariant():
            self.assertEqual(self.measure(), float("inf"))


if __name__ == "__main__":
    unittest.main()
