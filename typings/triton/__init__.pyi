# Triton is installed beside a GPU only. Its annotations do not know its own tensors.
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

def jit(function: Callable) -> Callable: ...

class _Runtime:
    interpret: bool

class _Cache:
    dir: str

    def get_triton_dir(self, dirname: str) -> str: ...
    def scope(self) -> AbstractContextManager[None]: ...

class _Knobs:
    runtime: _Runtime
    cache: _Cache

knobs: _Knobs

def compile(source: object, target: object, options: dict[str, object]) -> Any: ...
