"""Make `Trainer` disable the cache in the configuration of the text model, not only in the outer one."""

import libcst as cst

from ..edits import AlreadyFixed, assigns_attribute, code_of, edit, find, insert_after
from ..patch import Patch
from ..source import Edited


def apply_to(module: cst.Module) -> cst.Module:
    if "get_text_config(decoder=True).use_cache" in code_of(find(module, "Trainer.__init__")):
        raise AlreadyFixed("Trainer sets use_cache of the text model")
    what, match = "assignment of use_cache", assigns_attribute("use_cache")
    code = """
        # The text model of a composite one reads its own config
        if hasattr(self.model.config, "get_text_config"):
            self.model.config.get_text_config(decoder=True).use_cache = self.args.use_cache
    """
    return edit(module, "Trainer.__init__", insert_after, what, match, code)


def apply(tree: Edited) -> None:
    tree.edit("trainer.py", apply_to)


PATCH = Patch(
    title="Let Trainer turn off the cache of the text model of composite models",
    summary="Trainer leaves the cache of composite models on, and with a cache packed sequences are not kept apart.",
    problem="""\
`Trainer` sets `model.config.use_cache`, by default to False. The text model of a vision-language model reads
`use_cache` from its own config, where it stays True: unless gradient checkpointing is on, every training step
makes a cache that nobody uses. It costs memory, and with a cache masks are made without looking for packed
sequences, so SDPA and eager attention see across them.""",
    change="""\
`Trainer` sets it in the config of the text model as well. For all others that is the same config.""",
    families="all composite models, such as Qwen3.5 and Qwen3.5-MoE with vision",
    issues=(),
    reproduction="""\
import tempfile
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Trainer, TrainingArguments

text = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=16, layer_types=["full_attention"],
)
vision = dict(hidden_size=32, intermediate_size=32, depth=1, num_heads=2, out_hidden_size=32)
model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))
Trainer(model, TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to=[]))
print("config:", model.config.use_cache, "config of the text model:", model.config.text_config.use_cache)
""",
    apply=apply,
    beside="tests/trainer/test_trainer.py",
)
