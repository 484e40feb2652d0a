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


class PackedVariantTesterMixin:
    """Requirements on every variant of a family, such as one with dense layers beside one with experts.

    Set `builtin_class`, `packed_class`, `get_config()`, and `is_moe` for mixtures of experts. Documents are tensors of
    tokens `[n]`. Override the methods up to `changed` for other kinds of documents.
    """

    builtin_class: type
    packed_class: type
    is_moe = False
    has_vision = False
    lengths = (1, 3, 64, 70)
    logits_bar = 1e-5
    # In float32, the decay's gradients of the stock classes are up to 3.3e-5 from those in float64.
    decay_bar = 1e-4
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
        return 1e-4 if self.is_moe else 2e-6

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
        """Return two documents of 70 tokens as a plain batch, with images and videos in the first 40 tokens only."""
        return {"input_ids": torch.stack([self.documents[-1], self.documents[-1].flip(0)])}

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

    @parameterized.expand([("position_ids", "sdpa", "no_checkpointing"), ("all", "eager", "non_reentrant")])
    def test_alone_equals_together(self, source, attention, checkpointing):
        # Elsewhere: boundaries reach the convolution but not the delta rule, or vice versa.
        self.check_alone_equals_together(source, attention, checkpointing)

    def check_alone_equals_together(self, source: str, attention: str, checkpointing: str):
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

    def test_no_leak_backward(self):
        _, model = self.models()
        batch, leaves = self.leaves(model)
        inputs = [leaf.requires_grad_() for leaf in leaves.values()]
        logits = model(**batch).logits[0].split(self.lengths)
        for i, rows in enumerate(logits):
            grads = torch.autograd.grad(rows.square().sum(), inputs, retain_graph=True)
            for name, grad in zip(leaves, grads, strict=True):
                for j, block in enumerate(grad.flatten(0, -2).split(self.shares(name))):
                    reached = i == j and len(block) > 0
                    self.assertEqual(bool(block.any()), reached, f"loss of document {i}, {name} of document {j}")

    def test_save_and_reload(self):
        builtin, model = (m.eval() for m in self.models())
        batch = packed_batch(self.documents)
        with tempfile.TemporaryDirectory() as directory, torch.no_grad():
            model.save_pretrained(directory)
            back, report = self.builtin_class.from_pretrained(directory, output_loading_info=True)
            self.assertFalse(report["missing_keys"] | report["unexpected_keys"] | report["mismatched_keys"])
            self.assertEqual(back.config.architectures, [self.builtin_class.__name__])
            document = self.single(self.documents[-1])
            # Loaded weights have another alignment in memory, with which products may round differently.
            self.assertLess(relative_error(back(**document).logits, builtin(**document).logits), 1e-6)
            builtin.save_pretrained(directory)
            ours, report = self.packed_class.from_pretrained(directory, output_loading_info=True)
            self.assertFalse(report["missing_keys"] | report["unexpected_keys"] | report["mismatched_keys"])
            state = ours.state_dict()
            self.assertTrue(all(torch.equal(state[name], x) for name, x in model.state_dict().items()))
            self.assertLess(relative_error(ours(**batch).logits, model(**batch).logits), 1e-6)


class PackedModelTesterMixin(PackedVariantTesterMixin):
    """Requirements on code that each family has of its own."""

    def test_base_model(self):
        """The class without a head also works on its own."""
        builtin, model = self.models()
        base = type(model.model)._from_config(model.config, attn_implementation="sdpa")
        base.load_state_dict(builtin.model.state_dict())
        batch = packed_batch(self.documents)
        batch.pop("labels")
        states = base.train()(**batch).last_hidden_state[0]
        expected = torch.cat([builtin.model(**self.single(d)).last_hidden_state[0] for d in self.documents])
        self.assertLess(relative_error(states, expected), self.logits_bar)
        weight = torch.randn_like(expected)
        got, want = gradients(base, (states * weight).sum()), gradients(builtin.model, (expected * weight).sum())
        self.assertLess(total_relative_error(got, want), self.gradient_bar)

    # No leaks, bit for bit

    def test_no_leak_forward(self):
        """Equal bit for bit. Experts use batched_mm, because grouped products depend on the shapes of the groups."""
        experts = {"experts_implementation": "batched_mm"} if self.is_moe else {}
        _, model = self.models(**experts)
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

    def test_nan_stays_in_its_document(self):
        _, model = self.models()
        batch, leaves = self.leaves(model)
        for name, leaf in leaves.items():
            for poisoned in (0, 2, len(self.lengths) - 1):
                if not self.shares(name)[poisoned]:
                    continue
                planted = leaf.clone()
                planted.flatten(0, -2).split(self.shares(name))[poisoned][0] = float("nan")
                logits = model(**{**batch, name: planted}).logits[0].split(self.lengths)
                for i, rows in enumerate(logits):
                    self.assertEqual(bool(rows.isfinite().all()), i != poisoned, f"NaN in {name} of {poisoned}")

    # Padded = packed

    def test_padded_equals_builtin_and_packed(self):
        builtin, model = self.models()
        batch = self.padded(self.documents, "left")
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

    def test_unpacked_forward_is_the_builtin(self):
        builtin, model = self.models()
        batch = self.two_rows()
        input_ids = batch["input_ids"]
        expected, actual = builtin(**batch, labels=input_ids), model(**batch, labels=input_ids)
        self.assertLess(relative_error(actual.logits, expected.logits), self.logits_bar)
        self.assertIsNotNone(actual.past_key_values)
        want, got = gradients(builtin, expected.loss), gradients(model, actual.loss)
        self.assertLess(total_relative_error(got, want), self.gradient_bar)
        # Fill a cache in two steps of several tokens, then token by token.
        want = got = None
        for start, end in ((0, 40), (40, 68), (68, 69), (69, 70)):
            first = {n: x[:, :end] if x.shape == input_ids.shape else x for n, x in batch.items()}
            step = {"input_ids": input_ids[:, start:end], "use_cache": True} if start else {**first, "use_cache": True}
            with torch.no_grad():
                want = builtin(**step, past_key_values=want and want.past_key_values)
                got = model(**step, past_key_values=got and got.past_key_values)
            self.assertLess(relative_error(got.logits, want.logits), self.logits_bar)

    def test_patch_and_unpatch(self):
        """`patch_model` gives a stock model our classes and results, and `unpatch_model` its own back."""
        builtin, model = self.models()
        classes = [type(module) for module in builtin.modules()]
        batch = packed_batch(self.documents, model=model)
        self.assertTrue(torch.equal(patch_model(builtin)(**batch).logits, model(**batch).logits))
        self.assertEqual([type(module) for module in builtin.modules()], [type(module) for module in model.modules()])
        unpatch_model(builtin)
        self.assertEqual([type(module) for module in builtin.modules()], classes)

    # Requested outputs

    def test_output_attentions(self):
        builtin, model = self.models("eager")
        packed = model(**packed_batch(self.documents), output_attentions=True).attentions
        document, block = self.single(self.documents[-1]), slice(-self.lengths[-1], None)
        expected = builtin(**document, output_attentions=True).attentions
        unpacked = model(**document, output_attentions=True).attentions
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

    def test_boundaries_are_made_once_for_all_layers(self):
        """On a GPU each computation would cost a host sync."""
        # Elsewhere: every layer computes the metadata again.
        _, model = self.models("sdpa")
        made = mock.Mock(wraps=SequenceBoundaries._checked)
        with mock.patch.object(SequenceBoundaries, "_checked", made):
            model(**packed_batch(self.documents, "cu_seqlens"))
        self.assertEqual(made.call_count, 1)
