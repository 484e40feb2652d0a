"""A model is wholly of this package or untouched, however it was created."""

import copy
import unittest

import torch
import transformers
from common.families import documents, tiny_config
from mixins.model import alone, block_mask, packed_batch, relative_error, total_relative_error
from mixins.patch import BUILTINS, COMPOSITE, CONFIGS, builtin_model
from mixins.vision import alone_batch, document
from parameterized import parameterized
from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM
from transformers.models.auto import modeling_auto

from transformers_packed import DataCollatorWithFlattening, patch_model, registered
from transformers_packed.models import families
from transformers_packed.models.family import Mixers, Unpacked
from transformers_packed.models.generic import language_models
from transformers_packed.models.registry import check_patch, has_our_classes


# Stock classes that create their text model by an Auto class.
HEADS = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}
OTHERS = {
    "lfm2_vl": {"layer_types": ["conv", "full_attention"]},
    "minicpmv4_6": {"layer_types": ["linear_attention", "full_attention"]},
}
LENGTHS = (9, 1, 20, 5)


def models(model: torch.nn.Module) -> dict[str, bool]:
    """List the models inside of a model that accept text, and whether their class is ours."""
    return {
        name: type(module).__module__.startswith("transformers_packed.")
        for name, module in model.named_modules()
        if isinstance(module, transformers.PreTrainedModel) and "Vision" not in type(module).__name__
    }


def config_of(family: str):
    config = tiny_config(family)
    for name, value in OTHERS[family].items():
        setattr(config.text_config, name, value)
    return config


class WholeModelTest(unittest.TestCase):
    def check_whole(self, model: torch.nn.Module):
        self.assertTrue(has_our_classes(model))
        self.assertTrue(all(models(model).values()), models(model))

    @parameterized.expand(HEADS)
    def test_classes_that_no_mapping_of_ours_names(self, family):
        features = [document(9, 1, images=((1, 4, 4),)), document(3, 2), document(20, 3, images=((1, 4, 8),))]
        builtin = builtin_model(family, HEADS[family], COMPOSITE[family])
        stock, losses = getattr(BUILTINS[family], HEADS[family]), []
        targets = [len(f["input_ids"]) - 1 for f in features]
        outputs = [builtin(**alone_batch(f), labels=torch.tensor([f["input_ids"]])) for f in features]
        expected = sum(x.loss * n for x, n in zip(outputs, targets, strict=True)) / sum(targets)
        with registered():
            for create in (stock, AutoModelForMultimodalLM.from_config, stock._from_config):
                model = create(copy.deepcopy(COMPOSITE[family])).train()
                self.check_whole(model)
                model.load_state_dict(builtin.state_dict())
                losses.append(model(**DataCollatorWithFlattening(return_cu_seqlens=True, model=model)(features)).loss)
        for loss in losses:
            self.assertLess(relative_error(loss, expected), 1e-5)
        again = stock(copy.deepcopy(COMPOSITE[family]))
        self.assertFalse(any(models(again).values()))

    def test_classifiers_and_their_own_subclasses(self):
        class Head(transformers.Qwen3_5TextForSequenceClassification):
            pass

        with registered():
            self.check_whole(transformers.Qwen3NextForTokenClassification(copy.deepcopy(CONFIGS["qwen3_next"])))
            self.check_whole(transformers.Qwen3_5TextForSequenceClassification(copy.deepcopy(CONFIGS["qwen3_5"])))
            # This cannot become ours, and says so when it is to be packed.
            model = Head(copy.deepcopy(CONFIGS["qwen3_5"]))
        self.assertFalse(has_our_classes(model))
        with self.assertRaisesRegex(ValueError, "subclass or copy of a stock class, .*Head"):
            check_patch(model)

    @parameterized.expand(
        [("lfm2_vl", "patched"), ("minicpmv4_6", "registered"), ("lfm2_vl", "built"), ("minicpmv4_6", "half")]
    )
    def test_labels_of_enclosing_models(self, family, way):
        """No target crosses documents in a vision-language model around a text model of ours either."""
        config, rows = config_of(family), documents(LENGTHS)
        torch.manual_seed(0)
        stock = AutoModelForImageTextToText.from_config(config)
        self.assertFalse(any(models(stock).values()))
        logits, loss = alone(stock, rows)
        loss.backward()
        expected = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
        if way in ("patched", "half"):
            model = copy.deepcopy(stock)
            if way == "half":
                patch_model(model.model.language_model)
                self.assertFalse(has_our_classes(model))
            self.assertTrue(check_patch(model))
            patch_model(model)
        else:
            with registered():
                model = AutoModelForImageTextToText.from_config(config) if way == "registered" else type(stock)(config)
            model.load_state_dict(stock.state_dict())
        self.check_whole(model)
        batch = packed_batch(rows)
        batches = [{**batch, "labels": batch["input_ids"]}]
        row = {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
        batches += [{**row, "position_ids": batch["position_ids"]}, {**row, "attention_mask": block_mask(LENGTHS)}]
        for inputs in batches:
            model.zero_grad()
            output = model(**inputs)
            self.assertLess(relative_error(output.logits[0], torch.cat(logits)), 1e-5)
            self.assertLess(relative_error(output.loss, loss), 1e-5)
            output.loss.backward()
            actual = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            self.assertEqual(set(actual), set(expected))
            self.assertLess(total_relative_error(actual, expected), 1e-5)
        numbers = torch.tensor([[1] * 15 + [2] * 20])
        with self.assertRaisesRegex(ValueError, "expected attention_mask of 0 and 1, got 2"):
            model(row["input_ids"], attention_mask=numbers)

    def test_images_of_enclosing_models(self):
        """They are embeddings in a document, where the enclosing model gives them no positions of their own."""
        config = config_of("minicpmv4_6")
        config.image_token_id = 96
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config).eval()
        patch = config.vision_config.patch_size
        image = {"pixel_values": torch.randn(1, 3, patch, 32 * patch), "target_sizes": torch.tensor([[4, 8]])}
        first, second = (row.clamp(max=95) for row in documents((7, 9)))
        second = torch.cat([second[:3], torch.full((2,), 96), second[3:]])
        with torch.no_grad():
            alone = torch.cat([model(first[None]).logits[0], model(second[None], **image).logits[0]])
            row = packed_batch([first, second])
            row.pop("labels")
            packed = patch_model(model)(**row, **image).logits[0]
        self.assertLess(relative_error(packed, alone), 1e-5)

    def test_every_auto_class(self):
        """Each Auto class builds ours, or the class itself becomes ours when its text model does."""
        missing = []
        with registered():
            for name, auto in vars(modeling_auto).items():
                mapping = getattr(auto, "_model_mapping", None) if isinstance(auto, type) else None
                for model_type, cls in mapping._model_mapping.items() if mapping else ():
                    family = families.family_of(model_type)
                    if isinstance(family.apart, Mixers | Unpacked) and cls in language_models(family):
                        config = getattr(transformers, modeling_auto.CONFIG_MAPPING_NAMES[model_type])
                        if not mapping[config].__module__.startswith("transformers_packed."):
                            missing.append((name, model_type, cls))
        self.assertEqual(missing, [])
