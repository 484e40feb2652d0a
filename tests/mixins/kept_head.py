"""Checkpoints with a head of multi-token prediction, and what every saved checkpoint of such a model must have."""

import json
import tempfile
from pathlib import Path
from unittest import TestCase

import torch
from mixins.vision import EXPERTS, TINY, vision_config
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    set_seed,
)

from transformers_packed import patch_model, registered
from transformers_packed.models.mtp import declares_head, find_head


def stock_models(text: dict) -> dict:
    """The class of each stock model that declares a head, and a function that builds its configuration."""
    return {
        "dense": (Qwen3_5ForCausalLM, lambda: Qwen3_5TextConfig(**text, mtp_num_hidden_layers=1)),
        "experts": (Qwen3_5MoeForCausalLM, lambda: Qwen3_5MoeTextConfig(**text, **EXPERTS, mtp_num_hidden_layers=1)),
        "qwen3_next": (Qwen3NextForCausalLM, lambda: Qwen3NextConfig(**text, **EXPERTS, num_nextn_predict_layers=1)),
        "composite": (
            Qwen3_5ForConditionalGeneration,
            lambda: Qwen3_5Config(**vision_config({**text, "mtp_num_hidden_layers": 1})),
        ),
        "composite experts": (
            Qwen3_5MoeForConditionalGeneration,
            lambda: Qwen3_5MoeConfig(**vision_config({**text, **EXPERTS, "mtp_num_hidden_layers": 1})),
        ),
    }


STOCK = stock_models(TINY)
HEADS = {
    "dense": ["layers.0.mlp.gate_proj.weight", "layers.0.mlp.down_proj.weight"],
    "split": [f"layers.0.mlp.experts.{i}.{name}_proj.weight" for i in range(4) for name in ("gate", "up", "down")],
    "stacked": ["layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"],
}
KINDS = [
    ("dense", "dense"),
    ("experts", "split"),
    ("experts", "stacked"),
    ("qwen3_next", "split"),
    ("composite", "dense"),
    ("composite experts", "split"),
    ("composite experts", "stacked"),
]


def head_of(kind):
    """The tensors of a head, of several dtypes and sizes. Their sizes matter to nobody here."""
    names = ["fc.weight", "norm.weight", "layers.0.self_attn.q_proj.weight", *HEADS[kind]]
    generator = torch.Generator().manual_seed(1)
    tensors = {f"mtp.{name}": torch.randn(3, i + 1, generator=generator) for i, name in enumerate(names)}
    return {name: x.bfloat16() if "norm" not in name else x for name, x in tensors.items()}


def saved_in(folder):
    """All tensors of a checkpoint, by its index or from its only file, as servers read them."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    names = json.loads(index.read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in set(names.values())}
    for name, file in names.items():
        assert name in files[file], name
    return {name: files[file][name] for name, file in names.items()}


class KeptHeadMixin(TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def checkpoint(self, kind="dense", layout="dense", sharded=False):
        """A stock checkpoint with a head."""
        cls, config = STOCK[kind]
        set_seed(0)
        source = self.folder / "source"
        cls(config()).save_pretrained(source, max_shard_size="30KB" if sharded else "5GB")
        head = head_of(layout)
        if sharded:
            save_file(head, source / "other.safetensors")
            path = source / "model.safetensors.index.json"
            index = json.loads(path.read_text())
            index["weight_map"] |= dict.fromkeys(head, "other.safetensors")
            path.write_text(json.dumps(index))
        else:
            save_file(load_file(source / "model.safetensors") | head, source / "model.safetensors", {"format": "pt"})
        return source

    def load(self, source, patched=False, **options):
        with registered():
            if not patched:
                return AutoModelForCausalLM.from_pretrained(source, **options)
        return patch_model(AutoModelForCausalLM.from_pretrained(source, **options))

    def check(self, folder, layout="dense", declared=True):
        """The head is there, the configuration declares it, and the stock class loads the rest as before."""
        saved, head = saved_in(folder), head_of(layout)
        self.assertEqual({name for name in saved if name.startswith("mtp.")}, set(head))
        for name, x in head.items():
            self.assertEqual(saved[name].dtype, x.dtype)
            self.assertTrue(torch.equal(saved[name].view(torch.uint8), x.view(torch.uint8)), name)
        model, about = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        self.assertEqual((set(about["missing_keys"]), set(about["unexpected_keys"])), (set(), set()))
        self.assertEqual(declares_head(model.config), declared)
        self.assertEqual(set(find_head(model.config)), set(head))
        return model
