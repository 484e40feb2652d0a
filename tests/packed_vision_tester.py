"""Images and videos in packed rows, for every vision-language family. The oracle is the built-in class, alone."""

import torch
from packed_model_tester import VOCAB_SIZE, gradients, relative_error, total_relative_error
from parameterized import parameterized
from transformers import set_seed

from transformers_packed import DataCollatorWithFlattening


IMAGE, VIDEO, VISION_START, VISION_END = 90, 91, 92, 93
TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "pad_token_id": 0,
}
TEXT = {
    **TINY,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}


def vision_config(text: dict) -> dict:
    return {
        "text_config": text,
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "patch_size": 2,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
        },
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
    }


def document(length: int, seed: int, images: tuple = (), videos: tuple = ()) -> dict:
    """`length` text tokens with images and videos in the middle; grids in patches (time, height, width)."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(1, 90, (length,), generator=generator)
    ids, types = text[: length // 2].tolist(), [0] * (length // 2)

    def vision(token: int, token_type: int, count: int):
        ids.extend([VISION_START, *[token] * count, VISION_END])
        types.extend([0, *[token_type] * count, 0])

    for time, height, width in images:
        vision(IMAGE, 1, time * height * width // 4)
    for time, height, width in videos:
        for frame in range(time):
            ids.append(10 + frame)  # a timestamp stands before each frame
            types.append(0)
            vision(VIDEO, 2, height * width // 4)
    ids += text[length // 2 :].tolist()
    types += [0] * (length - length // 2)
    feature = {"input_ids": ids, "mm_token_type_ids": types}
    for name, grids in (("image", images), ("video", videos)):
        if grids:
            patches = sum(time * height * width for time, height, width in grids)
            pixels = "pixel_values" if name == "image" else "pixel_values_videos"
            feature[pixels] = torch.randn(patches, 3 * 2 * 2 * 2, generator=generator)
            feature[f"{name}_grid_thw"] = torch.tensor(grids)
    return feature


def alone_batch(feature: dict) -> dict:
    columns = ("input_ids", "mm_token_type_ids")
    return {n: torch.tensor([v]) if n in columns else v for n, v in feature.items()}


class PackedVisionTesterMixin:
    """Set `builtin_class`, `packed_class` and `get_config()`."""

    gradient_bar = 2e-6

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.features = [
            document(9, 1, images=((1, 4, 4),)),
            document(3, 2),
            document(70, 3, images=((1, 4, 8), (1, 8, 4)), videos=((2, 4, 4),)),
            document(20, 4, videos=((3, 4, 8),)),
        ]

    def models(self):
        set_seed(0)
        builtin = self.builtin_class(self.get_config()).train()
        packed = self.packed_class(self.get_config()).train()
        packed.load_state_dict(builtin.state_dict())
        return builtin, packed

    def alone(self, model):
        lengths = [len(f["input_ids"]) for f in self.features]
        outputs = [model(**alone_batch(f), labels=torch.tensor([f["input_ids"]])) for f in self.features]
        targets = sum(n - 1 for n in lengths)
        loss = sum(x.loss * (n - 1) for x, n in zip(outputs, lengths, strict=True)) / targets
        return torch.cat([x.logits[0] for x in outputs]), loss

    def collate(self, model=None, **arguments):
        collator = DataCollatorWithFlattening(
            return_cu_seqlens=True, return_flash_attn_kwargs=True, return_seq_idx=True, model=model, **arguments
        )
        return collator(self.features)

    @parameterized.expand(["collator", "config", "two_rows", "cu_seqlens", "seq_idx"])
    def test_alone_equals_together(self, positions):
        """Position ids made by the collator, or once at the top of the model from any kind of boundaries."""
        builtin, model = self.models()
        logits, loss = self.alone(builtin)
        expected = gradients(builtin, loss)
        batch = self.collate({"collator": model, "config": model.config}.get(positions))
        self.assertEqual(batch["position_ids"].ndim, 3 if positions in ("collator", "config") else 2)
        if positions in ("cu_seqlens", "seq_idx"):
            others = {"cu_seqlens", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
            batch = {n: v for n, v in batch.items() if n not in others - {positions} and n != "position_ids"}
        packed = model(**batch)
        self.assertLess(relative_error(packed.logits[0], logits), 1e-5)
        self.assertLess(relative_error(packed.loss, loss), 1e-5)
        actual = gradients(model, packed.loss)
        self.assertLess(total_relative_error(actual, expected), self.gradient_bar)

    def test_the_comparison_can_fail(self):
        """The built-in model, given the same row with two-dimensional position ids, is far off."""
        builtin, _ = self.models()
        logits, _ = self.alone(builtin)
        batch = self.collate()
        names = ("input_ids", "position_ids", "mm_token_type_ids", "pixel_values", "image_grid_thw")
        names += ("pixel_values_videos", "video_grid_thw")
        leaking = builtin(**{name: batch[name] for name in names}).logits[0]
        self.assertGreater(relative_error(leaking, logits), 1e-3)

    def test_no_leak(self):
        _, model = self.models()
        model.eval()
        lengths = [len(f["input_ids"]) for f in self.features]
        batch = self.collate(model)
        with torch.no_grad():
            before = model(**batch).logits[0].split(lengths)
            patches = 16  # those of the first document's image
            batch["pixel_values"] = batch["pixel_values"].clone()
            batch["pixel_values"][:patches] += 1.0
            after = model(**batch).logits[0].split(lengths)
        self.assertGreater(relative_error(after[0], before[0]), 1e-4)
        for got, want in zip(after[1:], before[1:], strict=True):
            self.assertLess(relative_error(got, want), 1e-4)

    def test_boundaries_stay_out_of_the_vision_tower(self):
        _, model = self.models()
        seen = []
        model.model.visual.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(set(kwargs)), with_kwargs=True
        )
        model(**self.collate(), num_items_in_batch=torch.tensor(7))
        self.assertEqual(len(seen), 2)
        for names in seen:
            self.assertFalse(
                names & {"cu_seqlens", "seq_idx", "cu_seq_lens_q", "boundaries", "num_items_in_batch", "max_length_q"}
            )

    def test_loss_is_a_mean_over_the_step(self):
        _, model = self.models()
        self.assertTrue(model.accepts_loss_kwargs)
        batch = self.collate()
        targets = int((batch["labels"] != -100).sum())
        mean, over_two_steps = model(**batch).loss, model(**batch, num_items_in_batch=2 * targets).loss
        self.assertLess(relative_error(2 * over_two_steps, mean), 1e-5)

    def test_text_only_row_and_unpacked_input(self):
        builtin, model = self.models()
        self.features, features = [document(5, 7), document(66, 8)], self.features
        logits, _ = self.alone(builtin)
        self.assertLess(relative_error(model(**self.collate(model)).logits[0], logits), 1e-5)
        self.features = features
        alone = alone_batch(features[2])
        self.assertLess(relative_error(model(**alone).logits, builtin(**alone).logits), 1e-5)
        arguments = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        with torch.no_grad():
            expected = builtin.eval().generate(**alone, **arguments)
            self.assertEqual(model.eval().generate(**alone, **arguments).tolist(), expected.tolist())

    def test_tail_padding(self):
        _, model = self.models()
        total = sum(len(f["input_ids"]) for f in self.features)
        plain = model(**self.collate(model))
        padded = model(**self.collate(model, pad_to_multiple_of=64, pad_token_id=0))
        self.assertEqual(padded.logits.shape[1] % 64, 0)
        self.assertLess(relative_error(padded.logits[:, :total], plain.logits), 1e-5)
        self.assertLess(relative_error(padded.loss, plain.loss), 1e-5)

    @parameterized.expand(["collator", "model"])
    def test_images_that_do_not_fit(self, where):
        _, model = self.models()

        def run(**changes):
            if where == "collator":
                features = [dict(f) for f in self.features]
                for name, value in changes.items():
                    features[2][name] = value
                return DataCollatorWithFlattening(model=model)(features)
            batch = self.collate()
            features, self.features = self.features, [dict(f) for f in self.features]
            for name, value in changes.items():
                self.features[2][name] = value
            batch, self.features = self.collate(), features
            return model(**batch)

        third = self.features[2]
        with self.assertRaisesRegex(ValueError, "image tokens for entry 2.*got 8 in document 2"):
            run(image_grid_thw=torch.tensor([[1, 4, 8], [1, 4, 4]]))
        with self.assertRaisesRegex(ValueError, "0 image tokens for entry 2 .*in document 2"):
            run(image_grid_thw=torch.tensor([[1, 4, 8]]))
        with self.assertRaisesRegex(ValueError, "all 4 entries of image_grid_thw.*got 3"):
            run(image_grid_thw=torch.cat([third["image_grid_thw"], torch.tensor([[1, 4, 4]])]))

    def test_a_boundary_that_cuts_an_image(self):
        _, model = self.models()
        batch = self.collate()
        bounds = batch["cu_seqlens"].clone()
        inside = batch["input_ids"][0].tolist().index(IMAGE) + 2
        cut = torch.cat([bounds[:1], torch.tensor([inside], dtype=torch.int32), bounds[1:]])
        names = ("input_ids", "mm_token_type_ids", "pixel_values", "image_grid_thw", "pixel_values_videos")
        row = {name: batch[name] for name in (*names, "video_grid_thw")}
        with self.assertRaisesRegex(ValueError, "4 image tokens for entry 0.*got 2 in document 0.*boundary may cut"):
            model(**row, cu_seqlens=cut)
        row.pop("mm_token_type_ids")
        with self.assertRaisesRegex(ValueError, "mm_token_type_ids"):
            model(**row, cu_seqlens=bounds)
