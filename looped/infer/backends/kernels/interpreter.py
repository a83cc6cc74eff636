"""Kernels on a CPU: Triton's interpreter, chosen by TRITON_INTERPRET=1 before Triton is imported. Slow; for tests."""

# mypy: disable-error-code="attr-defined"

from typing import Any

import triton


def interpreting() -> bool:
    """Whether kernels defined from now on are interpreted."""
    return bool(triton.knobs.runtime.interpret)


def repair() -> None:
    """Let the interpreter of Triton <= 3.6 loop up to a loaded number: numpy >= 2.4 refuses int() of its arrays.

    It also makes Triton's modules ready anew whenever a kernel calls a function, which takes longer than the call: the
    kernel's module is ready by then, that of Triton's own functions stays so after the first time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    if hasattr(interpreter, "_looped_patch"):
        return
    interpreter._looped_patch = original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not core_ready and any(value is tl.core for value in self.fn.__globals__.values()):
            interpreter._patch_lang(self.fn)
            core_ready.append(True)
        return self.rewrite()(*args, **kwargs)

    core_ready: list[bool] = []
    interpreter._patch_lang_tensor = patch
    interpreter.InterpretedFunction.__call__ = call
