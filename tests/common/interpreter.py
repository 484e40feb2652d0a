"""Mend Triton's interpreter: patch the language once per launch, and treat bfloat16 and float8 as a GPU does."""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


_patch_language = interpreter._patch_lang


def _patch_language_once(function):
    """Patch the language unless it is patched. The interpreter patches it in every call and undoes only the launch."""
    seen = [module for module in (tl, tl.core) if any(x is module for x in function.__globals__.values())]
    if any(tl.core.is_builtin(module.load) for module in seen):
        return _patch_language(function)
    return interpreter._LangPatchScope()


interpreter._patch_lang = _patch_language_once


_create_dot = interpreter.InterpreterBuilder.create_dot


def _create_dot_of_values(self, a, b, *args):
    """Multiply bfloat16 factors by their values. The interpreter multiplies their bits, read as integers."""
    a, b = (
        interpreter.TensorHandle(
            interpreter._convert_float(x.data, tl.bfloat16, tl.float32, None).view("float32"), tl.float32
        )
        if x.dtype.scalar == tl.bfloat16
        else x
        for x in (a, b)
    )
    return _create_dot(self, a, b, *args)


interpreter.InterpreterBuilder.create_dot = _create_dot_of_values


_convert_float = interpreter._convert_float


def _convert_float_as_a_gpu(values, input_dtype, output_dtype, rounding_mode):
    """Round to the nearest float8 with ties to even, and saturate. The interpreter rounds ties up, and small ones to 0."""
    if (input_dtype, output_dtype) != (tl.float32, tl.float8e4nv):
        return _convert_float(values, input_dtype, output_dtype, rounding_mode)
    rounded = torch.from_numpy(np.array(values, np.float32)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return rounded.view(torch.uint8).numpy()


interpreter._convert_float = _convert_float_as_a_gpu
