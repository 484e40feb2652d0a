"""What `launches.py` starts beside the examples: a checkpoint to train, and a run to save, resume or kill.

    python benchmarks/launch_worker.py make --shape 0.8B --folder /dev/shm/checkpoint
    torchrun --nproc_per_node 2 benchmarks/launch_worker.py train --model /dev/shm/checkpoint --output run --save-at 4
    torchrun --nproc_per_node 2 benchmarks/launch_worker.py train --model /dev/shm/checkpoint --output run --resume 4

`make` trains for a few steps, so that samples differ in their loss and answers are text. `train` packs rows with
`configure_packing`, and writes the loss of each step and a hash of each row to `OUTPUT/NAME.rank0.jsonl`, one file per process.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from datasets import Dataset
from shapes import MODELS
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from transformers_packed import configure_packing


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import common


CHATS = 200  # what the examples train on


def tokenized(chats: list, tokenizer) -> Dataset:
    rows = [tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"] for chat in chats]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def arguments(output: Path, **more) -> TrainingArguments:
    cuda = torch.cuda.is_available()
    more |= {"per_device_train_batch_size": 1, "bf16": cuda, "report_to": "none", "save_strategy": "no"}
    return TrainingArguments(str(output), disable_tqdm=True, **more)


def make(options: argparse.Namespace) -> None:
    """Save a language model, a vision-language model with the same text weights, and a file of chats."""
    folder, shape, cuda = options.folder, MODELS[options.shape], torch.cuda.is_available()
    set_seed(0)
    tokenizer = common.tiny_tokenizer()
    config = AutoConfig.for_model(**shape | {"pad_token_id": tokenizer.pad_token_id, "use_cache": True})
    with torch.device("cuda" if cuda else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Other chats than those of the examples.
    chats = common.chats(CHATS + 2000)["messages"]
    rate = 2e-3 if options.shape == "tiny" else 3e-4
    more = {"learning_rate": rate, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5, "logging_steps": 5}
    data = tokenized(chats[CHATS:], tokenizer)
    trainer = Trainer(model, arguments(folder / "trainer", max_steps=options.steps, **more), train_dataset=data)
    configure_packing(trainer, True, max_length=options.tokens)
    trainer.train()
    state = {name: x.to(torch.bfloat16 if cuda else torch.float32) for name, x in model.state_dict().items()}
    with torch.device("cuda" if cuda else "cpu"):
        stock = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if cuda else torch.float32)
    stock.load_state_dict(state)
    stock.save_pretrained(folder / "text")
    tokenizer.save_pretrained(folder / "text")
    lines = [json.dumps({"messages": messages}) for messages in chats[:CHATS]]
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    try:
        make_vision(folder / "vision", config, stock, tokenizer)
    except Exception as error:
        (folder / "vision.txt").write_text(f"{type(error).__name__}: {error}"[:300], encoding="utf-8")
    (folder / "complete").touch()


def make_vision(folder: Path, text, stock: torch.nn.Module, tokenizer) -> None:
    """A small vision tower in front of the language model, with a processor that needs torchvision."""
    from transformers import AutoProcessor, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    patches = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
    images = Qwen2VLImageProcessor(**patches, size={"shortest_edge": 64, "longest_edge": 4096})
    videos = Qwen3VLVideoProcessor(**patches)
    processor = Qwen3VLProcessor(images, tokenizer, videos, chat_template=common.TEMPLATE)
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "patch_size": 4}
    vision |= {"temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 64}
    vision["out_hidden_size"] = text.hidden_size
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(common.IMAGE_TOKENS), strict=True))
    rope = dict(text.rope_parameters)
    half = int(text.head_dim * rope["partial_rotary_factor"]) // 2
    # Three parts, the first for time.
    rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    config = Qwen3_5Config(
        text_config=text.to_dict() | {"rope_parameters": rope},
        vision_config=vision,
        tie_word_embeddings=text.tie_word_embeddings,
        **ids,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3_5ForConditionalGeneration(config).to(stock.dtype)
    model.model.language_model.load_state_dict(stock.model.state_dict())
    model.tie_weights()
    # Image features of about the size of token embeddings, as after training. Larger ones make steps depend on rounding.
    with torch.no_grad():
        model.model.visual.merger.linear_fc2.weight.mul_(0.1)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    AutoProcessor.from_pretrained(folder)


class Recording(Trainer):
    """Keeps a hash of each row that it trains on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rows: list[str] = []

    def training_step(self, model, inputs, *args, **kwargs):
        self.rows.append(hashlib.sha256(inputs["input_ids"].cpu().numpy().tobytes()).hexdigest()[:12])
        return super().training_step(model, inputs, *args, **kwargs)


class Record(TrainerCallback):
    """Writes rows and losses, saves one checkpoint, and ends process 1 with SIGKILL in the middle of a step."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.rank, self.trainer = options, int(os.environ.get("RANK", 0)), None
        self.path = options.output / f"{options.name}.rank{self.rank}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)

    def write(self, **entry) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def on_step_begin(self, args, state, control, **kwargs):
        if self.options.kill_at == state.global_step and self.rank == 1:
            threading.Timer(0.05, self.kill).start()

    def kill(self) -> None:
        self.path.with_suffix(".killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args, state, control, **kwargs):
        self.write(step=state.global_step, rows=self.trainer.rows)
        self.trainer.rows = []
        control.should_save = state.global_step == self.options.save_at

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.write(step=state.global_step, loss=logs["loss"], grad_norm=float(logs["grad_norm"]))


def train(options: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    # Before the model: with FSDP, only one process then reads the weights.
    args = arguments(
        options.output,
        max_steps=options.steps,
        gradient_accumulation_steps=options.accumulation,
        logging_steps=1,
        use_cpu=not torch.cuda.is_available() and "ACCELERATE_USE_FSDP" not in os.environ,
    )
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    record = Record(options)
    data = tokenized(common.chats(CHATS)["messages"], tokenizer)
    trainer = Recording(model, args, train_dataset=data, callbacks=[record])
    record.trainer = trainer
    configure_packing(trainer, True, max_length=options.tokens, overlong="truncate")
    checkpoint = str(options.output / f"checkpoint-{options.resume}") if options.resume else None
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.accelerator.end_training()  # destroys the process group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("make", help="save checkpoints")
    making.add_argument("--shape", choices=MODELS, default="0.8B")
    making.add_argument("--folder", type=Path, required=True)
    making.add_argument("--steps", type=int, default=40)
    making.add_argument("--tokens", type=int, default=2048, help="tokens of each row")
    making.set_defaults(run=make)
    training = commands.add_parser("train", help="train, and record rows and losses")
    training.add_argument("--model", required=True)
    training.add_argument("--output", type=Path, required=True)
    training.add_argument("--name", default="run", help="name of the record")
    training.add_argument("--steps", type=int, default=8)
    training.add_argument("--tokens", type=int, default=256, help="tokens of each row")
    training.add_argument("--accumulation", type=int, default=1, help="rows of each process in a step")
    training.add_argument("--save-at", type=int, metavar="STEP", help="save a checkpoint after this step")
    training.add_argument("--resume", type=int, metavar="STEP", help="start from the checkpoint of this step")
    training.add_argument("--kill-at", type=int, metavar="STEP", help="kill process 1 after this step")
    training.set_defaults(run=train)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
