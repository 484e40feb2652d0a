"""Load what goes with a checkpoint's weights, without running code that comes with it unless that was asked for.

Transformers asks on the terminal whether to run such code when it is not told. A command must not: whatever is piped
into it would be the answer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from ..errors import input_error


def load_config(option: str, source: str, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration in a directory, in a file, or of a name on the Hub; `option` is what errors begin with.

    Raises:
        `OSError`: there is none.
        `ValueError`: it needs code that comes with it and may not run, or Transformers does not know its type.
    """
    with _errors(option, source, "configuration"):
        if Path(source).name == "config.json" and not Path(source).is_file():
            raise FileNotFoundError("there is no such file")
        # Transformers looks for a configuration's code in directories only.
        source = directory_of(source) if Path(source).name == "config.json" else source
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)


def load_tokenizer(option: str, source: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer in a directory or of a name on the Hub; `option` is what errors begin with.

    Raises:
        `OSError`: there is none.
        `ValueError`: it needs code that comes with it and may not run.
    """
    with _errors(option, source, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    # Without files Transformers makes an empty one of the class that the configuration's type has.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        fix = "Save the one that the model was trained with there: tokenizer.save_pretrained(...)."
        raise input_error(f"a tokenizer in {source}", "none", fix, option=option)
    return tokenizer


def has_own_code(error: ValueError) -> bool:
    """Whether Transformers refused code that comes with a checkpoint."""
    return "trust_remote_code" in str(error)


@contextmanager
def own_code_refused(option: str, source: str) -> Iterator[None]:
    """Name the option of our commands where Transformers names its argument."""
    try:
        yield
    except ValueError as error:
        if not has_own_code(error):
            raise
        expected, fix = "a checkpoint that runs no code of its own", "Read that code; --trust-remote-code runs it."
        raise input_error(expected, f"{source}, which comes with some", fix, option=option) from error


@contextmanager
def _errors(option: str, source: str, what: str) -> Iterator[None]:
    try:
        with own_code_refused(option, source):
            yield
    except OSError as error:
        raise OSError(f"{option}: no {what} can be read from {source}: {' '.join(str(error).split())}") from error


def directory_of(source: str) -> str:
    """A checkpoint's directory where `source` is its configuration's file, else `source`."""
    return str(Path(source).parent) if Path(source).is_file() else source
