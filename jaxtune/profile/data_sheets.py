"""Vendors' figures of devices: `data_sheet` finds the DataSheet of a device by its name in the table DATA_SHEETS,
`known_devices` lists the names, and `refusal` says which devices jaxtune refuses. The planner uses all three.
`known_ceilings` and a run's metric mfu use data sheets only, and `jaxtune doctor` data sheets and `refusal`.

Sources are NVIDIA's data sheets of the data-centre and RTX professional cards, and its architecture papers (GA102,
AD102, GB202, GA100, GH100) for the GeForce cards, whose 16-bit products with fp32 sums run at twice their fp32 rate.
Memory is what nvidia-smi shows where error correction takes a part of it. Where a chip is sold under one name with two
sizes of memory, the name stands for the smaller one.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class DataSheet:
    """The figures that a vendor states for a device: its rates, without sparsity, the size of its memory and its links;
    and the host memory that machines with it usually have. The planner takes from it NVLink and how much slower fp32
    is than bfloat16 in any case, the rates of bfloat16 products, memory and host link unless they were measured, and
    the sizes of memory for a device of another machine. `known_ceilings` gives its rates to reports if none were
    measured, `jaxtune doctor` compares measured rates with it, a run's metric mfu is its FLOP/s over the sheet's."""

    bf16_tflops: float  # TFLOP/s of products in bfloat16 with fp32 sums
    fp8_tflops: float | None  # TFLOP/s of products in FP8 with fp32 sums; None: the chip has no FP8
    copy_tbps: float  # TB/s of the device's memory, reads plus writes
    memory_gib: float  # size of the device's memory
    link_gbps: float  # GB/s of the host link, each way; 0 where device and host share one memory
    fp32_tflops: float  # TFLOP/s of products in fp32, without TF32
    host_gb: float  # GB of host memory for each such device, in machines as they are usually sold or rented
    # GB/s of NVLink each way to the other devices of the host; None: they communicate through the host
    nvlink_gbps: float | None = None


def _data_sheets() -> dict[str, DataSheet]:
    """Reads data_sheets.csv, whose columns are the fields of DataSheet, and returns {name of a device: its data sheet},
    for data-centre, workstation and GeForce cards. A host link of 63 GB/s is PCIe 5 with 16 lanes; PCIe 4 and 8 lanes
    each halve it; one of 450 GB/s is NVLink-C2C. It is called once, for DATA_SHEETS, when this module is imported."""
    text = Path(__file__).with_name("data_sheets.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return {row.pop("device"): DataSheet(**{k: json.loads(v or "null") for k, v in row.items()}) for row in rows}


DATA_SHEETS = _data_sheets()

# Names of devices of compute capability below 8.0, which are refused. Every GTX and TITAN is one, and no RTX 2050 is.
_TOO_OLD = re.compile(
    r"""(?<![A-Z0-9])(?:
        GTX\ \d+M?(?:\ ?(?:Ti|SUPER))? | TITAN(?:\ (?:Xp|X|V|RTX))? | RTX\ 20[678]0(?:\ (?:Ti|SUPER))?
        | Quadro\ (?:RTX\ [34568]000|[A-Z]{1,2}\d+) | [KM][1-8]0 | P4 | P6 | P40 | P100 | V100S? | T4G? | T[1-6]\d?00
    )(?![A-Z0-9])""",
    re.IGNORECASE | re.VERBOSE,
)


def data_sheet(device: str) -> DataSheet | None:
    """Looks up the data sheet of a device. device: its name, jax.Device.device_kind or a card's name such as "RTX
    4090", in any case of letters; of the sheets whose name occurs in it as whole words, that with the longest is taken.
    Returns None if there is no sheet for it. The planner, `known_ceilings`, `jaxtune doctor` and a run's metric mfu
    look figures up by it.

    A laptop's chip has the name of a larger one, and a slice of a GPU (MIG) has only a part of its rates, so both give
    None.
    """
    name = _name_in(device, DATA_SHEETS)
    return None if name is None or re.search(r"\b(Laptop|MIG)\b", device, re.IGNORECASE) else DATA_SHEETS[name]


def refusal(device: str) -> str | None:
    """The reason, a sentence for users, why jaxtune does not run on a device of this name, if the name contains that of
    an NVIDIA card before Ampere, such as V100, T4, GTX 1080 or RTX 2080, whose compute capability is below 8.0
    (_TOO_OLD). None for every other name. `jaxtune doctor` shows it as a finding. The planner, which also plans each
    training run, raises it as an error."""
    if (found := _TOO_OLD.search(device)) is not None:
        return (
            f"{found[0]} is older than compute capability 8.0 (Ampere): it has no bfloat16 products, and none of the "
            "kernels runs there"
        )
    return None


def known_devices() -> tuple[str, ...]:
    """The names of all cards that have a data sheet, such as "H100", in the table's order. The planner's error message
    lists them if the name in plan.device is unknown."""
    return tuple(DATA_SHEETS)


def _name_in(device: str, names) -> str | None:
    """The longest of `names`, an iterable of cards' names, that occurs in `device`, a device's name, in any case of
    letters; None if none occurs. No letter or digit may precede or follow it, so that "GH200" is not taken for "H200",
    nor "RTX 4090D" for "RTX 4090". Only `data_sheet` uses it; `refusal` has a pattern of its own."""
    found = [n for n in names if re.search(rf"(?<![A-Z0-9]){re.escape(n)}(?![A-Z0-9])", device, re.IGNORECASE)]
    return max(found, key=len) if found else None
