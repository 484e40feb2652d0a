"""Compile the products of experts in float8 for GPUs that are not here. Prints the largest shared memory of a program, in bytes.

python float8_kernels.py RANK [RANK ...]
"""

import sys

from expert_kernels import HIDDEN, TARGETS, descriptor, of_both_directions, shared_memory

from transformers_packed.ops.backends.triton import float8_blocks as kernels


FLOAT8, BLOCK = "fp8e4nv", kernels.BLOCK


def product(target, rank, n, k, *, transposed, of_tokens, one_weight=False):
    integers = dict.fromkeys(("order_ptr", "table_ptr", "tiles_ptr"), None if one_weight else "*i32")
    signature = integers | dict.fromkeys(("COUNT", "FIRST", "LAST"), "i32")
    signature |= {
        "a": f"*{FLOAT8}" if of_tokens else descriptor(kernels._ROWS, BLOCK, dtype=FLOAT8),
        "a_scale_ptr": "*fp32",
        "w_desc": descriptor(BLOCK, BLOCK, dtype=FLOAT8),
        "w_scale_ptr": "*fp32",
        "low_ptr": "*bf16" if rank else None,
        "up_desc": (descriptor(BLOCK, rank) if transposed else descriptor(rank, BLOCK)) if rank else None,
        "y_ptr": "*bf16",
    }
    constants = {"N": n, "K": k, "RANK": rank, "TOP": 8 * of_tokens, "TRANSPOSED": transposed}
    constants |= {"ROWS": kernels._ROWS, "WIDE": True, "BLOCK": BLOCK, "PROGRAMS": 132}
    constants |= {"JOINED": rank > 0 and target < 100, "GROUP": kernels._GROUP}
    options = {"num_warps": 8, "num_stages": kernels._STAGES}
    return shared_memory(kernels._rows_times_weights, target, signature, constants, **options)


if __name__ == "__main__":
    found = of_both_directions(product, sys.argv[1:])
    found.append(product(TARGETS[0], 0, HIDDEN, HIDDEN, transposed=True, of_tokens=False, one_weight=True))
    print(max(found))
