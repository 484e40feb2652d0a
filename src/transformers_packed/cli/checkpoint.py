"""Load the parts of a checkpoint. Code of the checkpoint runs only with `--trust-remote-code`.

By default, Transformers asks on the terminal whether to run such code. A command must not ask, because piped input
would be the answer.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import is_offline_mode
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME, find_adapter_config_file

from ..errors import count, input_error
from ..models.mtp import HEAD_FILE, OF_PROCESSES
from .early import INVALID, LOCAL_OR_HUB, OFFLINE, UNREACHABLE
from .lines import shortened


_LOG_IN = "`hf auth login`"
# Type of the cause, reason and fix. A gated repository is also a RepositoryNotFoundError.
_UNAVAILABLE = (
    (HFValidationError, *INVALID),
    (GatedRepoError, "access to this model on the Hub is restricted", f"Request access, then log in with {_LOG_IN}."),
    (
        RepositoryNotFoundError,
        "the Hub has no such model",
        f"Check the name; for a private model, log in with {_LOG_IN}.",
    ),
    (LocalEntryNotFoundError, *UNREACHABLE),
)


def load_config(option: str, source: str, trust_remote_code: bool, expected: str = LOCAL_OR_HUB) -> PreTrainedConfig:
    """Load a configuration from a directory, a file, or a name on the Hub. Errors start with `option`.

    Raises:
        `OSError`: the configuration does not exist.
        `ValueError`: it needs its own code, which may not run, Transformers does not know its type, it has values of
            wrong types, or there is only an adapter.
    """
    with reading(option, source, "configuration", expected):
        if Path(source).name == "config.json" and not Path(source).is_file():
            raise FileNotFoundError("file not found")
        check_directory(source)
        # Transformers looks for code only in directories.
        source = directory_of(source) if Path(source).name == "config.json" else source
        try:
            return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        except StrictDataclassError as error:
            got = f"{source}: {' '.join(str(error).split()).rstrip('.')}"
            fix = "Correct config.json, or download it again."
            raise input_error("a valid configuration", got, fix, option=option) from error


def check_directory(source: str) -> None:
    """Raise a `FileNotFoundError` for a directory without a configuration. Transformers would name a missing key in it."""
    if Path(source).is_dir() and not (Path(source) / CONFIG_NAME).is_file():
        raise FileNotFoundError(f"it has no {CONFIG_NAME}")


def lacking_weights(source: str) -> str | None:
    """The first file of weights that Transformers would not find in a local directory, if it lacks one."""
    folder = Path(source)
    if not folder.is_dir() or any(folder.glob(OF_PROCESSES)):
        return None
    for whole in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        if (folder / whole).is_file():
            return None
        if (index := folder / f"{whole}.index.json").is_file():
            shards = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values()
            return min((name for name in shards if not (folder / name).is_file()), default=None)
    return SAFE_WEIGHTS_NAME


def load_tokenizer(option: str, source: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a directory or a name on the Hub. Errors start with `option`.

    Raises:
        `OSError`: the tokenizer does not exist.
        `ValueError`: it needs its own code, which may not run, or has no vocabulary.
    """
    with reading(option, source, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    # Without files, Transformers creates an empty tokenizer of the class for the configuration's type.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        fix = "Save the tokenizer of the model there: tokenizer.save_pretrained(...)."
        raise input_error(f"a tokenizer in {source}", "none", fix, option=option)
    return tokenizer


def check_same_ids(option: str, source: str, trusted: bool, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Raise a `ValueError` if a token of `tokenizer` has another id in that of `source`, or return why nobody knows."""
    try:
        theirs = load_tokenizer(option, source, trusted).get_vocab()
    except (OSError, ValueError) as error:
        return str(error)
    others = [token for token, number in tokenizer.get_vocab().items() if theirs.get(token) != number]
    if others:
        got = f"{source} with other ids of {count(len(others), 'token')} ({shortened(others)})"
        raise input_error("the ids of the model's tokenizer", got, "Choose another teacher.", option=option)
    return None


def load_weights(option: str, source: str, auto: Any, **options) -> PreTrainedModel:
    """Load a model with all of its weights, by `auto.from_pretrained(source, **options)`. Errors start with `option`.

    Transformers only logs weights that a checkpoint lacks, and initializes them at random. Here this is an error, and so
    are tensors that the class does not know or declare as left out, and tensors of another shape.

    Raises:
        `OSError`: the checkpoint does not exist.
        `ValueError`: the weights are not those of the model, or there is only an adapter.
    """
    if Path(source).is_dir():
        # Transformers would load the base model and add the adapter.
        _refuse_adapter(option, source)
    flags = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    fix = "Save the checkpoint with Transformers' class: model.save_pretrained(...)."
    try:
        with reading(option, source, "checkpoint"):
            model, info = auto.from_pretrained(source, **flags, **options)
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # of the device, such as its memory
            raise
        got = f"{source}: {' '.join(str(error).split()).rstrip('.')}"
        raise input_error("weights that Transformers can convert", got, fix, option=option) from error
    kinds = {"missing_keys": "missing", "unexpected_keys": "unexpected", "mismatched_keys": "of another shape"}
    found = {told: [key if isinstance(key, str) else key[0] for key in info[kind]] for kind, told in kinds.items()}
    if wrong := [f"{len(keys)} {told} ({shortened(keys)})" for told, keys in found.items() if keys]:
        got = f"{source} with {', '.join(wrong)}"
        raise input_error(f"all weights of {type(model).__name__} and no others", got, fix, option=option)
    return model


def _refuse_adapter(option: str, source: str) -> None:
    """Raise a `ValueError` that names the base model if `source` has an adapter."""
    try:
        path = find_adapter_config_file(source)
    except (OSError, ValueError):  # there is no such model
        return
    if path is None:
        return
    base = json.loads(Path(path).read_text(encoding="utf-8")).get("base_model_name_or_path")
    fix = "Merge it: PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(...)."
    if Path(path).with_name(HEAD_FILE).exists():
        fix += " Before merge_and_unload, load its trained head: add_mtp(model, adapter)."
    raise input_error("a model", f"{source}, a PEFT adapter of {base}", fix, option=option)


def has_own_code(error: ValueError) -> bool:
    """Whether Transformers refused to run code of a checkpoint."""
    return "trust_remote_code" in str(error)


@contextmanager
def reading(option: str, source: str, what: str, expected: str = LOCAL_OR_HUB) -> Iterator[None]:
    """Replace errors of Transformers: by an adapter without a model, a part that is absent or cut off, or code of the checkpoint."""
    try:
        yield
    except SafetensorError as error:
        got = f"{source} ({error})"
        raise input_error("complete safetensors files", got, "Download or save them again.", option=option) from error
    except (OSError, ValueError) as error:
        _refuse_adapter(option, source)
        if isinstance(error, OSError):
            raise _cannot_read(option, source, what, error, expected) from error
        if not has_own_code(error):
            raise
        expected, fix = "a checkpoint without its own code", "Review the code, then add --trust-remote-code to run it."
        raise input_error(expected, f"{source}, which needs its own code", fix, option=option) from error


def _cannot_read(option: str, source: str, what: str, error: OSError, expected: str) -> OSError:
    """Build the error of a command for the `error` of Transformers. Raise it from `error`.

    If `source` is neither a local path nor available on the Hub, Transformers gives the reason only by the type of the
    cause.
    """
    if not Path(source).exists():
        for kind, reason, fix in _UNAVAILABLE:
            if isinstance(error.__cause__, kind):
                if kind is LocalEntryNotFoundError and is_offline_mode():
                    reason, fix = OFFLINE
                got = f"{source!r}: no such local directory, and {reason}"
                return OSError(str(input_error(expected, got, fix, option=option)))
    return OSError(f"{option}: cannot read a {what} from {source}: {' '.join(str(error).split())}")


def directory_of(source: str) -> str:
    """The directory of a checkpoint if `source` is its configuration file, else `source`."""
    return str(Path(source).parent) if Path(source).is_file() else source
