"""Find the damaged file of compiled Python code that made an import fail.

On a full disk, or beyond a limit of file sizes, Python keeps the beginning of a ``.pyc`` file as if it were
whole. Each later import of that module fails with "marshal data too short", without the name of the file.
"""

from __future__ import annotations


def describe_damaged_bytecode(error: BaseException | None) -> str:
    """Return which ``.pyc`` file led to ``error`` and what to do; empty if none did."""
    while error is not None:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None and trace.tb_frame.f_code.co_name == "_compile_bytecode":  # of importlib
            path = trace.tb_frame.f_locals.get("bytecode_path")
            return (
                f"the compiled Python file {path} is damaged, as a full disk leaves it. "
                "Free space on its disk and remove the file; Python compiles it again."
            )
        error = error.__cause__ or error.__context__
    return ""
