"""Fine-tune a vision-language model in the stock Trainer: packed rows through ours, padded through the stock class."""

import tempfile
import unittest

import numpy as np
import torch
from common.records import SPECIAL
from mixins.model import total_relative_error
from mixins.vision import TEXT, vision_config
from parameterized import parameterized
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3VLProcessor,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from transformers_packed import DataCollatorWithFlattening, PackingDataset, registered


PAD, VISION = SPECIAL[0], ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
# Text, and images (height, width in pixels) at their places.
EXAMPLES = [
    (f"{PLACE} a cat", [(8, 8)]),
    ("only text", []),
    (f"first {PLACE} then {PLACE} and on it goes, for a good while: " + "so. " * 12, [(16, 4), (9, 13)]),
    (f"so {PLACE}", [(20, 12)]),
    ("x", []),
    (f"{PLACE}{PLACE}{PLACE} three", [(8, 8), (4, 4), (12, 8)]),
    ("what is this? " * 5 + PLACE, [(8, 16)]),
    ("a question without an image, " * 3, []),
]


class ImagesProcessor(Qwen3VLProcessor):
    """The processor of Qwen3.5 without its video part, which requires torchvision."""

    def check_argument_for_proper_class(self, name, argument):
        if name != "video_processor":
            super().check_argument_for_proper_class(name, argument)


def make_processor() -> Qwen3VLProcessor:
    symbols = [*SPECIAL, *VISION, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, extra_special_tokens=list(VISION))
    images = Qwen2VLImageProcessorPil(
        patch_size=2, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 16, "longest_edge": 400}
    )
    return ImagesProcessor(image_processor=images, tokenizer=tokenizer, video_processor=None)


def make_images() -> list[tuple[str, list[Image.Image]]]:
    random = np.random.default_rng(0)
    return [
        (text, [Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes])
        for text, sizes in EXAMPLES
    ]


class Processed(torch.utils.data.Dataset):
    """The processor's output for each example, with its number. Image tokens have no loss."""

    def __init__(self, processor):
        self.processor, self.examples = processor, make_images()

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        text, images = self.examples[index]
        batch = self.processor(text=[text], images=images or None, return_tensors="pt")
        per_token = ("input_ids", "attention_mask", "mm_token_type_ids")
        feature = {name: value[0] if name in per_token else value for name, value in batch.items()}
        labels = feature["input_ids"].masked_fill(feature["mm_token_type_ids"] != 0, -100)
        return {**feature, "labels": labels, "number": index}


class PaddedCollator:
    """The processor's own padded batch of some samples, or of rows of samples."""

    def __init__(self, dataset: Processed):
        self.dataset = dataset
        self.seen = 0

    def __call__(self, features):
        rows = [feature if isinstance(feature, list) else [feature] for feature in features]
        numbers = [sample["number"] for row in rows for sample in row]
        self.seen += len(numbers)
        texts, images = zip(*[self.dataset.examples[i] for i in numbers], strict=True)
        batch = self.dataset.processor(
            text=list(texts), images=[i for group in images for i in group] or None, padding=True, return_tensors="pt"
        )
        ignored = (batch["mm_token_type_ids"] != 0) | (batch["attention_mask"] == 0)
        return {**batch, "labels": batch["input_ids"].masked_fill(ignored, -100)}


class VisionTrainerTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name
        self.processor = make_processor()

    def model(self, arm):
        tokens = dict(zip(("image", "video", "vision_start", "vision_end"), VISION, strict=True))
        ids = {f"{name}_token_id": self.processor.tokenizer.convert_tokens_to_ids(t) for name, t in tokens.items()}
        text = {**TEXT, "vocab_size": len(self.processor.tokenizer)}
        config = Qwen3_5Config(**{**vision_config(text), **ids})
        set_seed(0)
        if arm == "padded":
            return AutoModelForImageTextToText.from_config(config)
        with registered():
            return AutoModelForImageTextToText.from_config(config)

    def train(self, arm, rows="samples", positions="collator", accumulation=2, model=None):
        """Run 10 steps. Return the change of each parameter, the losses, and the trainer."""
        model = model or self.model(arm)
        dataset = Processed(self.processor)
        if arm == "padded":
            collator = PaddedCollator(dataset)
        else:
            of_model = {"model": model} if positions == "collator" else {"on_leak": "ignore"}
            collator = DataCollatorWithFlattening(return_cu_seqlens=True, return_seq_idx=True, **of_model)
        if rows == "planned":
            dataset = PackingDataset(dataset, max_length=128)
            self.assertLess(len(dataset), len(EXAMPLES))
        args = TrainingArguments(
            self.directory,
            max_steps=10,
            per_device_train_batch_size=1 if rows == "planned" else 3,
            gradient_accumulation_steps=accumulation,
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_steps=1,
            remove_unused_columns=False,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model, args=args, train_dataset=dataset, data_collator=collator, processing_class=self.processor
        )
        if arm == "padded" and accumulation > 1:
            # The stock class computes a mean of the micro-batches' means, ours the mean over all targets of a step.
            self.assertFalse(trainer.model_accepts_loss_kwargs)
            trainer.model_accepts_loss_kwargs = True
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        trainer.train()
        updates = {name: p.detach() - before[name] for name, p in model.named_parameters()}
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return updates, losses, trainer

    @parameterized.expand(
        [("samples", "collator", 1), ("samples", "collator", 2), ("samples", "model", 2), ("planned", "collator", 2)]
    )
    def test_packed_updates_equal_padded_updates(self, rows, positions, accumulation):
        # Elsewhere: padding-free training with images scores lower.
        want, expected, padded = self.train("padded", rows, accumulation=accumulation)
        got, losses, packed = self.train("packed", rows, positions, accumulation)
        self.assertEqual(type(packed.model).__module__, "transformers_packed.models.qwen3_5.modeling_qwen3_5")
        self.assertGreater(padded.data_collator.seen, 20)
        self.assertEqual(len(expected), 10)
        for actual, loss in zip(losses, expected, strict=True):
            self.assertLess(abs(actual - loss) / loss, 1e-5)
        self.assertLess(total_relative_error(got, want), 1e-6)
        for name, update in got.items():
            if "visual" in name and name.endswith("weight"):
                self.assertGreater(update.abs().max(), 0, name)

    def test_the_comparison_can_fail(self):
        """The patches of a row's images are in the wrong order."""
        want, *_ = self.train("padded")
        model = self.model("packed")
        get_image_features = model.model.get_image_features
        model.model.get_image_features = lambda pixels, *a, **k: get_image_features(pixels.flip(0), *a, **k)
        swapped, *_ = self.train("packed", model=model)
        self.assertGreater(total_relative_error(swapped, want), 1e-4)
