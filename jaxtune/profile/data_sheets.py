"""What vendors state of devices, and which devices are refused.

Sources: NVIDIA's data sheets of the data-centre and RTX professional cards, and its architecture papers (GA102, AD102,
GB202, GA100, GH100) for the GeForce cards, whose 16-bit products summed in fp32 run at twice their fp32 rate. Memory is
what nvidia-smi shows where error correction takes a part of it. A chip of one name with two sizes of memory has the
smaller one under its name.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class DataSheet:
    """Rates of a device without sparsity, and what is around it.

    bf16_tflops, fp8_tflops: products summed in fp32 (None: the chip has no FP8). copy_tbps, memory_gib: of its memory.
    link_gbps: each way to the host; 0 where device and host share one memory. fp32_tflops: without TF32. host_gb: of a
    machine's memory, for each such device, as such machines are usually sold or rented. nvlink_gbps: each way to the
    others of its host; None: they talk through the host.
    """

    bf16_tflops: float
    fp8_tflops: float | None
    copy_tbps: float
    memory_gib: float
    link_gbps: float
    fp32_tflops: float
    host_gb: float
    nvlink_gbps: float | None = None


def _data_sheets() -> dict[str, DataSheet]:
    """Those of data_sheets.csv: data centres', workstations', GeForce's. A link of 63 is PCIe 5, 31.5 PCIe 4."""
    text = Path(__file__).with_name("data_sheets.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return {row.pop("device"): DataSheet(**{k: json.loads(v or "null") for k, v in row.items()}) for row in rows}


DATA_SHEETS = _data_sheets()

# Compute capability 6.x and 7.x.
_TOO_OLD = (
    "T4",
    "V100",
    "T4G",
    "TITAN V",
    "TITAN RTX",
    "RTX 2060",
    "RTX 2070",
    "RTX 2080",
    "RTX 2080 Ti",
    "Quadro RTX 5000",
    "Quadro RTX 6000",
    "Quadro RTX 8000",
    "P100",
    "P40",
)


def data_sheet(device: str) -> DataSheet | None:
    """The data sheet of the device whose name (jax.Device.device_kind, or "RTX 4090") holds one that is known.

    A laptop's chip bears the name of another one, and a slice of a GPU has a part of its rates: both are unknown.
    """
    name = _name_in(device, DATA_SHEETS)
    return None if name is None or re.search(r"\b(Laptop|MIG)\b", device, re.IGNORECASE) else DATA_SHEETS[name]


def refusal(device: str) -> str | None:
    """Why no run on a device of this name is planned, where the name says it; None for all others."""
    if (name := _name_in(device, _TOO_OLD)) is not None:
        return (
            f"{name} is older than compute capability 8.0 (Ampere): it has no bfloat16 products, and none of the "
            "kernels runs there"
        )
    return None


def known_devices() -> tuple[str, ...]:
    """Names that `data_sheet` knows."""
    return tuple(DATA_SHEETS)


def _name_in(device: str, names) -> str | None:
    # "H200" is in "GH200" too: the longest name that the device bears is the right one.
    found = [n for n in names if re.search(rf"(?<![A-Z0-9]){re.escape(n)}(?![0-9])", device, re.IGNORECASE)]
    return max(found, key=len) if found else None
