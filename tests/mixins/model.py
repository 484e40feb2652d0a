"""Requirements on every family of packed models. `tests/models/<family>/test_modeling_<family>.py` runs these tests.

The oracle is always the stock class of Transformers on each document alone.
"""

import copy
import tempfile
from typing import Any
from unittest import mock

import torch
from common.releases import DECAY_ROUNDING, DECAYS
from parameterized import parameterized
from torch.nn.utils.rnn import pad_sequence
from transformers import set_seed

from transformers_packed import DataCollatorWithFlattening, SequenceBoundaries, patch_model, unpatch_model


VOCAB_SIZE = 97
PAD_TOKEN = 0
SOURCES = ("position_ids", "seq_idx", "cu_seq_lens", "cu_seqlens", "all")
ATTENTION = ("eager", "sdpa")
CHECKPOINTING = ("no_checkpointing", "reentrant", "non_reentrant")


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def total_relative_error(actual: dict, expected: dict) -> float:
    difference = sum((actual[name] - expected[name]).square().sum() for name in expected)
    return (difference / sum(grad.square().sum() for grad in expected.values())).sqrt().item()


def packed_batch(documents: list, source: str = "all", **arguments) -> dict:
    """Collate a row and keep only the given kind of boundaries. Documents are tokens `[n]` or features."""
    collator = DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_seq_idx=True, return_cu_seqlens=True, on_leak="ignore", **arguments
    )
    batch = collator([d if isinstance(d, dict) else {"input_ids": d} for d in documents])
    kinds = {
        "position_ids": {"position_ids"},
        "seq_idx": {"seq_idx"},
        "cu_seq_lens": {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"},
        "cu_seqlens": {"cu_seqlens"},
    }
    others = set().union(*kinds.values()) - (set(batch) if source == "all" else kinds[source])
    return {name: value for name, value in batch.items() if name not in others}


def padded_batch(documents: list[torch.Tensor], side: str) -> dict:
    """Collate a padded batch. As in a document alone, the first token of each document is no target."""
    input_ids = pad_sequence(documents, batch_first=True, padding_value=PAD_TOKEN, padding_side=side)
    mask = pad_sequence([torch.ones_like(d) for d in documents], batch_first=True, padding_side=side)
    labels = [torch.cat([torch.tensor([-100]), document[1:]]) for document in documents]
    labels = pad_sequence(labels, batch_first=True, padding_value=-100, padding_side=side)
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


def block_mask(lengths: tuple, padding: int = 0, dtype: torch.dtype = torch.bool, pads: str = "none") -> torch.Tensor:
    """Build a mask `[1, 1, T, T]` with a causal block for each document, and padding at the end of the row.

    `pads` tells whether padding attends to nothing (as LLaMA-Factory's masks have it), or to all tokens (as masks have
    it that avoid softmax over nothing).
    """
    numbers = torch.arange(1, len(lengths) + 1).repeat_interleave(torch.tensor(lengths))
    numbers = torch.nn.functional.pad(numbers, (0, padding))
    attends = torch.ones(len(numbers), len(numbers), dtype=torch.bool).tril()
    attends &= (numbers[:, None] == numbers) & (numbers > 0)
    if pads == "all":
        attends |= ~attends.any(1, keepdim=True)
    if dtype != torch.bool:
        attends = torch.zeros(attends.shape, dtype=dtype).masked_fill(~attends, torch.finfo(dtype).min)
    return attends[None, None]


def other_masks(length: int) -> dict[str, Any]:
    """Build masks for attention that are neither padding nor documents, by name."""
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    prefix = causal.clone()
    prefix[:4, :4] = True
    gap = causal.clone()
    gap[5:, 2] = False
    masks = {"sliding": causal.triu(-4), "both_ways": torch.ones_like(causal), "prefix": prefix, "gap": gap}
    masks |= {"strict": causal.tril(-1), "nothing": torch.zeros_like(causal)}
    masks = {name: mask[None, None] for name, mask in masks.items()}
    masks["per_head"] = masks["sliding"].expand(1, 4, length, length)
    masks["bias"] = torch.zeros(causal.shape).masked_fill(~causal, -1e9)[None, None] - causal * 0.5
    masks["integers"] = causal[None, None].long()
    masks["three_dimensions"] = causal[None]
    masks["by_layer"] = {"full_attention": causal[None, None], "linear_attention": None}
    return masks


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def alone(model: torch.nn.Module, documents: list) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the logits `[n, vocab]` of each document and the mean loss over all targets.

    Documents are tokens `[n]` or batches of one.
    """
    batches = [d if isinstance(d, dict) else {"input_ids": d[None]} for d in documents]
    logits, loss, targets = [], 0.0, sum(batch["input_ids"].shape[1] - 1 for batch in batches)
    for batch in batches:
        output = model(**batch, labels=batch["input_ids"])
        logits.append(output.logits[0])
        if len(logits[-1]) > 1:
            loss = loss + output.loss * (len(logits[-1]) - 1) / targets
    return logits, loss


class PackedModelTesterMixin:
    """Tests of a model class. Set `builtin_class`, `packed_class`, `get_config()`, and `is_moe` for mixtures of
    experts.

    Documents are tensors of tokens `[n]`. Override the methods up to `changed` for other kinds of documents.
    """

    builtin_class: type
    packed_class: type
    is_moe = False
    has_vision = False
    lengths = (1, 2, 3, 63, 64, 65, 130, 300)
    logits_bar = 1e-5
    # In float32, the decay's gradients of the stock classes are up to 3.3e-5 from those in float64.
    decay_bar = 5e-5
    lora_targets = ("q_proj", "v_proj", "out_proj")
    suppress_tokens = None
    # Parts of the names of parameters that are constants initially.
    constants: tuple[str, ...] = ("norm", "dt_bias")
    # The kind of the attention layers, whether they take flex attention, and positions that several rows share.
    attention_kind = "full_attention"
    has_flex = True
    has_shared_positions = True

    @property
    def has_router_loss(self) -> bool:
        return self.is_moe and hasattr(self.get_config().get_text_config(), "router_aux_loss_coef")

    @property
    def gradient_bar(self) -> float:
        return 1e-4 if self.is_moe else 1e-6

    def get_config(self):
        raise NotImplementedError

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        generator = torch.Generator().manual_seed(0)
        cls.documents = [torch.randint(1, VOCAB_SIZE, (n,), generator=generator) for n in cls.lengths]
        cls.oracles = {}

    def single(self, document) -> dict:
        """Return a document alone, as a batch of one."""
        return {"input_ids": document[None]}

    def padded(self, documents, side: str) -> dict:
        return padded_batch(documents, side)

    def two_rows(self) -> dict:
        """Return two documents of 130 tokens as a plain batch, with images and videos in the first 80 tokens only."""
        return {"input_ids": torch.stack([self.documents[-1][:130], self.documents[-2]])}

    def shares(self, name: str) -> tuple:
        """Return the number of rows of an input `[*, features]` for each document."""
        return self.lengths

    def changed(self, document):
        """Yield copies of a document, each with one change."""
        document, place = document.clone(), len(document) // 2
        document[place] = document[place] % (VOCAB_SIZE - 1) + 1
        yield document

    def alone(self, model):
        return alone(model, [self.single(document) for document in self.documents])

    def leaves(self, model) -> tuple[dict, dict]:
        """Return the packed row with embeddings instead of tokens, and its inputs that can have gradients."""
        batch = packed_batch(self.documents, model=model)
        batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach()
        return batch, {n: x for n, x in batch.items() if torch.is_tensor(x) and x.is_floating_point()}

    def models(self, attn_implementation: str = "sdpa", **kwargs):
        """Build the stock model and ours with the same weights, in train mode."""
        set_seed(0)
        builtin = self.builtin_class._from_config(
            self.get_config(), attn_implementation=attn_implementation, dtype=torch.float32, **kwargs
        )
        # Random values make every gradient relevant. Large output
        # weights make the loss depend on the layers.
        with torch.no_grad():
            for name, parameter in builtin.named_parameters():
                if any(part in name for part in self.constants):
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            builtin.lm_head.weight.mul_(20)
        packed = self.packed_class._from_config(
            copy.deepcopy(builtin.config), attn_implementation=attn_implementation, dtype=torch.float32, **kwargs
        )
        packed.load_state_dict(builtin.state_dict())
        return builtin.train(), packed.train()

    def oracle(self, attn_implementation: str):
        """Return the stock model's logits, loss and gradients on documents alone, and the bar of each parameter."""
        if attn_implementation not in self.oracles:
            builtin, _ = self.models(attn_implementation)
            logits, loss = self.alone(builtin)
            expected = gradients(builtin, loss)
            padded = gradients(builtin, builtin(**self.padded(self.documents, "right")).loss)
            bars = {name: max(self.floor(name), 3 * relative_error(padded[name], expected[name])) for name in expected}
            self.oracles[attn_implementation] = [x.detach() for x in logits], loss.detach(), expected, bars
        return self.oracles[attn_implementation]

    def floor(self, name: str) -> float:
        return self.decay_bar * DECAY_ROUNDING if name.endswith(DECAYS) else 1e-5

    # Alone = together

    @parameterized.expand(
        [
            (f"{source}_{attention}_{checkpointing}", source, attention, checkpointing)
            for source in SOURCES
            for attention in ATTENTION
            for checkpointing in CHECKPOINTING
            if checkpointing == "no_checkpointing" or source in ("position_ids", "all")
        ]
    )
    def test_alone_equals_together(self, _, source, attention, checkpointing):
        # Elsewhere: boundaries reach the convolution but not the delta rule, or vice versa.
        logits, loss, expected, bars = self.oracle(attention)
        _, model = self.models(attention)
        if checkpointing != "no_checkpointing":
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        # `A_log` and `dt_bias` amplify rounding. The bars assume the stock order of operations, which computes logits.
        output = model(**packed_batch(self.documents, source), skip_logits=False)
        self.assertIsNone(output.past_key_values)
        for got, want in zip(output.logits[0].split(self.lengths), logits, strict=True):
            self.assertLess(relative_error(got, want), self.logits_bar)
        self.assertLess(relative_error(output.loss, loss), self.logits_bar)
        actual = gradients(model, output.loss)
        self.assertEqual(set(actual), set(expected))
        self.assertLess(total_relative_error(actual, expected), self.gradient_bar)
        for name, bar in bars.items():
            self.assertLess(relative_error(actual[name], expected[name]), bar, name)

    @parameterized.expand([(torch.bool, "none"), (torch.float32, "all"), (torch.bfloat16, "none")])
    def test_masks_that_separate_documents(self, dtype, pads):
        """A 4-D mask with a block for each document describes a packed row, whatever the position ids."""
        _, loss, expected, _ = self.oracle("sdpa")
        _, model = self.models()
        packed = packed_batch(self.documents, model=model)
        total = sum(self.lengths)
        boundaries = ("seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        row = {name: x for name, x in packed.items() if name not in (*boundaries, "position_ids")}
        positions = {"none": None, "counting": torch.arange(total)[None], "restarting": packed["position_ids"]}
        for (name, position_ids), padding in zip(positions.items(), (0, 5, 5), strict=True):
            batch = {**row, "attention_mask": block_mask(self.lengths, padding, dtype, pads)}
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
        mask = block_mask(self.lengths, 0, dtype)
        with self.assertRaisesRegex(ValueError, "position_ids that restart where attention_mask separates"):
            model(**row, attention_mask=mask, position_ids=wrong)
        with self.assertRaisesRegex(ValueError, "without use_cache=True"):
            model(**row, attention_mask=mask, use_cache=True)
        two = {"input_ids": row["input_ids"][:, :20].expand(2, 20)}
        with self.assertRaisesRegex(ValueError, "expected one row if a mask separates documents in it, got 2"):
            model(**two, attention_mask=block_mask((8, 12), 0, dtype))

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
            self.assertLess(relative_error(actual[name], expected[name]), max(bar, 1e-4 if decay else 0.0), name)
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

    @parameterized.expand(ATTENTION)
    def test_without_boundaries_every_bar_is_broken(self, attention):
        """The comparison above can fail: the same row without boundaries exceeds every bar a hundredfold."""
        logits, loss, expected, bars = self.oracle(attention)
        _, model = self.models(attention)
        batch = packed_batch(self.documents, "position_ids")
        batch["position_ids"] = torch.arange(sum(self.lengths))[None]
        output = model(**batch)
        self.assertGreater(relative_error(output.logits[0], torch.cat(logits)), 100 * self.logits_bar)
        self.assertGreater(relative_error(output.loss, loss), 100 * self.logits_bar)
        actual = gradients(model, output.loss)
        self.assertGreater(total_relative_error(actual, expected), 100 * self.gradient_bar)
        for name, bar in bars.items():
            self.assertGreater(relative_error(actual[name], expected[name]), 100 * bar, name)

    @parameterized.expand(ATTENTION)
    def test_base_model(self, attention):
        """The class without a head also works on its own."""
        builtin, model = self.models(attention)
        base = type(model.model)._from_config(model.config, attn_implementation=attention)
        base.load_state_dict(builtin.model.state_dict())
        batch = packed_batch(self.documents)
        batch.pop("labels")
        states = base.train()(**batch).last_hidden_state[0]
        expected = torch.cat([builtin.model(**self.single(d)).last_hidden_state[0] for d in self.documents])
        self.assertLess(relative_error(states, expected), self.logits_bar)
        weight = torch.randn_like(expected)
        got, want = gradients(base, (states * weight).sum()), gradients(builtin.model, (expected * weight).sum())
        self.assertLess(total_relative_error(got, want), self.gradient_bar)

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

    # No leaks, bit for bit

    @parameterized.expand(ATTENTION)
    def test_no_leak_forward(self, attention):
        """Equal bit for bit. Experts use batched_mm, because grouped products depend on the shapes of the groups."""
        experts = {"experts_implementation": "batched_mm"} if self.is_moe else {}
        _, model = self.models(attention, **experts)
        model.eval()
        with torch.no_grad():
            before = model(**packed_batch(self.documents)).logits[0].split(self.lengths)
            changes = [(i, new) for i, document in enumerate(self.documents) for new in self.changed(document)]
            for changed, new in changes:
                documents = [*self.documents[:changed], new, *self.documents[changed + 1 :]]
                after = model(**packed_batch(documents)).logits[0].split(self.lengths)
                self.assertFalse(torch.equal(before[changed], after[changed]))
                for i in set(range(len(documents))) - {changed}:
                    self.assertTrue(torch.equal(before[i], after[i]), f"document {changed} changed document {i}")

    @parameterized.expand(ATTENTION)
    def test_no_leak_backward(self, attention):
        _, model = self.models(attention)
        batch, leaves = self.leaves(model)
        inputs = [leaf.requires_grad_() for leaf in leaves.values()]
        logits = model(**batch).logits[0].split(self.lengths)
        for i, rows in enumerate(logits):
            grads = torch.autograd.grad(rows.square().sum(), inputs, retain_graph=True)
            for name, grad in zip(leaves, grads, strict=True):
                for j, block in enumerate(grad.flatten(0, -2).split(self.shares(name))):
                    reached = i == j and len(block) > 0
                    self.assertEqual(bool(block.any()), reached, f"loss of document {i}, {name} of document {j}")

    @parameterized.expand(ATTENTION)
    def test_nan_stays_in_its_document(self, attention):
        _, model = self.models(attention)
        batch, leaves = self.leaves(model)
        for name, leaf in leaves.items():
            for poisoned in (0, 2, 4, len(self.lengths) - 1):
                if not self.shares(name)[poisoned]:
                    continue
                planted = leaf.clone()
                planted.flatten(0, -2).split(self.shares(name))[poisoned][0] = float("nan")
                logits = model(**{**batch, name: planted}).logits[0].split(self.lengths)
                for i, rows in enumerate(logits):
                    self.assertEqual(bool(rows.isfinite().all()), i != poisoned, f"NaN in {name} of {poisoned}")

    # Padded = packed

    @parameterized.expand(
        [(f"{side}_{attention}", side, attention) for side in ("left", "right") for attention in ATTENTION]
    )
    def test_padded_equals_builtin_and_packed(self, _, side, attention):
        builtin, model = self.models(attention)
        batch = self.padded(self.documents, side)
        expected, padded = builtin(**batch), model(**batch)
        real = batch["attention_mask"].bool()
        self.assertLess(relative_error(padded.logits[real], expected.logits[real]), self.logits_bar)
        self.assertLess(relative_error(padded.loss, expected.loss), self.logits_bar)
        packed = model(**packed_batch(self.documents))
        self.assertLess(relative_error(packed.logits[0], padded.logits[real]), self.logits_bar)
        self.assertLess(relative_error(packed.loss, padded.loss), self.logits_bar)
        got, want = (gradients(model, output.loss) for output in (packed, padded))
        self.assertLess(total_relative_error(got, want), self.gradient_bar)

    # Other behaviour is unchanged

    @parameterized.expand(ATTENTION)
    def test_unpacked_forward_is_the_builtin(self, attention):
        builtin, model = self.models(attention)
        batch = self.two_rows()
        input_ids = batch["input_ids"]
        expected, actual = builtin(**batch, labels=input_ids), model(**batch, labels=input_ids)
        self.assertLess(relative_error(actual.logits, expected.logits), self.logits_bar)
        self.assertIsNotNone(actual.past_key_values)
        want, got = gradients(builtin, expected.loss), gradients(model, actual.loss)
        self.assertLess(total_relative_error(got, want), self.gradient_bar)
        # Fill a cache in two steps of several tokens, then token by token.
        want = got = None
        for start, end in ((0, 80), (80, 128), (128, 129), (129, 130)):
            first = {n: x[:, :end] if x.shape == input_ids.shape else x for n, x in batch.items()}
            step = {"input_ids": input_ids[:, start:end], "use_cache": True} if start else {**first, "use_cache": True}
            with torch.no_grad():
                want = builtin(**step, past_key_values=want and want.past_key_values)
                got = model(**step, past_key_values=got and got.past_key_values)
            self.assertLess(relative_error(got.logits, want.logits), self.logits_bar)

    @parameterized.expand(
        [
            ("greedy", {"do_sample": False}),
            ("beam", {"num_beams": 3, "do_sample": False}),
            ("no_cache", {"do_sample": False, "use_cache": False}),
        ]
    )
    def test_generate_is_the_builtin(self, _, arguments):
        builtin, model = (m.eval() for m in self.models())
        batch = self.padded(self.documents[1:6], "left")
        batch.pop("labels")
        arguments = {"max_new_tokens": 12, "pad_token_id": PAD_TOKEN, "output_scores": True, **arguments}
        arguments |= {"return_dict_in_generate": True, "suppress_tokens": self.suppress_tokens}
        expected, actual = builtin.generate(**batch, **arguments), model.generate(**batch, **arguments)
        self.assertEqual(actual.sequences.tolist(), expected.sequences.tolist())
        finite = torch.isfinite(torch.stack(expected.scores))
        self.assertLess(
            relative_error(torch.stack(actual.scores)[finite], torch.stack(expected.scores)[finite]), self.logits_bar
        )

    def test_save_and_reload(self):
        builtin, model = (m.eval() for m in self.models())
        batch = packed_batch(self.documents)
        with tempfile.TemporaryDirectory() as directory, torch.no_grad():
            model.save_pretrained(directory)
            ours, report = self.packed_class.from_pretrained(directory, output_loading_info=True)
            self.assertFalse(report["missing_keys"] | report["unexpected_keys"] | report["mismatched_keys"])
            self.assertTrue(torch.equal(ours(**batch).logits, model(**batch).logits))
            self.assertEqual(ours.config.architectures, [self.builtin_class.__name__])
            back, report = self.builtin_class.from_pretrained(directory, output_loading_info=True)
            self.assertFalse(report["missing_keys"] | report["unexpected_keys"] | report["mismatched_keys"])
            document = self.single(self.documents[-1])
            self.assertTrue(torch.equal(back(**document).logits, builtin(**document).logits))
            builtin.save_pretrained(directory)
            ours, report = self.packed_class.from_pretrained(directory, output_loading_info=True)
            self.assertFalse(report["missing_keys"] | report["unexpected_keys"] | report["mismatched_keys"])
            self.assertTrue(torch.equal(ours(**batch).logits, model(**batch).logits))

    def test_patch_and_unpatch(self):
        """`patch_model` gives a stock model our classes and results, and `unpatch_model` its own back."""
        builtin, model = self.models()
        classes = [type(module) for module in builtin.modules()]
        batch = packed_batch(self.documents, model=model)
        self.assertTrue(torch.equal(patch_model(builtin)(**batch).logits, model(**batch).logits))
        self.assertEqual([type(module) for module in builtin.modules()], [type(module) for module in model.modules()])
        unpatch_model(builtin)
        self.assertEqual([type(module) for module in builtin.modules()], classes)

    def test_resize_token_embeddings(self):
        builtin, model = self.models()
        for each in (builtin, model):
            set_seed(1)
            each.resize_token_embeddings(VOCAB_SIZE + 7, mean_resizing=False)
        logits, _ = self.alone(builtin)
        packed = model(**packed_batch(self.documents))
        self.assertEqual(packed.logits.shape[-1], VOCAB_SIZE + 7)
        self.assertLess(relative_error(packed.logits[0], torch.cat(logits)), self.logits_bar)

    def test_peft_lora(self):
        from peft import LoraConfig, get_peft_model

        wrapped = []
        for each in self.models():
            set_seed(2)
            config = LoraConfig(r=4, target_modules=list(self.lora_targets), init_lora_weights=False, lora_dropout=0.0)
            wrapped.append(get_peft_model(each, config))
        builtin, model = wrapped
        logits, loss = self.alone(builtin)
        packed = model(**packed_batch(self.documents))
        self.assertLess(relative_error(packed.logits[0], torch.cat(logits)), self.logits_bar)
        loss.backward()
        packed.loss.backward()
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        want = {name: p.grad for name, p in builtin.named_parameters() if name in trained}
        got = {name: p.grad for name, p in model.named_parameters() if name in trained}
        self.assertGreater(len(trained), 0)
        self.assertLess(total_relative_error(got, want), self.gradient_bar)

    # Requested outputs

    @parameterized.expand(ATTENTION)
    def test_output_hidden_states(self, attention):
        builtin, model = self.models(attention)
        document = self.single(self.documents[-1])
        expected = builtin(**document, output_hidden_states=True).hidden_states
        actual = model(**document, output_hidden_states=True).hidden_states
        self.assertEqual(len(actual), len(expected))
        packed = model(**packed_batch(self.documents), output_hidden_states=True).hidden_states
        self.assertEqual(len(packed), len(expected))
        for got, row, want in zip(actual, packed, expected, strict=True):
            self.assertLess(relative_error(got, want), self.logits_bar)
            self.assertLess(relative_error(row[:, -self.lengths[-1] :], want), self.logits_bar)

    def test_output_attentions(self):
        builtin, model = self.models("eager")
        packed = model(**packed_batch(self.documents), output_attentions=True).attentions
        for i, document in enumerate(self.documents):
            block = slice(sum(self.lengths[:i]), sum(self.lengths[: i + 1]))
            expected = builtin(**self.single(document), output_attentions=True).attentions
            unpacked = model(**self.single(document), output_attentions=True).attentions
            self.assertEqual(len(packed), len(expected))
            for got, row, want in zip(unpacked, packed, expected, strict=True):
                self.assertLess(relative_error(got, want), self.logits_bar)
                self.assertLess(relative_error(row[:, :, block, block], want), self.logits_bar)
                outside = row[:, :, block].clone()
                outside[..., block] = 0
                self.assertFalse(outside.any())
        _, model = self.models("sdpa")
        with self.assertRaisesRegex(ValueError, "eager"):
            model(**packed_batch(self.documents), output_attentions=True)

    def test_padding_beside_position_ids_alone(self):
        """By default the collator returns only position ids and padding_tokens for padded rows."""
        _, model = self.models()
        outputs = {}
        for source in ("position_ids", "all"):
            batch = packed_batch(self.documents, source, model=model, pad_to_multiple_of=64, pad_token_id=0)
            self.assertGreater(batch["padding_tokens"], 0)
            options = {"output_router_logits": True} if self.is_moe else {}
            outputs[source] = model(**batch, **options)
        for name in ("logits", "loss", *(["aux_loss"] if self.has_router_loss else [])):
            self.assertTrue(torch.equal(outputs["position_ids"][name], outputs["all"][name]), name)
        batch["padding_tokens"] += 1
        for name in set(batch) - {
            "input_ids",
            "labels",
            "position_ids",
            "padding_tokens",
        }:
            if not name.startswith(("pixel", "image", "video", "mm_")):
                batch.pop(name)
        with self.assertRaisesRegex(ValueError, "padding_tokens of 0 or"):
            model(**batch)

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

    # Bad input

    def assert_rejected(self, pattern: str, **changes):
        _, model = self.models()
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

    def test_boundaries_are_made_once_for_all_layers(self):
        """On a GPU each computation would cost a host sync."""
        # Elsewhere: every layer computes the metadata again.
        _, model = self.models("sdpa")
        made = mock.Mock(wraps=SequenceBoundaries._checked)
        with mock.patch.object(SequenceBoundaries, "_checked", made):
            model(**packed_batch(self.documents, "cu_seqlens"))
        self.assertEqual(made.call_count, 1)

    def test_bad_input(self):
        # Elsewhere: with an attention mask, a layer overwrites the boundaries.
        total, longest = sum(self.lengths), max(self.lengths)
        batch = packed_batch(self.documents)
        bounds = batch["cu_seqlens"]
        none = dict.fromkeys(("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
        one = {**none, "position_ids": None}
        self.assert_rejected("starts at 0", **one, cu_seqlens=bounds + 1)
        self.assert_rejected("dispatch_batches=False.*DataParallel", **one, cu_seqlens=bounds[:-1])
        self.assert_rejected("dispatch_batches=False", **one, cu_seqlens=bounds[:1])
        self.assert_rejected("increasing", **one, cu_seqlens=torch.cat([bounds[:2], bounds[1:]]))
        self.assert_rejected("int32 or int64", **one, cu_seqlens=bounds.float())
        self.assert_rejected("int32 or int64", **one, cu_seqlens=bounds[None])
        only_idx = {**one, "cu_seqlens": None}
        self.assert_rejected("never decreases", **{**only_idx, "seq_idx": batch["seq_idx"].flip(1)})
        self.assert_rejected("seq_idx of shape", **{**only_idx, "seq_idx": batch["seq_idx"][:, :-1]})
        moved = bounds.clone()
        moved[3] += 1
        self.assert_rejected("same documents", **{**none, "cu_seq_lens_q": moved})
        self.assert_rejected("cu_seqlens and cu_seq_lens_k", cu_seq_lens_k=moved)
        self.assert_rejected("seq_idx", **{**one, "seq_idx": batch["seq_idx"] * 0})
        self.assert_rejected("position_ids", position_ids=torch.arange(total)[None])
        self.assert_rejected(f"max_length_q of at least {longest}", max_length_q=longest - 1)
        self.assert_rejected(
            "no document boundaries", **{**none, "cu_seqlens": None, "position_ids": None, "max_length_q": longest}
        )
        self.assert_rejected("without attention_mask", attention_mask=torch.ones(1, total, dtype=torch.long))
        self.assert_rejected("without past_key_values", past_key_values=self.filled_cache())
        self.assert_rejected("use_cache", use_cache=True)
        two = self.two_rows()["input_ids"][:, :65]
        restarting = torch.arange(65).remainder(40).expand(2, -1)
        blank = dict.fromkeys((*none, "cu_seqlens", "labels"))
        self.assert_rejected("batch size 2", **{**blank, "input_ids": two, "position_ids": restarting})
        self.assert_rejected(
            "batch size 2", **{**blank, "input_ids": two, "position_ids": None, "cu_seqlens": torch.tensor([0, 65])}
        )
        self.assert_rejected(
            "use_cache", **dict.fromkeys((*none, "cu_seqlens")), use_cache=True, position_ids=batch["position_ids"]
        )

    def filled_cache(self):
        builtin, _ = self.models()
        return builtin(**self.single(self.documents[2]), use_cache=True).past_key_values
