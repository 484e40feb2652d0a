"""The trained head of multi-token prediction beside an adapter: where it is, how it is saved, and how it is read.

Servers refuse other tensors in the file of an adapter, so the head has a file of its own in the folder of each adapter that
it was saved with. PEFT may train a copy of the head for each adapter (`modules_to_save=["mtp"]`), which is then the head of
that adapter.
"""

import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.utils import cached_file, logging

from .mtp import HEAD_FILE, PREFIX


logger = logging.get_logger(__name__)

# The module of PEFT's copies by adapter in the wrapper of a module, and that of the frozen module.
_COPIES, _FROZEN = "modules_to_save", "original_module"
# The options of a loaded adapter that say where its files are.
_PLACES = "subfolder", "revision", "cache_dir", "token", "local_files_only"


def head_in_use(module: Any, adapter: str | None = None) -> Any:
    """Return the head itself, or PEFT's copy of it for an adapter, by default the active one."""
    copies = getattr(module, _COPIES, None)
    if copies is None:
        return module
    names = module.active_adapters if adapter is None else [adapter]
    return next((copies[name] for name in names if name in copies), getattr(module, _FROZEN))


def save_beside(model: Any, state: Mapping[str, torch.Tensor] | None, folder: str | os.PathLike, adapter: str) -> None:
    """Save the head of a language model into the folder of an adapter, if the model has one.

    `state` has all tensors of the model or of a wrapper, by name. FSDP passes whole ones.
    """
    if getattr(model, "mtp", None) is None:
        return
    state = model.state_dict() if state is None else state
    tensors = {name: x for key, x in state.items() if (name := f".{key}".partition(f".{PREFIX}")[2])}
    for part in (f"{_COPIES}.{adapter}.", f"{_FROZEN}."):
        if any(name.startswith(part) for name in tensors):
            tensors = {name.removeprefix(part): x for name, x in tensors.items() if name.startswith(part)}
            break
    tensors = {f"{PREFIX}{name}": x.detach().contiguous() for name, x in tensors.items()}
    save_file(tensors, Path(folder) / HEAD_FILE, metadata={"format": "pt"})


def load_beside(model: Any, source: Any, adapter: str, options: Mapping[str, Any]) -> None:
    """Load the head in the folder or the repository of a loaded adapter, if there is one, or say how to load it."""
    if not (Path(str(source)).is_dir() or hasattr(type(model), "skips_logits")):
        # Nothing is looked for on the Hub for other models.
        return
    file = None
    with suppress(OSError):
        places = {name: options[name] for name in _PLACES if options.get(name) is not None}
        file = cached_file(source, HEAD_FILE, **places)
    if file is None:
        return
    if getattr(model, "mtp", None) is None:
        fix = f"Call transformers_packed.add_mtp(model, {str(Path(file).parent)!r}) to load it, for example before a merge."
        logger.warning(f"{file} holds a trained head of multi-token prediction, which this model does not have. {fix}")
        return
    tensors = {name.removeprefix(PREFIX): x for name, x in load_file(file).items()}
    head_in_use(model.mtp, adapter).load_state_dict(tensors)


def saving_head(original: Callable) -> Callable:
    """Make `PeftModel.save_pretrained` of the original one: it saves the head with each adapter."""

    @wraps(original)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        original(self, save_directory, *args, **kwargs)
        given = inspect.signature(original).bind(self, save_directory, *args, **kwargs).arguments
        if not given.get("is_main_process", True):
            return
        model, selected = self.get_base_model(), given.get("selected_adapters")
        for adapter in self.peft_config if selected is None else selected:
            # As PEFT names the folders of adapters.
            folder = Path(save_directory) / (adapter if adapter != "default" else "")
            save_beside(model, kwargs.get("state_dict"), folder, adapter)

    return save_pretrained


def loading_head(original: Callable) -> Callable:
    """Make `PeftModel.load_adapter` of the original one: it loads the head with an adapter."""

    @wraps(original)
    def load_adapter(self: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, model_id, *args, **kwargs)
        given = inspect.signature(original).bind(self, model_id, *args, **kwargs)
        load_beside(self.get_base_model(), model_id, given.arguments["adapter_name"], kwargs)
        return result

    return load_adapter
