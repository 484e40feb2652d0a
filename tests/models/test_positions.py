"""Position ids of every shape in which documents restart. The oracle is the stock class on each document alone."""

import copy
import unittest

import torch
from common.families import tiny_model
from mixins.kept_head import EXPERTS
from mixins.model import alone, gradients, relative_error, total_relative_error
from mixins.vision import TEXT, VISION_INPUTS, alone_batch, document, vision_config
from parameterized import parameterized
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5TextConfig,
    set_seed,
)

from transformers_packed import DataCollatorWithFlattening, patch_model


LENGTHS = (9, 1, 20, 5)
SHAPES = {
    "[T]": lambda row: row[0],
    "[1, T]": lambda row: row,
    "[1, 1, T]": lambda row: row[None],
    "[3, 1, T]": lambda row: row.expand(3, 1, -1),
    "[4, 1, T]": lambda row: row.expand(4, 1, -1),
    "[4, 1, T], text counts on": lambda row: torch.cat([torch.arange(row.shape[1])[None, None], row.expand(3, 1, -1)]),
}
OWN = {
    "text": (Qwen3_5ForCausalLM, lambda: Qwen3_5TextConfig(**TEXT)),
    "vision_moe": (
        Qwen3_5MoeForConditionalGeneration,
        lambda: Qwen3_5MoeConfig(**vision_config({**TEXT, **EXPERTS})),
    ),
}
# Text with position ids of several rows, then generic families: with rotary embeddings, without them, and on documents.
MODELS = [*OWN, "lfm2", "jamba", "mamba", "bloom", "fuyu"]


def model_of(kind):
    set_seed(0)
    if kind not in OWN:
        return tiny_model(kind)
    cls, config = OWN[kind]
    model = cls(config())
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


def tokens(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 80, (n,), generator=generator) for n in lengths]


class TextTest(unittest.TestCase):
    @parameterized.expand(MODELS)
    def test_documents_alone(self, kind):
        stock, documents = model_of(kind), tokens()
        model = patch_model(copy.deepcopy(stock))
        stock.config.get_text_config().use_cache = False
        logits, loss = alone(stock, documents)
        expected = gradients(stock, loss)
        row, positions = torch.cat(documents)[None], torch.cat([torch.arange(n) for n in LENGTHS])[None]
        labels = row.masked_fill(positions == 0, -100)
        for name, shape in SHAPES.items():
            with self.subTest(name):
                output = model(input_ids=row, position_ids=shape(positions), labels=labels)
                self.assertLess(relative_error(output["logits"][0], torch.cat(logits)), 1e-5)
                self.assertLess(total_relative_error(gradients(model, output.loss), expected), 1e-4)

    @parameterized.expand(MODELS)
    def test_one_document(self, kind):
        """An ordinary call, which fills a cache."""
        stock, (row,) = model_of(kind).eval(), tokens((12,))
        model = patch_model(copy.deepcopy(stock))
        positions = torch.arange(12)[None]
        shapes = ("[1, T]", "[3, 1, T]", "[4, 1, T]") if kind in OWN else ("[1, T]",)
        with torch.no_grad():
            for name in shapes:
                expected = stock(input_ids=row[None], position_ids=SHAPES[name](positions), use_cache=True).logits
                logits = model(input_ids=row[None], position_ids=SHAPES[name](positions), use_cache=True).logits
                self.assertLess(relative_error(logits, expected), 1e-5)


class ImagesTest(unittest.TestCase):
    def setUp(self):
        self.documents = [
            document(9, 1, images=((1, 4, 4),)),
            document(3, 2),
            document(20, 3, images=((1, 4, 8), (1, 2, 2)), videos=((2, 4, 4),)),
        ]

    def batch(self, model, documents):
        """A row and its position ids `[4, 1, T]`."""
        collator = DataCollatorWithFlattening(model=model, return_cu_seqlens=True, on_leak="ignore")
        columns = "input_ids", "position_ids", "cu_seqlens", "mm_token_type_ids", *VISION_INPUTS
        return {name: x for name, x in collator(documents).items() if name in columns}

    def test_documents_alone(self):
        stock = model_of("vision_moe")
        model = patch_model(copy.deepcopy(stock))
        logits, loss = alone(stock, [alone_batch(x) for x in self.documents])
        expected = gradients(stock, loss)
        batch = self.batch(model, self.documents)
        four, bounds = batch.pop("position_ids"), batch.pop("cu_seqlens")
        counting = torch.cat([torch.arange(four.shape[-1])[None, None], four[1:]])
        for name, given in {
            "text positions": {"position_ids": four},
            "3 rows": {"position_ids": four[1:], "cu_seqlens": bounds},
            "text counts on": {"position_ids": counting, "cu_seqlens": bounds},
        }.items():
            with self.subTest(name):
                output = model(**batch, **given, labels=batch["input_ids"])
                self.assertLess(relative_error(output["logits"][0], torch.cat(logits)), 1e-5)
                self.assertLess(total_relative_error(gradients(model, output.loss), expected), 1e-4)
        for positions in (four[1:], counting):
            with self.assertRaisesRegex(ValueError, "cu_seq_lens_q or seq_idx for documents with images"):
                model(**batch, position_ids=positions)
        with self.assertRaisesRegex(ValueError, "position_ids with the 2 documents"):
            model(**batch, position_ids=four[1:], cu_seqlens=bounds[[0, 1, 3]])
