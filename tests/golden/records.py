"""Records as files, and what lies between two of them, in words and as relative errors."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parent
SAMPLES = 2
# As shares: of predicted bytes and seconds; of a compiled program's bytes.
PREDICTIONS, BYTES = 1e-6, 0.005
# Of runs in float32 on a machine that computes otherwise than that of the record: norms, and single elements beside
# their tensor's root mean square. Between AVX2 unoptimised and AVX-512 optimised all was within 8.5e-6. Between the
# record and an AMD EPYC without AVX-512, whose approximate reciprocals and roots are others, gradients of step 1 were
# within 7.2e-6, and what 19 more steps make of that within 1.7e-5 (losses) and 3.8e-5 (weights).
OTHER_MACHINE = {"gradient": 1e-5, "loss": 1e-4, "weight": 1e-4}
# Of runs that round to fewer bits, on such a machine: a number at the middle between two may go either way.
OTHER_MACHINE_ROUNDED = dict.fromkeys(OTHER_MACHINE, 3e-2)
# A gradient that is zero but for rounding (a key's bias without rotation) has no digits to compare: norms below this
# share of the run's largest count as that much.
_SMALLEST = 1e-3


def described(array: np.ndarray) -> list:
    """[digest of the bytes, norm, a few elements, number of elements]; numbers have eight digits."""
    wide = np.asarray(array, np.float64)
    flat = wide.ravel()
    chosen = flat[np.linspace(0, flat.size - 1, SAMPLES).astype(int)]
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:12]
    return [digest, *(float(f"{x:.8g}") for x in (np.linalg.norm(flat), *chosen)), int(flat.size)]


def tensor_error(got: list, wanted: list, least: float = 0.0) -> float:
    """How far two descriptions lie apart: of norms as a share of the norm, of elements as one of their root mean
    square, where `least` is the smallest norm that counts. 0 where the bytes are the same; infinite where sizes differ
    or only one of two numbers is finite. Where both gradients overflow, as a loss scale's first ones do, numbers that
    are finite in both are compared with themselves."""
    if got[0] == wanted[0]:
        return 0.0
    pairs = list(zip(got[1:-1], wanted[1:-1], strict=True))
    if got[-1] != wanted[-1] or any(math.isfinite(a) != math.isfinite(b) for a, b in pairs):
        return math.inf
    if not math.isfinite(wanted[1]):
        return max((abs(a - b) / max(abs(b), least) for a, b in pairs if math.isfinite(b)), default=0.0)
    scale = max(wanted[1], least)
    if not scale:
        return math.inf
    norm, *elements = (abs(a - b) / scale for a, b in pairs)
    return max([norm, *(error * math.sqrt(wanted[-1]) for error in elements)])


def training_differences(got: dict, wanted: dict) -> Iterator[tuple[str, float]]:
    """(what differs, relative error) between two records of one run."""
    if len(got["losses"]) != len(wanted["losses"]):
        yield "the number of losses", math.inf
    else:
        for step, (a, b) in enumerate(zip(got["losses"], wanted["losses"], strict=True), 1):
            if a != b:
                yield f"loss {step}", abs(a - b) / abs(b) if b else math.inf
    now, then = got["tensors"], wanted["tensors"]
    for name in sorted(now.keys() ^ then.keys()):
        yield f"{name} is there only {'now' if name in now else 'in the record'}", math.inf
    for index, what in enumerate(("gradient", "weight")):
        least = _SMALLEST * max(both[index][1] for both in then.values())
        for name in sorted(now.keys() & then.keys()):
            if now[name][index][0] != then[name][index][0]:
                yield f"{what} of {name}", tensor_error(now[name][index], then[name][index], least)


def training_changes(got: dict, wanted: dict, tolerances: Mapping[str, float] | None = None) -> list[str]:
    """What differs between two records of one case ({plan: what its run gave}), in words: by more than `tolerances` has
    for a "loss", a "gradient" and a "weight", or with None at all."""
    changes = [
        f"plan {plan!r} is there only {'now' if plan in got else 'in the record'}"
        for plan in sorted(got.keys() ^ wanted.keys())
    ]
    for plan in (plan for plan in got if plan in wanted):
        found = training_differences(_of_plan(got, plan), _of_plan(wanted, plan))
        # Bytes can differ where the few numbers that are kept of them do not.
        changes += [
            f"{plan}: {what}: {error:.1e} of it"
            for what, error in found
            if tolerances is None or error > tolerances.get(what.split()[0], 0.0)
        ]
    return changes


def _of_plan(record: dict, plan: str) -> dict:
    entry = record[plan]
    return record[entry] if isinstance(entry, str) else entry


def differences(got: Any, wanted: Any, tolerance: float = 0.0, where: str = "") -> Iterator[str]:
    """What differs between two trees of dicts, in words. Numbers whose names end with bytes or seconds differ from
    `tolerance` on, as a share of the larger one; everything else where it is not equal."""
    if isinstance(got, dict) and isinstance(wanted, dict):
        for key in sorted(got.keys() | wanted.keys()):
            place = f"{where}: {key}" if where else key
            if key not in wanted:
                yield f"{place}: new: {got[key]}"
            elif key not in got:
                yield f"{place}: gone: {wanted[key]}"
            else:
                yield from differences(got[key], wanted[key], tolerance, place)
    elif where.endswith(("bytes", "seconds")):
        largest = max(abs(got), abs(wanted))
        if abs(got - wanted) > tolerance * largest:
            yield f"{where}: {got} for {wanted} ({(got - wanted) / largest:+.2e} of it)"
    elif got != wanted:
        yield f"{where}: {got} for {wanted}"


def exists(name: str) -> bool:
    return (FOLDER / f"{name}.json").exists()


def read(name: str) -> dict:
    """tests/golden/NAME.json"""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def write(name: str, record: dict) -> None:
    """A case a line or so: small, and still readable in a diff."""

    def text(value: Any, depth: int) -> str:
        if depth and isinstance(value, dict) and value:
            inner = ",\n".join(f"{json.dumps(key)}: {text(item, depth - 1)}" for key, item in value.items())
            return f"{{\n{inner}\n}}"
        return json.dumps(value, separators=(",", ":"))

    (FOLDER / f"{name}.json").write_text(text(record, 3) + "\n", encoding="utf-8")
