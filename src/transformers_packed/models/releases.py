"""The private parts of Transformers, TRL, PEFT, accelerate and Muon of PyTorch: what must be there, and the only code that names them.

`tests/models/test_releases.py` lists what may be missing. No other module looks for a private or a missing name.
`versions.py` has adapters to releases of Transformers.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial, update_wrapper
from importlib import import_module
from operator import attrgetter
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
import transformers
from packaging.version import Version
from transformers.utils import generic, logging, output_capturing


if TYPE_CHECKING:
    # They import accelerate, and what is installed of the libraries that it serves.
    from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments


logger = logging.get_logger(__name__)

# The newest minor releases that the tests ran on.
TESTED = {"transformers": "5.24", "trl": "1.16", "peft": "0.21", "accelerate": "1.15"}


# What `patch_model` and `register` need: its module and its name there, `module:name.attribute`.
MODELS = (
    "transformers.utils.output_capturing:_CAN_RECORD_REGISTRY",  # output_hidden_states
    "transformers.utils.output_capturing:_active_collector",  # output_router_logits of graphs
    "transformers.modeling_utils:PreTrainedModel._can_record_outputs",
    "transformers.modeling_utils:PreTrainedModel._can_set_experts_implementation",  # our op for experts
    "transformers.integrations.moe:_default_apply_gate",
    "transformers.modeling_utils:PreTrainedModel._supports_flex_attn",  # flex_attention
    "transformers.models.auto.modeling_auto:AutoModel._model_mapping._extra_content",  # register
    "transformers.models.auto.modeling_auto:AutoModel._model_mapping._model_mapping",
    "transformers.utils.generic:merge_with_config_defaults",  # models that read use_cache from the configuration
    "transformers.modeling_utils:PreTrainedModel._init_weights",  # new heads of multi-token prediction
)
# The methods of a Trainer that count the targets of a step, make a dataloader, move a batch to the device, and make the
# sampler of its dataset.
COUNT_ITEMS, MAKE_LOADER, PREPARE = "_get_num_items_in_batch", "_get_dataloader", "_prepare_inputs"
MAKE_SAMPLER = "_get_train_sampler"
# What a Trainer needs in addition, also for columns that divide rows and trees, and checkpoints of the `train` command.
_OF_TRAINERS = ("_set_signature_columns_if_needed", "_get_output_dir", "_save_checkpoint")
TRAINING = tuple(
    f"transformers:Trainer.{name}" for name in (COUNT_ITEMS, MAKE_LOADER, PREPARE, MAKE_SAMPLER, *_OF_TRAINERS)
)

# The public parts of Transformers' modules that our methods use. Without them a model would fail in the middle of a forward.
_REQUIRED = (
    "transformers.cache_utils:Cache.update_conv_state",
    "transformers.cache_utils:Cache.update_recurrent_state",
    "transformers.integrations.accelerate:force_accelerate_hooks",
    "transformers.integrations.moe:grouped_mm_experts_forward",
    "transformers.integrations.finegrained_fp8:ALL_FP8_EXPERTS_FUNCTIONS",
    "transformers.integrations.finegrained_fp8:fp8_grouped_mm_experts_forward",
    "transformers.utils.generic:is_flash_attention_requested",
    "transformers.utils.generic:TransformersKwargs.__annotations__",
)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_names(names: tuple[str, ...] = MODELS) -> None:
    """Raise an `ImportError` that lists all of `names` that the installed Transformers lacks.

    Logs a warning, once, for each imported library that is newer than its newest tested release.
    """
    for library, tested in TESTED.items():
        installed = getattr(sys.modules.get(library), "__version__", tested)
        if Version(installed).release[:2] > Version(tested).release[:2]:
            newer = (
                f"{library} {installed} is newer than {tested}, the newest release tested with transformers_packed."
            )
            logger.warning_once(f"{newer} What it lacks is an error, but other changes may go unnoticed.")
    _check([name.replace(":", ".") for name in (*names, *_REQUIRED) if not is_present(name)], "lacks", "requires")


def is_present(where: str) -> bool:
    """Whether a module has what `where` names, `module:name.attribute`."""
    module, _, name = where.partition(":")
    try:
        attrgetter(name)(import_module(module))
    except (ImportError, AttributeError):
        return False
    return True


def check_signatures(replacements: Mapping[type, type]) -> None:
    """Raise an `ImportError` that lists every argument of a stock method that our method in its place does not have."""
    new = [argument for builtin, ours in replacements.items() for argument in _new_arguments(builtin, ours)]
    _check(new, "has the new", "would ignore")


def _new_arguments(builtin: type, ours: type) -> list[str]:
    found = []
    for name, method in vars(ours).items():
        original = getattr(builtin, name, None)
        # Another package may have replaced the method, which tells nothing about the release.
        if not isinstance(original, FunctionType) or not original.__module__.startswith("transformers."):
            continue
        if isinstance(method, FunctionType):
            found += [f"argument {x} of {builtin.__name__}.{name}" for x in _unknown_arguments(original, method)]
    return found


@cache
def _unknown_arguments(original: FunctionType, method: FunctionType) -> list[str]:
    """Return the arguments of a method that another one does not have. Each call of `patch_model` asks for all methods."""
    known = inspect.signature(method).parameters
    # A method with `*args`, such as a wrapper that somebody has put around it, passes all arguments on.
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in known.values()):
        return []
    return [x for x, p in inspect.signature(original).parameters.items() if p.kind not in _VARIABLE and x not in known]


def _check(names: list[str], has: str, verb: str) -> None:
    if names:
        fix = "Install a supported release: pip install 'transformers>=5.16.1,<6'."
        what = f"{has} {', '.join(names)}, which transformers_packed {verb}"
        raise ImportError(f"transformers {transformers.__version__} {what}. {fix}")


# Private parts of Transformers


def registered_classes(auto: Any) -> dict[type, type]:
    """Return the classes that were registered with an Auto class, by configuration class, to change it."""
    return auto._model_mapping._extra_content


def class_names(auto: Any) -> Mapping[str, Any]:
    """Return the names of the classes that an Auto class builds, by model type. It is empty for a base class."""
    return getattr(getattr(auto, "_model_mapping", None), "_model_mapping", {})


def builds(auto: Any, config: "PreTrainedConfig") -> bool:
    """Whether an Auto class builds a model for this configuration."""
    return type(config) in auto._model_mapping


def whole_layers(model: "PreTrainedModel") -> list[str]:
    """Return the names of the classes of its layers that are not split, for FSDP2. Without any, it gathers all at once."""
    return sorted(
        {type(module).__name__ for module in model.modules()}.intersection(
            getattr(model, "_no_split_modules", None) or ()
        )
    )


def auto_class(
    config: "PreTrainedConfig",
) -> "type[transformers.AutoModelForCausalLM] | type[transformers.AutoModelForImageTextToText]":
    """Return the Auto class of a checkpoint: that of causal language models, or that of vision-language models."""
    causal = builds(transformers.AutoModelForCausalLM, config) or hasattr(config, "auto_map")
    return transformers.AutoModelForCausalLM if causal else transformers.AutoModelForImageTextToText


def recorder_key(model: torch.nn.Module) -> torch.nn.Module | str:
    """Return the key of a model in the registry of recordable outputs. Before 5.23 it is the name of its class."""
    return str(type(model)) if type(output_capturing._CAN_RECORD_REGISTRY) is dict else model


def record_outputs(module: torch.nn.Module) -> None:
    """List a model of a new class in the registry of recordable outputs. An existing entry stays."""
    registry: Any = output_capturing._CAN_RECORD_REGISTRY
    key = recorder_key(module)
    if hasattr(module, "_can_record_outputs") and not registry.get(key):
        registry[key] = module._can_record_outputs


def forget_recorders(package: str) -> None:
    """Remove the classes of a package from the registry of recordable outputs, where its keys are classes."""
    registry: Any = output_capturing._CAN_RECORD_REGISTRY
    for key in [key for key in registry if isinstance(key, str) and f"'{package}." in key]:
        del registry[key]


# The attribute of model classes that support flex_attention.
FLEX = "_supports_flex_attn"
# The attributes of Transformers and PyTorch with the function that runs a layer under checkpointing.
CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
# Those of PEFT's wrappers with the copies of a module that it trains, by adapter, and the frozen module itself.
COPIES, ORIGINAL = "modules_to_save", "original_module"


def checkpoint_of(layer: torch.nn.Module) -> Callable | None:
    """Return the function that runs a layer under gradient checkpointing."""
    return getattr(layer, CHECKPOINTS[0], None)


_ROUTERS = "router_logits"


def router_logits_of_forward() -> list[torch.Tensor] | None:
    """Return the list to which routers append their logits in the forward that runs, if it is to return them."""
    found = output_capturing._active_collector.get()
    return None if found is None else found.get(_ROUTERS)


@contextmanager
def collected_router_logits() -> Iterator[list[torch.Tensor]]:
    """Let routers append their logits to this list meanwhile, whatever the forward that runs is to return."""
    logits: list[torch.Tensor] = []
    token = output_capturing._active_collector.set({_ROUTERS: logits})
    try:
        yield logits
    finally:
        output_capturing._active_collector.reset(token)


def wrap_checkpoints(model: torch.nn.Module, wrapper: Callable) -> None:
    """Let `wrapper` run layers under gradient checkpointing, with the function that ran them as its first argument."""
    for layer in model.modules():
        if CHECKPOINTS[0] in vars(layer):
            setattr(layer, CHECKPOINTS[0], partial(wrapper, vars(layer)[CHECKPOINTS[0]]))


def arguments_of_layer(function: Callable) -> dict[str, Any]:
    """Return the keyword arguments of a layer, which Transformers binds to it for the checkpointing function."""
    return dict(function.keywords) if isinstance(function, partial) else {}


def fills_in_arguments(forward: Callable | None) -> bool:
    """Whether Transformers fills in arguments of a forward from the configuration."""
    while forward is not None and getattr(forward, "__code__", None) is not _code_that_fills_in():
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None


@cache
def _code_that_fills_in() -> CodeType:
    """Return the code of Transformers' wrapper. It takes the forward's name and signature, so only its code identifies it."""
    return generic.merge_with_config_defaults(lambda self: None).__code__


def supports_flash_attention(model: torch.nn.Module) -> bool:
    """Whether a model declares that it supports FlashAttention."""
    return getattr(model, "_supports_flash_attn", False)


def calls_step_layer(mixer: torch.nn.Module) -> bool:
    """Whether a Mamba mixer calls the layer of its steps, instead of reading its weight."""
    return hasattr(mixer.config, "_is_quantized")


def has_usual_gate(experts: torch.nn.Module) -> bool:
    """Whether experts multiply their gate as most mixtures do."""
    # Late, because their modules import triton.
    from transformers.integrations.finegrained_fp8 import FP8Experts
    from transformers.integrations.moe import _default_apply_gate

    if type(experts) is FP8Experts:
        return all(getattr(experts, name, None) is None for name in ("limit", "swiglu_alpha", "gate_softcap"))
    return getattr(type(experts), "_apply_gate", None) is _default_apply_gate


def saves_adapter(model: torch.nn.Module) -> bool:
    """Whether Transformers itself has put adapters into a model, and saves the active one instead of the model."""
    return getattr(model, "_hf_peft_config_loaded", False)


def revision_of(config: "PreTrainedConfig") -> str | None:
    """Return the revision that a model was loaded from: our classes note it, and so did releases before 5.0."""
    return getattr(config, "_commit_hash", None)


def note_revision(config: "PreTrainedConfig", revision: str) -> None:
    """Note the revision that a model was loaded from, under the name that Transformers does not save."""
    config._commit_hash = revision


@torch.no_grad()
def initialize(model: "PreTrainedModel", part: torch.nn.Module) -> None:
    """Initialize the parameters of a new part of a model as those of its own layers."""
    for module in part.modules():
        initialize_module(model, module)


def initialize_module(model: "PreTrainedModel", module: torch.nn.Module) -> None:
    """Initialize the parameters of one module, without those of its parts."""
    model._init_weights(module)


# The columns of samples that a Trainer does not remove, once it has read them from the model.
KEPT_COLUMNS = "_signature_columns"


def prepare_inputs(trainer: "Trainer", batch: Any) -> Any:
    """Return a batch as a Trainer passes it to its loss: on the device, and with what subclasses add."""
    return trainer._prepare_inputs(batch)


def kept_columns(trainer: "Trainer") -> list[str]:
    """Return the columns of samples that a Trainer does not remove. The Trainer stays as it is."""
    trainer = copy.copy(trainer)
    trainer._set_signature_columns_if_needed()
    return list(getattr(trainer, KEPT_COLUMNS))


def rows_per_batch(trainer: "Trainer") -> int:
    """Return the number of rows in a full batch. `auto_find_batch_size` may have reduced it."""
    return getattr(trainer, "_train_batch_size", trainer.args.train_batch_size)


def shifts_labels(trainer: "Trainer") -> bool:
    """Whether the loss compares a token's logits with the next label, as a Trainer decides by the model's loss."""
    return getattr(trainer, "_loss_shifts_labels", True)


def use_one_gpu(arguments: "TrainingArguments") -> None:
    """Keep a Trainer in one process from splitting each row over all GPUs."""
    arguments._n_gpu = 1


# Private parts of accelerate


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether accelerate has put hooks around the module's forward, as for a `device_map`."""
    return "_hf_hook" in vars(module)


def forward_inside_hooks(module: torch.nn.Module) -> Any:
    """Return the forward that accelerate's hooks around the module's own `forward` call, or this one without hooks."""
    own = vars(module)
    return own.get("_old_forward") if _calls_hooks(own["forward"]) else own["forward"]


def with_hooks(module: torch.nn.Module, forward: Callable) -> dict[str, Any]:
    """Return the attributes with which the module runs another forward, inside the hooks around its own if there are any."""
    own = vars(module)["forward"]
    if not _calls_hooks(own):
        return {"forward": forward}
    return {"forward": update_wrapper(partial(own.func, *own.args, **own.keywords), forward), "_old_forward": forward}


def _calls_hooks(forward: Any) -> bool:
    return isinstance(forward, partial) and getattr(forward.func, "__module__", None) == "accelerate.hooks"


def undo_prepare(model: torch.nn.Module) -> bool:
    """Undo accelerate's autocast around a model, and return whether there was one.

    A wrapper of the user around it stays, and `patch_model` refuses it.
    """
    own = vars(model)
    is_prepared = getattr(own.get("forward"), "__module__", "").startswith("accelerate.")
    if not is_prepared or "_original_forward" not in own:
        return False
    model.forward = own.pop("_original_forward")
    if model.forward == MethodType(type(model).forward, model):
        del model.forward
    return True


def prepare_again(accelerator: Any, model: torch.nn.Module) -> None:
    """Let accelerate put its autocast around a model of which it was undone."""
    # With this mark, accelerate would leave it as it is. It would also save a model that it lists twice again.
    vars(model).pop("_is_accelerate_prepared", None)
    listed = getattr(accelerator, "_models", [])
    listed[:] = [other for other in listed if other is not model]
    accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)


def dataloaders_of(accelerator: Any) -> list:
    """Return the loaders of which accelerate sets the epochs, to change it."""
    return getattr(accelerator, "_dataloaders", [])


# Private parts of PEFT


# The method of `PeftModel` that returns the class of the model to save in an adapter.
BASE_CLASS = "_get_base_model_class"
# What of a model DDP leaves as it is: the names of its parameters and buffers.
IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"


def has_swapped_features(layer: torch.nn.Module) -> bool:
    """Whether PEFT's wrapper of a parameter `[E, out, in]` has swapped the last two dimensions for its adapters."""
    return vars(layer).get("_did_swap_in_out_features", False)


# Private parts of TRL


def has_images(trainer: "Trainer") -> bool:
    """Whether a trainer of TRL reads a dataset of images, which its collator processes."""
    return getattr(trainer, "_is_vision_dataset", False)


def token_logps(trainer: "Trainer") -> Callable | None:
    """Return the method of GRPO and RLOO that computes the log-probability of each token."""
    return getattr(trainer, "_get_per_token_logps_and_entropies", None)


def training_metrics(trainer: "Trainer") -> dict[str, list]:
    """Return the metrics that a trainer of TRL collects for its next log."""
    return getattr(trainer, "_metrics", {}).get("train", {})


def is_trl_forward(forward: Any) -> bool:
    """Whether `forward` is what TRL's trainers set to score tokens, or what `beside_trl` made of it."""
    return isinstance(forward, MethodType) and "fused_lm_head" in (getattr(forward, "__kwdefaults__", None) or ())


def forward_inside_trl(forward: MethodType) -> Any:
    """Return the forward that TRL's calls when it does not score tokens. Only its closure holds that."""
    return inspect.getclosurevars(forward.__func__).nonlocals.get("original_forward")


# The function in TRL's module that scores tokens, and its arguments in the releases that `trl_head.py` knows.
TRL_SCORES = "_ChunkedLogProbFunction"
_SCORES_ARGUMENTS = [
    *("ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping"),
    *("logit_scale", "outputs"),
]


def takes_known_arguments(scores: Any) -> bool:
    """Whether TRL's function that scores tokens is one that `trl_head.py` can take the place of."""
    forward = getattr(scores, "forward", None)
    return callable(forward) and list(inspect.signature(forward).parameters) == _SCORES_ARGUMENTS


# The method of TRL's trainer of distillation that computes its loss, the function that it calls, and its arguments in
# the releases that `trl_head.py` knows.
TRL_LOSS, TRL_DIVERGENCE = "_compute_loss", "_chunked_divergence_loss"
_DIVERGENCE_ARGUMENTS = [
    *("student_hidden_states", "teacher_hidden_states", "student_lm_head_weight", "teacher_lm_head_weight"),
    *("completion_mask", "beta", "num_items_in_batch", "student_lm_head_bias", "teacher_lm_head_bias"),
    *("student_logit_scale", "teacher_logit_scale", "student_final_logit_softcapping"),
    *("teacher_final_logit_softcapping", "temperature"),
]


def is_known_divergence(function: Any) -> bool:
    """Whether TRL's function of the divergence is one that `trl_head.py` can take the place of."""
    return callable(function) and list(inspect.signature(function).parameters) == _DIVERGENCE_ARGUMENTS


# PyTorch's iteration of Muon. `torch.optim.Muon` itself takes neither the matrices of experts nor the parts of FSDP2.
NEWTON_SCHULZ = "torch.optim._muon:_zeropower_via_newtonschulz"


def newton_schulz() -> Callable[..., torch.Tensor]:
    """Return PyTorch's function that orthogonalizes a matrix in bfloat16: `(matrix, coefficients, steps, eps)`."""
    module, _, name = NEWTON_SCHULZ.partition(":")
    if not is_present(NEWTON_SCHULZ):
        raise ImportError(f"PyTorch {torch.__version__} lacks {module}.{name}, which --optim muon requires.")
    return getattr(import_module(module), name)
