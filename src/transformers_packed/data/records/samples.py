"""Read a file or a dataset into tokenized samples with labels.

A record is a conversation (`messages`), a prompt with its completion (`prompt` and `completion`, strings or lists of
messages), `text`, or tokens (`input_ids`). The loss covers the assistant's turns, the completion, the whole text, or
the tokens that labels and masks say. All records are read and checked before a command writes anything.

Parquet files and `datasets` fill the keys that an object lacks with null. Keys with null are therefore removed from the
records of all file formats. A null that belongs to the data can be kept in a JSON string (`arguments` or `tools`).
"""

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ...errors import alternatives, count, input_error
from ..samples import IGNORED_LABEL, count_targets
from ..trees import nodes_of
from .chat import AssistantTurns, check_messages, describe, from_json, target_turns
from .columns import FORMATS, formats_of, is_chat, unread_columns, with_first_turns
from .files import find_file, read_file
from .tokens import read_tokens
from .turns import samples_within


logger = logging.get_logger(__name__)


@dataclass
class Samples:
    """Tokenized samples, with counts of truncated and dropped records.

    Args:
        format (`str`):
            A key of `FORMATS`.
        data (`list[dict[str, Any]]`):
            The samples, each with `input_ids` and `labels` (int32 `[tokens]`, -100 where there is no loss), and with
            `turns`, the samples that continue it, if there are such.
        truncated (`int`):
            Samples that were truncated, including dropped ones.
        dropped (`int`):
            Records without a target.
    """

    format: str
    data: list[dict[str, Any]] = field(default_factory=list)
    truncated: int = 0
    dropped: int = 0

    @property
    def tokens(self) -> int:
        """Tokens in all samples. Those that several turns continue count once."""
        return sum(len(node["input_ids"]) for node in nodes_of(self.data)[0])

    @property
    def targets(self) -> int:
        """Tokens with loss. The first token of a sample has none, because no token predicts it."""
        nodes, parents = nodes_of(self.data)
        labels = [
            node["labels"] if parent is not None else node["labels"][1:]
            for node, parent in zip(nodes, parents, strict=True)
        ]
        return sum(int((x != IGNORED_LABEL).sum()) for x in labels)

    @property
    def largest(self) -> int:
        """The largest token id."""
        return max(int(node["input_ids"].max()) for node in nodes_of(self.data)[0])

    def fingerprint(self) -> str:
        """A hash of all tokens and labels in order."""
        digest = hashlib.sha256()
        for node, parent in zip(*nodes_of(self.data), strict=True):
            digest.update(len(node["input_ids"]).to_bytes(8, "little") + str(parent).encode())
            digest.update(node["input_ids"].tobytes() + node["labels"].tobytes())
        return digest.hexdigest()


def read_records(data: str, split: str | None = None, subset: str | None = None) -> Iterator[tuple[str, Any]]:
    """Read the records of a JSON, CSV or parquet file, a dataset on the Hub, or a directory that `datasets` can load.

    Args:
        data (`str`):
            The path of the file, or the name or directory of the dataset. JSON is one object per line or an array, and may
            be compressed (`.gz`, `.zst` or `.bz2`).
        split (`str`, *optional*):
            The split of the dataset, by default `"train"`. Slices such as `"train[:1%]"` are supported.
        subset (`str`, *optional*):
            The configuration of the dataset.

    Yields:
        `tuple[str, Any]`: the place of the record, for error messages, and the record.

    Raises:
        `ImportError`: the datasets library, or pyarrow for a parquet file or a compressed one, is missing.
        `OSError`: the file or the dataset cannot be read.
        `ValueError`: a line or the array is not JSON, the file is not parquet or not compressed, or `datasets` cannot load the dataset.
    """
    path = find_file(data)
    if path is None:
        yield from _read_dataset(data, split or "train", subset)
        return
    if split or subset:
        raise input_error("a dataset with split or subset", f"the file {data}", option="data")
    yield from read_file(path)


def _read_dataset(name: str, split: str, subset: str | None) -> Iterator[tuple[str, Any]]:
    if find_spec("datasets") is None:
        raise ImportError(f"{name} is not a file, and datasets need the datasets library: pip install datasets")
    import datasets

    if int(datasets.__version__.partition(".")[0]) < 4:
        need = "needs datasets >= 4, which does not run dataset code: pip install -U datasets"
        raise ImportError(f"{name} {need}")
    try:
        dataset = datasets.load_dataset(name, subset, split=split)
    except OSError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        if Path(name).exists():
            raise OSError(f"data: cannot read a dataset from {name}: {reason}.") from error
        expected, got = "a file, a local directory or a dataset on the Hub", f"{name!r}: no such file or directory"
        fix = "Check the path or the name."
        raise OSError(str(input_error(expected, f"{got} ({reason})", fix, option="data"))) from error
    except Exception as error:  # datasets raises its own exceptions and those of the file readers
        got = f"{name}: {' '.join(str(error).split())}".rstrip(".")
        raise input_error(f"a file or a dataset with the split {split!r}", got, option="data") from error
    for number, record in enumerate(dataset, 1):
        yield f"{name} [{split}], row {number}", record


def make_samples(
    records: Iterable[tuple[str, Any]],
    tokenizer: PreTrainedTokenizerBase | None,
    max_length: int,
    format: str | None = None,
    every_turn: bool = False,
    row_length: int | None = None,
    keep_all: bool = False,
) -> Samples:
    """Tokenize records of one format.

    A completion or a text ends with the tokenizer's EOS token, which is added if it is missing. Samples longer than
    `max_length` are truncated at the end. Samples without a target are dropped. Both are counted. A warning names the
    columns that are not read. Those that would change what is trained are an error.

    Args:
        records (`Iterable[tuple[str, Any]]`):
            The output of [`read_records`].
        tokenizer (`PreTrainedTokenizerBase`):
            A fast tokenizer, with a chat template for conversations and an EOS token for completions and texts. Records
            of tokens need none.
        max_length (`int`):
            Maximum number of tokens per sample.
        format (`str`, *optional*):
            A key of `FORMATS`. By default, the columns of the records determine it.
        every_turn (`bool`, *optional*, defaults to `False`):
            Whether each turn of the assistant follows the conversation as the chat template renders it up to there.
            Templates that omit the reasoning of earlier turns then give samples that branch.
        row_length (`int`, *optional*):
            The most computed tokens of samples that branch. A conversation with more becomes several of them.
        keep_all (`bool`, *optional*, defaults to `False`):
            Whether samples without a target stay, so that those of tokens have the numbers of their records.

    Raises:
        `ValueError`: a record is malformed, or has another format than the first one or a column that is refused; the
            tokenizer lacks a chat template or an EOS token that the format needs; or no sample is left.
    """
    samples, read = None, _Records(tokenizer, format, every_turn)
    for place, record in tqdm(records, "tokenizing", unit="record", disable=None):
        try:
            renderings = read(record)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        samples = samples or Samples(read.format)
        samples.truncated += any(len(input_ids) > max_length for input_ids, _ in renderings)
        columns = [tuple(np.array(x[:max_length], np.int32) for x in rendering) for rendering in renderings]
        with_targets = [(input_ids, labels) for input_ids, labels in columns if keep_all or count_targets(labels)]
        samples.data += samples_within(with_targets, row_length) if with_targets else []
        samples.dropped += not with_targets
    if samples is None:
        raise input_error("at least one record", "none", "Check the file or the split.", option="data")
    if not samples.data:
        got, fix = f"none in {count(samples.dropped, 'record')}", "Check that conversations have assistant messages."
        if samples.truncated:
            got += f" ({samples.truncated:,} longer than {count(max_length, 'token')})"
            fix = "Raise max_length, or check that conversations have assistant messages."
        raise input_error("at least one sample with a target", got, fix, option="data")
    return samples


class _Records:
    """Converts records of one format to tokens and labels. The format is given or that of the first record."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, wanted: str | None, every_turn: bool):
        self._tokenizer = tokenizer
        self.wanted = wanted
        self.every_turn = every_turn
        self.noted = False
        self.named: set[str] = set()
        self.format: str | None = None
        self.turns: AssistantTurns | None = None

    def __call__(self, record: Any) -> list[tuple[Sequence, Sequence]]:
        """The tokens and labels of a record, or those of each turn."""
        if not isinstance(record, dict):
            raise input_error("a JSON object", describe(record))
        record = {name: value for name, value in record.items() if value is not None}
        found = self._format_of(record)
        self.format = self.format or found
        if found != self.format:
            first, got = (" and ".join(FORMATS[name]) for name in (self.format, found))
            raise input_error(f"the columns of the first record, {first}", got, "Train each format in a separate run.")
        record = record if found == "tokens" else without_nulls(record)
        self._name_once(unread_columns(found, record))
        if found == "tokens":
            return [read_tokens(record)]
        if is_chat(found, record):
            return self._chat(found, record)
        if found == "text":
            input_ids = self._with_eos(self._encode(_string("text", record["text"]), add_special_tokens=True))
            return [(input_ids, input_ids)]
        # Each part is tokenized separately, so that the prompt has the same tokens as at inference.
        prompt = _string("prompt", record["prompt"], may_be_empty=True)
        prompt_ids = self._encode(prompt, add_special_tokens=True)
        completion = _string("completion", record["completion"])
        completion_ids = self._with_eos(self._encode(completion, add_special_tokens=False))
        return [([*prompt_ids, *completion_ids], [*[IGNORED_LABEL] * len(prompt_ids), *completion_ids])]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise input_error("the column input_ids, or a tokenizer", "neither", "Pass --tokenizer.")
        return self._tokenizer

    def _chat(self, found: str, record: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
        prompt, *completion = (check_messages(name, record[name]) for name in FORMATS[found])
        prompt = with_first_turns(record, prompt)
        return self._turns(record, [*prompt, *chain(*completion)], len(prompt) if completion else None)

    def _name_once(self, columns: list[str]) -> None:
        new = [name for name in columns if name not in self.named]
        if new:
            self.named.update(new)
            logger.warning(f"These columns of records are not read: {', '.join(new)}.")

    def _format_of(self, record: dict[str, Any]) -> str:
        """The given format, or the one that matches the columns of the record."""
        found = formats_of(record)
        if self.wanted in found or self.wanted is None and len(found) == 1:
            return self.wanted or found[0]
        got = f"the columns {', '.join(record)}" if record else "no columns"
        if self.wanted is not None:
            raise input_error(f"{' and '.join(FORMATS[self.wanted])}, as set by --format", got)
        fix = f"Choose one with --format {' or '.join(found)}." if found else "Rename or add columns."
        every = alternatives([" and ".join(needed) for needed in FORMATS.values()])
        raise input_error(f"the columns of one format: {every}", got, fix)

    def _turns(
        self, record: dict[str, Any], messages: list[dict[str, Any]], first: int | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """The conversation, or with `every_turn` the conversation up to each turn that is a target."""
        turns = target_turns(messages, first or 0) if self.every_turn else []
        if not turns:
            return [self._conversation(record, messages, first)]
        return [self._conversation(record, _up_to(messages, turn), first) for turn in turns]

    def _note_other_renderings(
        self, messages: list[dict[str, Any]], first: int, options: dict[str, Any], whole: str | None = None
    ) -> None:
        """Log once if the template renders a turn that is a target differently when others follow.

        `whole` is the text of the conversation, if it is there.
        """
        turn = next(iter(target_turns(messages, first)), len(messages))
        if self.noted or turn + 1 >= len(messages):
            return
        assert self.turns is not None
        with suppress(Exception):  # a template may raise anything, which the rendering of the whole reports
            whole = self.turns.render(messages, **options) if whole is None else whole
            self.noted = not whole.startswith(self.turns.render(messages[: turn + 1], **options))
            if self.noted:
                logger.warning(
                    "The chat template renders earlier turns of the assistant differently from the last one, so they "
                    "are trained in a form that the model does not write. Train each turn as it is written with "
                    "--every-turn, or every_turn=True."
                )

    def _conversation(
        self, record: dict[str, Any], messages: list[dict[str, Any]], first: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Tokens, and labels on the assistant's turns, optionally starting at message number `first`."""
        self.turns = self.turns or AssistantTurns(self.tokenizer)
        options = {"tools": self._tools(record), **self._template_variables(record)}
        if unread := self.turns.unread_keys(messages):
            logger.warning_once(f"The chat template does not read these keys of messages: {', '.join(unread)}.")
        try:
            if first is None and self.turns.template_marks_them:
                self._note_other_renderings(messages, 0, options)
                input_ids, mask = self._encode_with_marks(messages, options)
            else:
                text = self.turns.render(messages, **options)
                self._note_other_renderings(messages, first or 0, options, text)
                spans = self.turns.find(messages, text, target_turns(messages, first or 0), **options)
                input_ids, mask = self._encode_with_mask(text, spans)
        except Exception as error:  # a template may raise anything
            message = " ".join(str(error).split()) or type(error).__name__
            raise input_error("a conversation that the chat template renders", f"an error ({message})") from error
        return input_ids, [token if keep else IGNORED_LABEL for token, keep in zip(input_ids, mask, strict=True)]

    def _tools(self, record: dict[str, Any]) -> list | None:
        tools = from_json(record.get("tools")) or None
        if tools is not None and not isinstance(tools, list):
            raise input_error("tools as a list of JSON schemas", describe(tools))
        return tools

    def _template_variables(self, record: dict[str, Any]) -> dict[str, Any]:
        given = record.get("chat_template_kwargs", {})
        if not isinstance(given, dict):
            raise input_error("chat_template_kwargs as an object", describe(given))
        own = inspect.signature(self.tokenizer.apply_chat_template).parameters.keys() - {"documents"}
        if taken := sorted(own & given.keys()):
            got = f"the argument {taken[0]} of apply_chat_template"
            raise input_error("variables of the chat template in chat_template_kwargs", got)
        return given

    def _encode_with_marks(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> tuple[list[int], list]:
        """Tokens, and the mask that the template's marks give, without the turns of weight 0."""
        assert self.turns is not None
        flags = {"return_dict": True, "return_assistant_tokens_mask": True, "tokenizer_kwargs": {"verbose": False}}
        encoded = self.tokenizer.apply_chat_template(messages, **options, **flags)
        input_ids, mask = encoded["input_ids"], encoded["assistant_masks"]
        targets = set(target_turns(messages))
        others = [n for n, message in enumerate(messages) if message["role"] == "assistant" and n not in targets]
        if others:
            text = self.turns.render(messages, **options)
            _, left_out = self._encode_with_mask(text, self.turns.find(messages, text, others, **options))
            mask = [keep and not out for keep, out in zip(mask, left_out, strict=True)]
        return input_ids, mask

    def _encode_with_mask(self, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ends = np.array([end for _, end in encoded["offset_mapping"]])
        mask = np.zeros(len(ends), bool)
        for start, end in spans:
            # Start with the token of the first character. Exclude a token that extends into the template's next text.
            mask |= (start < ends) & (ends <= end)
        return encoded["input_ids"], mask.tolist()

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        except (TypeError, UnicodeError) as error:
            raise input_error("valid Unicode text", error) from error

    def _with_eos(self, input_ids: list[int]) -> list[int]:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            fix = "Set tokenizer.eos_token and save the tokenizer beside the model."
            raise input_error("a tokenizer with an EOS token to end each sample", "one without", fix)
        return input_ids if input_ids[-1:] == [eos] else [*input_ids, eos]


def _up_to(messages: list[dict[str, Any]], turn: int) -> list[dict[str, Any]]:
    """The messages up to number `turn`, which is the only target."""
    earlier = [m | {"weight": 0} if m["role"] == "assistant" else m for m in messages[:turn]]
    return [*earlier, messages[turn]]


def without_nulls(value: Any) -> Any:
    """JSON data without the keys whose value is null, at every depth. Lists keep their nulls."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _string(name: str, value: Any, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise input_error(f"{name} as a string", describe(value))
    if not value.strip() and not may_be_empty:
        raise input_error(f"non-empty text in {name}", repr(value[:20]), "Remove the record.")
    return value
