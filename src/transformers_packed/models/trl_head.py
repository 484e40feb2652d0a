"""The heads of TRL's trainers, which score tokens and compare models without logits, with the products of this package.

TRL folds tiles of logits into the scores of their tokens and computes all logits again in backward. In its place,
[`linear_logps`] keeps whole rows of logits for a moment, and does not compute them again where the forward can know the
gradients: with a frozen head, and for the sum of the log-probabilities, which is the loss of `SFTTrainer`. The same holds
for the divergence from a teacher and [`linear_divergence`], whose forward always knows the gradients.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from inspect import signature
from threading import RLock
from types import MethodType, SimpleNamespace
from typing import Any

import torch

from ..foreign import swapped
from .releases import TRL_DIVERGENCE, TRL_LOSS, TRL_SCORES, is_known_divergence, is_trl_forward, takes_known_arguments


# In the order of TRL's results. The head of this package computes those that it names.
_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_OURS = {"log_probs", "entropy", "is_top1"}
# TRL's forward looks its function up in its module, so only one thread at a time may replace the function.
_LOCK = RLock()


def use_our_products(module: torch.nn.Module) -> None:
    """Score tokens with the products of this package, if TRL set the `forward` of the module."""
    theirs = vars(module).get("forward")
    if isinstance(theirs, MethodType) and is_trl_forward(theirs) and not hasattr(theirs, "trl_forward"):
        module.forward = beside_trl(theirs, module, theirs.__func__, our_products=True)


def beside_trl(theirs: MethodType, module: torch.nn.Module, other: Callable, our_products: bool) -> MethodType:
    """Create a `forward` that runs TRL's to score tokens, and `other` in other calls."""
    function = theirs.__func__

    @wraps(other)
    def forward(self, *args, fused_lm_head=False, **kwargs):
        if not fused_lm_head:
            return other(self, *args, **kwargs)
        with _our_products(function.__globals__) if our_products else nullcontext():
            score = partial(function, self, *args, fused_lm_head=True)
            # Our language models add the loss of a head of multi-token prediction.
            return self.forward_of_trl(score, kwargs) if hasattr(self, "forward_of_trl") else score(**kwargs)

    vars(forward)["trl_forward"] = theirs
    return MethodType(forward, module)


@contextmanager
def _our_products(names: dict[str, Any]) -> Iterator[None]:
    """Let TRL's forward compute scores with [`_Scores`], unless this release computes them in another way.

    `names` are those of the module of the forward.
    """
    with _LOCK:
        theirs: Any = names.get(TRL_SCORES)
        known = isinstance(theirs, type) and takes_known_arguments(theirs)
        with swapped(names, **{TRL_SCORES: _Scores(theirs)}) if known else nullcontext():
            yield


class _Scores:
    """What TRL's forward calls in place of its autograd function."""

    def __init__(self, theirs: type[torch.autograd.Function]):
        self.theirs = theirs

    def apply(self, hidden, weight, bias, targets, temperature, chunk_size, softcapping, logit_scale, outputs) -> Any:
        plain = softcapping is None and logit_scale == 1.0 and set(outputs) <= _OURS and _is_plain(hidden, weight)
        if not plain:
            given = hidden, weight, bias, targets, temperature, chunk_size, softcapping, logit_scale, outputs
            return self.theirs.apply(*given)
        # The ops import the compiler of torch.
        from ..ops import linear_logps

        # On a CPU, TRL also scores tokens without a target, and their gradients are 0.
        summed = "is_top1" in outputs and hidden.is_cuda
        asked: dict[str, Any] = {name: name in outputs for name in ("entropy", "is_top1")}
        found = linear_logps(
            hidden, weight, targets, bias, temperature=temperature, ignore_index=None, same_gradient=summed, **asked
        )
        names = [name for name in _OUTPUTS if name == "log_probs" or asked.get(name)]
        scores = dict(zip(names, found if any(asked.values()) else (found,), strict=True))
        return tuple(scores.get(name) for name in _OUTPUTS)


def _is_plain(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the weight is whole, of the dtype of the product, and the same in backward (unlike DeepSpeed's)."""
    if type(weight) not in (torch.Tensor, torch.nn.Parameter) or hasattr(weight, "ds_id"):
        return False
    same = hidden.dtype == weight.dtype or torch.is_autocast_enabled(hidden.device.type)
    return same and not torch.compiler.is_compiling()


def distills_with_our_products(trainer: Any) -> dict[str, Callable]:
    """Return the method of TRL's trainer of distillation with the loss, which then calls [`linear_divergence`].

    There is none if this release, or a class of the user, computes its loss in another way.
    """
    theirs = getattr(trainer, TRL_LOSS)
    names = getattr(theirs, "__globals__", {})
    if not is_known_divergence(names.get(TRL_DIVERGENCE)):
        return {}

    @wraps(theirs)
    def loss(*args, **kwargs):
        with _LOCK, swapped(names, **{TRL_DIVERGENCE: partial(_divergence, names[TRL_DIVERGENCE])}):
            return theirs(*args, **kwargs)

    return {TRL_LOSS: loss}


def _divergence(theirs: Callable, *args: Any, **kwargs: Any) -> Any:
    """What TRL calls in place of its function: the loss, the sum of the student's entropies, and the number of targets."""
    given = signature(theirs).bind(*args, **kwargs)
    given.apply_defaults()
    x = SimpleNamespace(**given.arguments)
    student = x.student_hidden_states, x.student_lm_head_weight
    teacher = x.teacher_hidden_states, x.teacher_lm_head_weight
    if not (_is_plain(*student) and _is_plain(*teacher)):
        return theirs(*args, **kwargs)
    # The ops import the compiler of torch.
    from ..ops import linear_divergence

    is_target = x.completion_mask != 0
    number = is_target.sum()
    loss, entropies = linear_divergence(
        *student,
        *teacher,
        is_target,
        x.student_lm_head_bias,
        x.teacher_lm_head_bias,
        beta=x.beta,
        temperature=x.temperature,
        logit_scale=x.student_logit_scale,
        teacher_logit_scale=x.teacher_logit_scale,
        softcap=x.student_final_logit_softcapping,
        teacher_softcap=x.teacher_final_logit_softcapping,
        # The loss of a mask without targets is 0.
        num_items_in_batch=number.clamp(min=1) if x.num_items_in_batch is None else x.num_items_in_batch,
        return_entropies=True,
    )
    return loss, entropies.sum(), number
