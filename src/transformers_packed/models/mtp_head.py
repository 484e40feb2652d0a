"""The head of multi-token prediction as a module of a language model, which trains in packed rows.

Row `t` of the head reads the embedding of token `t + 1` and the trunk's last hidden state of token `t`, and predicts token
`t + 2`: `layer(fc([norm(e_{t+1}), norm(h_t)]))`, normalized, times the trunk's own `lm_head`. The hidden state is that
after the trunk's last norm, the embedding comes first, and rows keep the positions of the trunk, as in vLLM. The layer is
a decoder layer of the family with full attention, so it takes boundaries, adapters, float8 and shards as those of the
trunk do. Nothing crosses the end of a document: the embedding after its last token is zero, and its last two rows have no
target.

Module and parameters have the names of the checkpoint, `mtp.*`, so `save_pretrained` writes them where servers read them.
"""

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig

from ..boundaries import PACKING_KEYWORDS, SequenceBoundaries
from ..errors import input_error
from ..foreign import swapped
from ..ops import linear_cross_entropy
from ..ops.cross_entropy import FROZEN_CHUNK_SIZE, TargetCount, shift_labels
from ..ops.prompts import repeat_rows
from ..parallel.shard import RowShard
from ..shared_prompts import SharedPrompts, Successors
from .families import OWN, families_of, family_of, titles
from .inputs import resolve_boundaries
from .masks import is_padding, read_padding
from .mtp import DECLARED, HEAD_FILE, PREFIX, find_head, read_tensors, tensors_of_head, to_module_names
from .mtp_beside import head_in_use
from .padding import PaddedBatch
from .projections import project
from .releases import CHECKPOINTS, initialize
from .replacements import convert
from .untouched import gathers_weights, is_bare_linear, is_sharded_linear


# The label of a token without a target.
_IGNORED = -100
_TITLES = titles(family for family in OWN if family.has_mtp)
_RETRY = "Train without the head, or load a checkpoint with one."


@dataclass
class MtpRow:
    """What a head reads. The text model fills it in its forward, which gets it as `mtp_row`.

    Args:
        embeddings (`torch.Tensor` of shape `[1, T, hidden]`):
            The embeddings of the packed row, with images in their places.
        hidden_states (`torch.Tensor` of shape `[1, T, hidden]`):
            The last hidden states of the same tokens, after the last norm.
        position_ids (`torch.LongTensor` of shape `[1, T]` or `[3, 1, T]`):
            The positions of the trunk's rotary embeddings.
        position_embeddings (`tuple[torch.Tensor, torch.Tensor]`):
            Their cosines and sines.
        boundaries ([`SequenceBoundaries`]):
            The documents of the row. The rows of a padded batch are documents.
        batch (`PaddedBatch`, *optional*):
            The places of the row's tokens in a batch that is not packed.
        successors ([`Successors`], *optional*):
            The rows of the head, if documents continue others. The last token of a document is then followed by the
            first token of each of its children, which has a row of the head in the child.
    """

    embeddings: torch.Tensor = field(init=False)
    hidden_states: torch.Tensor = field(init=False)
    position_ids: torch.Tensor = field(init=False)
    position_embeddings: tuple[torch.Tensor, torch.Tensor] = field(init=False)
    boundaries: SequenceBoundaries = field(init=False)
    batch: PaddedBatch | None = None
    successors: Successors | None = None

    def embed(self, model: Any, inputs: dict[str, Any]) -> None:
        """Embed the tokens of a text model's forward, so that trunk and head read the same embeddings."""
        if inputs.get("inputs_embeds") is None:
            inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
        self.embeddings = inputs["inputs_embeds"]

    def finish(
        self,
        model: Any,
        inputs: dict[str, Any],
        hidden_states: torch.Tensor,
        boundaries: SequenceBoundaries | None,
        batch: PaddedBatch | None,
    ) -> None:
        """Take the last hidden states of the text model that ran on `inputs`."""
        self.batch, self.hidden_states, position_ids = batch, hidden_states, inputs.get("position_ids")
        if boundaries is None:
            self.batch = batch = _whole(inputs, self.embeddings)
            boundaries = batch.boundaries
            packed = batch.packed({"inputs_embeds": self.embeddings, "position_ids": position_ids})
            self.embeddings, position_ids = packed["inputs_embeds"], packed["position_ids"]
            self.hidden_states = self.of_row(hidden_states)
        if batch is not None and batch.shared is not None:
            expected = "rows that are documents of their own for multi-token prediction (mtp)"
            raise input_error(expected, "a padded batch with shared prompts", "Do not share them.")
        self.boundaries = boundaries
        assert position_ids is not None
        if isinstance(boundaries, SharedPrompts):
            self.successors = boundaries.successors
            position_ids = position_ids.index_select(-1, self.successors.before.rows)
        if position_ids.ndim == 3 and len(position_ids) == 4:
            # The first row is the position in the text.
            position_ids = position_ids[1:]
        self.position_ids = position_ids
        self.position_embeddings = model.rotary_emb(self.embeddings, position_ids)

    @property
    def documents(self) -> SequenceBoundaries:
        """The boundaries of the rows of the head."""
        return self.boundaries if self.successors is None else self.successors.boundaries

    def own(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return for each row of the head what belongs to its token, from the row `[1, T, ...]`."""
        return tokens if self.successors is None else repeat_rows(tokens[0], self.successors.before)[None]

    def following(self, tokens: torch.Tensor, fill: float) -> torch.Tensor:
        """Return for each row of the head what belongs to the token after its own, and `fill` if there is none."""
        if self.successors is None:
            return fill_ends(self.boundaries.next_tokens(tokens), self.boundaries, fill)
        return tokens.index_select(1, self.successors.tokens)

    def of_row(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what belongs to the tokens of the row `[1, T, ...]`, from all tokens of the batch `[B, L, ...]`."""
        if self.batch is None:
            return tokens
        return tokens.flatten(0, 1).index_select(0, self.batch.slots.to(tokens.device))[None]


def _whole(inputs: dict[str, Any], embeddings: torch.Tensor) -> PaddedBatch:
    """The real tokens of a batch that the trunk did not pack."""
    mask, (rows, length) = inputs.get("attention_mask"), embeddings.shape[:2]
    batch = None
    if mask is not None:
        real = read_padding(mask) if is_padding(mask) else None
        if real is None or bool(((real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0] > 1).any()):
            expected = "a mask of padding around each row for multi-token prediction (mtp)"
            raise input_error(expected, f"another of shape {tuple(mask.shape)}", _RETRY)
        batch = PaddedBatch.from_attention_mask(real, embeddings.device)
    if batch is None:
        boundaries = SequenceBoundaries.from_lengths([length] * rows, device=embeddings.device)
        batch = PaddedBatch(boundaries, torch.arange(rows * length, device=embeddings.device), (rows, length))
    return batch


def fill_ends(tokens: torch.Tensor, boundaries: SequenceBoundaries, fill: float) -> torch.Tensor:
    """Put `fill` at the last token of each document of a row `[1, T, ...]`, unless another part of the row has it."""
    return tokens.index_fill(1, boundaries.ends.to(tokens.device), fill)


class MtpHead(torch.nn.Module):
    """A head of multi-token prediction for a language model of this package. [`add_mtp`] creates it.

    Args:
        model (`PreTrainedModel`):
            The language model whose layers it resembles.
    """

    # Whether the trunk gets no gradient from the head.
    detached = False
    # Set by the callback of a Trainer: the losses and choices since the last log, and whether to compare choices.
    record: "list[torch.Tensor] | None" = None
    compares = False
    # The loss of the last forward, where a trainer computes that of the trunk from scores.
    pending: torch.Tensor | None = None

    def __init__(self, model: Any):
        super().__init__()
        text = model.get_decoder()
        config = deepcopy(text.config)
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        # Qwen3-Next may have layers without experts. Its head has them.
        config.mlp_only_layers, config.decoder_sparse_step = [], 1
        norm, size, eps = type(text.norm), config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(size, eps=eps), norm(size, eps=eps)
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.layers = torch.nn.ModuleList([type(text.layers[0])(config, 0)])
        self.norm = norm(size, eps=eps)
        for module in self.modules():
            # A later choice of an attention implementation holds for both.
            if getattr(module, "config", None) is config:
                vars(module)["config"] = text.config
        convert(self)

    def forward(self, row: MtpRow) -> torch.Tensor:
        """Return the hidden states `[1, T, hidden]` from which `lm_head` predicts the token after the next one."""
        hidden_states = self.layers[0](
            self.pairs(row),
            position_embeddings=row.position_embeddings,
            attention_mask=None,
            position_ids=None,
            boundaries=row.documents,
        )
        return self.norm(hidden_states)

    def pairs(self, row: MtpRow) -> torch.Tensor:
        """Return the input of the layer `[1, T, hidden]`."""
        hidden_states, embeddings = row.hidden_states, row.embeddings
        if self.detached:
            hidden_states, embeddings = hidden_states.detach(), embeddings.detach()
        return self.join(row.following(embeddings, 0), row.own(hidden_states))

    def join(self, embeddings: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Combine the embeddings of the next tokens and hidden states, both `[1, T, hidden]`."""
        pair = self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden_states)
        return project(torch.cat(pair, dim=-1), self.fc)[0]


def add_mtp(model: torch.nn.Module, folder: str | Path | None = None, dtype: torch.dtype | None = None) -> MtpHead:
    """Add the head of multi-token prediction of a checkpoint to its model, as the module `mtp` of the language model.

    The head trains with `mtp_loss_weight` of [`configure_packing`] or of [`PackedTrainingArguments`], which call this
    function. `save_pretrained` writes it into the checkpoint, and beside an adapter of PEFT into `mtp.safetensors`.
    `PeftModel.from_pretrained` reads that file if the model has classes of this package.

    Args:
        model (`torch.nn.Module`):
            A language model with classes of this package ([`register`], [`patch_model`]), or a wrapper of it. Its
            configuration declares a head. A model that was created from a configuration gets a head with random weights.
        folder (`str`, *optional*):
            A folder with `mtp.safetensors`. By default, the head is that of the checkpoint of the model.
        dtype (`torch.dtype`, *optional*):
            The dtype of its parameters. Defaults to that of the model.

    Returns:
        `MtpHead`: the head, which trains all of its parameters. Set `requires_grad_(False)` for those that should stay,
            such as the experts. With `head.detached = True`, the trunk gets no gradient from it.

    Raises:
        `ValueError`: the model is of another class, its configuration declares no head or another kind of head, or the
            checkpoint has no complete head in floating point.

    Example:

    ```python
    >>> from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    >>> from transformers_packed import add_mtp, patch_model
    >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
    >>> model = patch_model(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, mtp_num_hidden_layers=1)))
    >>> head = add_mtp(model)
    >>> head.fc.weight.shape
    torch.Size([32, 64])

    ```
    """
    inner = language_model(model)
    source = inner.config.name_or_path if folder is None else Path(folder) / HEAD_FILE
    tensors = find_head(inner.config) if folder is None else tensors_of_head(Path(source))
    check_declared(inner.config, bool(tensors))
    if source and not tensors:
        raise input_error(f"tensors {PREFIX}* in {source}", "none", _RETRY)
    with torch.device("meta"):
        head = MtpHead(inner)
    like = inner.get_decoder().norm.weight
    dtype = inner.dtype if dtype is None else dtype
    if source:
        load_head(head, read_tensors(tensors), like.device, dtype)
    else:
        head.to_empty(device=like.device).to(dtype)
        initialize(inner, head)
    head.train(inner.training)
    for name in ("gradient_checkpointing", *CHECKPOINTS):
        if name in vars(inner.get_decoder().layers[0]):
            vars(head.layers[0])[name] = vars(inner.get_decoder().layers[0])[name]
    inner.mtp = head
    return head


def language_model(model: torch.nn.Module) -> Any:
    """Return the language model of this package in `model`, which has the embeddings and the head."""
    found = [module for module in model.modules() if hasattr(type(module), "skips_logits")]
    if not any(family.has_mtp for family in families_of(model)):
        raise input_error(f"a model of {_TITLES} for multi-token prediction", type(model).__name__, _RETRY)
    if not found:
        fix = "Call register() before from_pretrained, or patch_model."
        raise input_error("a language model of this package for multi-token prediction", type(model).__name__, fix)
    return found[0]


def head_of(model: torch.nn.Module) -> MtpHead | None:
    """Return the head of multi-token prediction that [`add_mtp`] has added to a model, or the copy that PEFT trains."""
    used = (head_in_use(module.mtp) for module in model.modules() if module._modules.get("mtp") is not None)
    return next((head for inside in used for head in inside.modules() if isinstance(head, MtpHead)), None)


def check_declared(config: PreTrainedConfig, found: bool, option: str = "") -> None:
    """Raise a `ValueError` unless a configuration declares a head that servers run: one layer, no other embedding.

    Released Qwen3-Next checkpoints declare none, and readers take this for one layer, where its tensors are `found`.
    A command passes the `option` that its errors name.
    """
    parts = config, config.get_text_config()
    if not any(family_of(part).has_mtp for part in parts):
        raise input_error(f"a model of {_TITLES} for multi-token prediction", config.model_type, _RETRY, option=option)
    numbers = [number for part in parts for name in DECLARED if (number := getattr(part, name, None)) is not None]
    if max(numbers, default=int(found)) != 1:
        expected = f"a configuration with {DECLARED[0]}=1, or {DECLARED[1]}=1 in Qwen3-Next"
        raise input_error(expected, max(numbers, default="none"), _RETRY, option=option)
    if any(getattr(part, "mtp_use_dedicated_embeddings", False) for part in parts):
        expected, got = "a head with the embeddings of the model", "mtp_use_dedicated_embeddings=True"
        raise input_error(expected, got, _RETRY, option=option)


def load_head(head: MtpHead, tensors: Mapping[str, torch.Tensor], device: Any, dtype: torch.dtype) -> None:
    """Load the tensors of a head, by the names of a checkpoint."""
    quantized = [name for name, x in tensors.items() if not x.is_floating_point() or x.dtype.itemsize < 2]
    if quantized:
        got = f"{quantized[0]} in {tensors[quantized[0]].dtype}"
        raise input_error("a head of multi-token prediction in floating point", got, _RETRY)
    state = {name.removeprefix(PREFIX): x.to(device, dtype) for name, x in to_module_names(tensors).items()}
    wanted = head.state_dict()
    wrong = sorted(name for name in {*state, *wanted} if name not in state or name not in wanted)
    wrong += [name for name in state if name in wanted and state[name].shape != wanted[name].shape]
    if wrong:
        name = wrong[0]
        got = f"one of shape {tuple(state[name].shape)}" if name in state else "none"
        expected = f"{PREFIX}{name} of shape {tuple(wanted[name].shape)}" if name in wanted else f"no {PREFIX}{name}"
        raise input_error(expected, got, _RETRY)
    head.load_state_dict(state, assign=True)


@dataclass
class MtpStep:
    """The loss of a head in a forward of its model.

    Args:
        shifted (`torch.LongTensor` of shape `[B, L]`):
            The targets of the trunk, one token ahead.
        items (`int` or `torch.Tensor`, *optional*):
            The divisor of the sum over the head's targets. Defaults to their number.
        number ([`TargetCount`], *optional*):
            Their number, counted before the trunk runs. That of a shard needs the first token of the next one.
        row ([`MtpRow`]):
            What the text model fills.
    """

    shifted: torch.Tensor
    items: int | torch.Tensor | None
    number: TargetCount | None
    row: MtpRow = field(default_factory=MtpRow)

    @classmethod
    def of(cls, labels: torch.Tensor, items: int | torch.Tensor | None, inputs: Mapping[str, Any]) -> "MtpStep":
        """Prepare the loss for the labels of a model's forward and its other arguments."""
        is_shard = isinstance(inputs.get("boundaries"), RowShard)
        counted = None if is_shard else mtp_targets_of_batch({**inputs, "labels": labels})
        shifted = inputs.get("shift_labels")
        shifted = shift_labels(labels) if shifted is None else shifted
        return cls(shifted, items, None if counted is None else TargetCount(counted, _IGNORED))

    def alone(self, model: Any) -> torch.Tensor:
        """Run the head after its trunk, and compute its loss."""
        hidden_states, targets, number, items = self._run(model)
        options = {"num_items_in_batch": items, "num_targets": number}
        loss, losses = head_loss(model.lm_head, hidden_states, targets, return_losses=True, **options)
        self._note(model, hidden_states, targets, losses)
        return loss

    def beside(
        self, model: Any, hidden_states: torch.Tensor, targets: torch.Tensor, number: int, items: Any
    ) -> torch.Tensor:
        """Compute the loss of the trunk plus the weighted one of the head, with one gradient of the vocabulary's weight.

        `number` of the trunk's `targets` `[B, L]` are not ignored, and `items` is the divisor of their sum.
        """
        own, own_targets, own_number, own_items = self._run(model)
        items = (number or math.nan) if items is None else items
        share = torch.as_tensor(model.mtp_loss_weight * items / own_items, dtype=torch.float32, device=own.device)
        rows = torch.cat([hidden_states.flatten(0, 1), own[0].to(hidden_states.dtype)])
        weights = torch.cat([share.new_ones(targets.numel()), share.expand(own_targets.numel())])
        every = torch.cat([targets.flatten().to(own_targets.device), own_targets[0]])
        options = {"num_items_in_batch": items, "num_targets": number + own_number, "token_weights": weights}
        loss, losses = head_loss(model.lm_head, rows, every, return_losses=True, **options)
        self._note(model, own, own_targets, losses[targets.numel() :])
        return loss

    def _run(self, model: Any) -> tuple[torch.Tensor, torch.Tensor, int, Any]:
        """The output of the head, its targets, their number on this rank, and the divisor of its loss."""
        row = self.row
        # No target of the trunk is in another document, but a caller may not have masked it.
        shifted = fill_ends(row.of_row(self.shifted), row.boundaries, _IGNORED)
        targets = row.following(shifted, _IGNORED)
        number = int(self.number or TargetCount(targets, _IGNORED))
        # Without a target, the loss is 0, and the head gets gradients of 0.
        items = (
            max(number, 1) if self.items is None else torch.as_tensor(self.items, device=targets.device).clamp(min=1)
        )
        return model.mtp(row), targets, number, items

    @torch.no_grad()
    def _note(self, model: Any, hidden_states: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor) -> None:
        """Record the summed loss, the targets, and how often the head's first choice is the model's own."""
        head = model.mtp
        if head.record is None:
            return
        same: Any = (0, 0)
        if head.compares:
            rows = (targets[0] != _IGNORED).nonzero()[:, 0]
            own = self.row.following(self.row.hidden_states, 0)
            drafted, chosen = (first_choices(model.lm_head, x[0].index_select(0, rows)) for x in (hidden_states, own))
            same = (drafted == chosen).sum(), len(rows)
        sums = losses.sum(), (targets != _IGNORED).sum(), *same
        head.record.append(torch.stack([torch.as_tensor(x, device=losses.device).float() for x in sums]))


def mtp_targets_of_batch(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Return labels of which as many are targets as a head has in a batch, or `None` without labels.

    Those of the trunk one token ahead are those of the head one token before, but for the first token of a document.
    """
    labels, shifted, mask = (batch.get(name) for name in ("labels", "shift_labels", "attention_mask"))
    if labels is None:
        return None
    shifted = shift_labels(labels) if shifted is None else shifted
    tokens = {
        "input_ids",
        "inputs_embeds",
        "position_ids",
        "attention_mask",
        "boundaries",
        "settled",
        *PACKING_KEYWORDS,
    }
    boundaries = resolve_boundaries({name: x for name, x in batch.items() if name in tokens})
    if boundaries is None:
        # The row of a token has a target two tokens ahead, if the token is real.
        shifted = shifted[..., 1:]
        return shifted if mask is None else shifted.masked_fill(mask[:, :-1].to(shifted.device) == 0, _IGNORED)
    places = torch.cat([boundaries.first_tokens, boundaries.ends])
    return shifted.index_fill(1, places.to(shifted.device), _IGNORED)


def head_loss(
    lm_head: Any, hidden_states: torch.Tensor, targets: torch.Tensor, *, return_losses: bool = False, **options: Any
) -> Any:
    """Call [`linear_cross_entropy`] with a language modeling head, or the head if its weight does not say what it does."""

    def loss_of(hidden_states: torch.Tensor) -> Any:
        options["return_losses"] = return_losses
        return linear_cross_entropy(hidden_states, lm_head.weight, targets, lm_head.bias, **options)

    if is_bare_linear(lm_head):
        return loss_of(hidden_states)
    if is_sharded_linear(lm_head):
        # FSDP2 and ZeRO-3 gather the weight only around the head's forward, so that forward must compute the loss.
        with swapped(vars(lm_head), forward=loss_of):
            return lm_head(hidden_states)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    kept = (targets.flatten() != _IGNORED).nonzero()[:, 0]
    logits = lm_head(rows.index_select(0, kept)).float()
    losses = F.cross_entropy(logits, targets.flatten().index_select(0, kept).to(logits.device), reduction="none")
    loss = losses.sum() / torch.as_tensor(options["num_items_in_batch"], device=losses.device)
    return (loss, losses.detach()) if return_losses else loss


def first_choices(lm_head: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return the token with the largest logit for each of these hidden states `[N, hidden]`."""
    size = max(len(rows), 1) if gathers_weights(lm_head) else FROZEN_CHUNK_SIZE
    return torch.cat([lm_head(some).argmax(-1) for some in rows.split(size)])
