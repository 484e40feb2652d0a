"""Mend Triton's interpreter: patch the language once per launch, and treat bfloat16 and float8 as a GPU does."""

from dataclasses import replace

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


# The rest is for speed: each operation makes new types, which takes most of the interpreter's time.
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
_get_np_dtype, _make_type, _make_tuple = interpreter._get_np_dtype, tl.block_type.__init__, tl.tuple.__init__
_get_attribute = tl.tuple.__getattr__
_np_dtypes, _types = {}, {}


def _get_np_dtype_once(dtype):
    if dtype.name not in _np_dtypes:
        _np_dtypes[dtype.name] = _get_np_dtype(dtype)
    return _np_dtypes[dtype.name]


def _make_type_once(self, element_ty, shape):
    """Share the attributes of equal types. None of them changes."""
    key = element_ty.name, *(getattr(n, "value", n) for n in getattr(shape, "values", shape))
    if key not in _types:
        _make_type(self, element_ty, shape)
        _types[key] = vars(self) | {"constants": tl.tuple([tl.constexpr(n) for n in self.shape])}
    self.__dict__ = _types[key]


def _make_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel = tl.constexpr(type.numel if type.is_block() else 1)
    self.shape = type.constants if type.is_block() else tl.tuple([])


def _make_tuple_without_type(self, args, type=None):
    if type is None:
        self.values = list(args)
    else:
        _make_tuple(self, args, type)


def _get_type_of_tuple(self, name):
    if name != "type":
        return _get_attribute(self, name)
    self.type = tl.core._type_for_tuple_values(self.values)
    return self.type


interpreter._get_np_dtype = _get_np_dtype_once
tl.block_type.__init__ = _make_type_once
tl.tensor.__init__ = _make_tensor
tl.tuple.__init__, tl.tuple.__getattr__ = _make_tuple_without_type, _get_type_of_tuple
