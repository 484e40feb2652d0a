"""Model heads: one result per document of a packed row, and a language model loss that skips the logits."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from transformers.generation import GenerationMixin
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)
from transformers.utils import ModelOutput, can_return_tuple, logging
from transformers.utils.import_utils import is_tracing

from ..boundaries import SequenceBoundaries
from ..errors import input_error, unsupported
from ..ops.autograd import is_transformed
from ..ops.cross_entropy import shift_labels
from ..parallel.shard import RowShard
from .inputs import kept_tokens, mask_targets_across_documents
from .losses import ITEMS, OWN, added, check_list, own_weight, trains_trunk
from .losses.head import is_plain, sum_of
from .losses.loss import Loss, LossStep
from .packed_model import PackedModelMixin, Switch
from .typed import OutputBase
from .untouched import is_bare_linear
from .versions import CACHE


logger = logging.get_logger(__name__)


class LanguageModelMixin(PackedModelMixin):
    """Language models: keep targets within documents, and skip the logits in training."""

    # The loss is a mean over all targets of a step, so Trainer may pass their number.
    accepts_loss_kwargs = True

    # Whether forwards in training skip the logits if labels are given. `False` is for losses that read the logits of a
    # copied output, as under mixed precision. The argument `skip_logits` of a call overrides it.
    skips_logits = Switch(True)

    # What a step trains. In evaluation, the loss of a model is that of `OWN`.
    losses: tuple[Loss, ...] = OWN
    # Those of the last forward that the stock model does not compute, where a Trainer computes the others from scores.
    pending_loss: torch.Tensor | None = None

    @can_return_tuple
    def forward_with_boundaries(
        self,
        boundaries: SequenceBoundaries | None,
        *,
        labels: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **inputs: Any,
    ) -> ModelOutput:
        if boundaries is not None:
            inputs["boundaries"] = boundaries
            labels = mask_targets_across_documents(boundaries, labels, inputs, logits_to_keep)
        elif _has_targets_after_padding(self, labels, logits_to_keep, inputs):
            fix = "set the labels of padding and of the first token of each row to -100"
            _compute_padding(inputs, "Labels follow padding", fix)
        step = _loss_step(self, labels, logits_to_keep, inputs)
        if _skips_logits(step, inputs):
            assert step is not None
            return loss_without_logits(step)
        if step is None or not added(step.losses):
            return super().forward(labels=labels, logits_to_keep=logits_to_keep, **inputs)
        # The stock forward computes all of its losses, or none.
        labels = labels if any(loss.is_own for loss in step.losses) else None
        stock = partial(super().forward, labels=labels, logits_to_keep=logits_to_keep)
        outputs = step.run(added(step.losses), lambda: stock(**inputs))
        own = [] if outputs.loss is None else [own_weight(step.losses) * outputs.loss]
        outputs.loss = sum_of([*own, *step.terms()])
        return outputs

    def forward_of_trl(self, score: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """Call TRL's forward `score`, from whose scores its trainer computes a loss, and keep the others for it."""
        step = _loss_step(self, inputs.get("labels"), 0, inputs)
        if step is None or not added(step.losses):
            return score(**inputs)
        outputs = step.run(added(step.losses), lambda: score(**inputs))
        self.pending_loss = sum_of(step.terms())
        return outputs

    @wraps(GenerationMixin.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, *args, **kwargs) -> dict[str, Any]:
        # `generate` never packs, even without a cache.
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]  # of GenerationMixin
        return {**inputs, "packs_padding": False}


class DocumentClassifierMixin(PackedModelMixin):
    """Sequence classifiers: one result per document of a packed row, from the token that the stock class pools."""

    @can_return_tuple
    def forward_with_boundaries(
        self,
        boundaries: SequenceBoundaries | None,
        *,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        **inputs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Like the stock forward. A packed row has `labels` `[N]` (-100 is ignored) and logits `[N, num_labels]`."""
        if boundaries is None:
            if _pools_padding(self, inputs):
                fix = "pass input_ids whose padding is the pad_token_id of the configuration, or pad on the left"
                _compute_padding(inputs, "A classifier pools padding", fix)
            return super().forward(labels=labels, use_cache=use_cache, **inputs)
        boundaries.check_kind("a classifier of documents")
        outputs = getattr(self, self.base_model_prefix)(boundaries=boundaries, **inputs)
        pooled = _pooled_tokens(self, boundaries, inputs.get("input_ids"))
        score: Any = self.score
        logits = score(outputs.last_hidden_state[0].index_select(0, pooled))
        loss = None
        if labels is not None:
            if labels.shape[0] != boundaries.num_documents:
                expected = f"labels for the row's {boundaries.num_documents} documents"
                raise input_error(
                    expected, f"shape {tuple(labels.shape)}", "Tail padding is a document, with the label -100."
                )
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class TokenClassifierMixin(PackedModelMixin):
    """Classifiers of tokens: like the stock class, also where a padded batch has labels at padding."""

    def forward_with_boundaries(
        self, boundaries: SequenceBoundaries | None, *, labels: torch.LongTensor | None = None, **inputs: Any
    ) -> TokenClassifierOutput:
        if boundaries is not None:
            inputs["boundaries"] = boundaries
        elif labels is not None and _has_targets_at_padding(self, labels, inputs):
            _compute_padding(inputs, "Labels are at padding", "set the labels of padding to -100")
        return super().forward(labels=labels, **inputs)


def _pooled_tokens(model: Any, boundaries: SequenceBoundaries, input_ids: torch.Tensor | None) -> torch.Tensor:
    """Return the index of the token `[N]` of each document that the stock class pools for the document alone.

    It is the last one that is not the pad token, which may also end a sample, and the first if there is no other. Given
    embeddings, or without a pad token, it is the last one.
    """
    starts, lasts = boundaries.first_tokens, boundaries.ends
    pad = model.config.get_text_config().pad_token_id
    if pad is None or input_ids is None:
        return lasts
    tokens = input_ids[0].to(lasts.device)
    latest = torch.arange(len(tokens), device=lasts.device).where(tokens != pad, -1).cummax(0).values
    return torch.maximum(latest[lasts], starts)


def _has_targets_after_padding(
    model: Any, labels: torch.Tensor | None, logits_to_keep: int | torch.Tensor, inputs: dict[str, Any]
) -> bool:
    """Whether the token before a target is padding, as in a batch whose labels are a copy of its padded `input_ids`.

    The first token of a row with padding on the left is such a target too, if it has a label.
    """
    targets = inputs.get("shift_labels")
    if targets is None and labels is not None:
        targets = shift_labels(labels)
    return targets is not None and _has_targets_at_padding(model, targets, inputs, logits_to_keep)


def _has_targets_at_padding(
    model: Any, targets: torch.Tensor, inputs: dict[str, Any], logits_to_keep: int | torch.Tensor = 0
) -> bool:
    """Whether there are targets where a padded batch that the model packs has padding."""
    mask = _mask_of_packed(model, inputs)
    if mask is None:
        return False
    mask = mask.to(targets.device)[:, kept_tokens(logits_to_keep)]
    if targets.shape != mask.shape:
        return False
    return bool(((targets != inputs.get("ignore_index", -100)) & (mask == 0)).any())


def _pools_padding(model: Any, inputs: dict[str, Any]) -> bool:
    """Whether the stock classifier pools padding in a row of a padded batch that the model packs.

    It does with another pad token than that of the configuration, and with embeddings and padding on the right.
    """
    mask, input_ids = _mask_of_packed(model, inputs), inputs.get("input_ids")
    if mask is None:
        return False
    pad, pooled = model.config.get_text_config().pad_token_id, mask[:, -1:]
    if pad is not None and input_ids is not None:
        tokens = input_ids.to(mask.device)
        latest = torch.arange(tokens.shape[1], device=mask.device) * (tokens != pad)
        pooled = mask.gather(1, latest.argmax(1, keepdim=True))
    return bool((pooled == 0).any())


def _mask_of_packed(model: Any, inputs: dict[str, Any]) -> torch.Tensor | None:
    """The mask of a padded batch whose padding the model may leave out."""
    mask, allowed = inputs.get("attention_mask"), inputs.get("packs_padding")
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or is_tracing(mask) or is_transformed():
        return None
    return mask if (model.packs_padding if allowed is None else allowed) else None


def _compute_padding(inputs: dict[str, Any], why: str, fix: str) -> None:
    """Let the model compute the padding of a batch, on which its result depends. A packed row has nothing there."""
    inputs["packs_padding"] = False
    logger.warning_once(f"{why} in a padded batch, so its padding is computed. To skip it, {fix}.")


def _loss_step(
    model: Any, labels: torch.Tensor | None, logits_to_keep: int | torch.Tensor, inputs: dict
) -> LossStep | None:
    """Return the losses of this forward, if it has labels. Removes the divisors of added losses from `inputs`."""
    items = {name: inputs.pop(name, None) for name in ITEMS}
    if labels is None:
        return None
    losses = model.losses if model.training else OWN
    check_list(losses)
    step = LossStep(model, losses, labels, logits_to_keep, inputs, items)
    others = added(step.losses)
    if others and (not step.keeps_all or torch.compiler.is_compiling() or is_transformed()):
        got = "torch.compile or torch.func" if step.keeps_all else "logits_to_keep"
        raise unsupported(f"the loss of {others[0].title}", got, "Train without one of them.")
    return step


def _skips_logits(step: LossStep | None, inputs: dict) -> bool:
    """Whether this forward of a language model computes only its loss. Removes `skip_logits` from `inputs`.

    By default the logits are skipped in training if labels are given, unless `model.skips_logits` is `False`.
    """
    skip = inputs.pop("skip_logits", None)
    if step is None:
        return False
    if not trains_trunk(step.losses):
        return True
    model = step.model
    # Heads with PEFT adapters or accelerate's hooks are not plain.
    possible = model.loss_function is ForCausalLMLoss and is_plain(model.lm_head)
    skip = model.training and model.skips_logits if skip is None else skip
    is_shard = isinstance(inputs.get("boundaries"), RowShard)
    if is_shard and any(loss.is_of_rows(model) for loss in step.losses):
        skip = True
        if not possible:
            expected = "a plain linear lm_head and Transformers' own loss for a shard of a row"
            raise input_error(expected, type(model.lm_head).__name__, "Exclude lm_head from the adapted modules.")
    if not skip or (is_shard and not step.keeps_all):
        return False
    return possible and not (torch.compiler.is_compiling() or is_transformed())


@dataclass(init=False, repr=False, eq=False)
class _LogitsOnDemand(OutputBase):
    """Mixin for outputs that compute `logits` on first access by name, and in no other way.

    `outputs.logits`, `outputs["logits"]` and `outputs.get("logits")` compute them. Before that, `in`, `keys`, `items` and
    iteration leave them out, because libraries walk all outputs of a model. A copy of the output that was made before that
    access cannot compute them and raises an `AttributeError`.
    """

    make_logits: Callable[[], torch.Tensor] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # FSDP copies all dataclass fields into a new output, so `logits` must not be a field. `dataclasses` has no
        # public way to remove a field of a base class.
        fields = super().__dataclass_fields__ | _LogitsOnDemand.__dataclass_fields__  # type: ignore[misc]
        cls.__dataclass_fields__ = {name: field for name, field in fields.items() if name != "logits"}

    def __init__(self, *args: Any, make_logits: Callable[[], torch.Tensor] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # An attribute only, not an item like the other fields.
        vars(self)["make_logits"] = make_logits
        if vars(self)["_logits"] is None:
            del vars(self)["_logits"]

    @property
    def logits(self) -> torch.Tensor | None:
        if self.make_logits is not None:
            self.logits = self.make_logits()
        if "_logits" not in vars(self):
            got = "a copy, such as accelerate's under mixed precision"
            fix = "Set model.skips_logits = False, or pass skip_logits=False to the model."
            error = input_error("the original output of the model to compute logits", got, fix)
            # `hasattr` expects an AttributeError.
            raise AttributeError(str(error))
        return vars(self)["_logits"]

    @logits.setter
    def logits(self, value: torch.Tensor | None) -> None:
        vars(self).update(_logits=value, make_logits=None)
        if value is not None:
            OrderedDict.__setitem__(self, "logits", value)

    def __getitem__(self, key):
        return self.logits if key == "logits" else super().__getitem__(key)

    def get(self, key, default=None):
        value = self.logits if key == "logits" else super().get(key)
        return default if value is None else value

    def __reduce__(self):
        return type(self), (), None, None, iter(list(self.items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.items())})"


def _some_rows(weight: torch.Tensor) -> torch.Tensor:
    """View up to 64 evenly spaced rows of a weight or of FSDP2's local shard, or elements of ZeRO-3's flat shard."""
    weight = getattr(weight, "_local_tensor", getattr(weight, "ds_tensor", weight)).detach()
    return weight[:: max(1, -(-len(weight) // 64))]


def _logits_on_demand(head: Any, hidden_states: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that computes the head's logits in the modes of this forward, if the weights are unchanged."""
    device, bare = hidden_states.device.type, is_bare_linear(head)
    # ZeRO-3 would gather `head.weight`, and the model would keep it until its backward.
    weight, bias = (head.weight, head.bias) if bare else map(head._parameters.get, ("weight", "bias"))
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
    # Tensors created in inference mode have no version counter.
    tracked = [x for x in (hidden_states, weight, bias) if x is not None and not x.is_inference()]

    def state() -> list[tuple[int, int]]:
        # FSDP1 frees the storage of a gathered weight; FSDP2 and ZeRO-3 gather it again.
        return [(x._version, x.untyped_storage().nbytes() if bare else 0) for x in tracked]

    before = state()
    # Fused optimizers and writes through `.data` do not increment versions either. FSDP2 later frees weights that it
    # gathered for more than the head.
    kept = bare or hasattr(weight, "_local_tensor") or hasattr(weight, "ds_tensor")
    sample = _some_rows(weight).clone() if kept else None

    def make() -> torch.Tensor:
        changed = before != state()
        if not changed and sample is not None:
            changed = not torch.allclose(_some_rows(weight), sample, rtol=0, atol=0, equal_nan=True)
        if changed:
            got = "tensors changed in place since then, for example by optimizer.step()"
            fix = "Read logits before that change, or pass skip_logits=False to the model."
            raise input_error("the head and the hidden states of the forward pass", got, fix)
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), autocast:
            # Avoid calling the layer, whose weight or hooks may have changed, unless its weight must be gathered.
            return F.linear(hidden_states, weight, bias) if bare else head(hidden_states)

    return make


class CausalLMOutputWithoutLogits(_LogitsOnDemand, CausalLMOutputWithPast):
    """Output of a language model that skipped the logits."""


class MoeCausalLMOutputWithoutLogits(_LogitsOnDemand, MoeCausalLMOutputWithPast):
    """Output of a mixture-of-experts language model that skipped the logits."""


def loss_without_logits(step: LossStep) -> CausalLMOutputWithoutLogits | MoeCausalLMOutputWithoutLogits:
    """Run a language model with a base model `model` and a head `lm_head`, and compute its losses without logits.

    The output computes its logits on first access.
    """
    model = step.model
    outputs = step.run(step.losses, lambda: model.model(**step.inputs))
    fields = {name: outputs.get(name) for name in (CACHE, "hidden_states", "attentions")}
    kept = outputs.last_hidden_state[:, kept_tokens(step.logits_to_keep)]
    fields["make_logits"] = _logits_on_demand(model.lm_head, kept)
    loss = sum_of(step.terms())
    if not hasattr(outputs, "router_logits"):
        return CausalLMOutputWithoutLogits(loss=loss, **fields)
    routers = outputs.router_logits
    return MoeCausalLMOutputWithoutLogits(loss=loss, router_logits=routers, **fields, **step.fields)
