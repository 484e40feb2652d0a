"""Muon for hidden matrices and AdamW for all other weights, as one optimizer of a Trainer."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate
from transformers import Trainer, TrainingArguments

from ..errors import input_error
from ..models.matrices import hidden_matrices
from ..models.optimizers import NO_MATRICES
from ..models.releases import newton_schulz


class MuonWithAdamW(torch.optim.Optimizer):
    """PyTorch's Muon for groups with `cuts`, also of experts and of fused weights, and its AdamW for the others.

    Updates of a matrix have the root mean square of AdamW's (`adjust_lr_fn="match_rms_adamw"`), so one learning rate serves
    all groups. A weight with `cuts` has one state: `momentum_buffer`, of its shape and dtype.

    Args:
        groups (`list[dict]`):
            Groups of parameters. With `cuts`, those of [`hidden_matrices`], the weights are `[..., out, in]`.
        lr (`float`), betas (`tuple[float, float]`), eps (`float`):
            The learning rate of all groups, and the other options of AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float):
        # Its groups and states are those of this optimizer. Unfused, it would copy the embeddings in each step.
        self._adamw = torch.optim.AdamW([torch.zeros(1)], lr, betas, eps, fused=True)
        muon = torch.optim.Muon([torch.zeros(1, 1)], lr, adjust_lr_fn="match_rms_adamw")
        self._orthogonalize = newton_schulz()
        super().__init__([(muon if "cuts" in x else self._adamw).defaults | x for x in groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all weights that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        # Loading a checkpoint and FSDP2 have replaced them.
        self._adamw.param_groups = [group for group in self.param_groups if "cuts" not in group]
        self._adamw.state = self.state
        self._adamw.step()
        for group in self.param_groups:
            for weight in group["params"] if "cuts" in group else ():
                if weight.grad is not None:
                    self._step(weight, weight.grad, group)
        return loss

    def _step(self, weight: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, momentum = self.state[weight], group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = self._of_whole(gradient.lerp(buffer, momentum), group)
        weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def _of_whole(self, update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Orthogonalize an update. The parts of FSDP2 are whole experts, but only rows of other weights."""
        if not isinstance(update, DTensor):
            return self._of_matrices(update, group)
        kept = [x if update.ndim > 2 and x.is_shard(0) else Replicate() for x in update.placements]
        # The iterations begin with a cast to bfloat16.
        whole = cast(DTensor, update.bfloat16()).redistribute(placements=kept)
        local = self._of_matrices(whole.to_local(), group)
        done = DTensor.from_local(local, update.device_mesh, kept, shape=update.shape, stride=update.stride())
        return done.redistribute(placements=update.placements)

    def _of_matrices(self, update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Orthogonalize and scale the matrices in `[..., out, in]`. The result is in float32."""
        repetitions, rows = group["cuts"]
        orthogonalize = partial(
            self._orthogonalize, **{name: group[name] for name in ("ns_coefficients", "ns_steps", "eps")}
        )
        blocks, done = update.unflatten(-2, (repetitions, -1)), []
        for block in blocks.split(rows or blocks.shape[-2], -2):
            matrices = block.flatten(-3, -2)
            # A process may have no experts.
            if len(matrices):
                matrices = (orthogonalize if matrices.ndim == 2 else torch.vmap(orthogonalize))(matrices)
            scale = 0.2 * max(matrices.shape[-2:]) ** 0.5
            done.append((scale * matrices.float()).view(block.shape))
        return torch.cat(done, -2).view(update.shape)


def muon_for(model: torch.nn.Module, args: TrainingArguments) -> MuonWithAdamW:
    """Return the optimizer of a model, with the learning rate, the decay of weights and the betas of `args`.

    Raises:
        `ValueError`: no hidden matrix is trained, or something flattens weights, such as ZeRO of DeepSpeed.
    """
    if args.deepspeed_plugin is not None:
        fix = "Train with DDP or FSDP2, which keep the shapes of weights."
        raise input_error("weights in their shapes with muon", "DeepSpeed", fix)
    matrices = hidden_matrices(model)
    if not matrices:
        raise input_error("trained hidden matrices with muon", "none", NO_MATRICES)
    # The method reads nothing of the Trainer.
    decaying = set(Trainer.get_decay_parameter_names(cast(Any, None), model))
    groups: dict[Any, dict[str, Any]] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            cuts = {"cuts": matrices[name]} if name in matrices else {}
            decay = args.weight_decay if name in decaying else 0.0
            # AdamW cannot update weights of several meshes together.
            key = matrices.get(name), decay, getattr(weight, "device_mesh", None)
            groups.setdefault(key, {"params": [], "weight_decay": decay, **cuts})["params"].append(weight)
    return MuonWithAdamW(
        list(groups.values()), args.learning_rate, (args.adam_beta1, args.adam_beta2), args.adam_epsilon
    )
