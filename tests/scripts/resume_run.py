"""A tiny training run over packed rows that logs the documents of every step and resumes from its newest checkpoint.

The tests start it in separate processes, kill them, and start it again. Also a script: `resume_run.py SPEC_AS_JSON`
for torchrun stops and resumes once.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import transformers_packed as packed


MAX_LENGTH = 32


def documents(size: int = 90) -> list[dict]:
    """Build documents of equal tokens, `i + 1` in document `i`, so that a row identifies its documents."""
    lengths = torch.randint(1, 21, (size,), generator=torch.Generator().manual_seed(5)).tolist()
    return [{"input_ids": [i + 1] * length} for i, length in enumerate(lengths)]


def read_shards(shards):
    for shard in shards:
        yield from shard


def source(name: str):
    rows = documents()
    if name == "list":
        return rows
    if name == "iterable":
        return Rereadable(rows)
    if name == "hf":
        return Dataset.from_list(rows)
    shards = [rows[i : i + 25] for i in range(0, len(rows), 25)]
    stream = IterableDataset.from_generator(read_shards, gen_kwargs={"shards": shards})
    return stream.shuffle(seed=3, buffer_size=20) if name == "hf_shuffled" else stream


class Rereadable:
    """An iterable without any other method."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class Log(torch.nn.Module):
    """A model that records its documents since the last step."""

    def __init__(self, pause: float):
        super().__init__()
        self.embedding = torch.nn.Embedding(200, 2)
        self.pause = pause
        self.seen = []

    def forward(self, input_ids=None, cu_seqlens=None, labels=None, position_ids=None):
        bounds = cu_seqlens.tolist()
        for start, end in zip(bounds, bounds[1:], strict=False):
            document = input_ids[0, start:end]
            assert (document == document[0]).all() and position_ids[0, start:end].tolist() == list(range(end - start))
            self.seen.append([int(document[0]) - 1, end - start])
        time.sleep(self.pause)
        return {"loss": self.embedding(input_ids).square().mean()}


class StopAt(TrainerCallback):
    """Save a checkpoint and end the run after a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


class WriteLog(TrainerCallback):
    """Write a line per step: the step and its documents."""

    def __init__(self, path: str):
        self.path = path

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model = getattr(model, "module", model)
        with open(self.path, "a") as log:
            log.write(json.dumps([state.global_step, model.seen]) + "\n")
        model.seen = []


def newest_checkpoint(output: str) -> str | None:
    """Find the newest complete checkpoint. Trainer writes its state last."""
    for path in sorted(Path(output).glob("checkpoint-*"), key=lambda p: -int(p.name.split("-")[1])):
        try:
            json.loads((path / "trainer_state.json").read_text())
            return str(path)
        except (OSError, ValueError):
            continue
    return None


def finished(checkpoint: str) -> bool:
    state = json.loads(Path(checkpoint, "trainer_state.json").read_text())
    return state["global_step"] >= state["max_steps"]


def build_trainer(spec: dict, rank: int = 0) -> Trainer:
    stateful = spec["resume"] == "state"
    if spec["dataset"] == "map":
        dataset = packed.PackingDataset(source(spec["source"]), MAX_LENGTH, world_size=spec.get("processes", 1))
    else:
        dataset = packed.IterablePackingDataset(source(spec["source"]), MAX_LENGTH, buffer_size=5)
    args = TrainingArguments(
        spec["output"],
        per_device_train_batch_size=spec.get("batch", 2),
        dataloader_num_workers=spec["workers"],
        ignore_data_skip=stateful,
        accelerator_config={"dispatch_batches": False},
        **{"max_steps": spec["steps"]} if "steps" in spec else {"num_train_epochs": spec["epochs"]},
        train_sampling_strategy=spec.get("sampling", "random"),
        save_strategy="steps",
        save_steps=3,
        save_total_limit=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    callbacks = [WriteLog(f"{spec['log']}.{rank}")] + [packed.PackingStateCallback()] * stateful
    model = Log(spec.get("pause", 0.0))
    collator = packed.DataCollatorWithFlattening(return_cu_seqlens=True, model=model)
    return Trainer(model=model, args=args, train_dataset=dataset, data_collator=collator, callbacks=callbacks)


def run(spec: dict) -> None:
    """Train to the end, or up to the step `stop`."""
    trainer = build_trainer(spec, int(os.environ.get("RANK", 0)))
    if "stop" in spec:
        trainer.add_callback(StopAt(spec["stop"]))
    checkpoint = newest_checkpoint(spec["output"])
    # From the checkpoint of the last step, Trainer would run one more step.
    if checkpoint is None or not finished(checkpoint):
        trainer.train(resume_from_checkpoint=checkpoint)
        torch.save(trainer.model.state_dict(), f"{spec['log']}.weights")
    if "stop" not in spec:
        Path(f"{spec['log']}.done").touch()


def trajectory(spec: dict, rank: int = 0) -> dict[int, list]:
    """Return the documents of each step, from the last run that took the step."""
    steps = {}
    for line in Path(f"{spec['log']}.{rank}").read_text().splitlines():
        try:
            step, seen = json.loads(line)
        except ValueError:  # killed while writing
            continue
        steps[step] = seen
    return dict(sorted(steps.items()))


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    run(spec)
    spec.pop("stop")
    run(spec)
