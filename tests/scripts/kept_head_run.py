"""Train a checkpoint with a head for a step under FSDP2 and save it: `kept_head_run.py SOURCE OUTPUT PATCHED STEPS FULL`.

It resumes from the newest checkpoint in OUTPUT, if any. With FULL, it gathers the weights and saves them in `OUTPUT/full`.
Start it in several processes as with torchrun, with the variables that make accelerate shard on a CPU.
"""

import sys
from pathlib import Path

import torch
from common.processes import pretend_gpus
from scripts.trainer_arms import Samples, end_process
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from transformers_packed import DataCollatorWithFlattening, patch_model, register


if __name__ == "__main__":
    source, output, patched, steps, full = sys.argv[1], Path(sys.argv[2]), *(int(x) for x in sys.argv[3:])
    pretend_gpus()
    if not patched:
        register()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model = patch_model(model) if patched else model
    args = TrainingArguments(
        str(output), max_steps=steps, save_steps=1, logging_strategy="no", report_to="none", disable_tqdm=True
    )
    trainer = Trainer(model, args, DataCollatorWithFlattening(on_leak="ignore"), Samples(8))
    trainer.train(resume_from_checkpoint=any(output.glob("checkpoint-*")))
    assert isinstance(next(trainer.model.parameters()), DTensor)
    if full:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        trainer.save_model(str(output / "full"))
    end_process()
