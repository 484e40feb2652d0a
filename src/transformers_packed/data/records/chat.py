"""Check conversations, render them with the tokenizer's chat template, and locate the assistant's turns.

A template with `{% generation %}` marks the tokens of the assistant. For any other template, `AssistantTurns` locates
them:

* It renders the conversation a second time, with the whole turn replaced by one character that occurs nowhere else.
  The turn is the part in which the two texts differ. No other message changes, so this also works for templates that
  render a turn differently if other turns follow (Qwen3.5 omits earlier reasoning).
* A probe with one question and one answer finds the text that the template inserts between its generation prompt and
  an answer (for example an empty reasoning block), and after the answer (an end-of-turn token). The model has to
  generate both.
"""

import json
import os.path
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...errors import input_error


ROLES = ("system", "user", "assistant", "tool")
# Keys of messages that are read here, or that only name something.
_KNOWN_KEYS = {"role", "content", "weight", "id", "name", "tool_call_id"}
_PRIVATE_USE = range(0xE000, 0xF900)


def check_messages(name: str, messages: Any) -> list[dict[str, Any]]:
    """Check `messages` and return them in the form that templates expect. Raises a `ValueError` for malformed messages.

    Each content is one string, and the arguments of tool calls are objects, also if they were given as JSON strings.

    Args:
        name (`str`):
            The name of the column, for the error message.
        messages (`Any`):
            A list of objects with `role` and `content`. The content is a string or a list of text parts. A message
            with `tool_calls` or `reasoning_content` needs no content. The `weight` of an assistant's message is 0 if it is
            no target, else 1.
    """
    if not isinstance(messages, list) or not messages:
        raise input_error(f"{name} as a list of messages", describe(messages))
    return [_checked(f"{name}, message {number}", message) for number, message in enumerate(messages, 1)]


def _checked(which: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise input_error(f"an object in {which}", describe(message), "Give it role and content.")
    if message.get("role") not in ROLES:
        got = repr(message["role"]) if "role" in message else "none"
        raise input_error(f"one of the roles {', '.join(ROLES)} in {which}", got)
    content = _content(which, message.get("content"))
    has_more = bool(message.get("tool_calls")) or bool(message.get("reasoning_content"))
    if (content is None and not has_more) or (message["role"] == "assistant" and not (content or has_more)):
        raise input_error(f"content in {which}", "none", "Add content or remove the message.")
    _check_weight(which, message)
    # Templates handle missing content differently, and some ignore a list of parts.
    checked = {**message, "content": content or ""}
    if "tool_calls" in message:
        checked["tool_calls"] = _tool_calls(which, message["tool_calls"])
    return checked


def _content(which: str, content: Any) -> str | None:
    if isinstance(content, list):
        return "".join(_text_part(which, part) for part in content)
    if content is not None and not isinstance(content, str):
        raise input_error(f"content as a string or a list of parts in {which}", describe(content))
    return content


def _check_weight(which: str, message: dict[str, Any]) -> None:
    weight = message.get("weight", 0)
    if weight not in (0, 1):
        raise input_error(f"weight 0 or 1 in {which}", repr(weight))
    if weight and message["role"] != "assistant":
        fix = "Only the assistant's messages are targets."
        raise input_error(f"weight 0 or none in {which}, of the role {message['role']}", weight, fix)


def target_turns(messages: list[dict[str, Any]], first: int = 0) -> list[int]:
    """The numbers of the assistant's messages that are targets, starting at message number `first`."""
    turns = range(first, len(messages))
    return [turn for turn in turns if messages[turn]["role"] == "assistant" and messages[turn].get("weight", 1)]


def _tool_calls(which: str, calls: Any) -> list[dict[str, Any]]:
    """Tool calls whose arguments are objects."""
    if not isinstance(calls, list):
        raise input_error(f"tool_calls as a list of objects in {which}", describe(calls))
    checked = []
    for number, call in enumerate(calls, 1):
        place = f"{which}, tool call {number}"
        if not isinstance(call, dict):
            raise input_error(f"an object in {place}", describe(call))
        function = call["function"] if isinstance(call.get("function"), dict) else call
        if "arguments" in function:
            arguments = from_json(function["arguments"])
            if not isinstance(arguments, dict):
                fix = 'Write "{}" for a call without arguments.'
                got = repr(function["arguments"])[:60]
                raise input_error(f"arguments as an object or a JSON string of one in {place}", got, fix)
            function = {**function, "arguments": arguments}
        checked.append(function if "function" not in call else {**call, "function": function})
    return checked


def from_json(value: Any) -> Any:
    """The value of a JSON string. Anything else is returned unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (json.JSONDecodeError, RecursionError):
        return value


def _text_part(which: str, part: Any) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    got = f"type {part['type']!r}" if isinstance(part, dict) and "type" in part else describe(part)
    raise input_error(f"only text parts in {which}", got, "Images and videos are not supported here.")


def describe(value: Any) -> str:
    """The type of a JSON value in words, for an error message."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    if value in ({}, [], ""):
        return f"an empty {names[type(value)].split()[1]}"
    return names.get(type(value), "a number")


class AssistantTurns:
    """Renders conversations and locates the assistant's turns in the text.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            A tokenizer with a chat template.

    Raises:
        `ValueError`: the tokenizer has no chat template.

    Example:

    ```python
    >>> from tokenizers import Tokenizer, models
    >>> from transformers import PreTrainedTokenizerFast
    >>> from transformers_packed.data.records.chat import AssistantTurns
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    >>> tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    >>> tokenizer.chat_template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    >>> turns = AssistantTurns(tokenizer)
    >>> messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    >>> text = turns.render(messages)
    >>> [text[start:end] for start, end in turns.find(messages, text, turns=[1])]
    ['2\\n']

    ```
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        if not tokenizer.chat_template:
            fix = "Train the instruct model, save a tokenizer.chat_template, or use prompt and completion strings."
            raise input_error("a tokenizer with a chat template, for messages", "one without", fix)
        self.tokenizer = tokenizer
        template = tokenizer.get_chat_template()
        self.template_marks_them = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
        self._probed: dict[str, tuple[str, str]] = {}

    def render(self, messages: list[dict[str, Any]], tools: list | None = None, **kwargs) -> str:
        """The text of a conversation."""
        text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs)
        assert isinstance(text, str)
        return text

    def unread_keys(self, messages: list[dict[str, Any]]) -> list[str]:
        """Keys with a value in `messages` that occur nowhere in the template."""
        keys = {key for message in messages for key, value in message.items() if value not in ("", [], {})}
        templates = self.tokenizer.chat_template
        text = templates if isinstance(templates, str) else " ".join(templates.values())
        return sorted(key for key in keys - _KNOWN_KEYS if not re.search(rf"\b{re.escape(key)}\b", text))

    def find(
        self, messages: list[dict[str, Any]], text: str, turns: list[int], tools: list | None = None, **kwargs
    ) -> list[tuple[int, int]]:
        """Locate the messages with the numbers `turns` in `text`, the `messages` rendered with `tools` and `kwargs`.

        Returns:
            `list[tuple[int, int]]`: the start and end character of each turn.

        Raises:
            `LookupError`: the template does not render a turn, or changes other messages with it.
        """
        filler, closing = self._probe(kwargs)
        mark = next(chr(code) for code in _PRIVATE_USE if chr(code) not in text)
        spans = []
        for turn in turns:
            marked = [*messages[:turn], {"role": "assistant", "content": mark}, *messages[turn + 1 :]]
            before, found, after = self.render(marked, tools, **kwargs).partition(mark)
            body_start = len(os.path.commonprefix([text, before]))
            body_end = len(text) - len(after)
            if not found or mark in after or not text.endswith(after) or body_end < body_start:
                raise _not_found(f"message {turn + 1}")
            start = min(body_start, len(before) - len(filler)) if before.endswith(filler) else body_start
            spans.append((start, body_end + len(os.path.commonprefix([closing, text[body_end:]]))))
        return spans

    def _probe(self, kwargs: dict[str, Any]) -> tuple[str, str]:
        """The text that the template inserts between the generation prompt and an answer, and after an answer."""
        key = json.dumps(kwargs, sort_keys=True)
        if key not in self._probed:
            question, mark = {"role": "user", "content": "a"}, chr(_PRIVATE_USE[0])
            prompt = self.render([question], add_generation_prompt=True, **kwargs)
            answer = {"role": "assistant", "content": mark}
            before, found, closing = self.render([question, answer], **kwargs).partition(mark)
            if not found or mark in closing:
                raise _not_found("a single answer")
            self._probed[key] = (before[len(prompt) :] if before.startswith(prompt) else "", closing)
        return self._probed[key]


def _not_found(what: str) -> LookupError:
    return LookupError(
        f"the template does not render {what} at its place in the conversation, so the assistant's text cannot be "
        "located; mark it in the template with {% generation %} and {% endgeneration %}"
    )
