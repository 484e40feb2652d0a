"""What heads on top of a model do: one result per document of a packed row, and a language model's loss without logits."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from transformers.generation import GenerationMixin
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.models.qwen3_next.modeling_qwen3_next import load_balancing_loss_func
from transformers.utils import ModelOutput, can_return_tuple

from ..boundaries import SequenceBoundaries
from ..errors import input_error
from ..ops import linear_cross_entropy
from ..ops.autograd import is_transformed
from .inputs import mask_targets_across_documents
from .registry import PackedModelMixin
from .untouched import is_bare_linear, is_sharded_linear


class LanguageModelMixin(PackedModelMixin):
    """For language models: targets within documents, and in training a loss without logits."""

    # The loss is a mean over the targets of the whole step, so Trainer may pass their number.
    accepts_loss_kwargs = True

    @can_return_tuple
    def forward_with_boundaries(
        self,
        boundaries: SequenceBoundaries | None,
        *,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **inputs: Any,
    ) -> ModelOutput:
        if boundaries is not None:
            inputs["boundaries"] = boundaries
            labels = mask_targets_across_documents(boundaries, labels, inputs)
        if _skips_logits(self, labels, logits_to_keep, inputs):
            return loss_without_logits(self, labels, **inputs)
        return super().forward(labels=labels, logits_to_keep=logits_to_keep, **inputs)

    @wraps(GenerationMixin.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, *args, **kwargs) -> dict[str, Any]:
        # `generate` does not pack, with a cache or without.
        return {**super().prepare_inputs_for_generation(*args, **kwargs), "packs_padding": False}


class DocumentClassifierMixin(PackedModelMixin):
    """For sequence classification: of a packed row one result per document, from its last token."""

    @can_return_tuple
    def forward_with_boundaries(
        self,
        boundaries: SequenceBoundaries | None,
        *,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        **inputs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """As the built-in, and for a packed row `labels` `[N]`, of which -100 counts for nothing, and logits `[N, num_labels]`."""
        if boundaries is None:
            return super().forward(labels=labels, use_cache=use_cache, **inputs)
        boundaries.check_whole("Train classifiers without sequence parallelism.")
        outputs = getattr(self, self.base_model_prefix)(boundaries=boundaries, **inputs)
        last_tokens = boundaries.cu_seqlens[1:].long() - 1
        logits = self.score(outputs.last_hidden_state[0].index_select(0, last_tokens))
        loss = None
        if labels is not None:
            if labels.shape[0] != boundaries.num_documents:
                expected = f"labels for the row's {boundaries.num_documents} documents"
                raise input_error(
                    expected, f"shape {tuple(labels.shape)}", "Tail padding is one, with the label -100."
                )
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


def _skips_logits(model: Any, labels: torch.Tensor | None, logits_to_keep: int | torch.Tensor, inputs: dict) -> bool:
    """Whether this forward of a language model gives its loss alone. Takes `skip_logits` out of `inputs`.

    By default that is so in training, where labels are given. It needs Transformers' own loss and a plain linear head,
    which FSDP2 may have sharded: not one of PEFT, or one that accelerate moves.
    """
    skip = inputs.pop("skip_logits", None)
    skip = model.training if skip is None else skip
    boundaries, head = inputs.get("boundaries"), model.lm_head
    possible = (is_bare_linear(head) or is_sharded_linear(head)) and model.loss_function is ForCausalLMLoss
    sparse = hasattr(model.config.get_text_config(), "router_aux_loss_coef")
    if boundaries is not None and boundaries.is_shard and sparse:
        # The routers have one loss for the whole row, and only `loss_without_logits` counts it once.
        skip = True
        if labels is not None and not possible:
            expected = "a plain linear lm_head and Transformers' own loss for a part of a row"
            raise input_error(expected, type(head).__name__, "Do not adapt lm_head.")
    if not skip or labels is None or not isinstance(logits_to_keep, int) or logits_to_keep:
        return False
    return possible and not (torch.compiler.is_compiling() or is_transformed())


@dataclass(init=False, repr=False, eq=False)
class _LogitsOnDemand:
    """Mixed into an output: `logits` are made when they are asked for by name, and in no other way.

    A copy that was made before them cannot make them: asking it is an `AttributeError`.
    """

    make_logits: Callable[[], torch.Tensor] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # FSDP returns a new output with all fields of the dataclass, which so must not name `logits`. No public way of
        # `dataclasses` leaves out a field that a base class has.
        fields = super().__dataclass_fields__ | _LogitsOnDemand.__dataclass_fields__
        cls.__dataclass_fields__ = {name: field for name, field in fields.items() if name != "logits"}

    def __init__(self, *args: Any, make_logits: Callable[[], torch.Tensor] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Only an attribute, and no item as the other fields are.
        vars(self)["make_logits"] = make_logits
        if vars(self)["_logits"] is None:
            del vars(self)["_logits"]

    @property
    def logits(self) -> torch.Tensor | None:
        if self.make_logits is not None:
            self.logits = self.make_logits()
        if "_logits" not in vars(self):
            got, fix = "a copy, as accelerate makes one under mixed precision", "Pass skip_logits=False to the model."
            error = input_error("the output that the model itself returned", got, fix)
            # So that `hasattr` is an answer.
            raise AttributeError(str(error))
        return vars(self)["_logits"]

    @logits.setter
    def logits(self, value: torch.Tensor | None) -> None:
        vars(self).update(_logits=value, make_logits=None)
        if value is not None:
            OrderedDict.__setitem__(self, "logits", value)

    def __getitem__(self, key):
        return self.logits if key == "logits" else super().__getitem__(key)

    def __reduce__(self):
        return type(self), (), None, None, iter(list(self.items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.items())})"


def _some_rows(weight: torch.Tensor) -> torch.Tensor:
    """At most 64 rows from all over a weight, without a copy; of a sharded one from the part that is here."""
    weight = getattr(weight, "_local_tensor", weight).detach()
    return weight[:: max(1, -(-len(weight) // 64))]


def _logits_on_demand(head: torch.nn.Module, hidden_states: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The head's logits as this forward would have made them: in its modes, and with weights that are still the same."""
    device, bare = hidden_states.device.type, is_bare_linear(head)
    weight, bias = head.weight, head.bias
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
    # Tensors made in inference mode count no versions.
    tracked = [x for x in (hidden_states, weight, bias) if x is not None and not x.is_inference()]

    def state() -> list[tuple[int, int]]:
        # FSDP1 leaves a weight that it gathered without memory; FSDP2 gathers it again.
        return [(x._version, x.untyped_storage().nbytes() if bare else 0) for x in tracked]

    before = state()
    # torch's fused optimizers, and writes through `.data`, count no version either. What FSDP2 gathered for more than
    # the head is gone later.
    sample = _some_rows(weight).clone() if bare or hasattr(weight, "_local_tensor") else None

    def make() -> torch.Tensor:
        changed = before != state()
        if not changed and sample is not None:
            changed = not torch.allclose(_some_rows(weight), sample, rtol=0, atol=0, equal_nan=True)
        if changed:
            got = "ones that were changed in place since, as by optimizer.step()"
            fix = "Read logits before that, or pass skip_logits=False to the model."
            raise input_error("the head and the hidden states of the forward", got, fix)
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), autocast:
            # Not the layer, which may have another weight or hooks by now, unless it has to gather its weight.
            return F.linear(hidden_states, weight, bias) if bare else head(hidden_states)

    return make


class CausalLMOutputWithoutLogits(_LogitsOnDemand, CausalLMOutputWithPast):
    """The output of a language model that made no logits."""


class MoeCausalLMOutputWithoutLogits(_LogitsOnDemand, MoeCausalLMOutputWithPast):
    """The output of a mixture of experts that made no logits."""


def loss_without_logits(
    model: Any,
    labels: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    output_router_logits: bool | None = None,
    **inputs: Any,
) -> CausalLMOutputWithoutLogits | MoeCausalLMOutputWithoutLogits:
    """The output of a language model, with the loss of the built-in forward; logits are made if somebody looks at them.

    Args:
        model (`PreTrainedModel`):
            A model with a base model `model` and a head `lm_head`.
        labels (`torch.LongTensor` of shape `[B, T]`):
            As in the forward of every causal language model.
        attention_mask (`torch.Tensor`, *optional*):
            As in forward.
        output_router_logits (`bool`, *optional*):
            As in the forward of a mixture of experts.
        inputs:
            The other arguments of forward, also those of the loss: `num_items_in_batch`, `shift_labels`,
            `ignore_index`, `label_smoothing`.
    """
    config = model.config.get_text_config()
    sparse = hasattr(config, "router_aux_loss_coef")
    if sparse:
        if output_router_logits is None:
            output_router_logits = config.output_router_logits
        inputs["output_router_logits"] = output_router_logits
    outputs = model.model(attention_mask=attention_mask, **inputs)
    ignore_index = inputs.get("ignore_index", -100)
    targets = inputs.get("shift_labels")
    if targets is None:
        targets = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
    head = model.lm_head
    make_logits = _logits_on_demand(head, outputs.last_hidden_state)

    def loss_of(hidden_states):
        return linear_cross_entropy(
            hidden_states,
            head.weight,
            targets,
            head.bias,
            num_items_in_batch=inputs.get("num_items_in_batch"),
            label_smoothing=inputs.get("label_smoothing", 0.0),
            ignore_index=ignore_index,
        )

    if is_bare_linear(head):
        loss = loss_of(outputs.last_hidden_state)
    else:
        # FSDP2 gathers the weight around the head's own forward, which so has to be what computes the loss.
        head.forward = loss_of
        try:
            loss = head(outputs.last_hidden_state)
        finally:
            del head.forward
    fields = {name: outputs.get(name) for name in ("past_key_values", "hidden_states", "attentions")}
    fields["make_logits"] = make_logits
    if not sparse:
        return CausalLMOutputWithoutLogits(loss=loss, **fields)
    aux_loss, routers = None, outputs.get("router_logits")
    if output_router_logits:
        aux_loss = load_balancing_loss_func(routers, config.num_experts, config.num_experts_per_tok, attention_mask)
        boundaries = inputs.get("boundaries")
        if boundaries is not None and boundaries.is_shard and inputs.get("num_items_in_batch") is not None:
            # Every rank has that of the whole row, and losses that are part of one sum are added up.
            aux_loss = aux_loss / boundaries.size
        loss = loss + config.router_aux_loss_coef * aux_loss.to(loss.device)
    return MoeCausalLMOutputWithoutLogits(loss=loss, aux_loss=aux_loss, router_logits=routers, **fields)
