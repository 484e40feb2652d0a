"""Stand-ins for the parts of Axolotl that the plugin imports, for machines without Axolotl."""

import sys
from importlib.util import find_spec
from types import ModuleType

import torch


class Plugin:
    """Axolotl's base class of plugins, whose hooks do nothing."""


class Collator:
    """Axolotl's collator of packed rows: concatenates the samples of each row, and pads all rows to one length."""

    fill = {"labels": -100, "input_ids": 0, "attention_mask": 0}

    def __init__(self, tokenizer, pad_to_multiple_of=None, **options):
        self.tokenizer, self.pad_to_multiple_of = tokenizer, pad_to_multiple_of or 1

    def __call__(self, features, return_tensors=None):
        rows = features if isinstance(features[0], list) else [features]
        length = max(sum(len(sample["input_ids"]) for sample in row) for row in rows)
        length += -length % self.pad_to_multiple_of
        batch = {}
        for name in rows[0][0].keys() - {"length"}:
            columns = [[value for sample in row for value in sample[name]] for row in rows]
            filled = []
            for column in columns:
                padding = [self.fill.get(name, 0)] * (length - len(column))
                filled.append(padding + column if self.tokenizer.padding_side == "left" else column + padding)
            batch[name] = torch.tensor(filled)
        return batch


def install() -> None:
    """Make the stand-ins importable under Axolotl's names, unless Axolotl is installed."""
    if "axolotl" in sys.modules or find_spec("axolotl") is not None:
        return
    parts = {"axolotl.integrations.base": {"BasePlugin": Plugin}}
    parts["axolotl.utils.collators"] = {"V2BatchSamplerDataCollatorForSeq2Seq": Collator}
    for name in ("axolotl", "axolotl.integrations", "axolotl.utils", *parts):
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(parts.get(name, {}))
