"""TRL's trainer of asynchronous GRPO for models with linear attention. Its rows are trees, of which states follow each path.

TRL folds the rollouts of a row into a trie, and its attention reads the keys of a path. It refuses a model with states,
because they would run through all branches. The models of this package start the state of a branch from that of its
parent, so that this class lets them through and tells them the tree of each row.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig
from trl.experimental.async_grpo import async_grpo_trainer as theirs

from ..data.trees import SEGMENTS, TOKENS, read_trl_row
from ..errors import input_error
from ..foreign import swapped
from ..models.families import OWN, family_of, titles
from ..models.registry import patch_model, registered


class AsyncGRPOTrainer(theirs.AsyncGRPOTrainer):
    """`AsyncGRPOTrainer` of TRL 1.16 for the models of this package, with the same arguments, metrics and batches.

    Attention and linear attention run with the implementations of this package, in place of TRL's `tree_fa3`.

    Raises:
        `ValueError`: the model is of another family. TRL's own class serves those without states.

    Example:

    ```python
    from transformers_packed.training.async_grpo import AsyncGRPOTrainer

    trainer = AsyncGRPOTrainer("Qwen/Qwen3.5-4B", reward_funcs=reward, train_dataset=prompts)  # beside `vllm serve`
    trainer.train()
    ```
    """

    def __init__(self, *args: Any, **kwargs: Any):
        with _models_with_states():
            super().__init__(*args, **kwargs)
        model: Any = self.model
        # TRL has added its head since.
        patch_model(model)

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """As TRL's, with a model that reads trees."""
        return super().compute_loss(partial(_run_tree, model), *args, **kwargs)


@contextmanager
def _models_with_states() -> Iterator[None]:
    """Let TRL build a trainer meanwhile with a model of this package, whose types of layers it would refuse."""
    create = theirs.create_model_from_path

    def create_ours(path: str, *, attn_implementation: str | None = None, **options: Any) -> torch.nn.Module:
        names = "revision", "trust_remote_code"
        config = AutoConfig.from_pretrained(path, **{name: options[name] for name in names if name in options})
        if family_of(config) not in OWN:
            fix = "Use the AsyncGRPOTrainer of TRL."
            raise input_error(f"a model of {titles(OWN)}", type(config).__name__, fix)
        with registered():
            model = create(path, **options)
        stack.enter_context(swapped(vars(model.config.get_text_config()), layer_types=None))
        return model

    with ExitStack() as stack:
        stack.enter_context(swapped(vars(theirs), create_model_from_path=create_ours))
        yield


def _run_tree(model: torch.nn.Module, **inputs: Any) -> Any:
    """Run a row of TRL, of which it describes the paths of keys, as a row of documents that continue others."""
    tree = {name: inputs.pop(name) for name in [*inputs] if name.startswith("tree_")}
    row = {name: tree[name].cpu() for name in SEGMENTS} | {name: inputs[name][0].cpu() for name in TOKENS}
    return model(**inputs, boundaries=read_trl_row(row)[0])
