"""The parser of the commands, types of options, and shared options."""

import argparse
from pathlib import Path
from typing import Any


class Parser(argparse.ArgumentParser):
    """A parser that shows defaults, adds shared options, and refuses unknown arguments with its own usage."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=_Formatter, **kwargs)

    def parse_known_args(self, args=None, namespace=None):
        """Refuse unknown arguments. `argparse` hands those of a command to the main parser, and so shows its usage."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        if any(action.dest == "lora_rank" for action in self._actions):
            if namespace.lora_rank is not None and not namespace.lora:
                self.error("--lora-rank needs --lora: without it, all parameters are trained")
            namespace.lora_rank = namespace.lora_rank or _LORA_RANK
        return namespace, unknown

    def add_count(self, flag: str, help: str, default: int | None = None) -> None:
        """Add an option for a positive integer."""
        self.add_argument(flag, type=positive_int, default=default, metavar="N", help=help)

    def add_lora(self, help: str = "train only LoRA adapters, on all linear layers (needs peft)") -> None:
        """Add `--lora` and `--lora-rank`, which is refused without the first."""
        self.add_argument("--lora", action="store_true", help=help)
        self.add_count("--lora-rank", f"rank of the adapters; alpha is twice the rank (default: {_LORA_RANK})")

    def add_shared(self, *flags: str) -> None:
        """Add some of the options in `_SHARED`."""
        for flag in flags:
            self.add_argument(flag, **_SHARED[flag])


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = action.default is None or action.default is False or "default:" in (action.help or "")
        return action.help if told else super()._get_help_string(action)


def positive_int(text: str, lowest: int = 1) -> int:
    """The `type` of options for positive integers."""
    number = int(text) if text.isdecimal() else 0
    if number < lowest:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {lowest}, got {text!r}")
    return number


def positive_float(text: str) -> float:
    """The `type` of options for positive numbers."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


def output_file(text: str) -> Path:
    """The `type` of options for output files. Fails at once instead of after minutes of work."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, got the directory {text}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"directory {path.parent} of {text} does not exist")
    return path


_LORA_RANK = 16
_DATA = "JSON-lines or parquet file, or a dataset: a name on the Hub or a directory"
_ATTN = "attention implementation: sdpa, eager, flash_attention_2, ... (default: sdpa)"
_DTYPES = ("float32", "bfloat16")
_SHARED: dict[str, dict[str, Any]] = {
    "--model": {
        "required": True,
        "metavar": "PATH|NAME",
        "help": "checkpoint: a directory or a name on the Hub",
    },
    "--data": {"required": True, "metavar": "FILE|NAME", "help": _DATA},
    "--split": {"metavar": "NAME", "help": "split of the dataset (default: train)"},
    "--subset": {"metavar": "NAME", "help": "configuration of the dataset"},
    "--format": {
        "choices": ("messages", "prompt-completion", "text"),
        "help": "record format, by column names (default: detected)",
    },
    "--dtype": {
        "choices": ("auto", *_DTYPES),
        "default": "auto",
        "help": "compute dtype (auto: bfloat16 if the GPU supports it, else float32)",
    },
    "--weights": {
        "choices": _DTYPES,
        "default": "float32",
        "help": "dtype of trained weights; frozen weights have the compute dtype",
    },
    "--gradient-checkpointing": {
        "action": "store_true",
        "help": "save memory by recomputing activations in the backward",
    },
    "--attn": {"metavar": "NAME", "help": _ATTN},
    "--seed": {"type": int, "default": 0, "metavar": "N", "help": "random seed"},
    "--trust-remote-code": {"action": "store_true", "help": "run code of the checkpoint"},
}
