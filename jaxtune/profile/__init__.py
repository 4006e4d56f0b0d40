"""Profiles of a training step: capture one, read where its time goes, compare two.

    with jaxtune.profile.capture("profiles/a", meta={"tokens_per_step": 16384}):
        for _ in range(3):
            state = step(state)

    print(jaxtune.profile.show("profiles/a"))
    print(jaxtune.profile.compare("profiles/a", "profiles/b"))

Works on any JAX program, and reads PyTorch's Chrome traces too. `ceilings` measures the device's highest rates once;
reports compare kernels with them, or else with the data sheet. notes/profile.md says how each number is made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtune.profile.comparison import Comparison, compare
    from jaxtune.profile.device import Ceilings, ceilings
    from jaxtune.profile.record import capture
    from jaxtune.profile.report import Report, show
    from jaxtune.profile.trace import TraceError

_WHERE = {
    "capture": "record",
    "ceilings": "device",
    "Ceilings": "device",
    "compare": "comparison",
    "Comparison": "comparison",
    "show": "report",
    "Report": "report",
    "TraceError": "trace",
}
__all__ = ["capture", "show", "compare", "ceilings", "Report", "Comparison", "Ceilings", "TraceError"]


def __getattr__(name: str) -> Any:
    """Imports the module of a public name at its first use, so that `import jaxtune.profile` loads none."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_WHERE[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, which Python would not list before their first use."""
    return sorted(__all__)
