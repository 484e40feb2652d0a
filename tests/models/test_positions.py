"""Position ids of every shape in which documents restart. The oracle is the stock class on each document alone."""

import copy
import unittest

import torch
from common.families import tiny_model
from mixins.kept_head import EXPERTS
from mixins.model import alone, gradients, relative_error, total_relative_error
from mixins.vision import TEXT, VISION_INPUTS, alone_batch, document, padded_documents, vision_config
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
VISION = {
    "vision_moe": (
        Qwen3_5MoeForConditionalGeneration,
        lambda: Qwen3_5MoeConfig(**vision_config({**TEXT, **EXPERTS})),
    ),
}
OWN = {"text": (Qwen3_5ForCausalLM, lambda: Qwen3_5TextConfig(**TEXT)), **VISION}
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
        shapes = ("[1, T]", "[3, 1, T]", "[4, 1, T]") if kind in ("text", *VISION) else ("[1, T]",)
        with torch.no_grad():
            for name in shapes:
                expected = stock(input_ids=row[None], position_ids=SHAPES[name](positions), use_cache=True).logits
                logits = model(input_ids=row[None], position_ids=SHAPES[name](positions), use_cache=True).logits
                self.assertLess(relative_error(logits, expected), 1e-5)

    @parameterized.expand(["text", "vision_moe", "jamba"])
    def test_several_rows(self, kind):
        model, rows = patch_model(model_of(kind)), torch.stack(tokens((12, 12)))
        restarting = torch.arange(12).remainder(7).expand(2, 12)
        for positions in (restarting, restarting.expand(3, 2, 12), restarting.expand(4, 2, 12)):
            with self.assertRaisesRegex(ValueError, "batch size 1.*position_ids that restart, got batch size 2"):
                model(input_ids=rows, position_ids=positions)


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

    @parameterized.expand(VISION)
    def test_documents_alone(self, kind):
        stock = model_of(kind)
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

    @parameterized.expand(VISION)
    def test_ordinary_calls(self, kind):
        """One document, whose positions the model computes or gets, and a padded batch with the positions of Qwen-VL."""
        stock = model_of(kind).eval()
        model = patch_model(copy.deepcopy(stock)).eval()
        one = self.batch(model, self.documents[2:])
        one.pop("cu_seqlens")
        four = one.pop("position_ids")
        given = {"3 rows": four[1:], "4 rows": four + 3}
        calls = {"computed": one} | {name: one | {"position_ids": x} for name, x in given.items()}
        for side in ("left", "right"):
            padded = padded_documents(self.documents, side)
            padded.pop("labels")
            names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "attention_mask")
            positions, _ = stock.model.get_rope_index(**{name: padded[name] for name in names})
            calls[side] = padded | {"position_ids": positions}
        for name, batch in calls.items():
            for cache in (True, False):
                with self.subTest(name), torch.no_grad():
                    expected, logits = (x(**batch, use_cache=cache).logits for x in (stock, model))
                    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
                    self.assertLess(relative_error(logits[real], expected[real]), 1e-5)


class OtherMasksTest(unittest.TestCase):
    @parameterized.expand(["text", "vision_moe", "jamba", "bloom"])
    def test_boundaries_as_a_mask(self, kind):
        """Collators for FlashAttention pass cumulative lengths as mask, others number the documents."""
        model, row = patch_model(model_of(kind)), torch.cat(tokens())[None]
        lengths = torch.tensor(LENGTHS)
        cumulative = torch.cat([torch.tensor([0]), lengths.cumsum(0)])
        numbers = torch.arange(1, 5).repeat_interleave(lengths)
        positions = torch.cat([torch.arange(n) for n in LENGTHS]).expand(3, 1, -1)
        for mask, fix in ((cumulative, "cu_seq_lens_q"), (numbers, "seq_idx")):
            for shaped, beside in ((mask, {}), (mask[None].int(), {"position_ids": positions})):
                with self.assertRaisesRegex(ValueError, f"[pP]ass them as {fix}"):
                    model(input_ids=row, attention_mask=shaped, **beside)
