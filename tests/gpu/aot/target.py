"""Compiling for an NVIDIA GPU that is not there: XLA's ahead-of-time compiler with a description of the device.

Needs the wheels of `make aot` (the CUDA plugin of jax, without a driver or cuDNN). What it proves: programs lower, pass
ptxas and fit; which libraries they call; what memory they take. It says nothing of speed.
"""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from jaxtune.pallas.targets import compile_for


class _PinnedHost(SingleDeviceSharding):
    """A device that is not there knows no memories, so JAX drops the kind that a sharding is made with."""

    memory_kind = property(lambda self: "pinned_host")


@dataclasses.dataclass(frozen=True)
class Target:
    """A device as XLA describes it; sizes in bytes, from the device's data sheet and cudaDeviceProp."""

    kind: str
    capability: tuple[int, int]
    cores: int
    shared_memory_per_block_bytes: int
    shared_memory_per_core_bytes: int
    l2_cache_bytes: int
    memory_bytes: int
    memory_bandwidth_bytes_per_second: int

    @property
    def description(self) -> str:
        """The text form of XLA's GpuTargetConfigProto."""
        major, minor = self.capability
        accelerated = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""  # sm_90a: wgmma
        return f"""
            gpu_device_info {{
              runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
              shared_memory_per_block: 49152 shared_memory_per_block_optin: {self.shared_memory_per_block_bytes}
              shared_memory_per_core: {self.shared_memory_per_core_bytes}
              core_count: {self.cores} fpus_per_core: 128 clock_rate_ghz: 1.98
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              memory_bandwidth: {self.memory_bandwidth_bytes_per_second} l2_cache_size: {self.l2_cache_bytes}
              device_memory_size: {self.memory_bytes}
              cuda_compute_capability {{ major: {major} minor: {minor} {accelerated} }}
            }}
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 19 }} device_description_str: "{self.kind}" """

    def sharding(self) -> SingleDeviceSharding:
        """Where arguments of a program for this device are."""
        topology = topologies.get_topology_desc("", "cuda", target_config=self.description, topology="1x1x1")
        return SingleDeviceSharding(topology.devices[0])

    def mesh(self, data: int, fsdp: int = 1) -> jax.sharding.Mesh:
        """So many devices of one host, over the axes of a run's mesh."""
        shape = f"1x1x{data * fsdp}"
        topology = topologies.get_topology_desc("", "cuda", target_config=self.description, topology=shape)
        devices = np.array(topology.devices).reshape(data, fsdp)
        return jax.sharding.Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)

    @staticmethod
    def on_host(sharding: SingleDeviceSharding) -> SingleDeviceSharding:
        """Where arguments that lie in pinned host memory are, beside those of `sharding`."""
        return _PinnedHost(next(iter(sharding.device_set)))

    @contextlib.contextmanager
    def lowering(self):
        """Traces and lowers for this device: our dispatch, Pallas and JAX's cuDNN checks ask which GPU there is."""
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        device = AbstractDevice(device_kind=self.kind, num_cores=self.cores, platform="gpu")
        with pytest.MonkeyPatch.context() as patch, compile_for(self.capability):
            patch.setattr(cudnn, "check_cudnn_version", lambda: 91900)
            patch.setattr(cudnn, "check_compute_capability", lambda wanted: True)
            patch.setattr(
                cudnn, "is_cuda_compute_capability_equal", lambda wanted: wanted == ".".join(map(str, self.capability))
            )
            with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
                yield


H200 = Target("NVIDIA H200", (9, 0), 132, 232_448, 233_472, 52_428_800, 150_000_000_000, 4_800_000_000_000)
