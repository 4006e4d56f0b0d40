"""Where the steps of a flax program and of a torch program differ: the same network, rows and optimizer, profiled."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves torch its part of a GPU's memory

import jax
import optax
import torch
from flax import nnx
from torch.profiler import ProfilerActivity, profile, record_function

import jaxtune

ROWS, WIDTH, STEPS = 4096, 4096, 3


def flax_program(folder):
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.gelu, nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    rows = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))

    @nnx.jit
    def step(model, optimizer):
        def loss_of(model):
            with jax.named_scope("mlp"):
                out = model(rows)
            with jax.named_scope("loss"):
                return ((out - rows) ** 2).mean()

        gradients = nnx.grad(loss_of)(model)
        with jax.named_scope("optimizer"):
            optimizer.update(model, gradients)

    step(model, optimizer)  # compiled before the capture
    with jaxtune.profile.capture(folder, {"what": "flax", "tokens_per_step": ROWS}):
        for number in range(STEPS):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                step(model, optimizer)


def torch_program(file):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wide, narrow = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
    model = torch.nn.Sequential(wide, torch.nn.GELU("tanh"), narrow).to(device)
    optimizer, rows = torch.optim.AdamW(model.parameters(), 1e-3), torch.randn(ROWS, WIDTH, device=device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as recorded:
        for _ in range(STEPS):
            with record_function("mlp"):
                out = model(rows)
            with record_function("loss"):
                loss = ((out - rows) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    recorded.export_chrome_trace(file)


flax_program("profiles/flax")
torch_program("profiles/torch.json")
print(comparison := jaxtune.profile.compare("profiles/torch.json", "profiles/flax"))
