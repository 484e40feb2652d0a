"""What the rows of `train` need: kernels, and memory. With `auto`, what gradient checkpointing computes again to fit it."""

import os
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ..data.dataset import find_tree
from ..data.planning.memory import FILLED, gib
from ..data.planning.segments import SMALLEST, choose_layers, choose_segment
from ..data.planning.step_memory import Parameters, checkpointed_layers, step_memory
from ..data.records.samples import Samples
from ..data.trees import nodes_of
from ..models.checkpoint_kinds import stored_as
from ..models.families import sizes_of
from ..models.memory import HALF, WIDTHS, Lora, on_host_of
from ..models.optimizers import OPTIMIZERS, dtype_of_weights
from ..ops.host_memory import free_device_memory
from ..ops.offload import SMALLEST_UNASKED
from ..training.kernels import Needs
from .lines import say
from .models import form_group
from .options import AUTO


def chosen_checkpoints(
    model: PreTrainedModel, samples: Samples, settings: Namespace, dtype: torch.dtype, device: torch.device
) -> tuple[int | None, int | None]:
    """Return `every_n_layers`, 0 without checkpointing, and the tokens of a segment, `None` for whole rows.

    What is chosen here is printed with the reason. `model` is loaded and has its adapters. `dtype` is that of products, and
    `device` the one that trains.
    """
    every, segment = settings.every_n_layers, settings.segment_tokens
    if AUTO not in (every, segment):
        return every, segment
    available, length = _available(device), longest_row(samples, settings)
    if available is None or dtype != torch.bfloat16:
        why = "on a CPU" if available is None else f"for computation in {str(dtype).removeprefix('torch.')}"
        unknown = f"the memory of a step {why} is not known"
        if every == AUTO:
            say(f"--every-n-layers auto: {unknown}, so all layers are checkpointed.")
        if segment == AUTO:
            say(f"--segment-tokens auto: {unknown}, so rows are not cut.")
        return 1 if every == AUTO else every, None if segment == AUTO else segment
    available = _fewest(available, settings, device)
    most, (need, layers) = FILLED * available, _need(model, settings, length)

    def tell(option: str, chosen: str, takes: str) -> None:
        usable = f"{gib(most)} of {gib(available)} that are free"
        say(f"{option} auto: {chosen}. GiB of a row of {length:,} tokens: {takes}, {usable} may be used.")

    if every == AUTO:
        whole = None if segment == AUTO else segment
        every = _chosen_layers(lambda n: need(n, whole), layers, most, tell)
    if segment == AUTO:
        segment = _chosen_segment(partial(need, 1 if every is None else every), length, most, tell)
    return every, segment


def _chosen_layers(need: Callable[[int], float], layers: int, most: float, tell: Callable[..., None]) -> int:
    fitting = 0 if need(0) <= most else choose_layers(need, layers, most)
    every = 1 if fitting is None else fitting
    chosen = {0: "no layer is", 1: "all layers are"}.get(every, f"one layer in {every} is") + " checkpointed"
    chosen += ", which does not suffice" if fitting is None else ""
    takes = f"{gib(need(every))} with them, " if every else ""
    tell("--every-n-layers", chosen, f"{takes}{gib(need(0))} without checkpoints")
    return every


def _chosen_segment(
    need: Callable[[int | None], float], length: int, most: float, tell: Callable[..., None]
) -> int | None:
    segment, fits = choose_segment(need, length, most)
    chosen = "whole rows" if segment is None else f"segments of {segment:,} tokens"
    chosen += "" if fits else f", which need least: none from {SMALLEST:,} tokens on fit"
    takes = "" if segment is None else f"{gib(need(segment))} with them, "
    tell("--segment-tokens", chosen, f"{takes}{gib(need(None))} whole")
    return segment


def _need(model: PreTrainedModel, settings: Namespace, length: int) -> tuple[Callable[[int, int | None], float], int]:
    """Return the bytes of a step by `every_n_layers`, 0 without checkpointing, and tokens of a segment; and the layers."""
    base: Any = model.get_base_model() if settings.lora else model  # type: ignore[operator]
    config = base.config
    mtp = settings.mtp or settings.mtp_only
    sizes, parameters = sizes_of(config), Parameters.of(config, mtp)
    on_host = on_host_of(settings.experts_in_host_memory, settings.layers_in_host_memory)
    lora = Lora(settings.lora_rank * settings.lora, settings.experts, stored_as(config), settings.mtp_only, on_host)
    width = WIDTHS[dtype_of_weights(settings.optim, settings.lora)]
    processes, rows = int(os.environ.get("WORLD_SIZE", 1)), settings.gradient_accumulation_steps
    sharded = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    # DDP keeps all gradients in its buckets, as a step of several rows does.
    gpus, rows = (processes, rows) if sharded else (1, max(rows, min(processes, 2)))
    share = settings.sequence_parallel_size
    tokens = -(-length // share)

    def need(every: int, segment: int | None) -> float:
        offload = settings.offload
        if offload is None:
            # What automatic copies leave on the GPU.
            offload = HALF * min(segment or tokens, tokens) * sizes.hidden >= SMALLEST_UNASKED
        checkpointed = checkpointed_layers(config, every, mtp)
        given = sizes, parameters, length, share, gpus, width, checkpointed, offload, None, lora
        # By default, no output of attention is kept on the GPU.
        options = OPTIMIZERS[settings.optim], rows, 1, bool(settings.keep_attention), segment
        return step_memory(*given, *options).total

    return need, len(sizes.layers)


def needs_of_samples(samples: Samples, settings: Namespace) -> Needs:
    """What the training needs before the model is there. Segments that are not chosen yet count as none."""
    segment = settings.segment_tokens if isinstance(settings.segment_tokens, int) else inf
    trees, processes = find_tree(samples.data) is not None, settings.sequence_parallel_size
    return Needs(longest_row(samples, settings), trees=trees, segment_tokens=segment, processes=processes)


def longest_row(samples: Samples, settings: Namespace) -> int:
    """The most tokens of a row of one device."""
    if settings.row_length:
        return settings.row_length
    lengths = sorted(sum(len(node["input_ids"]) for node in nodes_of([sample])[0]) for sample in samples.data)
    return sum(lengths[-settings.batch_size :])


def _available(device: torch.device) -> int | None:
    """Bytes of a GPU that no other process uses. Those of the model are among them, if it is there already."""
    if device.type != "cuda":
        return None
    return free_device_memory(device) + torch.cuda.memory_allocated(device)


def _fewest(available: int, settings: Namespace, device: torch.device) -> int:
    """The least of all processes, which then choose the same."""
    form_group(settings)
    least = torch.tensor(available, device=device)
    if dist.is_initialized():
        dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)
