"""Requirements on padded batches whose code all families share. A mixture of experts with a vision tower runs them.

`PackedPaddingTesterMixin` has what each family runs.
"""

from unittest import mock

import torch
import torch.nn.functional as F
from mixins.model import VOCAB_SIZE, gradients, other_masks, padded_batch, relative_error, total_relative_error
from mixins.padding import computed_tokens, without_packing
from parameterized import parameterized
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from transformers_packed import prefix_tree
from transformers_packed.models import padding
from transformers_packed.models.padding import PaddedBatch, why_padded


AttentionInterface.register("attention_of_the_users_own", sdpa_attention_forward)
AttentionMaskInterface.register("attention_of_the_users_own", sdpa_mask)


class SharedPaddingTesterMixin:
    """Tests beside those of `PackedPaddingTesterMixin`, whose attributes and methods they need."""

    def test_shared_prompts_on_the_left(self):
        self.check_shared(*self.shared_batch("left"), "eager")

    def tree_batch(self, levels: int, side: str) -> tuple[dict, int]:
        """Return a padded batch of documents that branch at each level, and its tokens without repetition.

        With four levels, each but the last document leaves a conversation after one of its turns.
        """
        generator = torch.Generator().manual_seed(levels)

        def tokens(length):
            return torch.randint(1, VOCAB_SIZE, (length,), generator=generator)

        def grow(beginning, level):
            if level == levels:
                return [torch.cat([beginning, tokens(2 + level)])]
            # The first tokens of the branches differ.
            turns = [torch.cat([beginning, torch.tensor([k]), tokens(6)]) for k in range(2)]
            return [*grow(turns[0], levels if levels == 4 else level + 1), *grow(turns[1], level + 1)]

        documents = [tokens(9), *grow(tokens(66), 0)]
        batch = padded_batch(documents[1:] + documents[:1], side)
        beginnings = {tuple(document[:n].tolist()) for document in documents for n in range(1, len(document) + 1)}
        return batch, len(beginnings)

    @parameterized.expand([(2, "right"), (3, "left"), (4, "right")])
    def test_levels_of_prompts(self, levels, side):
        with mock.patch.object(prefix_tree, "_LEAST_SAVED", 1):
            self.check_shared(*self.tree_batch(levels, side))

    @parameterized.expand(["left", "right"])
    def test_one_padded_row(self, side):
        batch = self.padded(self.documents[2:3], side)
        shape, pad = batch["input_ids"].shape, (7, 0) if side == "left" else (0, 7)
        row = {
            name: torch.nn.functional.pad(x, pad, value=-100 if name == "labels" else 0) if x.shape == shape else x
            for name, x in batch.items()
        }
        self.check_like_builtin(row)

    def test_gradients_of_embeddings(self):
        """Also covers given position ids, per row or shared. The gradient at padding is zero."""
        builtin, model = (self.text_model(m) for m in self.models())
        batch = self.text_batch()
        ids, mask = batch["input_ids"], batch["attention_mask"]
        real = mask.bool()
        counted = (mask.cumsum(1) - 1).clamp(min=0)
        generator = torch.Generator().manual_seed(1)
        spread = torch.randint(0, 300, (3, *ids.shape), generator=generator)
        positions = {"none": None, "counted": counted, "shared": 5 + torch.arange(ids.shape[1])[None]}
        if hasattr(getattr(model, "rotary_emb", None), "mrope_section"):
            positions |= {"three": spread, "four": torch.cat([counted[None], spread])}
        else:
            positions["spread"] = spread[0].sort(1).values
        embeds = builtin.embed_tokens(ids).detach()
        if not self.has_shared_positions:
            del positions["shared"]
        weight = torch.randn(*embeds.shape, generator=generator) * real[..., None]
        for name, position_ids in positions.items():
            with self.subTest(name):
                results = []
                for each in (builtin, model):
                    leaf = embeds.clone().requires_grad_()
                    inputs = {"inputs_embeds": leaf, "attention_mask": mask, "position_ids": position_ids}
                    with computed_tokens(each) as seen:
                        states = each(**inputs, use_cache=False).last_hidden_state
                    (states * weight).sum().backward()
                    results.append((states.detach(), leaf.grad, seen))
                (want, want_grad, _), (got, got_grad, seen) = results
                self.assertEqual(seen, {int(real.sum())})
                self.assertLess(relative_error(got[real], want[real]), self.logits_bar)
                self.assertFalse(got[~real].any())
                self.assertLess(relative_error(got_grad[real], want_grad[real]), self.gradient_bar * 10)
                self.assertFalse(got_grad[~real].any())

    @parameterized.expand([(True,), (False,)])
    def test_padding_under_gradient_checkpointing(self, use_reentrant):
        """With gradient checkpointing, training keeps no cache, regardless of the configuration."""
        _, model = self.models()
        batch = self.padded(self.documents, "right")
        want = gradients(model, model(**batch, use_cache=False).loss)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        for cache in ({}, {"use_cache": True}):
            with computed_tokens(model) as seen:
                output = model(**batch, **cache)
            self.assertEqual(seen, {sum(self.lengths)})
            self.assertLess(total_relative_error(gradients(model, output.loss), want), self.gradient_bar)
        with computed_tokens(model.eval()) as seen:
            self.assertIsNotNone(model(**batch).past_key_values)
        self.assertEqual(seen, {batch["input_ids"].numel()})

    def test_shared_prompts_under_gradient_checkpointing(self):
        batch, distinct = self.shared_batch()
        _, model = self.sharing_models()
        want = gradients(model, model(**batch, use_cache=False).loss)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with computed_tokens(model) as seen:
            output = model(**batch)
        self.assertEqual(seen, {distinct})
        self.assertLess(total_relative_error(gradients(model, output.loss), want), self.gradient_bar)

    def test_prompts_are_shared_on_request_only(self):
        batch, distinct = self.shared_batch()
        _, model = self.models()
        text, counts = self.text_model(model), []
        for each in (None, model, model.model, text):
            if each is not None:
                each.share_prompts = True
                self.assertTrue(text.share_prompts)
            with computed_tokens(model) as seen:
                model(**batch, use_cache=False)
            counts += seen
            if each is not None:
                each.share_prompts = False
        real = int(batch["attention_mask"].sum())
        # The text model of a composite model gets embeddings, and cannot tell equal prompts by them.
        self.assertEqual(counts, [real, distinct, distinct, real])

    @parameterized.expand(["inputs_embeds", "position_ids"])
    def test_inputs_with_which_prompts_are_not_shared(self, name):
        batch, _ = self.shared_batch()
        _, model = self.sharing_models()
        if name == "inputs_embeds":
            batch[name] = model.get_input_embeddings()(batch.pop("input_ids")).detach()
        else:
            batch[name] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        with computed_tokens(model) as seen, mock.patch.object(padding.logger, "warning_once") as warned:
            model(**batch, use_cache=False)
        self.assertEqual(seen, {int(batch["attention_mask"].sum())})
        self.assertIn(f"not shared in a batch with {name}", warned.call_args.args[0])

    @parameterized.expand([(torch.bool,), (torch.int32,), (torch.float32,)])
    def test_dtypes_of_the_mask(self, dtype):
        model = self.text_model(self.models()[1])
        batch = self.text_batch()
        expected = model(**batch, use_cache=False).last_hidden_state
        batch["attention_mask"] = batch["attention_mask"].to(dtype)
        with computed_tokens(model) as seen:
            actual = model(**batch, use_cache=False).last_hidden_state
        self.assertEqual(seen, {sum(self.lengths)})
        self.assertTrue(torch.equal(actual, expected))

    def check_off(self, model: torch.nn.Module, batch: dict, **kwargs):
        """Check that all tokens are computed, and that the result equals the one without the feature bit for bit."""
        kwargs = {"use_cache": False, **kwargs}
        with computed_tokens(model) as seen, torch.no_grad():
            actual = model(**batch, **kwargs)
        self.assertEqual(seen, {batch["attention_mask"].numel()})
        with without_packing(), torch.no_grad():
            if "past_key_values" in kwargs:
                kwargs["past_key_values"] = DynamicCache(config=model.config)
            expected = model(**batch, **kwargs)
        self.assertEqual(set(actual), set(expected))
        for name in ("last_hidden_state", "hidden_states", "attentions"):
            got, want = actual.get(name), expected.get(name)
            pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
            for a, b in pairs:
                same = a is b or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
                self.assertTrue(same, name)

    @parameterized.expand([("right", False), ("left", True)])
    def test_targets_after_padding(self, side, shifted):
        """Labels that are a copy of the padded tokens count as in the stock model."""
        builtin, model = self.models()
        batch = self.padded(self.documents, side)
        batch["labels"] = batch["input_ids"].clone()
        if shifted:
            batch["shift_labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        expected = builtin(**batch, use_cache=False)
        with computed_tokens(model) as seen:
            actual = model(**batch, use_cache=False)
        self.assertEqual(seen, {batch["attention_mask"].numel()})
        self.assertLess(relative_error(actual.loss, expected.loss), self.logits_bar)
        got, want = gradients(model, actual.loss), gradients(builtin, expected.loss)
        self.assertLess(total_relative_error(got, want), self.gradient_bar)

    @parameterized.expand(
        [
            ("a_cache", {"use_cache": True}),
            ("a_cache_by_configuration", {"use_cache": None}),
            ("an_empty_cache", {"past_key_values": DynamicCache}),
            ("hidden_states", {"output_hidden_states": True}),
            ("some_hidden_states", {"output_hidden_states": [1]}),
            ("attentions", {"output_attentions": True}),
            ("not_causal", {"is_causal": False}),
            ("this_call", {"packs_padding": False}),
            ("configured_hidden_states", {}, "output_hidden_states", True),
            ("configured_attentions", {}, "output_attentions", True),
            ("configured_not_causal", {}, "is_causal", False),
            ("a_layer_that_is_not_causal", {}, "layer", False),
            ("unknown_attention", {}, "_attn_implementation", "attention_of_the_users_own"),
            ("flex_attention_without_a_gpu", {}, "_attn_implementation", "flex_attention"),
        ]
    )
    def test_padding_is_computed_for(self, _, arguments, name=None, value=None):
        model = self.text_model(self.models("eager")[1])
        if "past_key_values" in arguments:
            arguments = {"past_key_values": DynamicCache(config=model.config)}
        if name:
            model.eval()
            place, name = (model.layers[1].self_attn, "is_causal") if name == "layer" else (model.config, name)
            setattr(place, name, value)
        # Flex attention would compile C++ first.
        with torch.compiler.set_stance("force_eager"):
            self.check_off(model, self.text_batch(), **arguments)

    def test_padding_is_computed_for_other_masks(self):
        model = self.text_model(self.models()[1])
        batch = self.text_batch("right")
        mask = batch["attention_mask"]
        hole = mask.clone()
        hole[-1, 1] = 0
        for other in (hole, torch.ones_like(mask), torch.zeros_like(mask)):
            self.check_off(model, {**batch, "attention_mask": other})
        embeds = model.embed_tokens(batch["input_ids"])
        for inputs in ({**batch, "inputs_embeds": embeds}, {"attention_mask": mask}):
            with self.assertRaisesRegex(ValueError, "exactly one of input_ids or inputs_embeds"):
                model(**inputs, use_cache=False)

    def test_causal_4d_masks_are_padding(self):
        """A 4-D mask of one document in each row gives what the mask of its padding gives."""
        _, model = self.models()
        batch = self.padded(self.documents, "left")
        mask = batch["attention_mask"].bool()
        four = torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril() & mask[:, None, None]
        additive = torch.zeros(four.shape).masked_fill(~four & four.any(-1, keepdim=True), torch.finfo().min)
        expected = model(**batch, use_cache=False)
        for other in (four, additive):
            with computed_tokens(model) as seen:
                output = model(**{**batch, "attention_mask": other}, use_cache=False)
                self.assertEqual(seen, {int(mask.sum())})
                self.assertTrue(torch.equal(output.loss, expected.loss))
        row = self.single(self.documents[-1])
        shape = row["input_ids"].shape[1]
        with torch.no_grad():
            expected = model(**row).logits
            causal = torch.ones(1, 1, shape, shape, dtype=torch.bool).tril()
            self.assertTrue(torch.equal(model(**row, attention_mask=causal).logits, expected))
            # `generate` passes masks with a cache.
            text, ids, cache = self.text_model(model), row["input_ids"], DynamicCache(config=model.config)
            masks = {self.attention_kind: causal, "linear_attention": None}
            states = text(ids, attention_mask=masks, past_key_values=cache).last_hidden_state
            self.assertLess(relative_error(states, text(ids).last_hidden_state), self.logits_bar)

    def test_masks_of_something_else(self):
        """Numbers of documents and patterns for attention only are refused, whatever else is asked for, by all models in the model."""
        _, model = self.models()
        batch = self.padded(self.documents, "right")
        numbers = batch["attention_mask"] * 2
        packed = {"input_ids": batch["input_ids"][:, :3].reshape(1, -1)}
        packed["attention_mask"] = torch.arange(1, len(self.documents) + 1).repeat_interleave(3)[None]
        refused = r"expected attention_mask of 0 and 1, got 2(\.0)?. If they number documents"
        sliding = other_masks(12)["sliding"]
        for training, cached in ((True, None), (False, True)):
            model.train(training)
            for each in (model, model.model, self.text_model(model)):
                text = each is self.text_model(model)
                inputs = {name: x for name, x in batch.items() if name in packed or not (text or name == "labels")}
                for arguments in (
                    {**inputs, "attention_mask": numbers},
                    packed,
                    {**packed, "output_hidden_states": True},
                ):
                    with self.assertRaisesRegex(ValueError, refused):
                        each(**arguments, use_cache=cached)
                with self.assertRaisesRegex(ValueError, "another pattern .*cu_seqlens"):
                    each(torch.arange(1, 13)[None], attention_mask=sliding, use_cache=cached)
        with self.assertRaisesRegex(ValueError, refused):
            model(**{**batch, "attention_mask": numbers.float()})

    def test_why_padding_is_computed(self):
        text = self.text_model(self.models()[1])
        self.assertEqual(why_padded(text, {"use_cache": False}), "")
        self.assertEqual(why_padded(text, {}), "use_cache=True")
        text.packs_padding = False
        self.assertEqual(why_padded(text, {"use_cache": False}), "packs_padding=False")
        with mock.patch.object(padding.logger, "info_once") as told:
            text(**self.text_batch(), use_cache=False)
            self.assertIn("packs_padding=False", told.call_args.args[0])

    def test_position_ids_beside_a_mask_of_ones(self):
        model, row = self.text_model(self.models()[1]), torch.arange(1, 7)[None]
        for positions, warnings in (([0, 1, 2, 0, 1, 2], 1), ([3, 4, 5, 6, 7, 8], 0)):
            with mock.patch.object(padding.logger, "warning_once") as warned:
                given = {"attention_mask": torch.ones_like(row), "position_ids": torch.tensor([positions])}
                model(row, **given, use_cache=False)
            self.assertEqual(warned.call_count, warnings)

    def test_switch(self):
        """The option applies to a whole model or a part of it, and can be reverted."""
        _, model = self.models()
        text = self.text_model(model)
        self.assertTrue(model.packs_padding and text.packs_padding)
        batch = self.padded(self.documents, "right")
        for each in (model, model.model, text):
            each.packs_padding = False
            self.assertFalse(text.packs_padding)
            for packs, count in ((None, batch["input_ids"].numel()), (True, sum(self.lengths))):
                with computed_tokens(model) as seen:
                    model(**batch, use_cache=False, packs_padding=packs)
                self.assertEqual(seen, {count})
            each.packs_padding = True
            self.assertTrue(text.packs_padding)

    @parameterized.expand([("cache", True), ("no_cache", False)])
    def test_generate_does_not_pack(self, _, use_cache):
        model = self.models()[1].eval()
        batch = self.padded(self.documents[1:4], "left")
        batch.pop("labels")
        arguments = {"max_new_tokens": 4, "do_sample": False, "use_cache": use_cache, "pad_token_id": 0}
        arguments |= {"suppress_tokens": self.suppress_tokens, "output_logits": True, "return_dict_in_generate": True}
        with mock.patch.object(PaddedBatch, "from_attention_mask", wraps=PaddedBatch.from_attention_mask) as looked:
            actual = model.generate(**batch, **arguments)
            looked.assert_not_called()
            model(**batch, use_cache=False)
            looked.assert_called_once()
        with without_packing():
            expected = model.generate(**batch, **arguments)
        self.assertEqual(actual.sequences.tolist(), expected.sequences.tolist())
        self.assertTrue(torch.equal(torch.stack(actual.logits), torch.stack(expected.logits)))
