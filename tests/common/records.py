"""Chat templates, a tokenizer and records, shared by the tests of the train command."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Renders the same text, but marked generations end before the line break.
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As in Qwen3.5: replies after the last question show reasoning, the generation prompt opens it, content is trimmed.
THINKING = (
    "{% set last = namespace(user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% if last.user < 0 %}{{ raise_exception('No question.') }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > last.user %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content | trim }}{% for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# No special tokens around turns, and one end token after the whole conversation.
PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% else %}{{ eos_token }}{% endif %}"
)
SPECIAL = ["<|pad|>", "<|im_end|>", "<|im_start|>"]


def user(content, **more):
    return {"role": "user", "content": content, **more}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def make_tokenizer(template: str | None = CHATML, **special) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per byte, so that a text and its parts have the same tokens."""
    symbols = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<|pad|>", "eos_token": "<|im_end|>", **special}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=["<|im_start|>"], **special)
    fast.chat_template = template
    return fast


def records(*rows):
    return [(f"record {number}", row) for number, row in enumerate(rows, 1)]
