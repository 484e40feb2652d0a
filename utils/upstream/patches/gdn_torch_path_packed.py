"""Run torch functions, and kernels without support for boundaries, on each packed sequence separately."""

import libcst as cst

from ..edits import AlreadyFixed, assigns, edit, insert_after, insert_before
from ..patch import Patch
from ..source import Edited
from .hub_kernels import DECORATOR, FILE, WRAPPED, add_functions, defines, insert_before_wrapped, is_refusal


TABLES = """

# How to cut a packed row into its sequences, by kernel: the dimension of the sequence and the arguments that have it
_SEQUENCE_ARGUMENTS = {
    "causal_conv1d_fn": (-1, ("hidden_states",)),
    "chunk_gated_delta_rule": (1, ("query", "key", "value", "g", "beta")),
    "chunk_kda": (1, ("query", "key", "value", "g", "beta")),
    "mamba_chunk_scan_combined": (1, ("hidden_states", "dt", "B", "C")),
    "mamba_split_conv1d_scan_combined": (1, ("zxbcdt",)),
    "selective_scan_fn": (-1, ("hidden_states", "dt", "B", "C", "z")),
}
# What says where the sequences are, each of them in full
_SEQUENCE_BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")
# Arguments of functions that read or return the states of a cache, which holds one per row
_STATE_ARGUMENTS = (
    "initial_state",
    "initial_states",
    "output_final_state",
    "return_final_states",
    "return_last_state",
)
# In these models other layers mix packed sequences, so they go on refusing them where the kernels are missing
_MIXES_SEQUENCES = ("glm5_next", "granitemoehybrid", "qwen4_exp", "zamba")
"""

RUN = '''

def _run_per_sequence(function: Callable, func_name: str, parameters: tuple[str, ...], args: tuple, kwargs: dict):
    """
    Run a function that knows nothing of packed sequences on each of them, and lay the results end to end. The lengths
    are needed on the host, and there is a call per sequence: this is for the torch path, and exact rather than fast.
    """
    cu_seqlens, cu_seq_lens_q, seq_idx = (kwargs.get(name) for name in _SEQUENCE_BOUNDARIES)
    cu_seqlens = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
    if cu_seqlens is not None:
        lengths = cu_seqlens.diff().tolist()
    else:
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()

    dim, names = _SEQUENCE_ARGUMENTS[func_name]
    arguments = dict(zip(parameters, args)) | {k: v for k, v in kwargs.items() if k not in _SEQUENCE_BOUNDARIES}
    row = {name: arguments[name] for name in names if arguments.get(name) is not None}
    if any(x.shape[0] != 1 or x.shape[dim] != sum(lengths) for x in row.values()):
        raise ValueError(
            f"`{func_name}` expects one row with the {sum(lengths)} tokens of the packed sequences, got shapes "
            f"{[tuple(x.shape) for x in row.values()]}. Packed sequences need batch size 1 and `use_cache=False`."
        )
    if any(arguments.get(name) is not None and arguments[name] is not False for name in _STATE_ARGUMENTS):
        raise ValueError(f"`{func_name}` can't cache the states of packed sequences. Pass `use_cache=False`.")

    pieces = {name: x.split([length for length in lengths if length > 0], dim) for name, x in row.items()}
    outputs = []
    for sequence in zip(*pieces.values()):
        call = arguments | dict(zip(pieces, sequence))
        positional = [call.pop(name) for name in parameters[: len(args)]]
        output = function(*positional, **call)
        # A fused kernel that is not there
        if output is None:
            return None
        outputs.append(output)
    if isinstance(outputs[0], tuple):
        return torch.cat([output for output, _ in outputs], dim=dim), None
    return torch.cat(outputs, dim=dim)
'''


def apply_to(module: cst.Module) -> cst.Module:
    if defines(module, "_run_per_sequence"):
        raise AlreadyFixed(f"{FILE} runs torch functions on each sequence")
    module = insert_after(module, "_PACKAGE_TO_DISTRIBUTION = ...", assigns("_PACKAGE_TO_DISTRIBUTION"), TABLES)
    module = add_functions(module, RUN)
    module = insert_before_wrapped(
        module,
        """

        torch_params = tuple(inspect.signature(torch_function).parameters)
        mixes_elsewhere = any(f".{model}." in torch_function.__module__ for model in _MIXES_SEQUENCES)
        splits_sequences = func_name in _SEQUENCE_ARGUMENTS and not mixes_elsewhere
        """,
    )
    code = """

        boundaries = [name for name in _SEQUENCE_BOUNDARIES if kwargs.get(name) is not None]
        told = any(is_new_implementation and name in applicable_params for name in boundaries)
        if splits_sequences and boundaries and not told:
            return _run_per_sequence(wrapped, func_name, torch_params, args, kwargs)
    """
    return edit(module, WRAPPED, insert_before, "check that raises for packed sequences", is_refusal, code)


def apply(tree: Edited) -> None:
    tree.edit(FILE, apply_to)


PATCH = Patch(
    title="Keep packed sequences apart on the torch path of linear attention",
    summary="Without kernels a packed batch is an error, or runs across its sequences.",
    problem="""\
Without flash-linear-attention, causal-conv1d and mamba-ssm a packed batch cannot be run at all: the torch
functions refuse `seq_idx` and `cu_seqlens`. So packed training cannot be tested on a CPU. With `cu_seq_lens_q`
alone, convolutions, Kimi delta attention and Mamba2 do not refuse but run across the sequences without a word.
So do kernels that take no boundaries (`selective_scan_fn`), or not those that were given.""",
    change=f"""\
`{DECORATOR}` runs a function on each sequence alone when it was given boundaries of which the implementation
takes none. The torch functions themselves still ignore boundaries. Nothing is inferred: only `cu_seqlens`,
`cu_seq_lens_q` or `seq_idx` lead there, and without them no tensor is looked at. The results are bit for bit
those of each sequence alone. Lengths are read on the host, so `torch.compile` breaks the graph there; kernels
that are told run as before. A cache is refused.

Four models have another layer that mixes sequences (Qwen4-exp its per-layer embeddings, GLM5-next its indexer,
Zamba its scan, GraniteMoeHybrid its attention mask), so they go on refusing packed batches on the torch path.
Functions not in the table do, too. Tests that expect the error of the others have to be changed.""",
    families="Qwen3-Next, Qwen3.5, Qwen3.5-MoE, OLMo-Hybrid, Kimi-Linear, Bailing-Hybrid, LFM2, LFM2-MoE, Bamba, "
    "Falcon-H1, Nemotron-H, Zamba2",
    issues=("#44717", "#46093"),
    reproduction="""\
import torch
from transformers import DataCollatorWithFlattening, Qwen3_5ForCausalLM, Qwen3_5TextConfig

torch.manual_seed(0)
config = Qwen3_5TextConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=2,
    layer_types=["linear_attention", "full_attention"],
)
model = Qwen3_5ForCausalLM(config)
collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
first, second = torch.randint(64, (2, 5)).tolist()
batch = collator([{"input_ids": first}, {"input_ids": second}])
logits = model(**batch, use_cache=False).logits[0, 5:]
alone = model(torch.tensor([second]), use_cache=False).logits[0]
print("largest difference to the sequence alone:", f"{(logits - alone).abs().max().item():.0e}")
""",
    apply=apply,
    beside="tests/kernels/test_packed_sequences.py",
)
