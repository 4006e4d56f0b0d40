"""Modules that are imported at the first use of a name in them."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from jaxtune.system.later import Later

_SLOW = """
import time
early = 1
time.sleep(0.5)
late = 2
"""


def test_a_thread_waits_for_a_module_that_another_one_imports(tmp_path, monkeypatch):
    (tmp_path / "module_that_imports_slowly.py").write_text(_SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    module = Later("module_that_imports_slowly")

    def late() -> int:
        return module.late

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(late)
        while "module_that_imports_slowly" not in sys.modules:
            time.sleep(0.001)
        others = [pool.submit(late) for _ in range(3)]
        assert [future.result() for future in (first, *others)] == [2] * 4
    assert module.early == 1
    del sys.modules["module_that_imports_slowly"]
