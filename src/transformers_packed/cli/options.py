"""The parser of the commands, types of options, and shared options."""

import argparse
import inspect
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import alternatives, described, input_error
from ..models.optimizers import DEFAULT, OPTIMIZERS
from ..training.options import TrainingOptions
from . import COMMANDS


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments of a command, with its name as `command` and its function as `run`. Exits if they are not valid."""
    parser, _ = parsers()
    return parser.parse_args(argv)


def parsers() -> tuple["Parser", dict[str, "Parser"]]:
    """The parser of the program, and those of its commands by name."""
    parser = Parser(
        prog=_PROGRAM,
        description="Packed (padding-free) training of hybrid linear-attention models in Transformers.",
        epilog=f"{_PROGRAM} COMMAND --help shows the options and examples of a command.",
    )
    version = f"%(prog)s {__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands = {}
    for name in COMMANDS:
        module = import_module(f".{name}", __package__)
        command = commands[name] = subparsers.add_parser(name, **_texts(inspect.cleandoc(str(module.__doc__))))
        module.add_options(command)
        command.set_defaults(run=module.run, parser=command, failed=getattr(module, "FAILED", 1))
    return parser, commands


def _texts(docstring: str) -> dict[str, Any]:
    """The help, the description and the examples of a command. Its docstring has them in this order."""
    title, description, *_ = docstring.split("\n\n")
    examples = [line.strip() for line in docstring.splitlines() if line.startswith(f"    {_PROGRAM} ")]
    return {
        "help": title.partition(": ")[2].rstrip("."),
        "description": " ".join(description.split()),
        "examples": examples,
    }


class Parser(argparse.ArgumentParser):
    """A parser that shows defaults, adds shared options, and refuses unknown arguments with its own usage."""

    def __init__(self, examples: Sequence[str] = (), **kwargs):
        # The abbreviation of one option may be a mistyped other one.
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **kwargs)
        self.examples, self._words = examples, list[str]()
        if examples:
            self.epilog = "\n  ".join(["examples:", *examples])

    def parse_known_args(self, args=None, namespace=None):
        """Refuse unknown arguments. `argparse` hands those of a command to the main parser, and so shows its usage."""
        self._words = sys.argv[1:] if args is None else [*args]
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        if getattr(namespace, "every_n_layers", None) == AUTO:
            # Until it is chosen that no layer is checkpointed.
            namespace.gradient_checkpointing = True
        given = {action.dest: getattr(namespace, action.dest, None) for action in self._actions}
        for flag, (other, why) in _NEEDS.items():
            # `memory` computes with and without gradient checkpointing.
            if given.get(dest(flag)) and not given.get(dest(other), True):
                self.error(f"{flag} needs {other}: {why}")
        if "lora_rank" in given:
            namespace.lora_rank = namespace.lora_rank or _LORA_RANK
        return namespace, unknown

    def error(self, message):
        """Also name what a word that is no option may mean: another error may come from that."""
        known = [flag for action in self._actions for flag in action.option_strings]
        words = [word.partition("=")[0] for word in self._words if word.startswith("-")]
        close = {word: flags for word in words if word not in known and (flags := _meant(word, known))}
        if close:
            message += "".join(f", got {word}" for word in close if word not in message)
            message += f". Did you mean {alternatives([flag for flags in close.values() for flag in flags])}?"
        super().error(message)

    def add_count(self, flag: str, help: str, default: int | None = None) -> None:
        """Add an option for a positive integer."""
        self.add_argument(flag, type=positive_int, default=default, metavar="N", help=help)

    def add_lora(self, help: str = "train LoRA adapters on all linear layers (needs peft)") -> None:
        """Add `--lora`, and `--lora-rank`, `--experts` and `--load-in-4bit`, which are refused without the first."""
        self.add_argument("--lora", action="store_true", help=help)
        self.add_count("--lora-rank", f"rank; alpha is twice the rank (default: {_LORA_RANK})")
        self.add_argument("--experts", action="store_true", help="also adapters of experts")
        in_4_bit = "keep frozen linear layers and experts in NF4 (needs bitsandbytes)"
        self.add_argument("--load-in-4bit", action="store_true", help=in_4_bit)

    def add_shared(self, *flags: str, to: Any = None, **changes: Any) -> None:
        """Add options in `_SHARED` or of packing, `to` a group if given. `changes` replace what `add_argument` takes."""
        for flag in flags:
            (to or self).add_argument(flag, **(_SHARED.get(flag) or _of_packing(flag)) | changes)

    def out_of_memory(self, args: argparse.Namespace, error: BaseException) -> str:
        """A message on the memory of a GPU, with the options of the command that need less and were not given."""
        given = {action.dest: getattr(args, action.dest, None) for action in self._actions}
        possible = [flag for flag in _LESS_MEMORY if flag not in _NEEDS or given.get(dest(_NEEDS[flag][0]))]
        possible = [flag for flag in possible if flag not in EXCLUDES or not given.get(dest(EXCLUDES[flag][0]))]
        less = [f"pass {flag}" for flag in possible if given.get(dest(flag)) is False]
        row = ("--row-length",) if given.get("row_length") else ("--batch-size", "--max-length")
        if given.get("every_n_layers") == 0:
            # Chosen by auto, which would choose it again.
            less[0] += " without --every-n-layers"
        less += [f"lower {flag}" for flag in (*row, "--every-n-layers") if given.get(dest(flag)) not in _LOWEST]
        advice = alternatives(less or ["use a larger GPU"])
        fix = f"{advice[0].upper()}{advice[1:]}. The command memory computes what fits."
        return str(input_error("a GPU with enough memory", described(error), fix))

    def with_options(self, message: str, args: argparse.Namespace | None = None) -> str:
        """A message of the library with the options that set the Python arguments it names, of those in `args`."""
        flags = {action.dest: action.option_strings[0] for action in self._actions if action.option_strings}
        row = getattr(args, "row_length", None)
        if row is not None and row == getattr(args, "max_length", None):
            # A sample is then as long as a row, and no option but that of the row is given.
            del flags["max_length"]
        for name, option in _ARGUMENTS.items():
            if option in flags.values():
                flags.setdefault(name, option)
        for name, flag in flags.items():
            # `cuda_graphs=True`, `overlong="split"`, and names that are no words.
            message = re.sub(f"{_ALONE}{name}=True\\b", flag, message)
            message = re.sub(f'{_ALONE}{name}=("?)([\\w-]+)\\1', rf"{flag} \2", message)
            if "_" in name:
                message = re.sub(rf"{_ALONE}{name}(?!\w|[/=(]|\.\w)", flag, message)
        return re.sub("^data: ", "--data: ", message)


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        # Examples keep their lines.
        return text if text.startswith("examples:") else super()._fill_text(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = action.default is None or action.default is False or "default:" in (action.help or "")
        return action.help if told else super()._get_help_string(action)


def _meant(word: str, known: Sequence[str]) -> list[str]:
    """The option of which `word` has the initials, as `--lr`, or else the most similar one."""
    initials = [flag for flag in known if "--" + "".join(part[0] for part in flag.split("-") if part) == word]
    return initials or get_close_matches(word, known, 1, 0.8)


def dest(flag: str) -> str:
    """Return the attribute of an option."""
    return flag.lstrip("-").replace("-", "_")


def _of_packing(flag: str) -> dict[str, Any]:
    """What `add_argument` takes for the option of a field of [`TrainingOptions`]."""
    option = TrainingOptions.__dataclass_fields__[dest(flag)]
    help = option.metadata["help"].removesuffix(".")
    kinds: dict[Any, dict[str, Any]] = {bool: {"action": "store_true"}, int: _COUNT}
    kinds[float] = {"type": float, "metavar": "X"}
    kind = kinds.get(option.type, {"action": argparse.BooleanOptionalAction})
    return {"default": option.default, "help": help[0].lower() + help[1:], **kind}


def positive_int(text: str, lowest: int = 1, others: str = "") -> int:
    """The `type` of options for positive integers. `others` says what else may be given."""
    number = int(text) if text.isdecimal() else 0
    if number < lowest:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {lowest}{others}, got {text!r}")
    return number


def positive_int_or_auto(text: str, lowest: int = 1) -> int | str:
    """The `type` of options for positive integers that `auto` chooses from the memory."""
    return text if text == AUTO else positive_int(text, lowest, f", or {AUTO}")


def positive_float(text: str) -> float:
    """The `type` of options for positive numbers."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


def not_empty(text: str) -> str:
    """The `type` of options for names and paths. An empty one, as of a shell variable that is not set, is the directory."""
    if not text:
        raise argparse.ArgumentTypeError("expected a value, got an empty one")
    return text


def output_folder(text: str) -> Path:
    """The `type` of options for directories."""
    return Path(not_empty(text))


def output_file(text: str) -> Path:
    """The `type` of options for output files. Fails at once instead of after minutes of work."""
    path = Path(not_empty(text))
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, got the directory {text}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"directory {path.parent} of {text} does not exist")
    return path


_PROGRAM = "transformers-packed"
# Arguments of the library that options set under another name.
_ARGUMENTS = {"max_length": "--row-length", "attn_implementation": "--attn", "lora_experts": "--experts"}
# Nothing before a name, so that parts of paths stay.
_ALONE = r"(?<![\w./`'-])"
# Of `train`: tokens of a sample, and samples of a row.
LONGEST_SAMPLE = 2048
SAMPLES = 8
_LORA_RANK = 16
AUTO = "auto"
# What no number can be lower than, or that is no number.
_LOWEST = (None, 0, 1, AUTO)
# Options without effect unless another one is given, and the reason.
_NEEDS = {
    "--lora-rank": ("--lora", "without it, all parameters are trained"),
    "--experts": ("--lora", "without it, experts are trained as all parameters are"),
    "--load-in-4bit": ("--lora", "weights in 4 bit are not trained"),
    "--experts-in-host-memory": ("--lora", "trained experts stay on the GPU"),
    "--layers-in-host-memory": ("--lora", "trained layers stay on the GPU"),
    "--teacher-in-host-memory": ("--teacher", "there is no other model"),
    "--offload": ("--gradient-checkpointing", "without it, there are no checkpoints"),
    "--keep-attention": ("--gradient-checkpointing", "without it, nothing is computed again"),
    "--every-n-layers": ("--gradient-checkpointing", "without it, all layers keep their activations"),
    "--segment-tokens": ("--gradient-checkpointing", "without it, segments would keep their activations"),
}
# Options that exclude another one, and the reason.
EXCLUDES = {
    f"--{what}-in-host-memory": ("--cuda-graphs", f"A graph would read the {what} at one address.")
    for what in ("experts", "layers")
}
# Options that need less memory and train the same weights.
_LESS_MEMORY = (
    "--gradient-checkpointing",
    "--offload",
    "--load-in-4bit",
    "--layers-in-host-memory",
    "--teacher-in-host-memory",
)
_DATA = "JSON, CSV or parquet file, or a dataset (directory or Hub)"
_ATTN = "attention implementation: sdpa, eager, flash_attention_2, ... (default: sdpa)"
_DTYPES = ("float32", "bfloat16")
_OPTIM = "AdamW of torch, Muon of torch for hidden matrices (muon), AdamW of torchao (adamw_torch_8bit, adamw_torch_4bit), bitsandbytes (adamw_8bit, paged_adamw_8bit) or flashoptim"
_COUNT: dict[str, Any] = {"type": positive_int, "metavar": "N"}
_SHARED: dict[str, dict[str, Any]] = {
    "--model": {
        "required": True,
        "type": not_empty,
        "metavar": "PATH|NAME",
        "help": "checkpoint (directory or Hub)",
    },
    "--data": {"required": True, "type": not_empty, "metavar": "FILE|NAME", "help": _DATA},
    "--split": {"metavar": "NAME", "help": "split of the dataset (default: train)"},
    "--subset": {"metavar": "NAME", "help": "its configuration"},
    "--tokenizer": {"type": not_empty, "metavar": "PATH|NAME", "help": "tokenizer (default: that of --model)"},
    "--format": {
        "choices": ("messages", "prompt-completion", "text", "tokens"),
        "help": "record format (default: by column names)",
    },
    "--dtype": {
        "choices": ("auto", *_DTYPES),
        "default": "auto",
        "help": "compute dtype (default: bfloat16 if the GPU has it, else float32)",
    },
    "--weights": {
        "choices": _DTYPES,
        "default": "float32",
        "help": "dtype of trained weights",
    },
    "--optim": {"choices": tuple(OPTIMIZERS), "default": DEFAULT, "metavar": "NAME", "help": _OPTIM},
    # A row of one token has no target.
    "--row-length": {"type": partial(positive_int, lowest=2), "metavar": "N"},
    "--gradient-accumulation-steps": {**_COUNT, "default": 1, "help": "rows per step on each device"},
    "--gradient-checkpointing": {
        "action": "store_true",
        "help": "recompute activations in the backward",
    },
    "--experts-in-host-memory": {
        "action": "store_true",
        "help": "keep frozen experts in host memory, and copy those of a layer to the GPU for it",
    },
    "--layers-in-host-memory": {
        "action": "store_true",
        "help": "keep all large frozen weights of layers in host memory, and copy those of a layer to the GPU for it",
    },
    "--attn": {"metavar": "NAME", "help": _ATTN},
    "--plot": {"type": output_file, "metavar": "FILE.png"},
    "--json": {"action": "store_true", "help": "print JSON"},
    "--seed": {"type": int, "default": 0, "metavar": "N", "help": "random seed"},
    "--trust-remote-code": {"action": "store_true", "help": "run code of the checkpoint"},
}
