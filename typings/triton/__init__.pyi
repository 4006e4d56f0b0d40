# Triton is installed beside a GPU only. Its annotations do not know its own tensors.
from collections.abc import Callable

def jit(function: Callable) -> Callable: ...
