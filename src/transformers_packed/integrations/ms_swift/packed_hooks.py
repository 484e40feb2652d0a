"""Make ms-swift train the models of this package: importing this module wraps three methods of ms-swift.

ms-swift has no hook between loading a model and changing it. It loads every model through `ModelLoader.load`, also one
without a registered model type, for which a registered loader would not be used. The plugin patches the result.

`SftArguments._check_padding_free` requires a flash attention implementation for packed rows. Our classes keep documents
apart in every implementation, so the plugin replaces this check for their models, and refuses the options that would
change the same modules or cut the rows.

`Template.compute_sft_loss` calls the model. Its output gets no logits if the model has skipped them, because ms-swift
would compute them for a metric.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import swift
import transformers
from swift.arguments import SftArguments
from swift.model.register import ModelLoader
from swift.template import Template

from ...errors import input_error
from ...models.families import family_of
from ...models.family import Own
from ...models.outputs import CausalLMOutputWithoutLogits, MoeCausalLMOutputWithoutLogits
from ..stock_methods import Framework


_SWIFT = Framework(
    plugin="transformers_packed",
    # Our classes isolate documents without this change.
    undone=("swift.model.models.qwen",),
    fixes={
        "liger_kernel": "Set --use_liger_kernel false.",
        "swift.model.npu_patch": "Set --enable_npu_model_patch false.",
        "swift.sequence_parallel": "Set --sequence_parallel_size 1, and train in a new process.",
        "unsloth": "Set --tuner_backend peft, and train in a new process.",
    },
    marks=("_ms_swift_sp_linear_patched", "_apply_mask_to_padding_states", "_swift_torch_chunk_gated_delta_rule"),
)
# Options with which ms-swift would change the model after it was patched, or cut its rows, and the supported value.
_REQUIRED = {
    "sequence_parallel_size": 1,
    "task_type": "causal_lm",
    "tuner_backend": "peft",
    "use_liger_kernel": False,
}


def _replace(cls: type, name: str, arguments: tuple[str, ...], replacement: Callable[[Callable], Callable]) -> None:
    """Set a method of ms-swift to `replacement` of it. Raises a `ValueError` if it has no such `arguments`."""
    method = inspect.getattr_static(cls, name, None)
    if not inspect.isfunction(method) or tuple(inspect.signature(method).parameters) != arguments:
        expected, got = f"a method {cls.__name__}.{name}({', '.join(arguments)})", f"ms-swift {swift.__version__}"
        raise input_error(expected, f"{got} without it", "Install a tested release: ms-swift==4.6.0.")
    setattr(cls, name, wraps(method)(replacement(method)))


def _patch_loaded(load: Callable) -> Callable:
    def load_and_patch(self: Any) -> tuple:
        model, processor = load(self)
        if model is not None:
            _SWIFT.patch(model)
        return model, processor

    return load_and_patch


def _check_options(check_padding_free: Callable) -> Callable:
    def check(self: Any) -> None:
        settings, _ = transformers.PreTrainedConfig.get_config_dict(self.model_info.model_dir)
        if not isinstance(family_of(settings.get("model_type", "")).apart, Own):
            return check_padding_free(self)
        for name, value in _REQUIRED.items():
            if (got := getattr(self, name)) != value:
                option = f"--{name} {str(value).lower()}"
                raise input_error(
                    f"{option} with the plugin of transformers_packed", got, "Set it, or remove the plugin."
                )
        # As in ms-swift's check.
        self.padding_free = self.padding_free or self.packing

    return check


def _without_logits(compute_sft_loss: Callable) -> Callable:
    def compute(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        outputs = compute_sft_loss(self, model, inputs, *args, **kwargs)
        if isinstance(outputs, CausalLMOutputWithoutLogits | MoeCausalLMOutputWithoutLogits):
            # ms-swift would compute the logits for its metric token_acc, or cannot, after mixed precision.
            outputs.logits = None
        return outputs

    return compute


_replace(ModelLoader, "load", ("self",), _patch_loaded)
_replace(SftArguments, "_check_padding_free", ("self",), _check_options)
_replace(Template, "compute_sft_loss", ("self", "model", "inputs", "num_items_in_batch", "trainer"), _without_logits)
