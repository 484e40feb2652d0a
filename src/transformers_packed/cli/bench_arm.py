"""The processes of `transformers-packed bench`. `main` times one arm."""

import json
import os
import statistics
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, PreTrainedModel, set_seed

from ..data.collator import DataCollatorWithFlattening
from ..data.documents import PaddedSamples
from ..ops.compilations import tuned_in_threads
from ..training.kernels import Needs, start_compiling
from ..training.warm_up import warm_up
from .audit import hide_gpu_packages
from .demo_arms import peak_memory
from .models import untrained_model


_LEARNING_RATE = 1e-5
_LARGEST_NORM = 1.0
_FEWEST_STEPS = 3


def time_arm(arm: str, work: Path, device: torch.device) -> dict[str, Any]:
    """Time the steps of one arm."""
    settings = Namespace(**json.loads((work / "settings.json").read_text(encoding="utf-8")))
    set_seed(settings.seed)
    lengths, config, dtype = settings.lengths, AutoConfig.from_pretrained(work), getattr(torch, settings.dtype)
    # What `transformers-packed train` would load.
    model = untrained_model(config, settings, dtype, device, sum(lengths), ours=arm == "packed").train()
    vocabulary = model.config.get_text_config().vocab_size
    documents = [torch.randint(1, vocabulary, (length,)).tolist() for length in lengths]
    batches = pack(documents, model) if arm == "packed" else pad(documents, settings.batch_size)
    batches = [{name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in b.items()} for b in batches]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=_LEARNING_RATE)
    targets = torch.tensor(sum(lengths) - len(lengths), device=device)

    def loss_of(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            return model(**batch, num_items_in_batch=targets, use_cache=False).loss

    def step() -> float:
        losses = []
        for batch in batches:
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, _LARGEST_NORM)
        optimizer.step()
        optimizer.zero_grad()
        # Waits for the device.
        return torch.stack(losses).sum().item()

    started = []
    if arm == "padded":
        # Its own kernels take longer, so those of the packed arm are on disk when it comes.
        started = start_compiling(config, device, dtype, Needs(sum(lengths), len(lengths)))
    start = time.perf_counter()
    if arm == "packed":
        warm_up(model, sum(lengths), max_documents=len(lengths), loss=loss_of, dtype=dtype, evaluation=False)
    with tuned_in_threads():
        loss = step()
    first_step = time.perf_counter() - start
    for kernels in started:
        kernels.wait()
    step()
    seconds: list[float] = []
    with tqdm(desc=f"timing, {arm}", unit="step", disable=None, leave=False) as bar:
        while len(seconds) < _FEWEST_STEPS or sum(seconds) < settings.seconds:
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
            bar.update()
    return {
        "seconds": statistics.median(seconds),
        "tokens": sum(lengths),
        "computed_tokens": sum(batch["input_ids"].numel() for batch in batches),
        "peak_memory": torch.cuda.max_memory_reserved() if device.type == "cuda" else peak_memory(),
        "first_step": first_step,
        "loss": loss,
        "compiled_for_packed": bool(started),
    }


def pack(documents: list[list[int]], model: PreTrainedModel) -> list[dict[str, Any]]:
    """One row with all documents."""
    collator = DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True, model=model)
    return [collator([{"input_ids": ids} for ids in documents])]


def pad(documents: list[list[int]], size: int) -> list[dict[str, torch.Tensor]]:
    """Batches of up to `size` documents, padded to the longest of each batch."""
    samples, collator = [{"input_ids": ids} for ids in documents], PaddedSamples()
    return [collator(samples[first : first + size]) for first in range(0, len(samples), size)]


def main(arm: str, work: Path) -> None:
    """Write the result of one arm to `<arm>.json` in `work`, or that its memory does not suffice."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        # Before importing a modeling file, which selects the kernels if they can be imported.
        hide_gpu_packages()
    if arm == "padded":
        # FlashQLA would compile its kernels for batches, one after the other. Those of flash-linear-attention run.
        os.environ.setdefault("FLA_FLASH_QLA", "0")
    try:
        result = time_arm(arm, work, device)
    except torch.OutOfMemoryError:
        result = {"error": "out of memory"}
    (work / f"{arm}.json").write_text(json.dumps(result), encoding="utf-8")
