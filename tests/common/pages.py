"""Find the code blocks in the Markdown of the documentation, and run them.

As a script, `python pages.py FOLDER [PAGE]`, it runs the `python` blocks of a page in the folder, which has the files
that a reader has: a tiny checkpoint under the name of a real one, and the data in `examples/`. Without a page it creates
these files.
"""

import importlib.util
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT, TEACHER = "Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-4B"
QUANTIZED = "checkpoint-AWQ"
# Families without classes of their own in this package, and another one with them.
OTHER_CHECKPOINTS = {
    "LiquidAI/LFM2-350M": "lfm2",
    "ibm-granite/granite-4.0-h-micro": "granitemoehybrid",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": "kimi_linear",
}
# Stop a page that blocks.
SECONDS = 600

# A fence, which may be indented in a tab or a list, with the line above it.
_FENCE = re.compile(
    r"^(?P<above>[^\n]*)\n+(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^(?P=indent)```", re.M | re.S
)
_NOT_RUN = re.compile(r"^ *<!-- not run: (.*?) -->")


class Block(NamedTuple):
    """A fenced block: its language, its code, the first line of the code, and the reason if it does not run."""

    language: str
    code: str
    line: int
    not_run: str | None


def pages() -> list[str]:
    """List the Markdown pages of the documentation, as paths from the root of the repository."""
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> Iterator[Block]:
    """Find the fenced blocks of a page that have a language."""
    # The first line may also be a fence.
    for found in _FENCE.finditer("\n" + text):
        reason = _NOT_RUN.match(found["above"])
        line = text.count("\n", 0, found.start("code") - 1) + 1
        yield Block(found["language"], textwrap.dedent(found["code"]), line, reason and reason[1])


def run_blocks(page: str, text: str) -> None:
    """Run the `python` blocks of a page in one namespace. Tracebacks show the lines of the page."""
    namespace = {"__name__": "__main__"}
    for block in blocks(text):
        if block.language == "python" and block.not_run is None:
            exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), namespace)


def make_files(folder: Path) -> None:
    """Create the files that a reader is assumed to have: a complete checkpoint, and data."""
    from families import tiny_model
    from trl import chat_template_utils

    sys.path.append(str(ROOT / "tests"))
    from common.checkpoints import write

    examples = examples_module()
    made, processor = examples.tiny_vision_checkpoint()
    _with_head(made, folder / CHECKPOINT)
    tokenizer = processor.tokenizer
    # TRL has the template of this checkpoint, and one that marks the assistant's tokens.
    tokenizer.chat_template = chat_template_utils.qwen3_5_nothink_chat_template
    for part in (tokenizer, processor.image_processor):
        part.save_pretrained(folder / CHECKPOINT)
    shutil.copytree(folder / CHECKPOINT, folder / TEACHER)
    for name, family in OTHER_CHECKPOINTS.items():
        tiny_model(family, vocab_size=len(tokenizer)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    write(tiny_model("qwen3_next", vocab_size=len(tokenizer)), str(folder / QUANTIZED), "awq")
    (folder / "examples").mkdir()
    for path in (ROOT / "examples").glob("*.jsonl"):
        shutil.copy(path, folder / "examples")


def _with_head(made: str, folder: Path) -> None:
    """Copy a checkpoint, and give it a head of multi-token prediction, which the real one has."""
    from transformers import AutoModelForImageTextToText

    from transformers_packed import add_mtp, registered

    with registered():
        model = AutoModelForImageTextToText.from_pretrained(made)
    model.config.name_or_path, model.config.text_config.mtp_num_hidden_layers = "", 1
    add_mtp(model)
    shutil.copytree(made, folder)
    model.save_pretrained(folder)


def examples_module():
    """Load the shared module of the examples, whose name is also that of the tests' `common`."""
    spec = importlib.util.spec_from_file_location("examples_common", ROOT / "examples" / "common.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _stand_in() -> None:
    """Replace requirements of a reader's machine: torchvision, and the GPU that TRL's configurations expect."""
    from transformers import AutoProcessor, TrainingArguments

    if importlib.util.find_spec("torchvision") is None:
        # The processor of the examples supports no videos and needs no torchvision.
        examples = examples_module()
        AutoProcessor.from_pretrained = lambda *args, **kwargs: examples.tiny_vision_checkpoint()[1]
    check = TrainingArguments.__post_init__

    def on_cpu(self):
        self.use_cpu, self.bf16 = True, False
        check(self)

    TrainingArguments.__post_init__ = on_cpu


def main(folder: str, page: str | None = None) -> None:
    """Create the files, or run a page with them."""
    import datasets
    import torch

    if page is None:
        make_files(Path(folder))
        return
    signal.alarm(SECONDS)
    os.chdir(folder)
    datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
    _stand_in()
    # Compiling the optimizer of torchao takes a minute.
    with torch.compiler.set_stance("force_eager"):
        run_blocks(page, (ROOT / page).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(*sys.argv[1:])
