"""The columns of a record: those that its format reads, and those that would change what is trained without it.

A record of one format may have any other columns. Those that say what is trained (the first turns of a chat, masks of
the loss, weights, images) are read or refused, and never left out.
"""

from typing import Any

from ...errors import input_error
from ..samples import MASK
from .chat import check_messages, describe


FORMATS = {
    "messages": ("messages",),
    "prompt-completion": ("prompt", "completion"),
    "text": ("text",),
    "tokens": ("input_ids",),
}
# Masks of 0 and 1 per token. A token is a target if all of them have 1.
LOSS_MASKS = ("loss_mask", "completion_mask", "assistant_masks")
_OF_CHATS = ("system", "history", "tools", "chat_template_kwargs")
_OF_TOKENS = ("labels", MASK, *LOSS_MASKS)
_ROLES = ("user", "assistant")
_WEIGHTS = ("weight", "loss_weight", "sample_weight")
# Columns that change what is trained, and what to do where they are not read.
_FIXES = {
    **dict.fromkeys(("images", "videos", "audios"), "Images and videos are not supported here."),
    "functions": "Rename it to tools, as a list of JSON schemas.",
    **dict.fromkeys(_WEIGHTS, "Repeat or remove records, or set the weight of a message to 0."),
    "seq_lengths": "Write each document as a record.",
    **dict.fromkeys(_OF_CHATS, "Only chats have it: write messages, or prompt and completion as lists of messages."),
    **dict.fromkeys(_OF_TOKENS, "Only tokens have it: write input_ids, or set the weight of a message to 0."),
}


def formats_of(record: dict[str, Any]) -> list[str]:
    """The formats whose columns a record has."""
    return [name for name, needed in FORMATS.items() if set(needed) <= record.keys()]


def is_chat(format: str, record: dict[str, Any]) -> bool:
    """Whether the chat template renders a record."""
    pair = FORMATS["prompt-completion"]
    return format == "messages" or (format == "prompt-completion" and any(isinstance(record[x], list) for x in pair))


def unread_columns(format: str, record: dict[str, Any]) -> list[str]:
    """The columns that `format` does not read from a record.

    Raises:
        `ValueError`: one of them would change what is trained, and belongs to no other format of the record.
    """
    belonging = {column for name in formats_of(record) if name != format for column in _read_by(name, record)}
    unread = [name for name in record if name not in _read_by(format, record)]
    for name in unread:
        value = record[name]
        says_nothing = value == 1 if name in _WEIGHTS else value in ("", [], {})
        if name in _FIXES and name not in belonging and not says_nothing:
            needed = " and ".join(FORMATS[format])
            raise input_error(f"no column {name} beside {needed}", describe(value), _FIXES[name])
    return unread


def _read_by(format: str, record: dict[str, Any]) -> tuple[str, ...]:
    further = _OF_TOKENS if format == "tokens" else _OF_CHATS if is_chat(format, record) else ()
    return FORMATS[format] + further


def with_first_turns(record: dict[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checked `messages` after the turns of the columns `system` and `history`.

    `system` is a string, and `history` a list of questions with their answers.

    Raises:
        `ValueError`: a column is malformed, or the messages have another system turn.
    """
    system, history = record.get("system", ""), record.get("history", [])
    if not isinstance(system, str):
        raise input_error("system as a string", describe(system))
    pairs = isinstance(history, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in history)
    if not pairs:
        raise input_error("history as a list of pairs, a question and its answer", describe(history))
    turns = [{"role": role, "content": x} for pair in history for role, x in zip(_ROLES, pair, strict=True)]
    turns = check_messages("history", turns) if turns else []
    own = [message["content"] for message in messages if message["role"] == "system"]
    if system and own not in ([], [system]):
        fix = "Remove one of them."
        raise input_error("the system turn of messages in the column system", "another one", fix)
    begins = messages[:1] if messages[0]["role"] == "system" else []
    first = [{"role": "system", "content": system}] if system and not own else begins
    return [*first, *turns, *messages[len(begins) :]]
