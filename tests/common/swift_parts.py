"""Stand-ins for the parts of ms-swift that the plugin changes, and tiny checkpoints as ms-swift loads them."""

import json
import random
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
import transformers
from common.records import make_tokenizer
from mixins.vision import TEXT, TINY, vision_config


HAS_SWIFT = find_spec("swift") is not None
# Lengths of the texts, three to a row.
LENGTHS = (30, 21, 11, 9, 35, 17)
_SPARSE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
# Bytes that the texts do not contain.
_VISION_TOKENS = dict(zip(("image", "video", "vision_start", "vision_end"), range(200, 204), strict=True))


class Arguments:
    """ms-swift's arguments, whose check does not accept SDPA for packed rows."""

    def _check_padding_free(self):
        raise ValueError("requires a flash attention implementation")


class Loader:
    """ms-swift's loader of models."""

    def load(self):
        return self.model, "processor"


class Template:
    """ms-swift's template, which calls the model in training."""

    def compute_sft_loss(self, model, inputs, num_items_in_batch=None, trainer=None):
        return model(**inputs)


def install() -> None:
    """Make the stand-ins importable under ms-swift's names, unless ms-swift is installed."""
    if "swift" in sys.modules or HAS_SWIFT:
        return
    parts = {
        "swift": {"__version__": "4.6.0"},
        "swift.arguments": {"SftArguments": Arguments},
        "swift.model": {},
        "swift.model.register": {"ModelLoader": Loader},
        "swift.template": {"Template": Template},
    }
    for name, attributes in parts.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(attributes)


def save_checkpoint(folder: Path, family: str) -> None:
    """Save a tiny model with random weights and its tokenizer or processor."""
    tokenizer = make_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 4, "initializer_range": 0.15, "eos_token_id": 1}
    sizes |= {"layer_types": ["linear_attention", "full_attention"] * 2}
    torch.manual_seed(0)
    if family == "qwen3_next":
        config = transformers.Qwen3NextConfig(**TINY | sizes | _SPARSE)
        transformers.Qwen3NextForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return
    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[family]
    values = vision_config(TEXT | sizes | (_SPARSE if name.endswith("Moe") else {}))
    values |= {f"{token}_token_id": value for token, value in _VISION_TOKENS.items()}
    values["vision_config"]["patch_size"] = 16
    config = getattr(transformers, f"{name}Config")(**values)
    getattr(transformers, f"{name}ForConditionalGeneration")(config).save_pretrained(folder)
    sizes = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    sizes["size"] = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
    transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**sizes),
        video_processor=transformers.Qwen3VLVideoProcessor(**sizes),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)


def save_chats(path: Path, count: int) -> None:
    """Save `count` random chats, one per line."""
    draw = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            text = "".join(draw.choice("abcdefghij ") for _ in range(LENGTHS[number % len(LENGTHS)]))
            middle = len(text) // 2
            messages = [{"role": "user", "content": text[:middle]}, {"role": "assistant", "content": text[middle:]}]
            file.write(json.dumps({"messages": messages}) + "\n")
