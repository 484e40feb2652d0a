"""Rows of TRL's trainer for asynchronous GRPO, against each of their samples alone."""

import unittest

import numpy as np
import torch
import torch.nn.functional as F
from mixins.model import total_relative_error
from parameterized import parameterized
from scripts.trainer_arms import CONFIGS
from transformers import AutoModelForCausalLM, set_seed

from transformers_packed import DataCollatorWithFlattening, patch_model, verify_packing
from transformers_packed.boundaries import SequenceBoundaries
from transformers_packed.data.collator import CausalLabelsCollator
from transformers_packed.models.inputs import mask_targets_across_documents
from transformers_packed.shared_prompts import SharedPrompts


try:
    from trl.experimental.async_grpo.packing import TreeRow
except ImportError:
    TreeRow = None


def make_model(family="qwen3_5"):
    set_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="sdpa").double()
    return patch_model(model).train()


def make_samples(shared=True):
    """Conversations of two prompts. Those of the first one share a turn, a part of a turn, or all tokens."""
    random = np.random.default_rng(0)
    prompt, other, *turns = (random.integers(1, 61, n).tolist() for n in (70, 5, 9, 4, 3, 12, 1, 8))
    answer, tool, second, again, short, new = turns
    conversations = [
        [prompt, answer, tool, second],
        [prompt, answer, tool, again],
        [prompt, answer[:4] + new, tool, second],
        [prompt, answer[:5] + new],
        [prompt, answer, tool, again],
        [prompt, short],
        [other, new],
    ]
    samples = []
    for number, conversation in enumerate(conversations if shared else conversations[-2:]):
        tokens = [token for part in conversation for token in part]
        mask = [at % 2 for at, part in enumerate(conversation) for _ in part]
        samples.append(
            {
                "input_ids": torch.tensor(tokens),
                "completion_mask": torch.tensor(mask),
                "old_log_probs": torch.from_numpy(random.normal(-4, 0.1, len(tokens))).float(),
                "advantage": float(np.float32(random.normal())),
                "group_id": number,
            }
        )
    return samples


def pack(samples):
    row = TreeRow()
    for sample in samples:
        row.add(sample)
    return row.pack()


def objective(logps, old_log_probs, advantages):
    ratio = torch.exp(logps - old_log_probs)
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()


def logps_of(logits, targets):
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


TERMS = ("token_index", "old_log_probs", "advantages", "segment_id")


@unittest.skipUnless(TreeRow, "needs the packing of TRL's asynchronous GRPO")
class TrlRowsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = make_model()
        cls.collator = DataCollatorWithFlattening(model=cls.model)

    @parameterized.expand(["qwen3_5", "qwen3_next"])
    def test_terms_equal_those_of_each_sample(self, family):
        model, samples = make_model(family), make_samples()
        batch = DataCollatorWithFlattening(model=model)([pack(samples)])
        terms = {name: batch.pop(name) for name in TERMS}
        at, targets = terms["token_index"], batch["shift_labels"][0]
        inputs = {name: batch[name] for name in ("input_ids", "position_ids", "cu_seqlens", "parent_of")}
        logps = logps_of(model(**inputs).logits[0, at], targets[at])
        found = gradients(model, objective(logps, terms["old_log_probs"], terms["advantages"]))

        expected, loss = [], 0
        for sample in samples:
            places = sample["completion_mask"].nonzero()[:, 0]
            logits = model(sample["input_ids"][None], use_cache=False).logits[0, places - 1]
            expected.append(logps_of(logits, sample["input_ids"][places]))
            loss = loss + objective(expected[-1], sample["old_log_probs"][places], sample["advantage"])
        self.assertLess((logps - torch.cat(expected)).abs().max().item(), 1e-10)
        self.assertLess(total_relative_error(found, gradients(model, loss)), 1e-10)

    def test_documents(self):
        samples, whole = make_samples(), []
        row = pack(samples)
        batch = DataCollatorWithFlattening(model=self.model, return_boundaries=True)([row])
        parent_of = batch["parent_of"].tolist()
        parts = batch["input_ids"][0].tensor_split(batch["cu_seqlens"][1:-1].long())
        for parent, tokens in zip(parent_of, parts, strict=True):
            whole.append((*(whole[parent] if parent >= 0 else ()), *tokens.tolist()))
        leaves = {tokens for number, tokens in enumerate(whole) if number not in parent_of}
        self.assertEqual(leaves, {tuple(sample["input_ids"].tolist()) for sample in samples})
        self.assertEqual(batch["boundaries"].parent_of, tuple(parent_of))
        self.assertEqual(batch["position_ids"].tolist(), [row["position_ids"].tolist()])
        self.assertTrue(torch.equal(batch["labels"], batch["shift_labels"]))
        for name in TERMS:
            self.assertTrue(torch.equal(batch[name], row[name]), name)
        self.assertEqual({name for name in batch if name.startswith("tree_")}, set())

    def test_loss(self):
        """Each target counts once, also where the next token is in another document."""
        batch = self.collator([pack(make_samples())])
        for name in TERMS:
            del batch[name]
        targets = batch["shift_labels"]
        ends = [end - 1 for number, end in enumerate(batch["cu_seqlens"][1:].tolist()) if number in batch["parent_of"]]
        self.assertTrue((targets[0, ends] != -100).any())
        logits = self.model(**{name: x for name, x in batch.items() if "labels" not in name}).logits
        expected = F.cross_entropy(logits[0], targets[0], reduction="sum") / 7
        for options in ({}, {"skip_logits": False}, {"logits_to_keep": logits.shape[1]}):
            loss = self.model(**batch, **options, num_items_in_batch=7).loss
            self.assertAlmostEqual(loss.item(), expected.item(), places=5)

    def test_verify(self):
        batch = self.collator([pack(make_samples())])
        verified = verify_packing(self.model, {name: x for name, x in batch.items() if name not in TERMS})
        self.assertEqual(verified.documents, len(batch["parent_of"]))
        self.assertAlmostEqual(verified.loss, verified.loss_alone, places=5)

    def test_samples_that_share_nothing(self):
        batch = self.collator([pack(make_samples(shared=False))])
        self.assertNotIn("parent_of", batch)
        self.assertEqual(batch["cu_seqlens"].tolist(), [0, 71, 84])
        loss = self.model(**{name: x for name, x in batch.items() if name not in TERMS}).loss
        self.assertTrue(loss.isfinite())

    def test_refusals(self):
        row, options = pack(make_samples()), {"model": self.model}
        shifted, length = row["tree_kv_index"].clone(), row["tree_cu_seqlens_q"].diff()[2]
        shifted[row["tree_cu_seqlens_k"][3] - length - 1] = 3
        for elements, other, pattern in (
            ([row, row], {}, "a row of TreeRow.pack.. alone in its batch, got 2 elements"),
            ([row, {"input_ids": [1]}], {}, "alone in its batch, got 2 elements"),
            ([row], {"pad_to_multiple_of": 4, "pad_token_id": 0}, "got pad_to_multiple_of"),
            ([row], {"model": None}, "got a model without classes"),
            ([row | {"shift_labels": None}], {}, "shift_labels of TreeRow.pack.., a flat tensor, got none"),
            ([row | {"input_ids": row["input_ids"][None]}], {}, "a flat tensor, got shape .1, "),
            ([row | {"tree_kv_index": shifted}], {}, "expected position_ids that count on from the segment before"),
            ([row | {"position_ids": row["position_ids"] + 1}], {}, "position_ids that count on from the segment"),
            ([row | {"tree_kv_index": shifted[1:]}], {}, "cu_seqlens that ends at the row's"),
            ([row | {"tree_cu_seqlens_k": row["tree_cu_seqlens_k"][[0, -1]]}], {}, "a path of keys for each of the"),
        ):
            with self.assertRaisesRegex(ValueError, pattern):
                DataCollatorWithFlattening(**options | other, on_leak="ignore")(elements)
        with self.assertRaisesRegex(ValueError, "labels all tokens does not support trees"):
            CausalLabelsCollator(0, model=self.model)([row])


class ShiftedTargetsTest(unittest.TestCase):
    """The last token of a document may have a target, if others continue the document."""

    def test_masked(self):
        lengths, targets = SequenceBoundaries.from_lengths([2, 1, 2, 1]), torch.arange(6)[None]
        shared = SharedPrompts.of(lengths, [-1, 0, 0, -1])
        for boundaries, ends in ((lengths, [1, 2, 4, 5]), (shared, [2, 4, 5])):
            for kept in (0, 6, torch.arange(6)):
                kwargs = {"shift_labels": targets}
                labels = mask_targets_across_documents(boundaries, targets, kwargs, kept)
                self.assertEqual((kwargs["shift_labels"][0] == -100).nonzero()[:, 0].tolist(), ends)
                self.assertEqual((labels[0] == -100).nonzero()[:, 0].tolist(), [0, 2, 3, 5])
