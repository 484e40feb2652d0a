"""Load the configuration and tokenizer of a checkpoint. Code of the checkpoint runs only with `--trust-remote-code`.

By default, Transformers asks on the terminal whether to run such code. A command must not ask, because piped input
would be the answer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from ..errors import input_error


def load_config(option: str, source: str, trust_remote_code: bool) -> PreTrainedConfig:
    """Load a configuration from a directory, a file, or a name on the Hub. Errors start with `option`.

    Raises:
        `OSError`: the configuration does not exist.
        `ValueError`: it needs its own code, which may not run, or Transformers does not know its type.
    """
    with _errors(option, source, "configuration"):
        if Path(source).name == "config.json" and not Path(source).is_file():
            raise FileNotFoundError("file not found")
        # Transformers looks for code only in directories.
        source = directory_of(source) if Path(source).name == "config.json" else source
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)


def load_tokenizer(option: str, source: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a directory or a name on the Hub. Errors start with `option`.

    Raises:
        `OSError`: the tokenizer does not exist.
        `ValueError`: it needs its own code, which may not run, or has no vocabulary.
    """
    with _errors(option, source, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    # Without files, Transformers creates an empty tokenizer of the class for the configuration's type.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        fix = "Save the tokenizer of the model there: tokenizer.save_pretrained(...)."
        raise input_error(f"a tokenizer in {source}", "none", fix, option=option)
    return tokenizer


def has_own_code(error: ValueError) -> bool:
    """Whether Transformers refused to run code of a checkpoint."""
    return "trust_remote_code" in str(error)


@contextmanager
def own_code_refused(option: str, source: str) -> Iterator[None]:
    """Replace the argument in Transformers' error with the option of our commands."""
    try:
        yield
    except ValueError as error:
        if not has_own_code(error):
            raise
        expected, fix = "a checkpoint without its own code", "Review the code, then add --trust-remote-code to run it."
        raise input_error(expected, f"{source}, which needs its own code", fix, option=option) from error


@contextmanager
def _errors(option: str, source: str, what: str) -> Iterator[None]:
    try:
        with own_code_refused(option, source):
            yield
    except OSError as error:
        raise OSError(f"{option}: cannot read a {what} from {source}: {' '.join(str(error).split())}") from error


def directory_of(source: str) -> str:
    """The directory of a checkpoint if `source` is its configuration file, else `source`."""
    return str(Path(source).parent) if Path(source).is_file() else source
