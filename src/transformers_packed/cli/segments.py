"""What the rows of `train` need: kernels, and memory. With `--segment-tokens auto`, the longest segments that fit it."""

import os
from argparse import Namespace
from math import inf
from typing import Any

import torch
from transformers import PreTrainedModel

from ..data.dataset import find_tree
from ..data.planning.memory import FILLED, gib
from ..data.planning.segments import SMALLEST, choose_segment
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
from .options import AUTO


def chosen_segments(
    model: PreTrainedModel, samples: Samples, settings: Namespace, dtype: torch.dtype, device: torch.device
) -> int | None:
    """Return the tokens of a segment, or `None` for whole rows. If they are chosen here, print the reason.

    `model` is loaded and has its adapters. `dtype` is that of products, and `device` the one that trains.
    """
    if settings.segment_tokens != AUTO:
        return settings.segment_tokens
    available, length = _available(device), longest_row(samples, settings)
    if available is None or dtype != torch.bfloat16:
        why = "on a CPU" if available is None else f"for computation in {str(dtype).removeprefix('torch.')}"
        say(f"--segment-tokens auto: the memory of a step {why} is not known, so rows are not cut.")
        return None
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
    checkpointed = checkpointed_layers(config, settings.every_n_layers or 1, mtp)

    def need(segment: int | None) -> float:
        offload = settings.offload
        if offload is None:
            # What automatic copies leave on the GPU.
            offload = HALF * min(segment or length, length) * sizes.hidden >= SMALLEST_UNASKED
        given = sizes, parameters, length, 1, gpus, width, checkpointed, offload, None, lora
        # By default, no output of attention is kept on the GPU.
        options = OPTIMIZERS[settings.optim], rows, 1, bool(settings.keep_attention), segment
        return step_memory(*given, *options).total

    segment, fits = choose_segment(need, length, FILLED * available)
    chosen, takes = "whole rows" if segment is None else f"segments of {segment:,} tokens", f"{gib(need(None))} whole"
    if segment is not None:
        takes = f"{gib(need(segment))} with them, {takes}"
    if not fits:
        chosen += f", which need least: none from {SMALLEST:,} tokens on fit"
    usable = f"{gib(FILLED * available)} of {gib(available)} that are free"
    say(f"--segment-tokens auto: {chosen}. GiB of a row of {length:,} tokens: {takes}, {usable} may be used.")
    return segment


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
