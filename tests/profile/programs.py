"""Programs and traces that the profile tests make themselves."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxtune

ROWS, WIDTH, HIDDEN, STEPS = 256, 128, 512, 3


@jax.jit
def train_step(weights, x, y):
    def loss_fn(weights):
        for up, down in weights:
            with jax.named_scope("layer"):
                with jax.named_scope("up"):
                    hidden = jnp.tanh(x @ up)
                with jax.named_scope("down"):
                    x_new = hidden @ down
        with jax.named_scope("loss"):
            return jnp.mean((x_new - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    with jax.named_scope("optimizer"):
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)
    return weights, loss


def capture_on_cpu(folder: Path, **options: Any) -> None:
    """Three steps of a small network, each waited for."""
    keys = jax.random.split(jax.random.key(0), 4)
    weights = [(jax.random.normal(keys[0], (WIDTH, HIDDEN)), jax.random.normal(keys[1], (HIDDEN, WIDTH)))]
    x, y = jax.random.normal(keys[2], (2, ROWS, WIDTH))
    jax.block_until_ready(train_step(weights, x, y))
    with jaxtune.profile.capture(folder, **options):
        for number in range(STEPS):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                weights, loss = train_step(weights, x, y)
                jax.block_until_ready(loss)


# ---- a Chrome trace as PyTorch's profiler writes it


class TorchTrace:
    """Builds one: ranges on the CPU's threads, kernels that they launch. Times in us."""

    MAIN, AUTOGRAD = 1, 2

    def __init__(self):
        self.rows: list[dict] = []
        self._correlation = 0

    def call(
        self, name: str, start: float, length: float, category: str = "cpu_op", thread: int = MAIN, **args
    ) -> None:
        row = {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": 7,
            "tid": thread,
            "ts": start,
            "dur": length,
            "args": args,
        }
        self.rows.append(row)

    def kernel(
        self,
        name: str,
        launched: float,
        start: float,
        length: float,
        thread: int = MAIN,
        category: str = "kernel",
        stream: int = 7,
        **args,
    ) -> None:
        self._correlation += 1
        self.call("cudaLaunchKernel", launched, 0.5, "cuda_runtime", thread, correlation=self._correlation)
        args |= {"device": 0, "stream": stream, "correlation": self._correlation}
        row = {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": 0,
            "tid": stream,
            "ts": start,
            "dur": length,
            "args": args,
        }
        self.rows.append(row)

    def content(self) -> dict:
        device = {"id": 0, "name": "NVIDIA H200"}
        return {"schemaVersion": 1, "deviceProperties": [device], "traceEvents": self.rows}

    def write(self, file: Path) -> Path:
        data = json.dumps(self.content()).encode()
        file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
        return file


def torch_trace(step_us: float = 1000.0, steps: int = 2, slower: dict[str, float] | None = None) -> TorchTrace:
    """Two steps of a network: attention, a product and its backward, a recomputed piece, loss, optimizer, copies.

    Kernels start 2,000 us after their launch, back to back but for 10 us before the optimizer. slower: added us by
    kernel name.
    """
    trace = TorchTrace()
    slower = slower or {}
    bf16 = "c10::BFloat16"
    start = 0.0
    for number in range(steps):
        base, at = number * step_us, start or 2000.0
        trace.call(f"ProfilerStep#{number + 5}", base, step_us, "user_annotation")

        def run(name, launched, length, gap=0.0, **options):
            nonlocal at
            at += gap
            length += slower.get(name, 0.0)
            trace.kernel(name, launched, at, length, **options)
            at += length

        trace.call("attention", base + 10, 80, "user_annotation")
        sdpa = {
            "Input Dims": [[2, 4, 128, 64]] * 3 + [[]] * 4,
            "Input type": [bf16] * 3 + ["Scalar"] * 4,
            "Concrete Inputs": ["", "", "", "0.", "True", "False", ""],
        }
        trace.call("aten::scaled_dot_product_attention", base + 20, 60)
        trace.call("aten::_scaled_dot_product_flash_attention", base + 25, 50, **sdpa)
        run("void pytorch_flash::flash_fwd_kernel<Traits>(Params)", base + 30, 50)
        trace.call("mlp", base + 100, 100, "user_annotation")
        trace.call("aten::linear", base + 110, 80)
        mm = {"Input Dims": [[256, 512], [512, 1024]], "Input type": [bf16, bf16]}
        trace.call("aten::mm", base + 120, 50, **mm, **{"Sequence number": 40})
        run("nvjet_tst_128x256", base + 130, 100)
        # A copy from the host, its first half under the product.
        trace.kernel(
            "Memcpy HtoD (Pinned -> Device)", base + 175, at - 20, 40, category="gpu_memcpy", stream=9, bytes=4000
        )
        at += 20
        trace.call("aten::cross_entropy_loss", base + 220, 50)
        run("void at::native::reduce_kernel<512>(ReduceOp)", base + 230, 20)
        node = "autograd::engine::evaluate_function: MmBackward0"
        trace.call(node, base + 300, 100, thread=trace.AUTOGRAD, **{"Sequence number": 40})
        grad = {"Input Dims": [[256, 1024], [1024, 512]], "Input type": [bf16, bf16]}
        trace.call("aten::mm", base + 310, 50, thread=trace.AUTOGRAD, **grad)
        run("nvjet_tst_256x128", base + 320, 110, thread=trace.AUTOGRAD)
        trace.call("autograd::engine::evaluate_function: CheckpointBackward", base + 450, 100, thread=trace.AUTOGRAD)
        trace.call("mlp", base + 460, 80, "user_annotation", thread=trace.AUTOGRAD)
        trace.call(
            "aten::silu", base + 470, 40, thread=trace.AUTOGRAD, **{"Input Dims": [[1024, 1024]], "Input type": [bf16]}
        )
        run("void at::native::vectorized_elementwise_kernel<4, silu>(int)", base + 480, 30, thread=trace.AUTOGRAD)
        trace.call("Optimizer.step#AdamW.step", base + 700, 100, "user_annotation")
        run("void at::native::multi_tensor_apply_kernel<Adam>(T)", base + 720, 40, gap=10.0)
        start = at
    return trace
