"""What a fine-tune does to the drafts of a head of multi-token prediction, and what training the head alone gives back.

A small model learns Python sources from random weights, together with its head. Then the trunk alone is fine-tuned on
other text, C++ headers, and its head stays as it was. At last, only the head trains on the same text, with `mtp_only`.
After each stage, [`mtp_acceptance`] measures held-out documents of both texts. Every stage is a `PackedTrainer` that
loads the checkpoint of the stage before. Both texts are on every machine: the sources of the standard library and of the
installed packages, and the headers of torch.

    python benchmarks/mtp_acceptance.py --output benchmarks/results/mtp_acceptance.json
    python benchmarks/mtp_acceptance.py --corpora corpora.npz --steps 20 10 10 --size tiny
"""

import argparse
import json
import platform
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from float8_corpus import documents, first_files, source_files, texts, train_tokenizer
from shapes import MODELS
from step import versions
from transformers import AutoConfig, AutoModelForCausalLM, set_seed
from transformers.utils import logging

from transformers_packed import PackedTrainer, PackedTrainingArguments, add_mtp, mtp_acceptance, registered


VOCABULARY, ROW, HELD_OUT = 8192, 8192, 60
# Tokens of each text, of which the last documents are held out.
TOKENS = 4_000_000
SIZES = {
    # With the heads of the 0.8B model.
    "small": MODELS["0.8B"] | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8},
    "tiny": MODELS["tiny"],
}
STAGES = (
    ("trunk and head on Python", "python", {"mtp_loss_weight": 0.3}),
    ("trunk alone on C++", "c++", {}),
    ("head alone on C++", "c++", {"mtp_only": True}),
)


def headers() -> list[Path]:
    """The C++ headers of torch, in the order of their paths."""
    return sorted((Path(torch.__file__).parent / "include").rglob("*.h"))


def make_corpora(output: Path, tokens: int) -> None:
    """Write the documents of both texts, in random order, by a tokenizer that is trained on both."""
    files = {"python": source_files(), "c++": headers()}
    for found in files.values():
        random.Random(0).shuffle(found)
    sample = [text for found in files.values() for text in first_files(texts(found), tokens)]
    tokenizer = train_tokenizer(sample, VOCABULARY)
    arrays = {}
    for name, found in files.items():
        made = list(documents(tokenizer, texts(found), tokens))
        random.Random(1).shuffle(made)
        arrays[f"{name} ids"] = np.concatenate([np.array(document, dtype=np.uint16) for document in made])
        arrays[f"{name} lengths"] = np.array([len(document) for document in made], dtype=np.int32)
        print(f"{name}: {len(made):,} documents, {len(arrays[f'{name} ids']):,} tokens", flush=True)
    np.savez_compressed(output, **arrays)


def load_corpora(path: Path) -> dict[str, list[dict[str, list[int]]]]:
    arrays, found = np.load(path), {}
    for name in ("python", "c++"):
        parts = np.split(arrays[f"{name} ids"], arrays[f"{name} lengths"].cumsum()[:-1])
        found[name] = [{"input_ids": x.tolist(), "labels": x.tolist()} for x in parts if len(x) > 16]
    return found


def stages(args, corpora: dict, folder: Path) -> Iterator[dict]:
    """Train each stage from the checkpoint of the one before, and yield what was measured."""
    set_seed(0)
    config = AutoConfig.for_model(**SIZES[args.size] | {"vocab_size": VOCABULARY, "mtp_num_hidden_layers": 1})
    with registered():
        model = AutoModelForCausalLM.from_config(config)
    for (name, text, options), steps in zip(STAGES, args.steps, strict=True):
        arguments = PackedTrainingArguments(
            str(folder / "run"),
            max_steps=steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            packing=True,
            max_length=ROW,
            learning_rate=args.rate,
            warmup_steps=max(1, steps // 10),
            lr_scheduler_type="cosine",
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            logging_steps=max(1, steps // 5),
            save_strategy="no",
            report_to="none",
            **options,
        )
        start = time.perf_counter()
        trainer = PackedTrainer(model, arguments, train_dataset=corpora[text][:-HELD_OUT])
        trainer.train()
        seconds = time.perf_counter() - start
        trainer.save_model(str(folder / "model"))
        with registered():
            model = AutoModelForCausalLM.from_pretrained(folder / "model").to(arguments.device)
        # The head of the checkpoint: trained, or kept as it was.
        add_mtp(model)
        measured = {}
        with torch.autocast(arguments.device.type, torch.bfloat16, enabled=arguments.bf16):
            for held, samples in corpora.items():
                found = mtp_acceptance(model, samples[-HELD_OUT:], steps=3)
                figures = {"accepted": found.rates, "tokens_per_forward": found.tokens_per_forward}
                measured[held] = {key: np.round(x, 4).tolist() for key, x in figures.items()}
                measured[held]["loss_of_head"] = round(found.loss, 4)
        loss = next(x["loss"] for x in reversed(trainer.state.log_history) if "loss" in x)
        yield {
            "stage": name,
            "text": text,
            "steps": steps,
            "seconds": round(seconds, 1),
            "loss": loss,
            "held_out": measured,
        }
        # The next stage adds the head again if it trains.
        del model.mtp


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", type=Path, help="file with the texts, made if it is not there")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of each text")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, nargs=3, default=(700, 300, 300), help="steps of each stage")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    args = parser.parse_args(argv)
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        path = args.corpora or Path(name) / "corpora.npz"
        if not path.exists():
            make_corpora(path, args.tokens)
        corpora = load_corpora(path)
        found = []
        for stage in stages(args, corpora, Path(name)):
            found.append(stage)
            print(json.dumps(stage), flush=True)
            if args.output:
                machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
                report = {"machine": machine, "versions": versions(), "command": shlex.join(["python", *sys.argv])}
                report |= {"size": args.size, "model": SIZES[args.size], "stages": found}
                args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
