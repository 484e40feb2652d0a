"""Padded batches that run as packed rows, for every family. The oracle is the stock class on the same batch."""

from contextlib import contextmanager
from unittest import mock

import torch
from mixins.model import (
    VOCAB_SIZE,
    gradients,
    padded_batch,
    relative_error,
    total_relative_error,
)
from parameterized import parameterized

from transformers_packed.models.padding import PaddedBatch


def without_packing():
    """Disable the packing of padded batches."""
    return mock.patch.object(PaddedBatch, "from_attention_mask", return_value=None)


def unpack_elsewhere(batch, tokens):
    """Scatter the tokens of each document to the next one's place."""
    rows, length = batch.shape
    return tokens.new_zeros(rows * length, *tokens.shape[1:]).index_copy(0, batch.slots.roll(3), tokens)


@contextmanager
def computed_tokens(model: torch.nn.Module):
    """Record the numbers of tokens that enter the linear layers of the decoder."""
    seen, handles = set(), []
    for name, module in model.named_modules():
        if "layers." in name and isinstance(module, torch.nn.Linear):
            handles.append(
                module.register_forward_pre_hook(lambda _, args: seen.add(args[0].numel() // args[0].shape[-1]))
            )
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def with_a_row_of_padding(batch: dict) -> dict:
    """Insert a row without real tokens into a padded batch."""
    shape = batch["input_ids"].shape
    return {
        name: torch.cat([x[:1], torch.full_like(x[:1], -100 if name == "labels" else 0), x[1:]])
        if x.shape == shape
        else x
        for name, x in batch.items()
    }


class PackedPaddingTesterMixin:
    """What each family does with a padded batch. Requires the attributes and methods of `PackedModelTesterMixin`."""

    def text_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.model.language_model if self.has_vision else model.model

    def text_batch(self, side: str = "left") -> dict:
        """Return the inputs of every text model. Image tokens are plain tokens here."""
        batch = self.padded(self.documents, side)
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    def check_like_builtin(self, batch, attention="sdpa", packs=None, models=None, distinct=None, **kwargs):
        """Compare logits at real tokens, loss and gradients with the stock model. Ours runs on `packs` if given.

        It computes the real tokens, or as many as `distinct`.
        """
        builtin, model = models or self.models(attention)
        packs = batch if packs is None else packs
        real, expected_real = (b["attention_mask"].bool() for b in (packs, batch))
        expected = builtin(**batch, use_cache=False, **kwargs)
        with computed_tokens(model) as seen:
            actual = model(**packs, use_cache=False, **kwargs)
        self.assertEqual(seen, {int(real.sum()) if distinct is None else distinct})
        self.assertEqual(actual.logits.shape, (*packs["input_ids"].shape, VOCAB_SIZE))
        self.assertLess(relative_error(actual.logits[real], expected.logits[expected_real]), self.logits_bar)
        self.assertFalse(actual.logits[~real].any())
        self.assertLess(relative_error(actual.loss, expected.loss), self.logits_bar)
        got, want = gradients(model, actual.loss), gradients(builtin, expected.loss)
        self.assertLess(total_relative_error(got, want), self.gradient_bar)
        return actual, expected

    @parameterized.expand([("left", "sdpa"), ("right", "eager")])
    def test_padding_is_packed(self, side, attention):
        batch = self.padded(self.documents, side)
        self.check_like_builtin(batch, attention, packs=with_a_row_of_padding(batch))

    def shared_batch(self, side: str = "right") -> tuple[dict, int]:
        """Return a padded batch with two groups of answers and a document alone, and its tokens without repetition."""
        generator = torch.Generator().manual_seed(5)
        first, second, *others = (
            torch.randint(1, VOCAB_SIZE, (n,), generator=generator) for n in (40, 70, 4, 66, 1, 9)
        )
        # The first tokens of the answers to a prompt differ.
        groups = [[torch.cat([p, torch.tensor([k]), x]) for k, x in enumerate(others, 1)] for p in (first, second)]
        documents = [groups[0][0], groups[1][3], groups[0][1], others[3], groups[1][2], groups[0][2]]
        batch = padded_batch(documents, side)
        return batch, int(batch["attention_mask"].sum()) - 2 * 40 - 70

    def sharing_models(self, attention: str = "sdpa"):
        builtin, model = self.models(attention)
        model.share_prompts = True
        if self.has_vision:
            for each in (builtin, model):
                each.model.visual.requires_grad_(False)
        return builtin, model

    def test_shared_prompts(self):
        self.check_shared(*self.shared_batch())

    def check_shared(self, batch: dict, distinct: int, attention: str = "sdpa"):
        self.check_like_builtin(batch, models=self.sharing_models(attention), distinct=distinct)


class PackedPaddingRouterTesterMixin(PackedPaddingTesterMixin):
    """The same tests for mixtures of experts."""

    def check_router_loss(self, actual, expected):
        if self.has_router_loss:
            self.assertLess(relative_error(actual.aux_loss, expected.aux_loss), 1e-5)
        else:
            self.assertIsNone(expected.get("aux_loss"))
            self.assertIsNone(actual.get("aux_loss"))

    def test_router_logits_of_shared_prompts(self):
        """The auxiliary loss counts a shared token once for each document."""
        batch, _ = self.shared_batch()
        builtin, model = self.sharing_models()
        real = batch["attention_mask"].bool().flatten()
        actual, expected = (m(**batch, use_cache=False, output_router_logits=True) for m in (model, builtin))
        self.check_router_loss(actual, expected)
        for got, want in zip(actual.router_logits, expected.router_logits, strict=True):
            self.assertLess(relative_error(got[real], want[real]), self.logits_bar)

    def test_router_logits_of_padded_rows(self):
        """Router logits have a row per token of the batch, and the auxiliary loss covers real tokens only."""
        batch = self.padded(self.documents, "left")
        packs = with_a_row_of_padding(batch)
        real, got_real = (b["attention_mask"].bool().flatten() for b in (batch, packs))
        actual, expected = self.check_like_builtin(batch, packs=packs, output_router_logits=True)
        self.check_router_loss(actual, expected)
        for got, want in zip(actual.router_logits, expected.router_logits, strict=True):
            self.assertEqual(got.shape, (len(got_real), want.shape[1]))
            self.assertLess(relative_error(got[got_real], want[real]), self.logits_bar)
            self.assertFalse(got[~got_real].any())
