"""`PackedModelMixin`, the base of all our model classes."""

from collections.abc import Mapping, Set
from copy import deepcopy
from os import PathLike
from pathlib import Path
from typing import Any

from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

from ..errors import input_error
from .families import family_of
from .family import Own
from .installed import EXPERTS, held, hold
from .mtp import PREFIX, keep_head, save_beside, to_module_names
from .quantization import QuantizationMixin
from .releases import note_revision, saves_adapter
from .replacements import convert
from .typed import ModelBase
from .versions import can_select_checkpoints


logger = logging.get_logger(__name__)

# The options of `save_pretrained` that `push_to_hub` takes.
_OF_UPLOADS = {"commit_message", "create_pr", "max_shard_size", "private", "token"}


class Switch:
    """An attribute of our models. Setting it also sets it in all submodels.

    Args:
        default (`bool`):
            The value of models in which it was never set.
    """

    def __init__(self, default: bool):
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        return self if model is None else vars(model).get(self.name, self.default)

    def __set__(self, model: Any, value: bool) -> None:
        for module in model.modules():
            if isinstance(module, PackedModelMixin):
                vars(module)[self.name] = value

    def __delete__(self, model: Any) -> None:
        del vars(model)[self.name]


class SavedNamesMixin(ModelBase):
    """Models that load weights by the names of a checkpoint, too."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights by the names of this model, or by those that `save_pretrained` writes.

        The two differ for experts and for the language model of a composite checkpoint. `Trainer` resumes with this
        method and `strict=False`, which would leave these weights out with no more than a warning.
        """
        own = self.state_dict().keys()
        if not state_dict.keys() <= own:
            state_dict = self._from_saved_names(state_dict, own)
        return super().load_state_dict(state_dict, strict, assign)

    def _from_saved_names(self, state_dict: Mapping[str, Any], own: Set[str]) -> Mapping[str, Any]:
        """`state_dict` by the names of this model, converted as `from_pretrained` does; unknown names stay."""
        # Saved checkpoints keep the head of multi-token prediction, for which a model may have no module.
        head = {name: x for name, x in state_dict.items() if name.startswith(PREFIX)} if hasattr(self, "mtp") else {}
        head = to_module_names(head)
        state_dict = {name: x for name, x in state_dict.items() if not name.startswith(PREFIX)}
        parameters = {name: x.to("meta") for name, x in self.named_parameters() if not name.startswith(PREFIX)}
        saved = revert_weight_conversion(self, parameters).keys()
        if not state_dict.keys() & (saved - own):
            return state_dict | head
        if missing := sorted(saved - state_dict.keys()):
            fix = "Save checkpoints in one file, or under FSDP, which keeps the names of the model."
            raise input_error("all weights that save_pretrained wrote", f"a part of them, without {missing[0]}", fix)
        weights = {name: x for name, x in state_dict.items() if name in saved or name in own}
        loaded = type(self).from_pretrained(None, config=deepcopy(self.config), state_dict=weights, dtype=self.dtype)
        return loaded.state_dict() | {name: x for name, x in state_dict.items() if name not in weights} | head


class PackedModelMixin(SavedNamesMixin, QuantizationMixin):
    """Base of all our model classes. Converts the layers of a model to our classes when the model is created."""

    # The stock classes do not declare this, so only our models accept flex_attention in `set_attn_implementation`.
    _supports_flex_attn = True
    # Whether padded batches run as packed rows if no cache is used.
    packs_padding = Switch(True)
    # Whether documents of a padded batch share the tokens that they begin with.
    share_prompts = Switch(False)

    def __init__(self, config, *args, **kwargs):
        # Transformers looks the implementation of experts up.
        hold(self)
        super().__init__(config, *args, **kwargs)
        convert(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Copies and unpickled models come without `__init__`.
        super().__setstate__(state)
        hold(self)

    @classmethod
    def from_pretrained(cls, *args: Any, revision: str = "main", **kwargs: Any) -> Any:
        with held():
            loaded = super().from_pretrained(*args, revision=revision, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        # Where to find the head of multi-token prediction.
        note_revision(model.config, getattr(revision, "resolved", revision))
        return loaded

    def save_pretrained(  # type: ignore[override]  # Other options go by name.
        self,
        save_directory: str | PathLike,
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save the model as Transformers does, with its head of multi-token prediction, or that of its checkpoint."""
        # All processes save a sharded model, and one of them writes. Older releases do not shard models.
        writes = getattr(self, "should_save_on_this_rank", bool)(is_main_process)
        with keep_head(self.config, Path(save_directory), writes and not hasattr(self, "mtp")):
            super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
        if writes and saves_adapter(self):
            save_beside(self, state_dict, save_directory, self.active_adapters()[0])
        if push_to_hub and is_main_process:
            # It calls this method to save what it uploads.
            options = {name: kwargs[name] for name in _OF_UPLOADS & kwargs.keys()}
            self.push_to_hub(kwargs.get("repo_id") or Path(save_directory).name, **options)  # type: ignore[arg-type]

    if can_select_checkpoints():

        def activation_checkpointing_enable(
            self,
            activation_checkpointing_kwargs: dict[str, Any] | None = None,
            every_n_layers: int = 1,
            offload: bool | str = False,
        ) -> None:
            """Compute layers again in backward, as Transformers does. With `offload`, copies run beside the layers.

            With `offload="auto"`, inputs of layers stay on the GPU where copies would cost time or too much host memory.

            With `"keep_attention": True` in `activation_checkpointing_kwargs`, softmax attention is not computed again,
            and its outputs are where the inputs of layers are. With `"auto"`, that holds for rows with documents of at
            least 16,384 tokens, as far as the outputs are in host memory.
            With `"segment_tokens": n`, layers compute longer rows in segments of `n` tokens.
            """
            # Late, because the ops import the compiler of PyTorch.
            from .checkpointing import enable, read_options

            options = read_options(activation_checkpointing_kwargs, every_n_layers, offload)
            enable(self, super().activation_checkpointing_enable, options)

    def __setattr__(self, name: str, value: Any) -> None:
        # With use_liger_kernel, Trainer assigns Liger's forward to a registered model in `train`, and this is the only
        # place to intercept it. Liger's norms and MLPs may stay, because they process each token separately.
        module = getattr(getattr(value, "__func__", None), "__module__", None) or ""
        if name == "forward" and module.startswith("liger_kernel."):
            logger.warning_once(
                f"{type(self).__name__} keeps its forward: Liger's fused_linear_cross_entropy ignores document "
                "boundaries and would train on targets across them."
            )
            return
        super().__setattr__(name, value)

    @classmethod
    def is_custom_code(cls) -> bool:
        # The weights are those of the stock class, so Transformers' weight conversion and initialization apply.
        return False

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # The check reads the source of the class's module, so it needs the stock class.
        stock: Any = next(base for base in cls.__mro__ if base.__module__.startswith("transformers."))
        return stock._can_set_experts_implementation()

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        family = family_of(type(self))
        if family is not None and isinstance(family.apart, Own):
            requested_experts = EXPERTS if requested_experts is None else requested_experts
        return super().get_correct_experts_implementation(requested_experts)
