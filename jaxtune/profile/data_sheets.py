"""Vendors' figures of devices.

Sources are NVIDIA's data sheets of the data-centre and RTX professional cards, and its architecture papers (GA102,
AD102, GB202, GA100, GH100) for GeForce cards, whose 16-bit products with fp32 sums run at twice their fp32 rate. Memory
is what nvidia-smi shows where error correction takes a part. A name that stands for two sizes of memory is the smaller.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class DataSheet:
    """The figures that a vendor states for a device, without sparsity, and the usual host memory of its machines."""

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
    """{device: data sheet} of data_sheets.csv. Host link: PCIe 5 with 16 lanes is 63 GB/s, NVLink-C2C 450."""
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
    """The sheet whose name, the longest, occurs in `device` (jax.Device.device_kind or "RTX 4090") as whole words.

    None for a laptop's chip, which has the name of a larger one, and for a slice of a GPU (MIG).
    """
    name = _name_in(device, DATA_SHEETS)
    return None if name is None or re.search(r"\b(Laptop|MIG)\b", device, re.IGNORECASE) else DATA_SHEETS[name]


def refusal(device: str) -> str | None:
    """Why jaxtune does not run on a card of compute capability below 8.0, such as V100, by its name; else None."""
    if (match := _TOO_OLD.search(device)) is not None:
        return (
            f"{match[0]} is older than compute capability 8.0 (Ampere): it has no bfloat16 products, and none of the "
            "kernels runs there"
        )
    return None


def known_devices() -> tuple[str, ...]:
    """The names of all data sheets."""
    return tuple(DATA_SHEETS)


def _name_in(device: str, names) -> str | None:
    """The longest of `names` in `device` as whole words, so that "GH200" is not "H200"."""
    contained = [n for n in names if re.search(rf"(?<![A-Z0-9]){re.escape(n)}(?![A-Z0-9])", device, re.IGNORECASE)]
    return max(contained, key=len) if contained else None
