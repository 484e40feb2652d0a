"""The multi-token-prediction head of a checkpoint, which servers use to draft tokens: kept in every saved checkpoint.

Released Qwen3.5/3.6/3.8 and Qwen3-Next checkpoints hold the tensors `mtp.*`. Transformers has no layer for them, leaves
them out, and saves a configuration that still declares a head, with which vLLM does not start. [`keep_head`] copies their
bytes from the checkpoint that a model was loaded from, file to file, and the names and layout of the experts stay as they
are.

A trained head is saved beside an adapter, too. Servers refuse other tensors in the file of an adapter, so the head has a
file of its own in the folder of each adapter that it was saved with. PEFT may train a copy of the head for each adapter
(`modules_to_save=["mtp"]`), which is then the head of that adapter.
"""

import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, logging

from ..errors import input_error
from .releases import COPIES, ORIGINAL, revision_of


logger = logging.get_logger(__name__)
PREFIX = "mtp."
# The entries of configurations that declare a head: those of Qwen3.5 and of Qwen3-Next.
DECLARED = "mtp_num_hidden_layers", "num_nextn_predict_layers"
# The file of a trained head beside an adapter.
HEAD_FILE = "mtp.safetensors"
# The shard of a head, beside those of a sharded checkpoint.
_SHARD = "model-mtp.safetensors"
# The files of a distributed checkpoint (`save_pretrained(distributed_checkpoint=True)`): a shard of each process.
OF_PROCESSES = "shard-*-model-*.safetensors"


def declares_head(config: PreTrainedConfig) -> bool:
    """Whether a configuration says that its checkpoint has a head."""
    return any(getattr(part, name, None) for part in (config, config.get_text_config()) for name in DECLARED)


def find_head(config: PreTrainedConfig) -> dict[str, Path]:
    """Return the tensors of the head in the checkpoint that `config` was loaded from, by name. None of them is read."""
    paths = [_file_of(config, SAFE_WEIGHTS_NAME)]
    # Where an earlier save has left an index, Transformers loads the file of all weights, too.
    if paths == [None] and (index := _file_of(config, SAFE_WEIGHTS_INDEX_NAME)) is not None:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {file for name, file in names.items() if name.startswith(PREFIX)}
        paths = [_file_of(config, file) for file in sorted(files)]
    elif paths == [None] and config.name_or_path and any(Path(config.name_or_path).glob(OF_PROCESSES)):
        paths = [_file_of(config, _SHARD)]
    # A part of a head is none.
    return {} if None in paths else {name: x for path in paths if path for name, x in tensors_of_head(path).items()}


def _file_of(config: PreTrainedConfig, name: str) -> Path | None:
    """Return a file of the checkpoint, in its folder or in the cache of the Hub."""
    if not config.name_or_path:
        return None
    try:
        path = cached_file(config.name_or_path, name, revision=revision_of(config), local_files_only=True)
    except OSError:
        return None
    return None if path is None else Path(path)


def _may_be_of_another_revision(config: PreTrainedConfig, head: dict[str, Path]) -> bool:
    """Whether the cache of the Hub has other weights as well, and nothing says which of them a model was loaded from."""
    if not head or revision_of(config) is not None or Path(config.name_or_path or "").is_dir():
        return False
    snapshots = {path.parent.parent for path in head.values()}
    files = {path.name: path.resolve() for path in head.values()}
    return any(x.resolve() != files[name] for name in files for x in min(snapshots).glob(f"*/{name}"))


def tensors_of_head(path: Path) -> dict[str, Path]:
    """Return the file of each tensor of the head in a safetensors file, by name."""
    try:
        with safe_open(path, "pt") as file:
            return {name: path for name in file.keys() if name.startswith(PREFIX)}
    except SafetensorError as error:
        got = f"{path} ({error})"
        raise input_error("complete safetensors files", got, "Download or save them again.") from error


def read_tensors(files: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    """Return the tensors with these names in their files. They are views of mapped files, of which no second copy exists."""
    found: dict[str, torch.Tensor] = {}
    for path in set(files.values()):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name, place in files.items() if place == path}
    return found


def to_module_names(head: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a head with its experts stacked, as the modules of experts hold them."""
    experts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    found = {}
    for name, tensor in head.items():
        split = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if split is None:
            found[name] = tensor
        else:
            experts.setdefault(split[1], {}).setdefault(int(split[2]), {})[split[3]] = tensor
    for prefix, parts in experts.items():
        # A part of the experts is none, which the missing name then tells.
        if sorted(parts) == list(range(len(parts))) and all(len(one) == 3 for one in parts.values()):
            ordered = [parts[number] for number in range(len(parts))]
            found[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([one["gate"], one["up"]]) for one in ordered])
            found[f"{prefix}.down_proj"] = torch.stack([one["down"] for one in ordered])
    return found


@contextmanager
def keep_head(config: PreTrainedConfig, folder: Path, saves: bool) -> Iterator[None]:
    """Add the head to the checkpoint that the block writes into `folder`, on the process that `saves`.

    If the head cannot be found, the saved configuration stops declaring one, and a warning says so.
    """
    # Released configurations of Qwen3-Next do not declare their head.
    head = find_head(config) if saves else {}
    if not saves or not (head or declares_head(config)):
        yield
        return
    before, unsure = _versions(folder), _may_be_of_another_revision(config, head)
    overwrites = folder.exists() and any(path.parent.samefile(folder) for path in head.values())
    with TemporaryDirectory(dir=folder.parent) if overwrites else nullcontext() as aside:
        if aside is not None:
            # The block overwrites the files that the head is read from.
            write_head(Path(aside) / _SHARD, head)
            head = tensors_of_head(Path(aside) / _SHARD)
        yield
        # An earlier save of another kind leaves its files. Adapters and shards of a run write none of these.
        written = [name for name, version in _versions(folder).items() if version != before.get(name)]
        if not written:
            return
        if head:
            add_head(head, folder, written)
            # Transformers may have seen that the model itself has none.
            declare_head(folder, config.to_dict())
            if unsure:
                logger.warning_once(
                    f"The head of multi-token prediction (mtp) in saved checkpoints is from revision main of "
                    f"{config.name_or_path!r}, because a patched model does not say which revision was loaded. "
                    "Load another revision with register() instead of patch_model."
                )
        else:
            declare_head(folder, {})
            logger.warning(
                f"The checkpoint in {folder} has no multi-token-prediction head (mtp), because {config.name_or_path!r}, "
                "which declares one, has none or cannot be read. The saved configuration no longer declares it."
            )


def _versions(folder: Path) -> dict[str, int]:
    """When the file of all weights, the index of shards and the shards of processes were written, by their names."""
    paths = [folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME, *folder.glob(OF_PROCESSES)]
    return {path.name: path.stat().st_mtime_ns for path in paths if path.exists()}


def add_head(head: dict[str, Path], folder: Path, written: list[str]) -> None:
    """Add the tensors of a head to the files `written` in a folder: to the only file, or as a shard."""
    if SAFE_WEIGHTS_NAME in written and SAFE_WEIGHTS_INDEX_NAME not in written:
        path = folder / SAFE_WEIGHTS_NAME
        with safe_open(path, "pt") as file:
            _write(path, read_tensors(dict.fromkeys(file.keys(), path) | head), file.metadata())
        return
    size = write_head(folder / _SHARD, head)
    if SAFE_WEIGHTS_INDEX_NAME in written:
        path = folder / SAFE_WEIGHTS_INDEX_NAME
        index = json.loads(path.read_text(encoding="utf-8"))
        index["weight_map"] |= dict.fromkeys(head, _SHARD)
        index["metadata"]["total_size"] += size
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_head(path: Path, head: dict[str, Path]) -> int:
    """Write a file with the tensors of a head, and return their bytes."""
    tensors = read_tensors(head)
    # What makes one file of those of all processes (`consolidate_distributed_checkpoint`) reads where each part starts.
    starts = {name: {"saved_offsets": [0] * tensor.ndim} for name, tensor in tensors.items()}
    _write(path, tensors, {"format": "pt", "DCP_SHARDING_INFO": json.dumps(starts)})
    return sum(tensor.nbytes for tensor in tensors.values())


def _write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> None:
    # Other processes may read the folder already, and `tensors` may be those of the file itself.
    partial = path.with_name(f"{path.name}.partial")
    save_file(tensors, partial, metadata)
    os.replace(partial, path)


def declare_head(folder: Path, declared: dict[str, Any]) -> None:
    """Let the configuration in `folder` declare the head of the configuration `declared`, on both levels, or none."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    before = json.dumps(config)
    for part, source in ((config, declared), (config.get("text_config", {}), declared.get("text_config", {}))):
        # Zero and not absent, because readers of Qwen3-Next take an absent entry for one layer.
        part |= {name: source.get(name, 0) for name in DECLARED if name in part}
    if json.dumps(config) != before:
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# The options of a loaded adapter that say where its files are.
_PLACES = "subfolder", "revision", "cache_dir", "token", "local_files_only"


def head_in_use(module: Any, adapter: str | None = None) -> Any:
    """Return the head itself, or PEFT's copy of it for an adapter, by default the active one."""
    copies = getattr(module, COPIES, None)
    if copies is None:
        return module
    names = module.active_adapters if adapter is None else [adapter]
    return next((copies[name] for name in names if name in copies), getattr(module, ORIGINAL))


def save_beside(model: Any, state: Mapping[str, torch.Tensor] | None, folder: str | os.PathLike, adapter: str) -> None:
    """Save the head of a language model into the folder of an adapter, if the model has one.

    `state` has all tensors of the model or of a wrapper, by name. FSDP passes whole ones.
    """
    if getattr(model, "mtp", None) is None:
        return
    state = model.state_dict() if state is None else state
    tensors = {name: x for key, x in state.items() if (name := f".{key}".partition(f".{PREFIX}")[2])}
    for part in (f"{COPIES}.{adapter}.", f"{ORIGINAL}."):
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
