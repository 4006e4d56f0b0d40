"""Compares this checkout with the records, or records it anew.

    python -m tests.golden.record [training] [planning] [kernels] [programs]    says what differs; 1 if anything does
    python -m tests.golden.record training --reason 'why it may differ'          writes it too, with the reason

`programs` needs the environment of `make aot`. Without a reason nothing is written; with one, what changed is printed,
and stands in the record beside the reason.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import tests.conftest  # settings of the environment, before jax
from tests.golden.flags import set_flags

if "programs" in sys.argv:
    import tests.gpu.aot.conftest  # likewise
else:
    set_flags()

sys.path.append(str(Path(tests.conftest.__file__).parent / "models"))
os.environ["JAX_PLATFORMS"] = "cpu"

from tests.golden import records

_KEPT_REASONS = 12
_SHOWN = 20


def _made(name: str) -> tuple[dict, dict[str, Callable[[], dict]]]:
    """(what is recorded beside the cases, {case: its record})"""
    if name == "training":
        from tests.golden import training as module

        beside: dict = {"calibration": module.calibration()}
    elif name == "planning":
        from tests.golden import planning as module

        beside = {}
    elif name == "kernels":
        from tests.golden import kernels as module

        beside = {}
    else:
        from tests.golden import programs as module

        beside = {}
    return beside, {case: (lambda case=case: module.record(case)) for case in module.CASES}


def _changes(name: str, got: dict, wanted: dict) -> list[str]:
    if name == "training":
        return records.training_changes(got, wanted)
    tolerance = records.PREDICTIONS if name == "planning" else records.BYTES
    return list(records.differences(got, wanted, tolerance))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="*", choices=["training", "planning", "kernels", "programs", []])
    parser.add_argument("--only", help="cases whose name holds this; the others stay as they are recorded")
    parser.add_argument("--reason", help="why what is recorded may change; without it nothing is written")
    options = parser.parse_args(arguments)
    differs = False
    for name in options.records or ["training", "planning", "kernels"]:
        beside, cases = _made(name)
        old = records.read(name) if records.exists(name) else {"reasons": [], "cases": {}}
        new, changed, run = {}, [], 0
        for case, make in cases.items():
            if options.only is not None and options.only not in case:
                if case in old["cases"]:
                    new[case] = old["cases"][case]
                continue
            new[case] = make()
            run += 1
            found = _changes(name, new[case], old["cases"][case]) if case in old["cases"] else ["not recorded before"]
            for line in found[:_SHOWN]:
                print(f"{name}: {case}: {line}", flush=True)
            if len(found) > _SHOWN:
                print(f"{name}: {case}: and {len(found) - _SHOWN} more", flush=True)
            if found:
                changed.append(case)
        changed += [f"{case} (no longer a case)" for case in old["cases"] if case not in new]
        for key, value in beside.items():
            if value != old.get(key):
                print(f"{name}: {key} differs: {list(records.differences(value, old.get(key, {})))}")
                changed.append(key)
        print(f"{name}: {run} cases, changed: {', '.join(changed) or 'nothing'}", flush=True)
        if changed and options.reason:
            reasons = [*old["reasons"], {"reason": options.reason, "changed": changed}][-_KEPT_REASONS:]
            records.write(name, {"reasons": reasons, **beside, "cases": new})
            print(f"{name}: recorded")
        elif changed:
            differs = True
            print(f"{name}: not recorded: say why with --reason")
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
