"""Profiles of a training step: capture one, read where its time goes, compare two.

    with jaxtune.profile.capture("profiles/a", meta={"tokens_per_step": 16384}):
        for _ in range(3):
            state = step(state)

    print(jaxtune.profile.show("profiles/a"))
    print(jaxtune.profile.compare("profiles/a", "profiles/b"))

`capture` records what runs in its `with` block; a training run uses it if `profile.steps` asks for a profile. `show`
returns a Report and `compare` a Comparison, which `jaxtune profile` prints; both raise TraceError for a profile that
cannot be read. `ceilings` measures the highest rates of this machine's device, once, and returns them as Ceilings;
`jaxtune doctor` and `jaxtune profile ceilings` call it. A report compares kernels with the rates measured on its
device, or else with those of the data sheet. The package works on any JAX program and reads PyTorch's Chrome traces
too. Of jaxtune it imports only `jaxtune.system`. README.md in this folder says how each number is made.
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
    """Returns what the package's public name `name` stands for, such as the function `capture`, by importing the module
    that defines it, and keeps it as an attribute of the package. Python calls this for a name that the package has no
    attribute for yet, so that `import jaxtune.profile` loads none of its modules. Raises AttributeError if `name` is
    not public."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_WHERE[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Returns the package's public names alone, sorted, for dir(jaxtune.profile): also those that have not been used
    yet, which Python would not list, because __getattr__ loads them at their first use."""
    return sorted(__all__)
