"""From a file or a dataset to tokenized samples with labels.

Everything is read and checked before the caller writes anything. A record is a conversation (`messages`), a prompt with
its completion (`prompt` and `completion`, strings or lists of messages), or `text`. Loss is on what the assistant
writes, on the completion, or on the whole text.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ...errors import input_error
from .chat import AssistantTurns, check_messages, describe


FORMATS = {"messages": ("messages",), "prompt-completion": ("prompt", "completion"), "text": ("text",)}
IGNORED_LABEL = -100
_FILE_ENDINGS = (".jsonl", ".json", ".ndjson", ".parquet")


@dataclass
class Samples:
    """Tokenized samples and what became of the records they come from.

    Args:
        format (`str`):
            A key of `FORMATS`.
        data (`list[dict[str, numpy.ndarray]]`):
            The samples, each with `input_ids` and `labels` (int32 `[tokens]`, -100 where there is no loss).
        truncated (`int`):
            Samples that were cut, among those in `data` and those dropped.
        dropped (`int`):
            Records that left no target.
    """

    format: str
    data: list[dict[str, np.ndarray]] = field(default_factory=list)
    truncated: int = 0
    dropped: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(len(sample["input_ids"]) for sample in self.data)

    @property
    def targets(self) -> int:
        """Tokens with loss; a sample's first token has none, as nothing predicts it."""
        return sum(count_targets(sample["labels"]) for sample in self.data)

    def fingerprint(self) -> str:
        """A hash of all tokens and labels in their order."""
        digest = hashlib.sha256()
        for sample in self.data:
            digest.update(len(sample["input_ids"]).to_bytes(8, "little"))
            digest.update(sample["input_ids"].tobytes() + sample["labels"].tobytes())
        return digest.hexdigest()


def count_targets(labels: np.ndarray) -> int:
    """How many tokens of a sample have loss."""
    return int((labels[1:] != IGNORED_LABEL).sum())


def read_records(data: str, split: str | None = None, subset: str | None = None) -> Iterator[tuple[str, Any]]:
    """The records of a JSON-lines or parquet file, of a dataset on the Hub, or of a directory `datasets` can load.

    Args:
        data (`str`):
            The file's path, or the dataset's name or directory.
        split (`str`, *optional*):
            The dataset's split, by default `"train"`. It may be sliced (`"train[:1%]"`).
        subset (`str`, *optional*):
            The dataset's configuration.

    Yields:
        `tuple[str, Any]`: where the record stands, for messages, and the record.

    Raises:
        `ImportError`: the datasets library, or pyarrow for a parquet file, is missing.
        `OSError`: the file or the dataset cannot be read.
        `ValueError`: a line is not JSON, the file is not parquet, or `datasets` cannot load the dataset.
    """
    path = Path(data)
    if path.is_file():
        if split or subset:
            raise input_error(
                "a dataset beside --split or --subset", f"the file {data}", "Leave them out.", option="--data"
            )
        yield from (_read_parquet if path.suffix == ".parquet" else _read_json_lines)(path)
    elif path.suffix in _FILE_ENDINGS:
        raise FileNotFoundError(f"--data: there is no file {data}")
    else:
        yield from _read_dataset(data, split or "train", subset)


def _read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            place = f"{path}, line {number}"
            try:
                # A byte order mark can only stand at the very beginning.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield place, json.loads(text)
            except UnicodeDecodeError as error:
                raise input_error("UTF-8", str(error), "Convert the file.") from None
            except (json.JSONDecodeError, RecursionError) as error:
                raise input_error("one JSON object per line", f"no JSON ({error})", "Correct the line.") from None


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    if find_spec("pyarrow") is None:
        raise ImportError(f"--data {path} needs pyarrow: pip install pyarrow")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(1024):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", record
    except ArrowException as error:
        raise input_error("a parquet file", str(error), "Check the file.") from error


def _read_dataset(name: str, split: str, subset: str | None) -> Iterator[tuple[str, Any]]:
    if find_spec("datasets") is None:
        raise ImportError(f"--data {name} is no file, and a dataset needs the datasets library: pip install datasets")
    import datasets

    if int(datasets.__version__.partition(".")[0]) < 4:
        raise ImportError(
            f"--data {name} needs datasets >= 4, which runs no code of a dataset: pip install -U datasets"
        )
    try:
        dataset = datasets.load_dataset(name, subset, split=split)
    except OSError:
        raise
    except Exception as error:  # datasets raises its own exceptions, and those of the file formats' readers
        message = " ".join(str(error).split())
        raise input_error(
            f"a file or a dataset with the split {split!r}", f"{name}: {message}", "Correct it.", option="--data"
        ) from error
    for number, record in enumerate(dataset, 1):
        yield f"{name} [{split}], row {number}", record


def make_samples(
    records: Iterable[tuple[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    format: str | None = None,
) -> Samples:
    """Tokenize records of one format.

    A completion or a text ends with the tokenizer's EOS token, which is added where it is not there. Longer samples are
    cut at their end; what has no target then is dropped. Both are counted.

    Args:
        records (`Iterable[tuple[str, Any]]`):
            What [`read_records`] yields.
        tokenizer (`PreTrainedTokenizerBase`):
            A fast tokenizer, with a chat template for conversations and an EOS token for anything else.
        max_length (`int`):
            The most tokens that a sample may have.
        format (`str`, *optional*):
            A key of `FORMATS`, by default the one whose columns the records have.

    Raises:
        `ValueError`: a record is malformed or of another format than the first one, the tokenizer cannot serve the
            format, or no sample is left.
    """
    make = samples = None
    for place, record in tqdm(records, "tokenizing", unit="record", disable=None):
        if not isinstance(record, dict):
            raise input_error("a JSON object", describe(record), "Correct it.")
        found = _format(place, record, format)
        if samples is None:
            samples = Samples(found)
            make = _Tokenize(tokenizer, found)
        elif found != samples.format:
            raise input_error(
                f"the columns of the first record, {' and '.join(FORMATS[samples.format])}",
                " and ".join(FORMATS[found]),
                "Train each format in a run of its own, or bring them to one.",
            )
        input_ids, labels = make(place, record)
        samples.truncated += len(input_ids) > max_length
        labels = np.array(labels[:max_length], np.int32)
        if count_targets(labels):
            samples.data.append({"input_ids": np.array(input_ids[:max_length], np.int32), "labels": labels})
        else:
            samples.dropped += 1
    if samples is None:
        raise input_error("at least one record", "none", "Check the file or the split.", option="--data")
    if not samples.data:
        raise input_error(
            "at least one sample with a target",
            f"none in {samples.dropped} records, {samples.truncated} of which are longer than {max_length} tokens",
            "Raise --max-length, or check that conversations have assistant messages.",
            option="--data",
        )
    return samples


def _format(place: str, record: dict[str, Any], wanted: str | None) -> str:
    """The one format whose columns the record has."""
    # datasets fills the columns that a record lacks with None.
    columns = [name for name, value in record.items() if value is not None]
    found = [name for name, needed in FORMATS.items() if set(needed) <= set(columns)]
    if wanted is not None:
        if wanted in found:
            return wanted
        raise input_error(
            f"{' and '.join(FORMATS[wanted])}, as --format says",
            f"the columns {', '.join(columns)}" if columns else "no columns",
            "Correct the record or --format.",
        )
    if len(found) == 1:
        return found[0]
    raise input_error(
        "the columns of one format: messages, prompt and completion, or text",
        f"the columns {', '.join(columns)}" if columns else "no columns",
        f"Choose one with --format {' or '.join(found)}." if found else "Rename or add columns.",
    )


class _Tokenize:
    """Tokens and labels of one record, by the format of the data."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, format: str):
        self.tokenizer = tokenizer
        self.by_format = {"messages": self.messages, "prompt-completion": self.pair, "text": self.text}[format]
        self.turns: AssistantTurns | None = None

    def __call__(self, place: str, record: dict[str, Any]) -> tuple[list[int], list[int]]:
        return self.by_format(place, record)

    def text(self, place: str, record: dict[str, Any]) -> tuple[list[int], list[int]]:
        text = self._string(place, "text", record["text"])
        input_ids = self._with_eos(self._encode(place, text, add_special_tokens=True))
        return input_ids, input_ids

    def pair(self, place: str, record: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Each part is tokenized alone, so that the prompt's tokens are those of inference."""
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, list) or isinstance(completion, list):
            prompt, completion = (check_messages(place, name, record[name]) for name in FORMATS["prompt-completion"])
            return self._conversation(place, record, [*prompt, *completion], len(prompt))
        prompt = self._string(place, "prompt", prompt, may_be_empty=True)
        completion = self._string(place, "completion", completion)
        prompt_ids = self._encode(place, prompt, add_special_tokens=True)
        completion_ids = self._with_eos(self._encode(place, completion, add_special_tokens=False))
        return [*prompt_ids, *completion_ids], [*[IGNORED_LABEL] * len(prompt_ids), *completion_ids]

    def messages(self, place: str, record: dict[str, Any]) -> tuple[list[int], list[int]]:
        return self._conversation(place, record, check_messages(place, "messages", record["messages"]))

    def _conversation(
        self, place: str, record: dict[str, Any], messages: list[dict[str, Any]], first: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Loss on the assistant's turns, from message number `first` on when that is given."""
        if self.turns is None:
            self.turns = AssistantTurns(self.tokenizer)
        tools = record.get("tools") or None
        if tools is not None and not isinstance(tools, list):
            raise input_error("tools as a list of JSON schemas", describe(tools), "Correct it.")
        try:
            if first is None and self.turns.template_marks_them:
                encoded = self.tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    return_dict=True,
                    return_assistant_tokens_mask=True,
                    tokenizer_kwargs={"verbose": False},
                )
                input_ids, mask = encoded["input_ids"], encoded["assistant_masks"]
            else:
                text = self.turns.render(messages, tools)
                turns = [n for n in range(first or 0, len(messages)) if messages[n]["role"] == "assistant"]
                spans = self.turns.find(messages, text, turns, tools)
                input_ids, mask = self._encode_with_mask(text, spans)
        except Exception as error:  # a template may raise anything
            message = " ".join(str(error).split())
            raise input_error(
                "a conversation that the chat template renders",
                f"an error ({message or type(error).__name__})",
                "Correct the record or the template.",
            ) from error
        return input_ids, [token if keep else IGNORED_LABEL for token, keep in zip(input_ids, mask, strict=True)]

    def _encode_with_mask(self, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        input_ids, mask = encoded["input_ids"], [0] * len(encoded["input_ids"])
        ends = np.array([end for _, end in encoded["offset_mapping"]])
        for start, end in spans:
            # From the token that holds the first character; not one that reaches into what the template goes on with.
            for token in range(int((ends <= start).sum()), int((ends <= end).sum())):
                mask[token] = 1
        return input_ids, mask

    def _encode(self, place: str, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        except (TypeError, UnicodeError) as error:
            raise input_error("text that is valid Unicode", str(error), "Correct it.") from error

    def _with_eos(self, input_ids: list[int]) -> list[int]:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise input_error(
                "a tokenizer with an EOS token, which ends each sample",
                "one without",
                "Set tokenizer.eos_token and save the tokenizer beside the model.",
            )
        return input_ids if input_ids[-1:] == [eos] else [*input_ids, eos]

    @staticmethod
    def _string(place: str, name: str, value: Any, may_be_empty: bool = False) -> str:
        if not isinstance(value, str):
            raise input_error(f"{name} as a string", describe(value), "Correct it.")
        if not value.strip() and not may_be_empty:
            raise input_error(f"some text in {name}", repr(value[:20]), "Leave the record out.")
        return value
