"""Make Triton's interpreter patch the language once per launch, not again for each function that a kernel calls."""

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
