"""Compile every kernel that training needs before its first step.

A kernel is compiled when a row needs it for the first time, which can stop training for seconds at any step. Most of
what selects the variant of a kernel is fixed by a model and its options: widths, numbers of heads, dtypes, trained
parameters, adapters, and whether rows are packed. The rest depends on the row. These are all properties of a row that
select a variant:

* FlashQLA: one of three forward kernels, by documents times value heads relative to 0.35 and 0.7 times the number of
  multiprocessors. The limits differ by a factor of two, so numbers of documents that double select all kernels. All of
  them, and those of the backward, are compiled at the same time. Trees, segments and parts of rows have states at the ends
  of documents, which select others.
* Triton: whether an integer argument is a multiple of 16, and whether it needs 64 bits. Kernels of this package take
  the number of tokens without either. Their exceptions are numbers of elements, which are multiples of 16 if the width
  of the tensor is one. The convolution of flash-linear-attention takes the number of tokens. Rows with and without a
  multiple of 64 tokens select both, and a row of full length selects 64-bit integers.
* flash-linear-attention: nothing else. The keys of its measurements contain no number of tokens or documents.
* CUDA graphs: one graph for up to 6, 30, 126, 510, ... documents.
* This package: kernels that cast to float8 or compute an input again run from a number of tokens on.
* Evaluation: kernels of a forward without gradients.

`varlen_attn` and cuBLAS are compiled in advance. [`Needs`] lists what a training needs: the calls of the delta rules, and
a row for each of these properties. [`make_tree`] makes a row with all kinds of states. A loop of one's own that does not call [`warm_up`] compiles the kernels of the delta
rules together, too: each op starts those of its forward and backward when it is called for the first time.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers.utils import logging

from ..audit.model_state import as_before
from ..data.collator import DataCollatorWithFlattening
from ..data.samples import IGNORED_LABEL
from ..errors import input_error
from ..models.families import LANGUAGE_MODELS
from ..models.registry import inner_model
from ..ops.backends import tilelang_output
from ..ops.compilations import Compilation, compilations, tuned_in_threads
from .kernels import Needs, split, start_for


logger = logging.get_logger(__name__)


def warm_up(
    model: torch.nn.Module,
    max_length: int,
    *,
    max_documents: int | None = None,
    collator: Callable[[list[dict[str, Any]]], dict[str, Any]] | None = None,
    loss: Callable[[torch.nn.Module, dict[str, Any]], torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
    evaluation: bool = True,
    trees: bool = False,
    progress: bool = True,
) -> list[Compilation]:
    """Compile every kernel that training on packed rows of up to `max_length` tokens needs.

    Runs forward and backward of a few synthetic rows on the model itself. Weights, gradients, buffers, the training mode
    and the states of the random number generators remain as they were. On a device without compiled kernels, such as a
    CPU, nothing runs. [`PackedTrainer`] calls this function before its first step.

    Compiled kernels stay in the process, and in the disk caches of their packages: the next process loads them from
    there. In a process group, call it on all processes: a sharded model (FSDP) exchanges its weights in each forward.

    Args:
        model (`torch.nn.Module`):
            The model to train, on its device, with everything that changes it: adapters, gradient checkpointing,
            [`use_float8`], [`use_cuda_graphs`], FSDP.
        max_length (`int`):
            Maximum number of tokens per row.
        max_documents (`int`, *optional*):
            Maximum number of documents per row. Defaults to 128. More matter only for CUDA graphs.
        collator (`Callable`, *optional*):
            Collator that makes a row from samples. Defaults to [`DataCollatorWithFlattening`] with all boundaries.
        loss (`Callable`, *optional*):
            Function of the model and a batch on its device that returns the loss, as training will compute it. Pass one
            if you train under autocast. Defaults to the model's own loss.
        dtype (`torch.dtype`, *optional*):
            Dtype in which `loss` computes matrix products, if not in that of the weights. With it, the kernel that takes
            longest is compiled from the start, and otherwise when the first row needs it.
        evaluation (`bool`, *optional*, defaults to `True`):
            Also compile the kernels of an evaluation, a forward without gradients.
        trees (`bool`, *optional*, defaults to `False`):
            Also compile the kernels of rows with trees of samples or groups of answers, which the model has to support.
        progress (`bool`, *optional*, defaults to `True`):
            Show a progress bar if the output of errors is a terminal.

    Returns:
        `list`: a record for each kernel that was compiled, or loaded from a disk cache.

    Raises:
        `ValueError`: `max_length` is less than 2, or `max_documents` less than 1.
        `KeyboardInterrupt`: Ctrl-C. The message tells how many kernels were ready.

    Example:

    ```python
    >>> from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    >>> from transformers_packed import patch_model, warm_up
    >>> config = Qwen3_5TextConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
    >>> model = patch_model(Qwen3_5ForCausalLM(config))
    >>> warm_up(model, max_length=2048)  # on a CPU, no kernel is compiled
    []

    ```
    """
    if max_length < 2 or (max_documents is not None and max_documents < 1):
        got = f"max_length={max_length}, max_documents={max_documents}"
        raise input_error("max_length of at least 2 and max_documents of at least 1", got)
    needs = Needs(max_length, max_documents, trees)
    return compile_kernels(model, needs, collator, loss, dtype, evaluation, progress)


def compile_kernels(
    model: torch.nn.Module,
    needs: Needs,
    collator: Callable | None = None,
    loss: Callable | None = None,
    dtype: torch.dtype | None = None,
    evaluation: bool = True,
    progress: bool = True,
) -> list[Compilation]:
    """Compile the kernels of `needs` for a model, as [`warm_up`] does."""
    device = next(model.parameters()).device
    if not compiles_kernels(device):
        logger.info(f"warm_up: skipped on {device.type}, where no kernel is compiled.")
        return []
    collator = collator or DataCollatorWithFlattening(
        return_seq_idx=True, return_flash_attn_kwargs=True, model=model, on_leak="ignore"
    )
    loss, start = loss or _loss, time.perf_counter()
    rows = [partial(make_row, model, lengths, collator, device) for lengths in needs.rows]
    of_trees = [partial(make_tree, model, tokens, collator, device) for tokens in needs.trees_to_run]
    # What a forward without gradients needs depends on the states alone.
    evaluated = [*rows[:1], *of_trees[:1]] if evaluation else []
    with _reported(len(rows + of_trees + evaluated), progress) as (found, done), as_before(model):
        started = start_for(model, device, dtype or inner_model(model).dtype, needs)
        for make in rows + of_trees:
            value = loss(model, make())
            for kernels in started:
                # Ctrl-C does not stop a backward, which would wait as well.
                kernels.wait()
            value.backward()
            model.zero_grad()
            done()
        if evaluation:
            model.eval()
        with torch.no_grad():
            for make in evaluated:
                loss(model, make())
                done()
    built = sum(not one.from_disk for one in found)
    logger.info(
        f"warm_up: {built} kernels compiled and {len(found) - built} loaded in {time.perf_counter() - start:.1f} s."
    )
    return found


@contextmanager
def _reported(rows: int, progress: bool) -> Iterator[tuple[list[Compilation], Callable[[], Any]]]:
    """Note what is compiled meanwhile, with variants in threads. Yields the records, and what counts a row."""
    found: list[Compilation] = []
    # While threads compile, the output of errors is a pipe.
    hidden = (False if tilelang_output.errors_are_shown() else None) if progress else True
    bar = tqdm(total=rows, desc="Compiling kernels", unit="row", leave=False, disable=hidden)

    def tell(compilation: Compilation) -> None:
        found.append(compilation)
        bar.set_postfix_str(f"{len(found)} kernels, {compilation.kernel} {compilation.seconds:.0f} s")

    try:
        with bar, _ticking(bar), tuned_in_threads(), compilations(tell):
            yield found, bar.update
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"while compiling kernels, before the first step; {len(found)} are ready") from error


@contextmanager
def _ticking(bar: tqdm) -> Iterator[None]:
    """Show the time of a bar each second, because a row may wait for a compiler that long."""
    done = threading.Event()

    def tick() -> None:
        while not done.wait(1):
            bar.refresh()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def compiles_kernels(device: torch.device) -> bool:
    """Whether kernels for this device are compiled when they are first needed."""
    return device.type == "cuda"


def only_loss(result: torch.Tensor | tuple[torch.Tensor, Any]) -> torch.Tensor:
    """Return what the `compute_loss` of a Trainer returns without `return_outputs=True`."""
    if not isinstance(result, torch.Tensor):
        raise input_error("a loss tensor from compute_loss", type(result).__name__)
    return result


def _loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return model(**batch).loss if "labels" in batch else model(**batch)[0].float().sum()


def make_row(model: torch.nn.Module, lengths: list[int], collator: Any, device: torch.device) -> dict[str, Any]:
    """Return a row with documents of these lengths. It has labels only if the model predicts tokens."""
    make = _sample_maker(model, collator)
    return _batch(model, [make(length) for length in lengths], collator, device)


def make_tree(model: torch.nn.Module, tokens: int, collator: Any, device: torch.device) -> dict[str, Any]:
    """Return a row with a tree of five samples, some of which begin and end with states of others."""
    make, lengths = _sample_maker(model, collator), split(tokens, 5)
    samples = [make(length) for length in lengths]
    for sample in samples:
        # A target of the first token would move the end of the sample before.
        sample["labels"][0] = IGNORED_LABEL
    first, middle, *leaves = samples
    middle["turns"] = leaves[:2]
    first["turns"] = [leaves[2], middle]
    return _batch(model, [first], collator, device)


def _sample_maker(model: torch.nn.Module, collator: Any) -> Callable[[int], dict[str, Any]]:
    """Return a function that makes a sample of so many tokens."""
    config = inner_model(model).config
    # Tokens that stand for images would need images.
    special = {getattr(config, name, None) for name in vars(config) if name.endswith("_token_id")}
    tokens = [token for token in range(min(config.get_text_config().vocab_size, 1024)) if token not in special]
    others = getattr(collator, "token_columns", ())

    def make(length: int) -> dict[str, Any]:
        ids = [tokens[at % len(tokens)] for at in range(length)]
        return {"input_ids": ids, "labels": list(ids)} | {name: [0] * length for name in others}

    return make


def _batch(model: torch.nn.Module, samples: list[dict], collator: Any, device: torch.device) -> dict[str, Any]:
    inner, batch = inner_model(model), collator(samples)
    if not type(inner).__name__.endswith(LANGUAGE_MODELS):
        batch = {name: x for name, x in batch.items() if name not in ("labels", "shift_labels")}
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
