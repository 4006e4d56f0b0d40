"""What vendors state of devices, and which devices are refused.

Sources: NVIDIA's data sheets of the data-centre and RTX professional cards, and its architecture papers (GA102, AD102,
GB202, GA100, GH100) for the GeForce cards, whose 16-bit products summed in fp32 run at twice their fp32 rate. Memory is
what nvidia-smi shows where error correction takes a part of it. A chip of one name with two sizes of memory has the
smaller one under its name.
"""

from __future__ import annotations

import dataclasses
import re


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


_PCIE5, _PCIE4, _PCIE4_X8 = 63.0, 31.5, 15.75

DATA_SHEETS: dict[str, DataSheet] = {
    # Data centres
    "B200": DataSheet(2250, 4500, 8.0, 179, _PCIE5, 75, 256, 900),
    "GB200": DataSheet(2500, 5000, 8.0, 185, 450, 80, 240, 900),
    "GB10": DataSheet(125, 250, 0.273, 119, 0, 31, 128),
    "H200": DataSheet(989, 1979, 4.8, 140, _PCIE5, 67, 256, 450),
    "H200 NVL": DataSheet(835, 1671, 4.8, 140, _PCIE5, 60, 256, 450),
    "GH200": DataSheet(989, 1979, 4.9, 96, 450, 67, 480, 450),
    "H100 PCIe": DataSheet(756, 1513, 2.0, 80, _PCIE5, 51, 128),
    "H100 NVL": DataSheet(835, 1671, 3.9, 94, _PCIE5, 60, 256, 300),
    "H100": DataSheet(989, 1979, 3.35, 80, _PCIE5, 67, 256, 450),
    "A100": DataSheet(312, None, 2.0, 80, _PCIE4, 19.5, 128, 300),
    "A100-SXM4-40GB": DataSheet(312, None, 1.56, 40, _PCIE4, 19.5, 128, 300),
    "A100-PCIE-40GB": DataSheet(312, None, 1.56, 40, _PCIE4, 19.5, 128),
    "A30": DataSheet(165, None, 0.933, 24, _PCIE4, 10.3, 64),
    "A40": DataSheet(149.7, None, 0.696, 45, _PCIE4, 37.4, 64),
    "A10": DataSheet(125, None, 0.6, 22.5, _PCIE4, 31.2, 64),
    "A10G": DataSheet(70, None, 0.6, 22.5, _PCIE4, 35, 32),
    "L40S": DataSheet(362, 733, 0.864, 45, _PCIE4, 91.6, 64),
    "L40": DataSheet(181, 362, 0.864, 45, _PCIE4, 90.5, 64),
    "L4": DataSheet(121, 242, 0.3, 22.5, _PCIE4, 30.3, 32),
    # Workstations
    "RTX PRO 6000 Blackwell": DataSheet(500, 1000, 1.79, 95.6, _PCIE5, 125, 128),
    "RTX 6000 Ada": DataSheet(364.2, 728.5, 0.96, 48, _PCIE4, 91.1, 128),
    "RTX 5000 Ada": DataSheet(261.1, 522.2, 0.576, 32, _PCIE4, 65.3, 64),
    "RTX 4500 Ada": DataSheet(158.5, 317, 0.432, 24, _PCIE4, 39.6, 64),
    "RTX 4000 Ada": DataSheet(106.9, 213.8, 0.36, 20, _PCIE4, 26.7, 64),
    "RTX A6000": DataSheet(154.8, None, 0.768, 48, _PCIE4, 38.7, 128),
    "RTX A5500": DataSheet(136.4, None, 0.768, 24, _PCIE4, 34.1, 64),
    "RTX A5000": DataSheet(111.1, None, 0.768, 24, _PCIE4, 27.8, 64),
    "RTX A4500": DataSheet(94.6, None, 0.64, 20, _PCIE4, 23.7, 64),
    "RTX A4000": DataSheet(76.7, None, 0.448, 16, _PCIE4, 19.2, 64),
    # GeForce: Blackwell, Ada, Ampere
    "RTX 5090": DataSheet(209.5, 419, 1.79, 32, _PCIE5, 104.8, 64),
    "RTX 5080": DataSheet(112.6, 225.1, 0.96, 16, _PCIE5, 56.3, 64),
    "RTX 5070 Ti": DataSheet(87.9, 175.8, 0.896, 16, _PCIE5, 43.9, 32),
    "RTX 5070": DataSheet(61.7, 123.5, 0.672, 12, _PCIE5, 30.9, 32),
    "RTX 5060 Ti": DataSheet(47.4, 94.8, 0.448, 8, _PCIE4, 23.7, 32),
    "RTX 5060 Ti 16GB": DataSheet(47.4, 94.8, 0.448, 16, _PCIE4, 23.7, 32),
    "RTX 5060": DataSheet(38.4, 76.8, 0.448, 8, _PCIE4, 19.2, 32),
    "RTX 4090": DataSheet(165.2, 330.3, 1.01, 24, _PCIE4, 82.6, 64),
    "RTX 4080 SUPER": DataSheet(104.4, 208.9, 0.736, 16, _PCIE4, 52.2, 32),
    "RTX 4080": DataSheet(97.5, 194.9, 0.717, 16, _PCIE4, 48.7, 32),
    "RTX 4070 Ti SUPER": DataSheet(88.2, 176.4, 0.672, 16, _PCIE4, 44.1, 32),
    "RTX 4070 Ti": DataSheet(80.2, 160.4, 0.504, 12, _PCIE4, 40.1, 32),
    "RTX 4070 SUPER": DataSheet(71.0, 141.9, 0.504, 12, _PCIE4, 35.5, 32),
    "RTX 4070": DataSheet(58.3, 116.6, 0.504, 12, _PCIE4, 29.1, 32),
    "RTX 4060 Ti": DataSheet(44.1, 88.3, 0.288, 8, _PCIE4_X8, 22.1, 32),
    "RTX 4060 Ti 16GB": DataSheet(44.1, 88.3, 0.288, 16, _PCIE4_X8, 22.1, 32),
    "RTX 4060": DataSheet(30.2, 60.5, 0.272, 8, _PCIE4_X8, 15.1, 32),
    "RTX 3090 Ti": DataSheet(80, None, 1.01, 24, _PCIE4, 40, 64),
    "RTX 3090": DataSheet(71, None, 0.936, 24, _PCIE4, 35.6, 64),
    "RTX 3080 Ti": DataSheet(68.2, None, 0.912, 12, _PCIE4, 34.1, 32),
    "RTX 3080": DataSheet(59.5, None, 0.76, 10, _PCIE4, 29.8, 32),
    "RTX 3080 12GB": DataSheet(61.3, None, 0.912, 12, _PCIE4, 30.6, 32),
    "RTX 3070 Ti": DataSheet(43.5, None, 0.608, 8, _PCIE4, 21.7, 32),
    "RTX 3070": DataSheet(40.6, None, 0.448, 8, _PCIE4, 20.3, 32),
    "RTX 3060 Ti": DataSheet(32.4, None, 0.448, 8, _PCIE4, 16.2, 32),
    "RTX 3060": DataSheet(25.5, None, 0.36, 12, _PCIE4, 12.7, 32),
}

# Compute capability 6.x and 7.x.
_TOO_OLD = ("T4", "V100", "T4G", "TITAN V", "TITAN RTX", "RTX 2060", "RTX 2070", "RTX 2080", "RTX 2080 Ti",
            "Quadro RTX 5000", "Quadro RTX 6000", "Quadro RTX 8000", "P100", "P40")  # fmt: skip


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
