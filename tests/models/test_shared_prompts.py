"""Which documents of a padded batch share which prompts. Whole models are tested in mixins/padding.py."""

import copy
import random
import unittest
from itertools import accumulate
from typing import ClassVar
from unittest import mock

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixins.model import padded_batch, relative_error, total_relative_error
from mixins.padding import computed_tokens
from mixins.patch import CONFIGS, builtin_model
from parameterized import parameterized
from transformers import Qwen3_5TextForSequenceClassification

from transformers_packed import patch_model
from transformers_packed.models import padding
from transformers_packed.models.padding import PaddedBatch, shared_prompts


def partitions(items):
    if not items:
        yield []
        return
    first, *rest = items
    for parts in partitions(rest):
        yield [[first], *parts]
        for k in range(len(parts)):
            yield [*parts[:k], [first, *parts[k]], *parts[k + 1 :]]


def common(documents):
    """The number of tokens that all documents start with, of which each keeps one at least."""
    n = min(map(len, documents)) - 1
    return next((k for k in range(n) if len({document[k] for document in documents}) > 1), n)


def most_saved(documents):
    """The largest number of tokens that any grouping saves."""
    return max(
        sum(common([documents[i] for i in part]) * (len(part) - 1) for part in parts)
        for parts in partitions(list(range(len(documents))))
    )


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
    parents = [-1, 0, *(draw(st.integers(-1, document - 1)) for document in range(2, draw(st.integers(2, 9))))]
    lengths = draw(st.lists(st.one_of(st.integers(1, 5), st.integers(1, 90)), min_size=9, max_size=9))
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
    @settings(deadline=None, max_examples=12)
    def test_any_tree(self, family, tree, seed):
        (lengths, parent_of), model = tree, self.models[family]
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
        self.assertLess(relative_error(logits, expected), self.BARS[family])
        found, want = (gradients((x * upstream).sum()) for x in (logits, expected))
        self.assertLess(total_relative_error(found, want), self.BARS[family])


class ClassifiersTest(unittest.TestCase):
    def test_packed_row(self):
        """The answers to a prompt have labels of their own, but the prompt has none."""
        model = patch_model(classifier())
        row = {"cu_seqlens": torch.tensor([0, 9, 14, 20]), "parent_of": torch.tensor([-1, 0, 0])}
        with self.assertRaisesRegex(ValueError, "got a row with shared prompts. .* without parent_of"):
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


class GroupingTest(unittest.TestCase):
    @parameterized.expand([(seed,) for seed in range(60)])
    def test_saves_as_much_as_any_grouping(self, seed):
        draw = random.Random(seed)
        # Distinct last tokens, because documents that are the start of others are grouped with neighbors only.
        lengths = [draw.randint(0, 8) for _ in range(draw.randint(2, 6))]
        documents = [[*(draw.randint(1, 2) for _ in range(n)), 10 + k] for k, n in enumerate(lengths)]
        with mock.patch.object(padding, "_LEAST_SAVED", 1):
            groups = shared_prompts([np.array(document) for document in documents])
        saved = sum(tokens * (len(members) - 1) for members, tokens in groups)
        self.assertEqual(saved, most_saved(documents), documents)
        for members, tokens in groups:
            self.assertEqual(tokens, common([documents[i] for i in members]))
        self.assertEqual(len({i for members, _ in groups for i in members}), sum(len(m) for m, _ in groups))

    def test_a_short_prompt_is_not_worth_it(self):
        for tokens, shared in ((63, False), (64, True)):
            documents = [np.array([*range(tokens), 100 + k]) for k in range(2)]
            self.assertEqual(bool(shared_prompts(documents)), shared)

    @parameterized.expand(["right", "left"])
    def test_the_row(self, side):
        """Prompts and documents alone come first, and every real token has a slot."""
        prompt = list(range(1, 71))
        documents = [[90, 91], [*prompt, 80], [92], [*prompt, 81, 82], [*prompt, 80, 83]]
        ids, mask = torch.zeros(2, 5, 72, dtype=torch.long)
        for i, document in enumerate(documents):
            own = slice(72 - len(document), None) if side == "left" else slice(len(document))
            ids[i, own], mask[i, own] = torch.tensor(document), 1
        batch = PaddedBatch.from_attention_mask(mask, ids.device, ids)
        self.assertEqual(batch.boundaries.lengths, [70, 2, 1, 1, 2, 2])
        self.assertEqual(batch.boundaries.parent_of, (-1, -1, -1, 0, 0, 0))
        packed = batch.packed({"input_ids": ids})
        self.assertEqual(packed["input_ids"].tolist(), [[*prompt, 90, 91, 92, 80, 81, 82, 80, 83]])
        after = [70, 70, 71, 70, 71]
        self.assertEqual(packed["position_ids"].tolist(), [[*range(70), 0, 1, 0, *after]])
        self.assertTrue(torch.equal(batch.unpack(packed["input_ids"][0]).view(5, 72), ids))

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


if __name__ == "__main__":
    unittest.main()
