"""Compile the products of experts for GPUs that are not here. Prints the largest shared memory of a program, in bytes.

python expert_kernels.py RANK [RANK ...]
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from transformers_packed.ops.backends.triton import grouped_products as kernels


# Compute capabilities, and sizes of 35B-A3B.
TARGETS, HIDDEN, WIDTH = (90, 100), 2048, 512
DIVISIBLE = [["tt.divisibility", 16]]


def descriptor(*block, dtype="bf16"):
    return f"tensordesc<{dtype}[{','.join(map(str, block))}]>"


def shared_memory(kernel, target, signature, constants, **options):
    """Compile a kernel with arguments by name; those that are `None` are constants too."""
    constants |= {name: None for name, kind in signature.items() if kind is None}
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    aligned = {(at,): DIVISIBLE for at, kind in enumerate(signature.values()) if kind.startswith("*")}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places, aligned)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options).metadata.shared


def product(target, rank, n, k, *, transposed, of_tokens):
    rows, step, columns = kernels._ROWS, kernels._STEP, 256
    stages, parts, joined = kernels._schedule(rank, target // 10)
    second = descriptor(columns, rank) if transposed else descriptor(rank, columns)
    integers = dict.fromkeys(("order_ptr", "table_ptr", "tiles_ptr"), "*i32") | dict.fromkeys(("FIRST", "LAST"), "i32")
    signature = integers | {
        "a": "*bf16" if of_tokens else descriptor(rows, step),
        "b_desc": descriptor(columns, step) if transposed else descriptor(step, columns),
        "low_ptr": "*bf16" if rank else None,
        "up_desc": second if rank else None,
        "y_ptr": "*bf16",
    }
    constants = {"N": n, "K": k, "RANK": rank, "TOP": 8 * of_tokens, "TRANSPOSED": transposed, "ROWS": rows}
    constants |= {"COLUMNS": columns, "STEP": step, "PROGRAMS": 132, "PARTS": parts, "JOINED": joined}
    kernel = kernels._rows_times_experts
    return shared_memory(kernel, target, signature, constants, num_warps=8, num_stages=stages)


def of_both_directions(product, ranks):
    """What a product takes in the forward and in the backward, for each rank and GPU."""
    found = []
    for rank in map(int, ranks):
        for target in TARGETS:
            found.append(product(target, rank, HIDDEN, WIDTH, transposed=True, of_tokens=False))
            found.append(product(target, rank, WIDTH, HIDDEN, transposed=False, of_tokens=True))
    return found


if __name__ == "__main__":
    print(max(of_both_directions(product, sys.argv[1:])))
