"""The page of the launch lines on two GPUs."""

from card import LAUNCHES, LAUNCHES_AGAIN, Card, fixed, percent, table


# The groups that follow no example by name.
TITLES = {
    "resume-ddp": "Saved and resumed, DDP",
    "resume-fsdp2": "Saved and resumed, FSDP2 with FULL_STATE_DICT",
    "resume-fsdp2-sharded": "Saved and resumed, FSDP2 with SHARDED_STATE_DICT",
    "kill-ddp": "A killed process, DDP",
    "kill-fsdp2": "A killed process, FSDP2",
    "train": "`transformers-packed train`",
    "train-lora": "`transformers-packed train --lora`",
}


def launches(results: dict) -> Card:
    report = results["launches.json"]
    entries = [entry for entry in report["launches"] if entry["status"] != "skipped"]
    good = [entry for entry in entries if as_expected(entry)]
    bars = report["bars"]
    kills = [
        check["seconds"]
        for entry in entries
        for check in entry.get("checks", {}).values()
        if check["passed"] and "exit_status" in check
    ]
    ends = (
        f"A launcher ended within {fixed(max(kills), 0)} s of the death of a process, with the cause." if kills else ""
    )
    return Card(
        "Launch lines on two GPUs",
        f"{len(good)} of {len(entries)} launches end as expected: with DDP and with FSDP2, a run that is saved on two GPUs "
        "continues with the same rows and the same losses.",
        [
            f"""Two GPUs ran these commands, with random weights of the {report["model"]} shape after a short training. CHECKPOINT
and OUTPUT stand for paths. {report.get("note", "")}""",
            table(
                ("Launch", "Command", "Result"),
                [(title(entry), f"`{entry['command']}`", result(entry)) for entry in entries],
            ),
            f"""Each logged loss may differ by {percent(bars["loss"])}, and the gradient norm by {percent(bars["gradient norm"])},
because two GPUs add in another order, in bfloat16.""",
            """A resumed run must train on the same rows as the whole run, in the same order. One GPU that resumes a run of two
accumulates two batches.""",
            f"""A process gets SIGKILL in the middle of a step, after a checkpoint. {ends} The run then continued from
the checkpoint.""",
            """With SHARDED_STATE_DICT, `save_model` writes no weights. `accelerate merge-weights` makes a file of them from the
`pytorch_model_fsdp_0` folder of a checkpoint.""",
        ],
        ["launches.json"],
        machine=report["machine"],
        versions=report["versions"],
        commands=report["commands"],
        committed=[LAUNCHES, LAUNCHES_AGAIN],
        number=f"{len(good)} of {len(entries)} launches as expected, the same rows and losses after each stop",
    )


def as_expected(entry: dict) -> bool:
    return entry["status"] != "failed" and all(check["passed"] for check in entry.get("checks", {}).values())


def title(entry: dict) -> str:
    group, _, name = entry["name"].partition("/")
    return f"{TITLES.get(group, f'`examples/{group}.py`')}: {name}"


def result(entry: dict) -> str:
    """What the checks of a launch found, or its error."""
    if entry["status"] != "ok":
        error = " ".join(entry["error"].split()).replace("|", "\\|")
        return f"{entry['status']}: {error[:300]}"
    parts = [told(name, check) for name, check in entry.get("checks", {}).items() if name != "losses are finite"]
    return "; ".join(filter(None, parts)) or "finite losses"


def told(name: str, check: dict) -> str:
    if "exit_status" in check:
        text = f"exit status {check['exit_status']} after {fixed(check['seconds'], 1)} s, {check['cause']}"
    elif "before" in check:
        text = f"loss of the saved model {fixed(check['loss'], 3)}, before {fixed(check['before'], 3)}"
    elif "largest" in check:
        text = f"{name} within {percent(check['largest'], 2)}"
    else:
        text = f"{name}: {'the same' if check['passed'] else check.get('reason', 'others')}"
    return text if check["passed"] else f"**fails**: {text}"
