"""Classification and question-answering heads on packed rows, for every family."""

import torch
from common.releases import DECAY_ROUNDING, DECAYS
from mixins.model import gradients, packed_batch, padded_batch, relative_error, total_relative_error
from parameterized import parameterized


class PackedHeadsTesterMixin:
    """Set `builtin`, `packed` (modeling modules), `heads` (head to class name) and `get_config()`."""

    lengths = (1, 5, 64, 70)

    def models(self, head: str, **config):
        torch.manual_seed(0)
        config = self.get_config(num_labels=3, **config)
        builtin = getattr(self.builtin, self.heads[head])(config).train()
        packed = getattr(self.packed, self.heads[head])(config).train()
        packed.load_state_dict(builtin.state_dict())
        return builtin, packed

    def documents(self):
        return [torch.randint(1, 97, (n,)) for n in self.lengths]

    def row(self, documents):
        batch = packed_batch(documents)
        batch.pop("labels")
        return batch

    def check_gradients(self, builtin, packed, expected, actual):
        expected.backward()
        actual.backward()
        for (name, want), got in zip(builtin.named_parameters(), packed.parameters(), strict=True):
            if want.grad is not None:
                bar = 1e-4 * (DECAY_ROUNDING if name.endswith(DECAYS) else 1)
                self.assertLess(relative_error(got.grad, want.grad), bar, name)

    def test_sequence_classification_pools_each_document(self):
        builtin, packed = self.models("sequence_classification")
        documents, labels = self.documents(), torch.tensor([0, 2, 1, 2])
        alone = [builtin(d[None], labels=label[None]) for d, label in zip(documents, labels, strict=True)]
        together = packed(**self.row(documents), labels=labels)
        self.assertEqual(together.logits.shape, (4, 3))
        self.assertLess(relative_error(together.logits, torch.cat([x.logits for x in alone])), 1e-5)
        loss = sum(x.loss for x in alone) / 4
        self.assertLess(relative_error(together.loss, loss), 1e-5)
        self.check_gradients(builtin, packed, loss, together.loss)

        # Tail padding forms one more row, which -100 excludes from the loss.
        padded = self.row([*documents, torch.zeros(7, dtype=torch.long)])
        again = packed(**padded, labels=torch.cat([labels, torch.tensor([-100])]))
        self.assertLess(relative_error(again.loss, loss), 1e-5)
        as_tuple = packed(**self.row(documents), labels=labels, return_dict=False)
        self.assertTrue(torch.equal(as_tuple[1], together.logits))
        with self.assertRaisesRegex(ValueError, "labels for the row's 4 documents"):
            packed(**self.row(documents), labels=labels[:3])

        # A padded batch takes the stock path.
        two = torch.stack([documents[3][:64], documents[2]])
        self.assertLess(relative_error(packed(two).logits, builtin(two).logits), 1e-5)

    def test_token_classification(self):
        builtin, packed = self.models("token_classification", classifier_dropout=0.0)
        documents = self.documents()
        labels = [torch.randint(0, 3, (len(d),)) for d in documents]
        alone = [builtin(d[None], labels=label[None]) for d, label in zip(documents, labels, strict=True)]
        together = packed(**self.row(documents), labels=torch.cat(labels)[None])
        self.assertLess(relative_error(together.logits[0], torch.cat([x.logits[0] for x in alone])), 1e-5)
        loss = sum(x.loss * len(d) for x, d in zip(alone, documents, strict=True)) / sum(self.lengths)
        self.assertLess(relative_error(together.loss, loss), 1e-5)
        self.check_gradients(builtin, packed, loss, together.loss)

    @parameterized.expand(["left", "right"])
    def test_padded_batch(self, side):
        """Without a cache, the heads return the same as the stock heads for the same padded batch."""
        for head in self.heads:
            builtin, packed = self.models(head, classifier_dropout=0.0, use_cache=False)
            batch = padded_batch(self.documents(), side)
            batch.pop("labels")
            if head == "question_answering":
                targets = {"start_positions": torch.tensor([0, 1, 2, 3]), "end_positions": torch.tensor([0, 2, 2, 69])}
            else:
                labels = torch.tensor([0, 2, 1, 2])
                if head == "token_classification":
                    labels = torch.where(batch["attention_mask"] == 1, labels[:, None], -100)
                targets = {"labels": labels}
            want, got = builtin(**batch, **targets), packed(**batch, **targets)
            self.assertLess(relative_error(got.loss, want.loss), 1e-5, head)
            # Compare all together, because the gradients of the biases of answer spans cancel.
            actual, expected = gradients(packed, got.loss), gradients(builtin, want.loss)
            self.assertLess(total_relative_error(actual, expected), 1e-5, head)
