"""The head of multi-token prediction as a module of a language model, which trains in packed rows.

Row `t` of the head reads the embedding of token `t + 1` and the trunk's last hidden state of token `t`, and predicts token
`t + 2`: `layer(fc([norm(e_{t+1}), norm(h_t)]))`, normalized, times the trunk's own `lm_head`. The hidden state is that
after the trunk's last norm, the embedding comes first, and rows keep the positions of the trunk, as in vLLM. The layer is
a decoder layer of the family with full attention, so it takes boundaries, adapters, float8 and shards as those of the
trunk do. Nothing crosses the end of a document: the embedding after its last token is zero, and its last two rows have no
target.

Module and parameters have the names of the checkpoint, `mtp.*`, so `save_pretrained` writes them where servers read them.
"""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..errors import input_error
from ..ops.cross_entropy import FROZEN_CHUNK_SIZE
from .families import OWN, families_of, family_of, titles
from .mtp import DECLARED, HEAD_FILE, PREFIX, find_head, head_in_use, read_tensors, tensors_of_head, to_module_names
from .projections import project
from .releases import CHECKPOINTS, initialize
from .replacements import convert
from .trunk_row import TrunkRow
from .untouched import gathers_weights


_TITLES = titles(family for family in OWN if family.has_mtp)
_RETRY = "Train without the head, or load a checkpoint with one."


class MtpHead(torch.nn.Module):
    """A head of multi-token prediction for a language model of this package. [`add_mtp`] creates it.

    Args:
        model (`PreTrainedModel`):
            The language model whose layers it resembles.
    """

    # Whether the trunk gets no gradient from the head.
    detached = False

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

    def forward(self, row: TrunkRow) -> torch.Tensor:
        """Return the hidden states `[1, T, hidden]` from which `lm_head` predicts the token after the next one."""
        hidden_states = self.layers[0](
            self.pairs(row),
            position_embeddings=row.position_embeddings,
            attention_mask=None,
            position_ids=None,
            boundaries=row.documents,
        )
        return self.norm(hidden_states)

    def pairs(self, row: TrunkRow) -> torch.Tensor:
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


def first_choices(lm_head: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return the token with the largest logit for each of these hidden states `[N, hidden]`."""
    size = max(len(rows), 1) if gathers_weights(lm_head) else FROZEN_CHUNK_SIZE
    return torch.cat([lm_head(some).argmax(-1) for some in rows.split(size)])
