"""Distill a teacher into a small model, by `PackedTrainer` and SGD: `teacher_run.py KIND OUTPUT`.

KIND is as in `mtp_run.py`. The update of each parameter and the log go to OUTPUT.
"""

import sys

import torch
from scripts import mtp_run
from scripts.trainer_arms import TINY, save_and_end, shards_by_fsdp, updates_and_log
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, set_seed


DISTILL = {"distill_beta": 0.3, "distill_weight": 0.4, "distill_temperature": 2.0}


def make_model(seed=0, **sizes):
    """A stock model. Its distributions, and so those of student and teacher, differ by more than rounding."""
    set_seed(seed)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TINY | sizes))
    with torch.no_grad():
        model.lm_head.weight.normal_()
    return model


def build(folder, kind="alone", teacher=None, **options):
    """A trainer as that of `mtp_run.py`, without a head and with a wider teacher."""
    options = {"model": make_model(), "mtp_loss_weight": 0.0, "max_steps": 1, **DISTILL, **options}
    return mtp_run.build(folder, kind, teacher=teacher or make_model(1, hidden_size=24), **options)


if __name__ == "__main__":
    kind, output = sys.argv[1:]
    sharded = shards_by_fsdp()
    trainer = build(f"{output}.trainer", kind, max_steps=2, use_cpu=not sharded)
    teacher = trainer.model.losses[-1].teacher
    updates, log = updates_and_log(trainer)
    parts = [x._local_tensor if sharded else x for x in teacher.parameters()]
    save_and_end(trainer, output, updates=updates, log=log, held=sum(x.numel() for x in parts))
