"""The Trainer of the `train` command: its checkpoints and the model appear in the output folder when they are complete."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.utils._pytree import tree_leaves
from transformers import Trainer
from transformers.trainer_utils import rotate_checkpoints

from .run_folder import LAST_FILES, PARTIAL, left


# Words in torch's RuntimeError for a file that cannot be written. torch raises RuntimeError for many other reasons.
_TORCH_WRITES = ("PytorchStreamWriter", "inline_container", "unexpected pos")


class RunFolderTrainer(Trainer):
    """The stock Trainer with atomic writes of checkpoints and the model.

    Raises:
        `OSError`: a file cannot be written. The message names the file, the reason, and the checkpoint for `--resume`.
    """

    def _get_output_dir(self, trial):
        return str(Path(super()._get_output_dir(trial), PARTIAL))

    def _save_checkpoint(self, model, trial):
        name = f"checkpoint-{self.state.global_step}"
        save = super()._save_checkpoint
        self._write(name, lambda partial: save(model, trial), lambda partial: [name])
        if self.args.should_save:
            rotate_checkpoints(self.args.output_dir, self.args.save_total_limit)

    def save_to_folder(self) -> None:
        """Save the model and its tokenizer in the output folder, next to the checkpoints."""

        def names(partial: Path) -> list[str]:
            return sorted((path.name for path in partial.iterdir()), key=lambda name: (name in LAST_FILES, name))

        self._write("the model", lambda partial: self.save_model(str(partial)), names)

    def _size(self, with_states: bool) -> int | None:
        """Bytes of the saved weights, also with the states of the optimizer. `None` if these are no plain tensors."""
        model: Any = self.accelerator.unwrap_model(self.model)
        weights = [x for x in model.parameters() if x.requires_grad or not hasattr(model, "peft_config")]
        states = tree_leaves(list(getattr(self.optimizer, "state", {}).values())) if with_states else []
        tensors = [x for x in states if isinstance(x, torch.Tensor)]
        # Others tell the bytes of what they stand for.
        return sum(x.nbytes for x in weights + tensors) if all(type(x) is torch.Tensor for x in tensors) else None

    def _write(self, what: str, write: Callable[[Path], None], names: Callable[[Path], list[str]]) -> None:
        """Call `write`, then move the files `names`, in this order, from the partial folder to the output folder."""
        folder = Path(str(self.args.output_dir))
        partial = folder / PARTIAL
        try:
            if self.args.should_save:
                shutil.rmtree(partial, ignore_errors=True)
            self.accelerator.wait_for_everyone()
            write(partial)
            self.accelerator.wait_for_everyone()
            for name in names(partial) if self.args.should_save else ():
                if (folder / name).is_dir():
                    os.replace(folder / name, partial / f"earlier-{name}")
                os.replace(partial / name, folder / name)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch raises a RuntimeError, safetensors its own
            if isinstance(error, RuntimeError) and not any(name in str(error) for name in _TORCH_WRITES):
                raise
            reason, free = " ".join(str(error).split()), shutil.disk_usage(folder).free / 2**20
            why = f"with {free:,.0f} MiB of free space ({reason}); {left(folder)}"
            size = self._size(with_states=what.startswith("checkpoint-"))
            needed = f" ({what} needs about {-(-size // 2**20):,} MiB)" if size else ""
            why += f". Free space{needed}, or choose another --output."
            raise OSError(f"{what} cannot be written to {folder}, {why}") from error
        finally:
            if self.args.should_save:
                shutil.rmtree(partial, ignore_errors=True)
        self.accelerator.wait_for_everyone()
