"""Triton's interpreter, made to replace the language once for a launch and not again for each function called in it."""

import triton.language as tl
from triton.runtime import interpreter


_patch_language = interpreter._patch_lang


def _patch_language_once(function):
    """What the interpreter does for a launch, and without end for each call; only a launch undoes it."""
    seen = [module for module in (tl, tl.core) if any(x is module for x in function.__globals__.values())]
    if any(tl.core.is_builtin(module.load) for module in seen):
        return _patch_language(function)
    return interpreter._LangPatchScope()


interpreter._patch_lang = _patch_language_once
