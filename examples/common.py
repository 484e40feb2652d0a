"""Shared code of the examples: the command line, a tiny model, and small data for runs without a network or a GPU."""

import argparse
import sys
import tempfile
from collections.abc import Callable

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3VLProcessor,
    set_seed,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
IMAGE_TOKENS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", *IMAGE_TOKENS]
COLORS = {"red": (220, 30, 30), "green": (30, 160, 60), "blue": (40, 60, 220), "yellow": (240, 220, 40)}

_directory = tempfile.TemporaryDirectory()  # deleted when the process ends


def run(main: Callable[[argparse.Namespace], None], description: str, dataset: str, **more: dict) -> None:
    """Parse the command line and call `main`. Ctrl-C exits with status 130. `more` holds additional arguments."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=100)
    )
    parser.add_argument("--model", metavar="NAME", help="checkpoint (default: a tiny one with random weights)")
    parser.add_argument("--dataset", metavar="NAME", help=f"dataset with {dataset} (default: a small generated one)")
    parser.add_argument("--output", default="example", metavar="DIR", help="output directory (default: example)")
    parser.add_argument("--max-steps", type=int, default=10, metavar="N", help="training steps (default: 10)")
    parser.add_argument(
        "--batch-size", type=int, default=4, metavar="N", help="samples or rows per batch (default: 4)"
    )
    parser.add_argument("--max-length", type=int, default=1024, metavar="N", help="maximum tokens (default: 1024)")
    for name, options in more.items():
        parser.add_argument(f"--{name}", **options)
    try:
        options = parser.parse_args()
        # New weights, such as those of adapters, are the same in every run.
        set_seed(0)
        main(options)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte."""
    symbols = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=SPECIAL_TOKENS[2:],
        chat_template=TEMPLATE,
    )


def text_config(cls: type = Qwen3_5TextConfig, **more):
    return cls(
        vocab_size=len(SPECIAL_TOKENS) + 256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,  # three with the gated delta rule, one with attention
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        **more,
    )


def tiny_checkpoint(experts: bool = False) -> str:
    """Save a tiny Qwen3.5, or a mixture of experts, with random weights and return its directory."""
    set_seed(0)
    tiny_tokenizer().save_pretrained(_directory.name)
    if experts:
        widths = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
        config = text_config(Qwen3_5MoeTextConfig, num_experts=8, num_experts_per_tok=2, **widths)
        model = Qwen3_5MoeForCausalLM(config)
    else:
        model = Qwen3_5ForCausalLM(text_config())
    model.save_pretrained(_directory.name)
    return _directory.name


def tiny_teacher() -> Qwen3_5ForCausalLM:
    """Make a wider Qwen3.5 with random weights and the vocabulary of `tiny_checkpoint`."""
    set_seed(1)
    config = text_config()
    config.hidden_size = 128
    return Qwen3_5ForCausalLM(config)


def chats(number: int = 200) -> Dataset:
    """Chats about short and long sums."""
    random, rows = np.random.default_rng(0), []
    for _ in range(number):
        terms = random.integers(0, 100, 2 + int(random.exponential(6)))
        question, answer = " + ".join(map(str, terms)), str(terms.sum())
        rows.append([{"role": "user", "content": f"{question} = ?"}, {"role": "assistant", "content": answer}])
    return Dataset.from_dict({"messages": rows})


def preferences(number: int = 64) -> Dataset:
    """The questions of `chats`, with a correct and a wrong answer."""
    rows = []
    for question, answer in chats(number)["messages"]:
        wrong = {"role": "assistant", "content": str(int(answer["content"]) + 1)}
        rows.append({"prompt": [question], "chosen": [answer], "rejected": [wrong]})
    return Dataset.from_list(rows)


def trees(number: int = 64) -> Dataset:
    """Sums of four terms, a step at a time. Each step has two tries, and the reward is the share of correct steps."""
    random, rows = np.random.default_rng(0), []
    for _ in range(number):
        terms = random.integers(10, 100, 4).tolist()
        turns = [
            {"role": "user", "content": f"Add these numbers, one at a time: {terms}", "parent": -1, "reward": 0.0}
        ]
        steps = [(0, 0.0)]
        for last in range(1, 4):
            tries = []
            for parent, reward in steps:
                for wrong in (0, int(random.integers(1, 10))):
                    total = f"{sum(terms[: last + 1]) + wrong}"
                    reached = reward + (wrong == 0) / 3
                    tries.append((len(turns), reached))
                    turns.append({"role": "assistant", "content": total, "parent": parent, "reward": reached})
            steps = []
            for parent, reward in tries if last < 3 else ():
                steps.append((len(turns), reward))
                turns.append({"role": "user", "content": "And the next?", "parent": parent, "reward": 0.0})
        rows.append({"turns": turns})
    return Dataset.from_list(rows)


class _ImagesProcessor(Qwen3VLProcessor):
    """The processor of Qwen3.5 without video processing, which needs torchvision."""

    def check_argument_for_proper_class(self, name, argument):
        if name != "video_processor":
            super().check_argument_for_proper_class(name, argument)


def tiny_vision_checkpoint() -> tuple[str, Qwen3VLProcessor]:
    """Save a tiny vision-language Qwen3.5 with random weights and return its directory and processor."""
    images = Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 64, "longest_edge": 4096}
    )
    tokenizer = tiny_tokenizer()
    processor = _ImagesProcessor(images, tokenizer, video_processor=None, chat_template=TEMPLATE)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "patch_size": 4}
    vision |= {"temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 64, "num_position_embeddings": 64}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(IMAGE_TOKENS), strict=True))
    set_seed(0)
    text = text_config(rope_parameters=rope).to_dict()
    config = Qwen3_5Config(text_config=text, vision_config=vision, **ids)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(_directory.name)
    return _directory.name, processor


def image_chats(number: int = 64) -> list[dict]:
    """Colored rectangles, each with a question about its color."""
    from PIL import Image

    random, rows = np.random.default_rng(0), []
    for _ in range(number):
        color = list(COLORS)[random.integers(len(COLORS))]
        image = Image.new("RGB", tuple((8 * random.integers(1, 6, 2)).tolist()), COLORS[color])
        question = [{"type": "image"}, {"type": "text", "text": "Which color is this?"}]
        answer = [{"type": "text", "text": f"It is {color}."}]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"images": [image], "messages": messages})
    return rows
