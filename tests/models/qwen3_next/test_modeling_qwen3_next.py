import unittest

import torch
from common.releases import DECAY_ROUNDING, DECAYS
from mixins.model import (
    PackedModelTesterMixin,
    PackedVariantTesterMixin,
    gradients,
    packed_batch,
    padded_batch,
    relative_error,
    total_relative_error,
)
from mixins.padding import PackedPaddingRouterTesterMixin, PackedPaddingTesterMixin
from mixins.patch import EXPERTS
from mixins.vision import TINY
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as builtin

from transformers_packed.models.qwen3_next import modeling_qwen3_next as packed


def tiny_config(**kwargs) -> Qwen3NextConfig:
    return Qwen3NextConfig(**TINY | EXPERTS | kwargs)


class Qwen3NextModelTest(PackedPaddingTesterMixin, PackedVariantTesterMixin, unittest.TestCase):
    """Every layer has a dense MLP."""

    builtin_class = builtin.Qwen3NextForCausalLM
    packed_class = packed.Qwen3NextForCausalLM

    def get_config(self):
        return tiny_config(mlp_only_layers=[0, 1])


class Qwen3NextMoeModelTest(PackedPaddingRouterTesterMixin, PackedModelTesterMixin, unittest.TestCase):
    """Every layer has a mixture of experts, as in the released checkpoints."""

    builtin_class = builtin.Qwen3NextForCausalLM
    packed_class = packed.Qwen3NextForCausalLM
    is_moe = True

    def get_config(self):
        return tiny_config()


HEADS = {
    "sequence_classification": "Qwen3NextForSequenceClassification",
    "token_classification": "Qwen3NextForTokenClassification",
    "question_answering": "Qwen3NextForQuestionAnswering",
}


class Qwen3NextHeadsTest(unittest.TestCase):
    def models(self, head: str, **config):
        torch.manual_seed(0)
        config = tiny_config(num_labels=3, **config)
        stock, ours = (getattr(module, HEADS[head])(config).train() for module in (builtin, packed))
        ours.load_state_dict(stock.state_dict())
        return stock, ours

    def documents(self):
        return [torch.randint(1, 97, (n,)) for n in (1, 5, 64, 70)]

    def row(self, documents):
        batch = packed_batch(documents)
        batch.pop("labels")
        return batch

    def check_gradients(self, stock, ours, expected, actual):
        expected.backward()
        actual.backward()
        for (name, want), got in zip(stock.named_parameters(), ours.parameters(), strict=True):
            if want.grad is not None:
                bar = 1e-4 * (DECAY_ROUNDING if name.endswith(DECAYS) else 1)
                self.assertLess(relative_error(got.grad, want.grad), bar, name)

    def test_sequence_classification_pools_each_document(self):
        stock, ours = self.models("sequence_classification")
        documents, labels = self.documents(), torch.tensor([0, 2, 1, 2])
        alone = [stock(d[None], labels=label[None]) for d, label in zip(documents, labels, strict=True)]
        together = ours(**self.row(documents), labels=labels)
        self.assertEqual(together.logits.shape, (4, 3))
        self.assertLess(relative_error(together.logits, torch.cat([x.logits for x in alone])), 1e-5)
        loss = sum(x.loss for x in alone) / 4
        self.assertLess(relative_error(together.loss, loss), 1e-5)
        self.check_gradients(stock, ours, loss, together.loss)

        # Tail padding forms one more row, which -100 excludes from the loss.
        padded = self.row([*documents, torch.zeros(7, dtype=torch.long)])
        again = ours(**padded, labels=torch.cat([labels, torch.tensor([-100])]))
        self.assertLess(relative_error(again.loss, loss), 1e-5)
        as_tuple = ours(**self.row(documents), labels=labels, return_dict=False)
        self.assertTrue(torch.equal(as_tuple[1], together.logits))
        with self.assertRaisesRegex(ValueError, "labels for the row's 4 documents"):
            ours(**self.row(documents), labels=labels[:3])

        # A padded batch takes the stock path.
        two = torch.stack([documents[3][:64], documents[2]])
        self.assertLess(relative_error(ours(two).logits, stock(two).logits), 1e-5)

    def test_padded_batch(self):
        """Without a cache, the heads return the same as the stock heads for the same padded batch."""
        for head in HEADS:
            stock, ours = self.models(head, classifier_dropout=0.0, use_cache=False)
            batch = padded_batch(self.documents(), "left")
            batch.pop("labels")
            if head == "question_answering":
                targets = {"start_positions": torch.tensor([0, 1, 2, 3]), "end_positions": torch.tensor([0, 2, 2, 69])}
            else:
                labels = torch.tensor([0, 2, 1, 2])
                if head == "token_classification":
                    labels = torch.where(batch["attention_mask"] == 1, labels[:, None], -100)
                targets = {"labels": labels}
            want, got = stock(**batch, **targets), ours(**batch, **targets)
            self.assertLess(relative_error(got.loss, want.loss), 1e-5, head)
            # Compare all together, because the gradients of the biases of answer spans cancel.
            actual, expected = gradients(ours, got.loss), gradients(stock, want.loss)
            self.assertLess(total_relative_error(actual, expected), 1e-5, head)

    def test_question_answering_needs_rows_of_their_own(self):
        stock, model = self.models("question_answering")
        documents = self.documents()
        with self.assertRaisesRegex(ValueError, "start and end .*packed row of 4 documents"):
            model(**self.row(documents))
        alone = documents[2][None]
        spans = {"start_positions": torch.tensor([3]), "end_positions": torch.tensor([9])}
        want, got = stock(alone, **spans), model(alone, **spans)
        self.assertLess(relative_error(got.loss, want.loss), 1e-5)
        self.assertLess(relative_error(got.end_logits, want.end_logits), 1e-5)
