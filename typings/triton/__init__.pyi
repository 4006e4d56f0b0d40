# Triton is installed beside a GPU only. Its annotations do not know its own tensors.
from collections.abc import Callable
from typing import Any

def jit(function: Callable) -> Callable: ...

class _Runtime:
    interpret: bool

class _Knobs:
    runtime: _Runtime

knobs: _Knobs

def compile(source: object, target: object, options: dict[str, object]) -> Any: ...
