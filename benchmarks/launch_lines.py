"""The launches of `launches.py`: the commands of the documentation for two GPUs, and those to compare them with.

Some words of a command stand for paths: CHECKPOINT, VISION, DATA and OUTPUT.
"""

from dataclasses import dataclass


DDP = "accelerate launch --multi_gpu --num_processes 2"
WORKER = "benchmarks/launch_worker.py train --model CHECKPOINT --output OUTPUT"
SHORT = "--model CHECKPOINT --output OUTPUT --max-steps 10 --max-length 256"
TRAIN = "transformers-packed train --model CHECKPOINT --data DATA --output OUTPUT --max-steps 10 --logging-steps 1"
SAVED_AT, KILLED_AT = 4, 5


def fsdp2(state_dict: str, processes: int = 2) -> str:
    """The command of docs/how_to/several_gpus.md."""
    return (
        f"accelerate launch --use_fsdp --fsdp_version 2 --num_processes {processes} "
        "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap Qwen3_5DecoderLayer "
        f"--fsdp_state_dict_type {state_dict}"
    )


def zero(stage: int) -> str:
    """DeepSpeed's ZeRO, which has to be installed."""
    return (
        f"accelerate launch --use_deepspeed --zero_stage {stage} --zero3_init_flag true --zero3_save_16bit_model true "
        "--num_processes 2"
    )


@dataclass
class Launch:
    """One command.

    Args:
        name (`str`): `group/name`. The launches of a group share their output folder if one continues another.
        command (`str`): what a user types.
        after (`str`, *optional*): the launch whose output this one continues.
        like (`str`, *optional*): the launch with the same losses.
        saved (`str`, *optional*): what the saved model started from, `"CHECKPOINT"` or `"VISION"`.
        lower (`bool`): whether a few steps must lower the loss of the saved model.
        merged (`bool`): whether the saved model must first be merged from its shards.
        record (`str`, *optional*): the name of the worker's record in the output folder.
        killed (`bool`): whether a process is killed, so that the launcher must fail.
        may_fail (`bool`): whether the libraries are known not to support all of it. An error is then a finding.
    """

    name: str
    command: str
    after: str = ""
    like: str = ""
    saved: str = ""
    lower: bool = True
    merged: bool = False
    record: str = ""
    killed: bool = False
    may_fail: bool = False

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]

    @property
    def sharded(self) -> bool:
        return any(word in self.command for word in ("--use_fsdp", "fsdp2.yaml", "hsdp.yaml", "--use_deepspeed"))

    @property
    def processes(self) -> int:
        words = self.command.split()
        flags = [i for i, word in enumerate(words) if word in ("--num_processes", "--nproc_per_node")]
        return int(words[flags[0] + 1]) if flags else 1


def example(name: str, batch: int, rest: str = "", short: str = SHORT) -> str:
    return f"examples/{name}.py {short} --batch-size {batch}{rest}"


def chain(group: str, start: str, start_of_one: str, sharded: bool) -> list[Launch]:
    """A whole run, its second half on as many GPUs, and its second half on one GPU."""
    whole = f"{group}/whole"
    again = {"after": whole, "like": whole}
    resume = f"--resume {SAVED_AT}"
    one = f"{WORKER} --name one {resume} --accumulation 2"
    launches = [
        Launch(whole, f"{start} {WORKER} --name whole --save-at {SAVED_AT}", record="whole"),
        Launch(f"{group}/two", f"{start} {WORKER} --name two {resume}", record="two", **again),
        Launch(f"{group}/one", f"{start_of_one} {one}", record="one", may_fail=sharded, **again),
    ]
    if sharded:
        plain = one.replace("--name one", "--name plain")
        launches.append(Launch(f"{group}/plain", f"python {plain}", record="plain", may_fail=True, **again))
    return launches


def killed(group: str, start: str, like: str) -> list[Launch]:
    """A run that loses a process after its checkpoint, and its second half."""
    kill = f"{start} {WORKER} --name killed --save-at {SAVED_AT} --kill-at {KILLED_AT}"
    resumed = f"{start} {WORKER} --name resumed --resume {SAVED_AT}"
    return [
        Launch(f"{group}/killed", kill, record="killed", killed=True),
        Launch(f"{group}/resumed", resumed, record="resumed", after=f"{group}/killed", like=like),
    ]


def launches(vision: bool) -> list[Launch]:
    """All launches, the longest chains first. Without `vision`, the example for images trains its own tiny model."""
    full, shards = fsdp2("FULL_STATE_DICT"), fsdp2("SHARDED_STATE_DICT")
    torchrun = "torchrun --nproc_per_node 2"
    cli = f"{torchrun} --no-python {TRAIN}"
    share, teacher = " --sequence_parallel_size 2", " --teacher CHECKPOINT"
    images = SHORT.replace("--model CHECKPOINT ", "--model VISION " if vision else "")
    answers = "--model CHECKPOINT --output OUTPUT --max-steps 5 --max-length 32"
    text, seen = {"saved": "CHECKPOINT"}, {"saved": "VISION", "lower": False} if vision else {}
    # The checkpoint has no experts.
    own = SHORT.replace("--model CHECKPOINT ", "")
    # Its 10 steps have a quarter of the tokens of the other examples, too few to lower the loss for sure.
    few = text | {"lower": False}
    return [
        *chain("resume-ddp", DDP, "python", sharded=False),
        *chain("resume-fsdp2", full, fsdp2("FULL_STATE_DICT", 1), sharded=True),
        *chain("resume-fsdp2-sharded", shards, fsdp2("SHARDED_STATE_DICT", 1), sharded=True),
        *killed("kill-ddp", DDP, "resume-ddp/whole"),
        *killed("kill-fsdp2", full, "resume-fsdp2/whole"),
        Launch("train/ddp", f"{cli} --batch-size 4 --save-steps 5", like="train/one", **text),
        Launch(
            "train/resumed", f"{cli} --batch-size 4 --save-steps 5 --resume", "train/ddp", like="train/one", **text
        ),
        Launch("train/one", f"{TRAIN} --batch-size 4 --gradient-accumulation-steps 2", **text),
        Launch("grpo/ddp", f"{DDP} {example('grpo', 4, short=answers)}", lower=False, **text),
        Launch("trainer/ddp", f"{DDP} {example('trainer', 4)}", like="trainer/one", **text),
        Launch("trainer/fsdp2", f"{full} {example('trainer', 4)}", like="trainer/one", **text),
        Launch("trainer/fsdp2-sharded", f"{shards} {example('trainer', 4)}", like="trainer/one", merged=True, **text),
        Launch(
            "trainer/hsdp",
            "accelerate launch --config_file examples/hsdp.yaml --num_processes 2 --parallelism_config_dp_shard_size 1 "
            + example("trainer", 4),
            like="trainer/one",
            **text,
        ),
        Launch("trainer/zero-2", f"{zero(2)} {example('trainer', 4)}", like="trainer/one", may_fail=True, **text),
        Launch("trainer/zero-3", f"{zero(3)} {example('trainer', 4)}", like="trainer/one", may_fail=True, **text),
        Launch("trainer/one", f"python {example('trainer', 8)}", **text),
        Launch("sft/ddp", f"{DDP} {example('sft', 2)}", like="sft/one", **text),
        Launch("sft/fsdp2", f"{full} {example('sft', 2)}", like="sft/one", **text),
        Launch("sft/one", f"python {example('sft', 4)}", **text),
        Launch("lora/ddp", f"{DDP} {example('lora', 2)}", like="lora/one", **text),
        Launch("lora/fsdp2", f"{full} {example('lora', 2)}", like="lora/ddp", **text),
        Launch("lora/zero-3", f"{zero(3)} {example('lora', 2)}", like="lora/ddp", may_fail=True, **text),
        Launch("lora/one", f"python {example('lora', 4)}", **text),
        Launch("experts/ep", f"{torchrun} {example('experts', 2, short=own)}", like="experts/one", lower=False),
        Launch("experts/one", f"python {example('experts', 4, short=own)}", lower=False),
        Launch("distillation/ddp", f"{DDP} {example('distillation', 2, teacher)}", like="distillation/one", **text),
        Launch("distillation/fsdp2", f"{full} {example('distillation', 2, teacher)}", like="distillation/one", **text),
        Launch("distillation/one", f"python {example('distillation', 4, teacher)}", **text),
        Launch("dpo/ddp", f"{DDP} {example('dpo', 2)}", like="dpo/one", lower=False, **text),
        Launch("dpo/one", f"python {example('dpo', 4)}", lower=False, **text),
        Launch("reward/ddp", f"{DDP} {example('reward', 2)}", like="reward/one", lower=False),
        Launch("reward/one", f"python {example('reward', 4)}", lower=False),
        Launch(
            "vision_language/ddp",
            f"{DDP} {example('vision_language', 2, short=images)}",
            like="vision_language/one",
            **seen,
        ),
        Launch("vision_language/one", f"python {example('vision_language', 4, short=images)}", **seen),
        Launch(
            "sequence_parallel/ddp",
            f"{torchrun} {example('sequence_parallel', 2, share)}",
            like="sequence_parallel/one",
            **few,
        ),
        Launch(
            "sequence_parallel/fsdp2",
            "accelerate launch --config_file examples/fsdp2.yaml --num_processes 2 "
            + example("sequence_parallel", 2, share),
            like="sequence_parallel/one",
            **few,
        ),
        Launch("sequence_parallel/one", f"python {example('sequence_parallel', 2)}", **few),
        Launch("train-lora/ddp", f"{cli} --batch-size 4 --lora", like="train-lora/one", **text),
        Launch("train-lora/one", f"{TRAIN} --batch-size 4 --gradient-accumulation-steps 2 --lora", **text),
    ]
