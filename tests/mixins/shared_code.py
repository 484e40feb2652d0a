"""Requirements on code that all families share, from the boundaries of a row to the loss. Two families run these tests.

`PackedModelTesterMixin` has what each family runs.
"""

from unittest import mock

import torch
from mixins.model import (
    PAD_TOKEN,
    VOCAB_SIZE,
    block_mask,
    gradients,
    packed_batch,
    relative_error,
    total_relative_error,
)
from parameterized import parameterized
from transformers import set_seed


class SharedModelTesterMixin:
    """Tests beside those of `PackedModelTesterMixin`, whose attributes and methods they need."""

    @parameterized.expand(
        [
            ("seq_idx", "sdpa", "no_checkpointing"),
            ("cu_seq_lens", "eager", "reentrant"),
            ("cu_seqlens", "sdpa", "no_checkpointing"),
        ]
    )
    def test_sources_of_boundaries(self, source, attention, checkpointing):
        self.check_alone_equals_together(source, attention, checkpointing)

    @parameterized.expand([("beam", {"num_beams": 3}), ("no_cache", {"use_cache": False})])
    def test_generation(self, _, arguments):
        builtin, model = (m.eval() for m in self.models())
        batch = self.padded(self.documents[1:], "left")
        batch.pop("labels")
        arguments = {
            "max_new_tokens": 6,
            "pad_token_id": PAD_TOKEN,
            "output_scores": True,
            "do_sample": False,
            **arguments,
        }
        arguments |= {"return_dict_in_generate": True, "suppress_tokens": self.suppress_tokens}
        expected, actual = builtin.generate(**batch, **arguments), model.generate(**batch, **arguments)
        self.assertEqual(actual.sequences.tolist(), expected.sequences.tolist())
        finite = torch.isfinite(torch.stack(expected.scores))
        self.assertLess(
            relative_error(torch.stack(actual.scores)[finite], torch.stack(expected.scores)[finite]), self.logits_bar
        )

    def test_output_hidden_states(self):
        builtin, model = self.models()
        document = self.single(self.documents[-1])
        expected = builtin(**document, output_hidden_states=True).hidden_states
        actual = model(**document, output_hidden_states=True).hidden_states
        self.assertEqual(len(actual), len(expected))
        packed = model(**packed_batch(self.documents), output_hidden_states=True).hidden_states
        self.assertEqual(len(packed), len(expected))
        for got, row, want in zip(actual, packed, expected, strict=True):
            self.assertLess(relative_error(got, want), self.logits_bar)
            self.assertLess(relative_error(row[:, -self.lengths[-1] :], want), self.logits_bar)

    def test_masks_that_separate_documents(self):
        """A 4-D mask with a block for each document describes a packed row, whatever the position ids."""
        _, loss, expected, _ = self.oracle("sdpa")
        _, model = self.models()
        packed = packed_batch(self.documents, model=model)
        total = sum(self.lengths)
        boundaries = ("seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        row = {name: x for name, x in packed.items() if name not in (*boundaries, "position_ids")}
        positions = {"none": None, "counting": torch.arange(total)[None], "restarting": packed["position_ids"]}
        kinds = (0, torch.bool, "none"), (5, torch.float32, "all"), (5, torch.bfloat16, "none")
        for (name, position_ids), kind in zip(positions.items(), kinds, strict=True):
            batch, padding = {**row, "attention_mask": block_mask(self.lengths, *kind)}, kind[0]
            if position_ids is not None:
                batch["position_ids"] = torch.nn.functional.pad(position_ids, (0, padding))
            for column, value in (("input_ids", PAD_TOKEN), ("labels", -100), ("mm_token_type_ids", 0)):
                if column in batch:
                    batch[column] = torch.nn.functional.pad(batch[column], (0, padding), value=value)
            with self.subTest(name):
                output = model(**batch)
                self.assertLess(relative_error(output.loss, loss), self.logits_bar)
                actual = gradients(model, output.loss)
                self.assertLess(total_relative_error(actual, expected), self.gradient_bar)
        wrong = torch.nn.functional.pad(torch.arange(total - 7), (7, 0))[None]
        mask = block_mask(self.lengths)
        with self.assertRaisesRegex(ValueError, "position_ids that restart where attention_mask separates"):
            model(**row, attention_mask=mask, position_ids=wrong)
        with self.assertRaisesRegex(ValueError, "without use_cache=True"):
            model(**row, attention_mask=mask, use_cache=True)
        two = {"input_ids": row["input_ids"][:, :20].expand(2, 20)}
        with self.assertRaisesRegex(ValueError, "expected one row if a mask separates documents in it, got 2"):
            model(**two, attention_mask=block_mask((8, 12)))

    def test_loss_without_logits(self):
        _, loss, expected, bars = self.oracle("sdpa")
        _, model = self.models("sdpa")
        batch = packed_batch(self.documents)
        made = []
        model.lm_head.weight.register_hook(lambda _: made.append("gradient"))
        with mock.patch.object(torch.nn.functional, "linear", wraps=torch.nn.functional.linear) as linear:
            output = model(**batch)
            self.assertNotIn(VOCAB_SIZE, [call.args[1].shape[0] for call in linear.call_args_list])
            self.assertNotIn("logits", output)
            with torch.no_grad():
                self.assertEqual(output.logits.shape, (1, sum(self.lengths), VOCAB_SIZE))
            self.assertIs(output["logits"], output.logits)
        self.assertLess(relative_error(output.loss, loss), self.logits_bar)
        actual = gradients(model, output.loss)
        self.assertEqual(len(made), 1)
        self.assertLess(total_relative_error(actual, expected), self.gradient_bar)
        for name, bar in bars.items():
            decay = name.endswith(("A_log", "dt_bias", "in_proj_a.weight"))
            self.assertLess(relative_error(actual[name], expected[name]), max(bar, 1.5e-4 if decay else 0.0), name)
        targets = int((batch["labels"] != -100).sum())
        halved = model(**batch, num_items_in_batch=2 * targets)
        self.assertLess(relative_error(2 * halved.loss, loss), 0.05 if self.is_moe else self.logits_bar)
        # Evaluation, partial logits, skip_logits=False, another loss and a head with a hook keep the logits.
        for kwargs, change in (
            ({}, lambda: model.eval()),
            ({"logits_to_keep": torch.arange(3)}, lambda: model.train()),
            ({"skip_logits": False}, lambda: None),
            ({}, lambda: setattr(model, "loss_function", lambda logits, *_, **__: logits.sum())),
        ):
            change()
            batch_kept = {n: x for n, x in batch.items() if n != "labels"} if "logits_to_keep" in kwargs else batch
            self.assertIn("logits", model(**batch_kept, **kwargs))
        del model._loss_function
        self.assertNotIn("logits", model(**batch, skip_logits=True))
        self.assertNotIn("logits", model.eval()(**batch, skip_logits=True))
        model.lm_head.register_forward_hook(lambda *_: None)
        self.assertIn("logits", model.train()(**batch))

    def test_labels_with_targets_at_document_starts(self):
        """`labels=input_ids` on a packed row creates no targets across documents."""
        _, loss, *_ = self.oracle("sdpa")
        _, model = self.models()
        batch = packed_batch(self.documents)
        unmasked = model(**{**batch, "labels": batch["input_ids"]})
        self.assertLess(relative_error(unmasked.loss, loss), self.logits_bar)
        shifted = torch.nn.functional.pad(batch["input_ids"][:, 1:], (0, 1), value=5)
        given = model(**batch, shift_labels=shifted)
        self.assertLess(relative_error(given.loss, loss), self.logits_bar)

    def test_resize_token_embeddings(self):
        builtin, model = self.models()
        for each in (builtin, model):
            set_seed(1)
            each.resize_token_embeddings(VOCAB_SIZE + 7, mean_resizing=False)
        logits, _ = self.alone(builtin)
        packed = model(**packed_batch(self.documents))
        self.assertEqual(packed.logits.shape[-1], VOCAB_SIZE + 7)
        self.assertLess(relative_error(packed.logits[0], torch.cat(logits)), self.logits_bar)

    def test_attention_that_is_not_causal(self):
        """A padded batch attends in both directions, as in the stock model. A packed row is refused."""
        batch = self.padded(self.documents, "right")
        real = batch["attention_mask"].bool()
        # The stock model would also pass the argument to the vision tower, which sets its own.
        for arguments in ({"is_causal": False}, {})[self.has_vision :]:
            builtin, model = self.models()
            for each in (builtin, model):
                each.config.get_text_config().is_causal = bool(arguments)
            expected, got = (each(**batch, **arguments, use_cache=False).logits[real] for each in (builtin, model))
            self.assertLess(relative_error(got, expected), 1e-5)
            with self.assertRaisesRegex(ValueError, "causal attention for a packed row.*got is_causal=False"):
                model(**packed_batch(self.documents), **arguments)
        builtin, model = self.models()
        model.config.get_text_config().is_causal = None  # not set
        model(**packed_batch(self.documents))
        next(module for module in model.modules() if getattr(module, "is_causal", False)).is_causal = False
        with self.assertRaisesRegex(ValueError, "a causal attention layer for a packed row.*is_causal=False"):
            model(**packed_batch(self.documents))

    def test_sdpa_builds_no_mask_over_the_row(self):
        """No op of a packed forward returns a tensor whose last two dimensions are T x T."""
        from torch.utils._python_dispatch import TorchDispatchMode

        total, shapes = sum(self.lengths), []

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                result = function(*args, **(kwargs or {}))
                if isinstance(result, torch.Tensor):
                    shapes.append(tuple(result.shape))
                return result

        builtin, model = self.models("sdpa")
        batch = packed_batch(self.documents)
        for each, expected in ((model, False), (builtin, True)):
            shapes.clear()
            with Recorder(), torch.no_grad():
                row = batch if each is model else {name: batch[name] for name in ("input_ids", "position_ids")}
                each(**row, use_cache=False)
            self.assertEqual(any(shape[-2:] == (total, total) for shape in shapes), expected)

    def assert_rejected(self, model, pattern: str, **changes):
        batch = {**packed_batch(self.documents), **changes}
        batch = {name: value for name, value in batch.items() if value is not None}
        for each in (model, model.model):
            with self.assertRaisesRegex(ValueError, "(?s)^expected .*, got ") as caught:
                each(**batch)
            self.assertRegex(str(caught.exception), pattern)
            batch.pop("labels", None)

    def test_flex_attention_is_refused_without_a_gpu(self):
        _, model = self.models("sdpa")
        name = {"text_config": "flex_attention"} if self.has_vision else "flex_attention"
        if not self.has_flex:
            with self.assertRaisesRegex(ValueError, "does not support .*flex_attention"):
                model.set_attn_implementation(name)
            return
        model.set_attn_implementation(name)
        with self.assertRaisesRegex(ValueError, "flex_attention: needs CUDA tensors"):
            model(**packed_batch(self.documents))

    def test_bad_input(self):
        # Elsewhere: with an attention mask, a layer overwrites the boundaries.
        builtin, model = self.models()
        total, longest = sum(self.lengths), max(self.lengths)
        batch = packed_batch(self.documents)
        bounds, positions = batch["cu_seqlens"], batch["position_ids"]
        moved = bounds.clone()
        moved[3] += 1
        cache = builtin(**self.single(self.documents[2]), use_cache=True).past_key_values
        two, restarting = self.two_rows()["input_ids"][:, :65], torch.arange(65).remainder(40).expand(2, -1)
        none = dict.fromkeys(("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
        one, no_lengths = {**none, "position_ids": None}, {**none, "cu_seqlens": None}
        rows = {**no_lengths, "labels": None, "input_ids": two}
        for pattern, changes in (
            ("dispatch_batches=False.*DataParallel", {**one, "cu_seqlens": bounds[:-1]}),
            ("seq_idx of shape", {**one, "cu_seqlens": None, "seq_idx": batch["seq_idx"][:, :-1]}),
            ("same documents", {**none, "cu_seq_lens_q": moved}),
            ("cu_seqlens and cu_seq_lens_k", {"cu_seq_lens_k": moved}),
            ("seq_idx", {**one, "seq_idx": batch["seq_idx"] * 0}),
            ("position_ids", {"position_ids": torch.arange(total)[None]}),
            (f"max_length_q of at least {longest}", {"max_length_q": longest - 1}),
            ("no document boundaries", {**no_lengths, "position_ids": None, "max_length_q": longest}),
            ("without attention_mask", {"attention_mask": torch.ones(1, total, dtype=torch.long)}),
            ("without past_key_values", {"past_key_values": cache}),
            ("use_cache", {"use_cache": True}),
            ("use_cache", {**no_lengths, "use_cache": True, "position_ids": positions}),
            ("batch size 2", {**rows, "position_ids": restarting}),
            ("batch size 2", {**rows, "position_ids": None, "cu_seqlens": torch.tensor([0, 65])}),
        ):
            with self.subTest(pattern):
                self.assert_rejected(model, pattern, **changes)
