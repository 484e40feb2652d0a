"""Images and videos in packed rows, for every vision-language family. The oracle is the stock class, alone."""

import torch
from mixins.model import VOCAB_SIZE, packed_batch, padded_batch, relative_error
from parameterized import parameterized
from torch.nn.utils.rnn import pad_sequence


PIXELS = ("pixel_values", "pixel_values_videos")
VISION_INPUTS = (*PIXELS, "image_grid_thw", "video_grid_thw")
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
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
TEXT = {**TINY, "rope_parameters": ROPE}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
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
    """Build `length` text tokens with images and videos in the middle. Grids are in patches (time, height, width)."""
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
            ids.append(10 + frame)  # each frame follows a timestamp
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


def padded_documents(documents: list[dict], side: str = "right") -> dict:
    """A padded batch of documents, whose labels are their tokens."""
    batch = padded_batch([torch.tensor(d["input_ids"]) for d in documents], side)
    types = [torch.tensor(d["mm_token_type_ids"]) for d in documents]
    batch["mm_token_type_ids"] = pad_sequence(types, batch_first=True, padding_side=side)
    found = {name: [d[name] for d in documents if name in d] for name in VISION_INPUTS}
    return batch | {name: torch.cat(parts) for name, parts in found.items() if parts}


class PackedVisionTesterMixin:
    """Documents with images and videos. Mixed in before `PackedModelTesterMixin` or `PackedVariantTesterMixin`."""

    has_vision = True
    # The terms of the decay's gradients nearly cancel here: their norms are 1e-4, those of other parameters 1e-1. The
    # rest shows the rounding of the delta rule, which runs in float32 even in float64 models.
    decay_bar = 1e-4
    # A generated image token would require an image.
    suppress_tokens = (IMAGE, VIDEO, VISION_START, VISION_END)

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.documents = [
            document(9, 1, images=((1, 4, 4),)),
            document(1, 2),
            document(70, 3, images=((1, 4, 8), (1, 8, 4)), videos=((2, 4, 4),)),
            document(20, 4, videos=((3, 4, 8),)),
        ]
        cls.lengths = tuple(len(d["input_ids"]) for d in cls.documents)

    def single(self, document):
        return alone_batch(document)

    def padded(self, documents, side):
        return padded_documents(documents, side)

    def two_rows(self):
        rows = [document(64, 7, images=((1, 4, 4),)), document(53, 8, images=((1, 4, 4),), videos=((1, 2, 4),))]
        batch = self.padded(rows, "right")
        return {name: value for name, value in batch.items() if name not in ("attention_mask", "labels")}

    def shares(self, name):
        return self.lengths if name == "inputs_embeds" else tuple(len(d.get(name, ())) for d in self.documents)

    def changed(self, document):
        """A text token, the pixels of images, the pixels of videos.

        The vision tower computes all patches of a row at once, with attention per image. Shapes and order do not
        depend on pixels, so the bits of other images do not change.
        """
        ids = document["input_ids"]
        yield {**document, "input_ids": [ids[0] % 89 + 1, *ids[1:]]}
        for name in PIXELS:
            if name in document:
                yield {**document, name: document[name] + 1.0}

    @parameterized.expand(["collator", "config"])
    def test_position_ids_of_the_collator(self, positions):
        """The collator computes the same positions as the model, from a model or its configuration.

        With explicit boundaries, the row of text positions may be missing.
        """
        _, model = self.models()
        batch = packed_batch(self.documents, model={"collator": model, "config": model.config}[positions])
        self.assertEqual(batch["position_ids"].shape, (4, 1, sum(self.lengths)))
        expected = model(**packed_batch(self.documents)).logits
        self.assertTrue(torch.equal(model(**batch).logits, expected))
        three = {**batch, "position_ids": batch["position_ids"][1:]}
        self.assertTrue(torch.equal(model(**three).logits, expected))

    def test_boundaries_stay_out_of_the_vision_tower(self):
        _, model = self.models()
        seen = []
        model.model.visual.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(set(kwargs)), with_kwargs=True
        )
        model(**packed_batch(self.documents), num_items_in_batch=torch.tensor(7))
        model(**self.padded(self.documents, "right"), packs_padding=True)
        self.assertEqual(len(seen), 4)
        unwanted = {"cu_seqlens", "seq_idx", "cu_seq_lens_q", "boundaries", "max_length_q"}
        for names in seen:
            self.assertFalse(names & (unwanted | {"num_items_in_batch", "packs_padding"}))

    def test_text_only_row(self):
        builtin, model = self.models()
        self.documents = [document(5, 7), document(66, 8)]
        logits, _ = self.alone(builtin)
        packed = model(**packed_batch(self.documents, model=model)).logits[0]
        self.assertLess(relative_error(packed, torch.cat(logits)), self.logits_bar)

    @parameterized.expand(["collator", "model"])
    def test_images_that_do_not_fit(self, where):
        _, model = self.models()

        def run(**changes):
            third = {**self.documents[2], **changes}
            documents = [*self.documents[:2], third, *self.documents[3:]]
            model(**packed_batch(documents, model=model if where == "collator" else None))

        with self.assertRaisesRegex(ValueError, "image tokens for entry 2.*got 8 in document 2"):
            run(image_grid_thw=torch.tensor([[1, 4, 8], [1, 4, 4]]))
        with self.assertRaisesRegex(ValueError, "0 image tokens for entry 2 .*in document 2"):
            run(image_grid_thw=torch.tensor([[1, 4, 8]]))
        with self.assertRaisesRegex(ValueError, "all 4 entries of image_grid_thw.*got 3"):
            run(image_grid_thw=torch.cat([self.documents[2]["image_grid_thw"], torch.tensor([[1, 4, 4]])]))

    def test_a_boundary_that_cuts_an_image(self):
        _, model = self.models()
        batch = packed_batch(self.documents)
        bounds = batch["cu_seqlens"].clone()
        inside = batch["input_ids"][0].tolist().index(IMAGE) + 2
        cut = torch.cat([bounds[:1], torch.tensor([inside], dtype=torch.int32), bounds[1:]])
        row = {name: batch[name] for name in ("input_ids", "mm_token_type_ids", *VISION_INPUTS)}
        with self.assertRaisesRegex(
            ValueError, "4 image tokens for entry 0.*got 2 in document 0.*boundary may cut it"
        ):
            model(**row, cu_seqlens=cut)
        row.pop("mm_token_type_ids")
        with self.assertRaisesRegex(ValueError, "mm_token_type_ids"):
            model(**row, cu_seqlens=bounds)
