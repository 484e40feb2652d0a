"""Rows with shared prompts in models. Whole models on padded batches are tested in mixins/padding.py."""

import copy
import unittest
from itertools import accumulate
from typing import ClassVar

import torch
from common.four_bit import store_in_nf4
from hypothesis import given, settings
from hypothesis import strategies as st
from mixins.model import padded_batch, relative_error, total_relative_error
from mixins.padding import computed_tokens
from mixins.patch import CONFIGS, builtin_model
from parameterized import parameterized
from peft import LoraConfig, get_peft_model
from transformers import Qwen3_5TextForSequenceClassification

from transformers_packed import patch_model, use_float8
from transformers_packed.models.padding import PaddedBatch


def make_batch():
    """Two answers to a prompt, and another document, padded on the right."""
    generator = torch.Generator().manual_seed(0)
    prompt, *others = (torch.randint(1, 60, (n,), generator=generator) for n in (70, 3, 1, 9))
    documents = [torch.cat([prompt, others[0]]), others[2], torch.cat([prompt, others[1] + 60])]
    return padded_batch(documents, "right")


def make_model(family="qwen3_5"):
    model = patch_model(builtin_model(family))
    model.share_prompts = True
    return model


def classifier():
    return Qwen3_5TextForSequenceClassification(copy.deepcopy(CONFIGS["qwen3_5"]))


class TransformsTest(unittest.TestCase):
    """Under `torch.func`, the gradients are those of autograd."""

    def check(self, model, batch):
        model(**batch, use_cache=False, skip_logits=False).loss.backward()
        expected = {name: p.grad for name, p in model.named_parameters()}

        def loss(parameters):
            options = {**batch, "use_cache": False}
            return torch.func.functional_call(model, parameters, (), options).loss

        actual = torch.func.grad(loss)(dict(model.named_parameters()))
        self.assertLess(total_relative_error(actual, expected), 1e-5)

    def test_padded_batch(self):
        self.check(make_model(), make_batch())

    def test_packed_row(self):
        row = {"input_ids": torch.arange(20)[None], "labels": torch.arange(20)[None]}
        row |= {"cu_seqlens": torch.tensor([0, 9, 14, 20]), "parent_of": torch.tensor([-1, 0, 0])}
        self.check(make_model(), row)


@st.composite
def trees(draw):
    """Lengths and parents of the documents of a row, up to two chunks long."""
    parents = [-1, 0, *(draw(st.integers(-1, document - 1)) for document in range(2, draw(st.integers(2, 7))))]
    lengths = draw(st.lists(st.one_of(st.integers(1, 5), st.integers(1, 70)), min_size=7, max_size=7))
    return lengths[: len(parents)], parents


class TreesTest(unittest.TestCase):
    """Each document of a row equals the end of the row of its ancestors and itself, in outputs and gradients."""

    @classmethod
    def setUpClass(cls):
        cls.models = {family: patch_model(builtin_model(family)).double() for family in cls.BARS}

    # Routers compute in float32.
    BARS: ClassVar = {"qwen3_5": 1e-11, "qwen3_5_moe": 1e-6, "kimi_linear": 1e-6}

    @parameterized.expand([*BARS])
    @given(tree=trees(), seed=st.integers(0, 1000))
    @settings(deadline=None, max_examples=4)
    def test_any_tree(self, family, tree, seed):
        self.compare(self.models[family], *tree, seed, self.BARS[family])

    @parameterized.expand([("checkpointing", 1e-5), ("lora", 1e-5), ("in_4_bit", 1e-5), ("float8", 0.1)])
    def test_other_ways_to_train(self, way, bar):
        """On a path of turns with a branch at each. Float8 rounds the sum of gradients in place of its terms."""
        torch.manual_seed(0)
        model = builtin_model("qwen3_5")
        if way == "in_4_bit":
            store_in_nf4(model, torch.float32)
        model = patch_model(model)
        if way == "float8":
            use_float8(model, lambda module, name: "mlp" in name)
        if way == "checkpointing":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if way in ("lora", "in_4_bit"):
            model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
        self.compare(model.train(), [9, 2, 70, 3, 5, 2, 1, 30], [-1, 0, 1, 2, 0, 1, 2, 3], 0, bar)

    def compare(self, model, lengths, parent_of, seed, bar):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, 60, (sum(lengths),), generator=generator)
        upstream = torch.randn(sum(lengths), model.config.vocab_size, generator=generator, dtype=torch.float64)

        def gradients(loss):
            model.zero_grad()
            loss.backward()
            return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

        places = [0, *accumulate(lengths)]
        row = {"cu_seqlens": torch.tensor(places), "parent_of": torch.tensor(parent_of)}
        logits = model(ids[None], **row, use_cache=False).logits[0]
        paths, expected = [], []
        for own, parent in zip(torch.arange(sum(lengths)).split(lengths), parent_of, strict=True):
            paths.append(torch.cat([paths[parent] if parent >= 0 else own[:0], own]))
            expected.append(model(ids[paths[-1]][None], use_cache=False).logits[0, -len(own) :])
        expected = torch.cat(expected)
        self.assertLess(relative_error(logits, expected), bar)
        found, want = (gradients((x * upstream).sum()) for x in (logits, expected))
        self.assertGreater(len(found), 0)
        self.assertLess(total_relative_error(found, want), bar)


class ClassifiersTest(unittest.TestCase):
    def test_packed_row(self):
        """The answers to a prompt have labels of their own, but the prompt has none."""
        model = patch_model(classifier())
        row = {"cu_seqlens": torch.tensor([0, 9, 14, 20]), "parent_of": torch.tensor([-1, 0, 0])}
        with self.assertRaisesRegex(
            ValueError, "a classifier of documents does not support a row with shared prompts"
        ):
            model(torch.arange(20)[None], **row)

    def test_padded_batch(self):
        """Each answer is classified by its own last token."""
        builtin = classifier()
        model = patch_model(copy.deepcopy(builtin))
        model.share_prompts = True
        batch = make_batch() | {"labels": torch.tensor([0, 1, 2])}
        outputs = []
        for each in (model, builtin):
            with computed_tokens(each) as seen:
                outputs.append(each(**batch, use_cache=False))
            outputs[-1].loss.backward()
            outputs.append(seen)
        (got, seen, want, _) = outputs
        self.assertEqual(seen, {int(batch["attention_mask"].sum()) - 70})
        self.assertLess(relative_error(got.logits, want.logits), 1e-5)
        gradients = ({name: p.grad for name, p in each.named_parameters()} for each in (model, builtin))
        self.assertLess(total_relative_error(*gradients), 1e-5)


class PaddedBatchTest(unittest.TestCase):
    def batch_of(self, documents, side):
        length = max(map(len, documents))
        ids, mask = torch.zeros(2, len(documents), length, dtype=torch.long)
        for i, document in enumerate(documents):
            own = slice(length - len(document), None) if side == "left" else slice(len(document))
            ids[i, own], mask[i, own] = torch.tensor(document), 1
        batch = PaddedBatch.from_attention_mask(mask, ids.device, ids)
        packed = batch.packed({"input_ids": ids})
        self.assertTrue(torch.equal(batch.unpack(packed["input_ids"][0]).view(ids.shape), ids))
        return batch.boundaries, packed["input_ids"].tolist(), packed["position_ids"].tolist()

    @parameterized.expand(["right", "left"])
    def test_the_row(self, side):
        """Prompts and documents alone come first, and every real token has a slot."""
        prompt = list(range(1, 71))
        documents = [[90, 91], [*prompt, 80], [92], [*prompt, 81, 82], [*prompt, 80, 83]]
        boundaries, ids, position_ids = self.batch_of(documents, side)
        self.assertEqual(boundaries.lengths, [70, 2, 1, 1, 2, 2])
        self.assertEqual(boundaries.parent_of, (-1, -1, -1, 0, 0, 0))
        self.assertEqual(ids, [[*prompt, 90, 91, 92, 80, 81, 82, 80, 83]])
        after = [70, 70, 71, 70, 71]
        self.assertEqual(position_ids, [[*range(70), 0, 1, 0, *after]])

    @parameterized.expand(["right", "left"])
    def test_the_row_of_a_tree(self, side):
        """Two answers to a prompt begin with the same turn. Levels come one after the other."""
        prompt, turn = list(range(1, 71)), list(range(201, 271))
        documents = [[*prompt, *turn, 80], [90], [*prompt, 81], [*prompt, *turn, 82, 83]]
        boundaries, ids, position_ids = self.batch_of(documents, side)
        self.assertEqual(boundaries.lengths, [70, 1, 70, 1, 1, 2])
        self.assertEqual(boundaries.parent_of, (-1, -1, 0, 0, 2, 2))
        self.assertEqual(ids, [[*prompt, 90, *turn, 81, 80, 82, 83]])
        self.assertEqual(position_ids, [[*range(70), 0, *range(70, 140), 70, 140, 140, 141]])
        self.assertIsNone(boundaries.layout.levels(8).sources)

    def test_a_batch_without_padding(self):
        ids = torch.cat([torch.arange(99).expand(3, -1), torch.tensor([[5], [6], [7]])], dim=1)
        mask = torch.ones_like(ids)
        self.assertEqual(PaddedBatch.from_attention_mask(mask, ids.device, ids).boundaries.lengths, [99, 1, 1, 1])
        self.assertIsNone(PaddedBatch.from_attention_mask(mask, ids.device))

    def test_equal_documents(self):
        """Each keeps its last token."""
        ids = torch.arange(100).expand(3, -1)
        batch = PaddedBatch.from_attention_mask(torch.ones_like(ids), ids.device, ids)
        self.assertEqual(batch.boundaries.lengths, [99, 1, 1, 1])
