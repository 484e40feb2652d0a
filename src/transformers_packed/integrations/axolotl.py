"""Plugin for Axolotl: `transformers_packed: true` in the configuration.

It patches the model once Axolotl has built it, and collates the rows of `sample_packing: true` with their boundaries.
Axolotl itself changes methods of Transformers' classes before it builds a model. The plugin restores the methods whose
work it does itself, and refuses the options that would change others.
"""

from typing import Any

import torch
from axolotl.integrations.base import BasePlugin
from axolotl.utils.collators import V2BatchSamplerDataCollatorForSeq2Seq
from pydantic import BaseModel

from ..data.collator import DataCollatorWithFlattening
from ..data.samples import TOKEN_COLUMNS
from ..errors import input_error
from .stock_methods import Framework


# Options that make documents depend on more than their own row, with the value that turns them off.
_REFUSED = {
    "context_parallel_size": (1, "whole rows"),
    "context_parallel.size": (1, "whole rows"),
    "use_pose": (False, "positions that count every token of a document"),
    "pretraining_dataset": (None, "a dataset that is tokenized before training"),
    "reward_model": (False, "labels per token"),
    "process_reward_model": (False, "labels per token"),
}
_AXOLOTL = Framework(
    plugin="PackedPlugin",
    # Our classes isolate documents and compute LoRA adapters without these changes.
    undone=(
        "axolotl.monkeypatch.lora_kernels",
        "axolotl.monkeypatch.models.qwen3_5.modeling",
        "axolotl.monkeypatch.models.qwen3_next.modeling",
    ),
    fixes={
        "axolotl.integrations.liger": "Set liger_fused_linear_cross_entropy: false.",
        "liger_kernel": "Set liger_fused_linear_cross_entropy: false.",
        "cut_cross_entropy": "Set cut_cross_entropy: false.",
        "axolotl.integrations.cut_cross_entropy": "Set cut_cross_entropy: false.",
        "axolotl.monkeypatch.tiled_mlp": "Set tiled_mlp: false.",
        "axolotl.monkeypatch.models.qwen3_5.fused_attn": "Set fused_attn_kernel: false.",
        "axolotl.monkeypatch.models.qwen3_5_moe.fused_attn": "Set fused_attn_kernel: false.",
        # Axolotl's own way to pack some other families.
        "axolotl.monkeypatch.models": "Set sample_packing: false, or remove PackedPlugin.",
    },
    # Axolotl marks an attention class that it has changed.
    marks=("_original_forward",),
)


def _value(cfg: Any, name: str) -> Any:
    """The value of an option, whose name may have the parts of a nested one."""
    for part in name.split("."):
        cfg = None if cfg is None else cfg.get(part)
    return cfg


class PackedArgs(BaseModel):
    """The option that the plugin adds to Axolotl's configuration."""

    transformers_packed: bool | None = None


class PackedPlugin(BasePlugin):
    """Axolotl plugin: keep the documents of a packed row apart, with the kernels of this package.

    Add one line to the configuration: Axolotl 0.21 or later finds the plugin by itself, and earlier ones need its name
    under `plugins`. With `sample_packing: true`, the model gets one row per batch, with the boundaries of its documents.
    Without, the model computes padded batches as packed rows. A model that Axolotl already trains correctly on packed
    rows, such as Llama, stays unchanged.

    ```yaml
    transformers_packed: true   # or plugins: [transformers_packed.integrations.axolotl.PackedPlugin]
    sample_packing: true
    attn_implementation: sdpa
    ```

    Raises:
        `ValueError`: an option of Axolotl that would change the same modules or cut the rows. The message names it.
    """

    def __init__(self):
        super().__init__()
        self._is_patched = False

    def _is_wanted(self, cfg: Any) -> bool:
        """Whether the configuration asks for this plugin, which Axolotl 0.21 creates wherever this package is installed."""
        name = f"{type(self).__module__}.{type(self).__name__}"
        return bool(cfg.get("transformers_packed")) or name in [x.replace(":", ".") for x in cfg.get("plugins") or ()]

    def get_input_args(self) -> str:
        """Return the name of the class with the option of this plugin."""
        return f"{PackedArgs.__module__}.{PackedArgs.__name__}"

    def pre_model_load(self, cfg: Any) -> None:
        """Raise a `ValueError` for options with which rows could not be kept whole."""
        for name, (off, expected) in _REFUSED.items() if cfg.sample_packing and self._is_wanted(cfg) else ():
            if (value := _value(cfg, name)) not in (None, off):
                fix = f"Remove {name}, or set sample_packing: false."
                raise input_error(f"{expected} for sample_packing: true", f"{name}: {value}", fix)

    def post_model_build(self, cfg: Any, model: torch.nn.Module) -> None:
        """Patch the model, before Axolotl adds adapters, checkpointing and FSDP."""
        self._is_patched = self._is_wanted(cfg) and _AXOLOTL.patch(model)

    def get_collator_cls_and_kwargs(self, cfg: Any, is_eval: bool = False) -> tuple[type, dict[str, Any]] | None:
        """Return the collator of packed rows, and `None` for padded batches."""
        is_packed = cfg.eval_sample_packing if is_eval else cfg.sample_packing
        return (PackedCollator, {}) if is_packed and self._is_patched else None

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Raise a `ValueError` if packed rows would reach the model without boundaries."""
        if not (self._is_patched and cfg.sample_packing) or isinstance(trainer.data_collator, PackedCollator):
            return
        got, fix = type(trainer.data_collator).__name__, "List this plugin before others that set a collator."
        raise input_error("the collator of PackedPlugin for sample_packing: true", got, fix)


class PackedCollator(V2BatchSamplerDataCollatorForSeq2Seq):
    """Axolotl's collator of packed rows, with one row per batch and the boundaries of the samples.

    Returns `input_ids`, `labels` and other columns `[1, T]` with one value per token, `position_ids` `[1, T]` and
    `cu_seqlens` `[N+1]`. All padding is at the end of the row, as its last document, and `padding_tokens` (`int`) is its
    length. There is no `attention_mask`: tokens with a mask of 0 are removed.
    """

    def __call__(self, features: list, return_tensors: str | None = None) -> dict[str, Any]:
        """Collate samples, or rows of samples, into one row."""
        # Axolotl's batch tells the columns, and the tokens with its padding.
        batch = super().__call__(features, return_tensors)
        shape, tokens = batch["input_ids"].shape, batch["input_ids"].numel()
        for name, column in batch.items():
            if column.shape != shape:
                got = f"column {name} of shape {tuple(column.shape)}"
                raise input_error("columns with one value per token", got, "Remove it, or set sample_packing: false.")
        padding = {"pad_to_multiple_of": tokens, "pad_token_id": self.tokenizer.pad_token_id}
        columns = [name for name in batch if name not in (*TOKEN_COLUMNS, "position_ids")]
        flatten = DataCollatorWithFlattening(
            return_cu_seqlens=True, token_columns=columns, on_leak="ignore", **padding
        )
        return flatten([features])
