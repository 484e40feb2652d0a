"""Compile a kernel of Triton for a GPU that is not here, and print whether its code came from the cache on disk."""

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def double(x_ptr):
    at = x_ptr + tl.arange(0, 128)
    tl.store(at, 2 * tl.load(at))


if __name__ == "__main__":
    knobs.compilation.listener = lambda **event: print("loaded" if event["cache_hit"] else "compiled")
    triton.compile(ASTSource(double, {"x_ptr": "*fp32"}), target=GPUTarget("cuda", 90, 32))
