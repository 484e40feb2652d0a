"""The data of the demo: docstring -> function pairs from Python's standard library.

The pairs are real text with widely varying lengths. They need no download.
"""

import ast
import random
import sysconfig
import textwrap
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..data.records.samples import make_samples
from ..errors import input_error


_LEFT_OUT_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def read_pairs(root: Path | None = None) -> tuple[list[tuple[str, str]], int]:
    """Read pairs of a docstring and the source of its function from all Python files below `root`.

    The docstring is removed from the source. Tests, installed packages, and functions that consist only of a docstring
    are skipped.

    Args:
        root (`Path`, *optional*):
            A directory, by default that of the standard library.

    Returns:
        `tuple`: the distinct pairs, in the order of path and line, and the number of files that could not be parsed.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else Path(root)
    files = [path for path in sorted(root.rglob("*.py")) if _LEFT_OUT_FOLDERS.isdisjoint(path.relative_to(root).parts)]
    pairs, broken = {}, 0
    for path in tqdm(files, desc="reading sources", unit="file", disable=None):
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError):
            broken += 1
            continue
        # Not str.splitlines: it also breaks at form feeds, which are not line ends in Python source.
        lines = [line + "\n" for line in text.split("\n")]
        functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        for function in sorted(functions, key=lambda node: node.lineno):
            docstring = ast.get_docstring(function)
            if docstring and len(function.body) > 1:
                source = _without_docstring(function, lines)
                if source is not None:
                    pairs[docstring, source] = None
    return list(pairs), broken


def _without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str | None:
    """The source of a function without its docstring, or `None` if the docstring shares a line with other code."""
    docstring, first_statement = function.body[:2]
    before = lines[function.lineno - 1 : docstring.lineno - 1]
    after = lines[docstring.end_lineno : function.end_lineno]
    if not before or first_statement.lineno == docstring.end_lineno:
        return None
    return textwrap.dedent("".join([*before, *after]))


def choose_pairs(pairs: Sequence[tuple[str, str]], number: int, seed: int) -> list[tuple[str, str]]:
    """`number` pairs in random order, or all pairs if there are fewer."""
    return random.Random(seed).sample(pairs, min(number, len(pairs)))


def train_tokenizer(pairs: Sequence[tuple[str, str]], directory: Path, vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer on `pairs`, save it in `directory`, and load it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokens = {"special_tokens": ["<|pad|>", "<|eos|>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **tokens)
    texts = [text for pair in pairs for text in pair]
    bar = tqdm(texts, "training the tokenizer", unit="text", disable=None)
    tokenizer.train_from_iterator(bar, trainer)
    special = {"pad_token": "<|pad|>", "eos_token": "<|eos|>", "padding_side": "right"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)


def tokenize(
    pairs: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[list[dict[str, list[int]]], int]:
    """Samples of at most `max_length` tokens: the docstring as prompt, the source and an end token as targets.

    Returns:
        `tuple`: samples with `input_ids` and `labels` (-100 for the prompt), and the number of truncated samples. A
            pair whose prompt fills `max_length` has no target and is skipped.
    """
    if not pairs:
        fix = "Use a Python installation with a standard library of .py files."
        raise input_error("functions with docstrings in the standard library", "none", fix)
    records = (("", {"prompt": f'"""{docstring}"""\n', "completion": source}) for docstring, source in pairs)
    samples = make_samples(records, tokenizer, max_length, "prompt-completion")
    data = [{name: column.tolist() for name, column in sample.items()} for sample in samples.data]
    return data, samples.truncated - samples.dropped
