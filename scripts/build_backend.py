"""hatchling, which tells an older Python that it is one.

pip looks for the dependencies of an extra before it compares `requires-python`: it finds no flax that is made for an
older Python, and says that instead. A build backend runs in the Python that pip installs for, and before.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 12):  # noqa: UP036
    sys.exit(
        f"jaxtune needs Python 3.12 or newer, and this is {sys.version.split()[0]}: make an environment with "
        "python3.12 -m venv .env"
    )

from hatchling.build import *  # noqa: F403
