from collections.abc import Mapping
from typing import Any

class ASTSource:
    def __init__(
        self, kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], attrs: Mapping[Any, Any]
    ): ...
