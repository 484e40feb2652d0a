"""Weights that a step may not train: those without a gradient under DDP, and those of 16 bits.

An optimizer updates weights of 16 bits in place, or rounds them apart in each process.

A bfloat16 number has 8 significant bits, so an update below 1/512 of a weight is rounded away. An update of AdamW is about
as large as the learning rate: at 2e-5, weights above 0.01 do not change.
"""

import torch
from transformers import TrainerCallback
from transformers.utils import logging

from ...errors import input_error
from ...models.lora import FACTORS
from ..facts import package_of
from ..optimizers import unwrapped
from .gradient_release import end_releases


logger = logging.get_logger(__name__)

# Packages whose optimizers round each update to the dtype of the weight. Others may keep a float32 copy, the rounded bits,
# or round at random: nothing is said about them.
_IN_PLACE = "torch", "transformers", "bitsandbytes", "transformers_packed"


class WeightsCallback(TrainerCallback):
    """Warns when training starts if updates of weights will be rounded away, or apart. [`configure_packing`] adds it.

    It also removes the hooks with which an earlier run that raised would go on to update weights.
    """

    def on_train_begin(self, args, state, control, *, model, optimizer=None, **kwargs):
        end_releases(model, but=state)
        for line in (rounded_away(model, optimizer), rounded_apart(optimizer, args.world_size)):
            if line is not None and state.is_world_process_zero:
                logger.warning(line)


class EveryGradient(TrainerCallback):
    """Stops training before a step in which a parameter has no gradient, because DDP has not summed all of them then."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        # Once, because walking through all modules in each step takes the host milliseconds.
        parameters = model.named_parameters() if args.world_size > 1 else ()
        self.trained = [(name, x) for name, x in parameters if x.requires_grad]

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        missing = [name for name, x in self.trained if x.grad is None]
        if missing:
            got = f"none for {len(missing)} of them, such as {missing[0]}"
            raise input_error("a gradient of each trained parameter", got, "Pass ddp_find_unused_parameters=True.")


def rounded_away(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Describe the trained weights of 16 bits whose small updates are lost, or return `None` if there are none."""
    optimizer = unwrapped(optimizer)
    # torchao's optimizers have this option.
    if package_of(optimizer) not in _IN_PLACE and getattr(optimizer, "bf16_stochastic_round", True):
        return None
    # LoRA's factors are small and have high learning rates, so their updates are not lost. TRL trains QLoRA in bfloat16.
    factors = {id(x) for name, x in model.named_parameters() if not FACTORS.isdisjoint(name.split("."))}
    trained = [x for group in optimizer.param_groups for x in group["params"] if id(x) not in factors]
    short = [x for x in trained if x.dtype in (torch.bfloat16, torch.float16)]
    if not short:
        return None
    dtype = short[0].dtype
    name, numbers = str(dtype).removeprefix("torch."), sum(x.numel() for x in short)
    option = "bf16" if dtype is torch.bfloat16 else "fp16"
    return (
        f"{numbers:,} trained weights are in {name}, and {type(optimizer).__name__} keeps no float32 copy of them: an update "
        f'below 1/{4 / torch.finfo(dtype).eps:.0f} of a weight is rounded away. Load the model with dtype="float32". '
        f"With {option}=True, it still computes in {name}."
    )


def rounded_apart(optimizer: torch.optim.Optimizer, processes: int) -> str | None:
    """Describe weights that processes keep equal and round at random, or return `None` if there are none."""
    optimizer = unwrapped(optimizer)
    weights = [x for group in optimizer.param_groups for x in group["params"] if x.dtype is torch.bfloat16]
    sharded = any(hasattr(x, "device_mesh") for x in weights)
    if processes == 1 or not weights or sharded or not getattr(optimizer, "bf16_stochastic_round", False):
        return None
    return (
        f"{type(optimizer).__name__} rounds updates at random in each process. The weights of the {processes} processes stay "
        "equal only while all of them draw the same random numbers: train without dropout and NEFTune."
    )
