"""Loggers, the progress display, the plot, and the numbers about speed and memory."""

import io
import itertools
import json
import logging
import math
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jaxtune.train.log import metrics
from jaxtune.train.log.metrics import MetricsLogger, Progress, duration, loss_plot, read_metrics, try_optional
from jaxtune.train.objectives.distillation import Distill
from jaxtune.train.objectives.kto import KTO
from jaxtune.train.objectives.policy import GRPO, RLOO
from jaxtune.train.objectives.preference import DPO
from jaxtune.train.objectives.reward import Reward
from jaxtune.train.objectives.sft import SFT
from jaxtune.train.planning.devices import device_peak_flops, memory_peak_bytes
from jaxtune.train.program.flops import model_flops_per_step
from tests import patience


def strict_lines(path) -> list[dict]:
    """Every line parsed as RFC 8259 has it: without NaN and Infinity."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


# ---- the file


def test_every_line_is_json_and_there_once_flushed(tmp_path, monkeypatch):
    times = itertools.count(7.0)
    monkeypatch.setattr(metrics, "time", types.SimpleNamespace(time=lambda: next(times), monotonic=time.monotonic))
    with MetricsLogger(tmp_path) as log:
        log.log(1, {"loss": 2.5, "grad_norm": float("nan"), "scale": float("inf"), "low": -float("inf")})
        log.flush()
        assert len(strict_lines(tmp_path / "metrics.jsonl")) == 1  # not only after close
        log.log(
            np.int64(2), {"loss": jnp.float32(1.5), "half": jnp.bfloat16(0.5), "n": np.int32(3), "flag": np.bool_(True)}
        )
        log.log(3, {"rows": [1, np.nan], "text": 'a "quoted"\nline', "none": None, "split": {"a": np.float64("inf")}})
        with pytest.raises(ValueError, match="a metric must be a number, string, list or dict, not set"):
            log.log(4, {"bad": {1, 2}})
    lines = strict_lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["time"]) for line in lines] == [(1, 7.0), (2, 8.0), (3, 9.0)]
    assert (lines[0]["grad_norm"], lines[0]["scale"], lines[0]["low"]) == ("nan", "inf", "-inf")
    assert (lines[1]["loss"], lines[1]["half"], lines[1]["n"], lines[1]["flag"]) == (1.5, 0.5, 3, True)
    assert (lines[2]["rows"], lines[2]["text"], lines[2]["none"]) == ([1, "nan"], 'a "quoted"\nline', None)
    assert math.isnan(read_metrics(tmp_path / "metrics.jsonl")[0]["grad_norm"])


def test_resume_appends_and_drops_later_and_torn_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLogger(tmp_path) as log:
        for step in range(1, 8):
            log.log(step, {"loss": math.nan if step == 2 else float(step)})
        log.log(5, {"eval_loss": 0.5})
    with open(path, "a") as file:
        file.write('{"step": 5, "lo')
    with MetricsLogger(tmp_path, resumed_step=5) as log:
        log.log(6, {"loss": 60.0})
    lines = strict_lines(path)
    assert [(line["step"], line.get("loss")) for line in lines] == [
        (1, 1.0),
        (2, "nan"),
        (3, 3.0),
        (4, 4.0),
        (5, 5.0),
        (5, None),
        (6, 60.0),
    ]
    with pytest.raises(ValueError, match=r"metrics\.jsonl is of another run: resume that one or choose another"):
        MetricsLogger(tmp_path)
    with MetricsLogger(tmp_path / "new", resumed_step=5) as log:  # an output folder whose metrics were removed
        log.log(6, {"loss": 1.0})
    assert len(strict_lines(tmp_path / "new" / "metrics.jsonl")) == 1


def test_a_full_disk_does_not_stop_training_and_the_file_goes_on(tmp_path, caplog, monkeypatch):
    class Full(io.FileIO):
        def write(self, data):
            return super().write(data[:10])

    log = MetricsLogger(tmp_path)
    log.log(1, {"loss": 1.0})
    with monkeypatch.context() as patched:
        patched.setattr(metrics, "open", lambda path, mode, buffering: Full(path, mode), raising=False)
        for step in (2, 3):
            log.log(step, {"loss": 1.0})
        log.flush()
    log.log(4, {"loss": 1.0})
    log.close()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 4]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "metrics.jsonl failed; training continues without it: OSError" in caplog.text


def test_a_file_that_cannot_be_opened_is_tried_again(tmp_path, caplog, monkeypatch):
    def no_handles(*arguments, **options):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(metrics, "open", no_handles, raising=False)
        patched.setattr(Path, "touch", no_handles)
        log = MetricsLogger(tmp_path)
        log.log(1, {"loss": 1.0})
        log.flush()
    for step in (2, 3):
        log.log(step, {"loss": 1.0})
    log.close()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [2, 3]
    assert caplog.text.count("metrics.jsonl failed; training continues without it: OSError") == 1


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_no_line_waits_for_a_disk_that_hangs_until_a_flush_and_all_are_in_order(tmp_path_factory, flushes):
    folder, answers = tmp_path_factory.mktemp("slow"), threading.Event()
    with MetricsLogger(folder) as log:
        log._write("files", answers.wait)
        for step, flushed in enumerate(flushes, 1):
            log.log(step, {"loss": float(step)})
            if flushed:
                answers.set()
                log.flush()
                assert [line["step"] for line in strict_lines(folder / "metrics.jsonl")] == [*range(1, step + 1)]
        answers.set()
    assert [line["step"] for line in strict_lines(folder / "metrics.jsonl")] == [*range(1, len(flushes) + 1)]


# ---- other loggers


@pytest.mark.parametrize(
    ("package", "arguments", "message"),
    [
        (
            "tensorboardX",
            {"tensorboard": True},
            r"metrics\.tensorboard needs tensorboardX .*pip install '\.\[tensorboard\]'",
        ),
        ("wandb", {"wandb_project": "p"}, r"metrics\.wandb_project needs wandb .*pip install '\.\[wandb\]'"),
        ("trackio", {"trackio_project": "p"}, r"trackio_project needs trackio .*pip install '\.\[trackio\]'"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, package, arguments, message):
    monkeypatch.setitem(sys.modules, package, None)  # what Python holds for a module that cannot be imported
    with pytest.raises(ValueError, match=message):
        MetricsLogger(tmp_path, **arguments)


class FakeTensorBoard(types.ModuleType):
    def __init__(self):
        super().__init__("tensorboardX")
        self.scalars, self.opened = [], []
        outer = self

        class SummaryWriter:
            def __init__(self, folder, purge_step=None):
                outer.opened.append((folder, purge_step))

            def add_scalar(self, key, value, step, walltime=None):
                outer.scalars.append((key, value, step))

            def close(self):
                outer.scalars.append("closed")

        self.SummaryWriter = SummaryWriter


class FakeWandb(types.ModuleType):
    def __init__(self, fail_after=10**9):
        super().__init__("wandb")
        self.calls, self.logged = [], []
        outer = self

        class Run:
            id = "abc123"

            def define_metric(self, name, step_metric):
                assert (name, step_metric) == ("*", "step")

            def log(self, values):
                if len(outer.logged) >= fail_after:
                    raise ConnectionError("no route to host")
                outer.logged.append(values)

            def finish(self):
                outer.logged.append("finished")

        def init(**arguments):
            outer.calls.append(arguments)
            return Run()

        self.init = init


def test_tensorboard_gets_the_numbers(tmp_path, monkeypatch):
    fake = FakeTensorBoard()
    monkeypatch.setitem(sys.modules, "tensorboardX", fake)
    with MetricsLogger(tmp_path, tensorboard=True, resumed_step=6) as log:
        log.log(7, {"loss": 2.5, "text": "x", "none": None, "grad_norm": math.inf})
    assert fake.opened == [(str(tmp_path / "tensorboard"), 7)]
    assert fake.scalars == [("loss", 2.5, 7), ("grad_norm", math.inf, 7), "closed"]


def test_a_logger_that_goes_down_is_reported_once_and_training_goes_on(tmp_path, monkeypatch, caplog):
    fake = FakeWandb(fail_after=2)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with MetricsLogger(tmp_path, wandb_project="p") as log:
        for step in range(1, 6):
            log.log(step, {"loss": 1.0})
    assert len(strict_lines(tmp_path / "metrics.jsonl")) == 5
    assert len(fake.logged) == 2
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert (
        record.getMessage()
        == "Weights & Biases failed; training continues without it: ConnectionError: no route to host"
    )


@pytest.mark.parametrize(("name", "shown"), [(None, "my-run"), ("a name", "a name")])
def test_a_run_has_a_name_at_wandb(tmp_path, monkeypatch, name, shown):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with MetricsLogger(tmp_path / "my-run", wandb_project="p", run_name=name) as log:
        log.log(1, {"loss": 1.0})
    [call] = fake.calls
    assert (call["name"], call["project"]) == (shown, "p")


@pytest.mark.parametrize("text", ["", '{"step": 0, "phase": "load"}\n', '{"step": 0}\n{"st', '{"step": 1, "lo'])
def test_what_a_run_wrote_before_its_first_step_is_replaced(tmp_path, text):
    """It was killed before config.yaml was written, so that the folder does not say whose it is."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with MetricsLogger(tmp_path) as log:
        log.log(1, {"loss": 1.0})
    assert [line["step"] for line in strict_lines(path)] == [1]


def test_a_logger_that_is_down_at_the_start(tmp_path, monkeypatch, caplog):
    fake = FakeWandb()
    monkeypatch.setattr(fake, "init", lambda **_: (_ for _ in ()).throw(TimeoutError("api")), raising=False)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with MetricsLogger(tmp_path, wandb_project="p") as log:
        log.log(1, {"loss": 1.0})
    assert len(strict_lines(tmp_path / "metrics.jsonl")) == 1
    assert "Weights & Biases failed" in caplog.text


# ---- progress


NUMBERS = {
    "loss": 1.25,
    "learning_rate": 1e-4,
    "grad_norm": 0.5,
    "tokens_per_second": 12345.6,
    "memory_bytes": 3_100_000_000,
}


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    return now


def test_a_logger_that_waits_holds_up_neither_files_nor_a_save(tmp_path, monkeypatch):
    answered, logged = threading.Event(), []
    monkeypatch.setattr(metrics, "_LOGGERS_SECONDS", 0.1)
    logger = MetricsLogger(tmp_path)

    def log(line: dict) -> None:
        assert answered.wait(patience.SECONDS)
        logged.append(line["step"])

    logger._sinks["of a network"] = types.SimpleNamespace(log=log, close=lambda: None)
    for step in (1, 2, 3):
        logger.log(step, {"loss": 1.0})
    logger.flush()
    assert not logged
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    answered.set()
    logger.close()


def test_plain_lines_without_a_terminal(clock):
    out = io.StringIO()
    with Progress(12, console=Console(file=out, width=40)) as progress:
        with progress.compiling():
            clock[0] += 20
        for step in range(1, 13):
            clock[0] += 2
            progress.update(step, **NUMBERS)
        progress.print("[a] message")
    shown = "loss 1.2500  lr 1.00e-04  grad norm 0.500  12,346 tokens/s  memory 3.10 GB"
    assert out.getvalue().splitlines() == [
        "compiling",
        "compiled in 20.0 s",
        f"step 1/12  {shown}",
        *(
            f"step {step}/12  {shown}  {left} left"
            for step, left in [(3, "0:18"), (5, "0:14"), (7, "0:10"), (9, "0:06"), (11, "0:02"), (12, "0:00")]
        ),
        "[a] message",
    ]


def test_time_left_after_a_resume_counts_this_run_only(clock):
    out = io.StringIO()
    with Progress(1000, start_step=500, line_seconds=0, console=Console(file=out)) as progress:
        for step in (501, 502):
            clock[0] += 10
            progress.update(step)
    assert out.getvalue().splitlines() == ["step 501/1000", "step 502/1000    1:23:00 left"]


def test_live_bar_on_a_terminal(clock):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    with Progress(10, console=console) as progress:
        with progress.compiling():
            progress._live.refresh()
            assert "compiling" in out.getvalue()
        clock[0] += 1
        progress.update(1, **NUMBERS)
        clock[0] += 2
        progress.update(2, **NUMBERS)
        progress.print("a message")
        progress._live.refresh()
    text = out.getvalue()
    assert "2/10" in text
    for part in (
        "loss 1.2500",
        "lr 1.00e-04",
        "grad norm 0.500",
        "12,346 tokens/s",
        "memory 3.10 GB",
        "0:16 left",
    ):
        assert part in text
    assert "a message" in text
    assert text.rindex("compiling") < text.index("loss")  # the phase is gone when the step runs


def test_duration():
    assert [duration(s) for s in (0, 59.6, 65, 3599, 3600, 7384, 100_000)] == [
        "0:00",
        "1:00",
        "1:05",
        "59:59",
        "1:00:00",
        "2:03:04",
        "27:46:40",
    ]


# ---- plot


def test_loss_plot_shows_what_was_logged(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    with MetricsLogger(tmp_path) as log:
        for step in range(1, 101):
            log.log(step, {"loss": math.nan if step == 7 else 3.0 / step})
            if step % 50 == 0:
                log.log(step, {"eval_loss": 1.0})
    drawn = []
    real = Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda self, x, y, *a, **k: (drawn.append((list(x), list(y))), real(self, x, y, *a, **k))[1]
    )
    loss_plot(tmp_path, "targets")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    (steps, losses), (smooth_steps, smooth), (eval_steps, eval_losses) = drawn
    assert steps == smooth_steps == [step for step in range(1, 101) if step != 7]
    assert losses == [3.0 / step for step in steps]
    # 99 points: windows of 3
    assert smooth[49] == pytest.approx(np.mean(losses[48:51])) and smooth[-1] == pytest.approx(np.mean(losses[-2:]))
    assert (eval_steps, eval_losses) == ([50, 100], [1.0, 1.0])


def test_a_plot_of_few_steps_has_no_mean_of_one(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    with MetricsLogger(tmp_path) as log:
        for step in range(1, 20):
            log.log(step, {"loss": 1.0})
    labels = []
    real = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda *a, **k: (labels.append(k["label"]), real(*a, **k))[1])
    loss_plot(tmp_path, "targets")
    assert labels == ["training loss"]


@pytest.mark.parametrize(
    ("unit", "label"),
    [
        (SFT.unit, "loss (nats per token)"),
        (Distill.unit, "loss (nats per token)"),
        (DPO.unit, "loss (mean over pairs)"),
        (KTO.unit, "loss (mean over examples)"),
        (Reward.unit, "loss (mean over pairs)"),
        (GRPO.of().unit, "loss (mean over tokens)"),
        (GRPO.of(loss_type="dr_grpo").unit, "loss (mean over possible tokens)"),
        (RLOO.of().unit, "loss (mean over answers)"),
    ],
)
def test_a_plot_says_what_the_loss_is(unit, label, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    with MetricsLogger(tmp_path) as log:
        log.log(1, {"loss": 1.0})
    labels = []
    monkeypatch.setattr(Figure, "savefig", lambda self, _: labels.append(self.axes[0].get_ylabel()))
    loss_plot(tmp_path, unit)
    assert labels == [label]


def test_loss_plot_without_a_loss(tmp_path):
    with MetricsLogger(tmp_path) as log:
        log.log(1, {"loss": math.nan})
    with pytest.raises(ValueError, match="has no finite loss to plot"):
        loss_plot(tmp_path, "targets")
    assert not (tmp_path / "loss.png").exists()


def test_without_matplotlib_a_run_ends_without_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    try_optional("loss.png", lambda: loss_plot(tmp_path, "targets"))
    assert not caplog.messages and not [*tmp_path.iterdir()]


# ---- memory and speed


_PEAK = """
import numpy as np
from jaxtune.train.planning.devices import memory_peak_bytes
before = memory_peak_bytes()
block = np.ones(before // 8 + 2**24)  # as many bytes again, so that whatever was freed since is too little
print(before, memory_peak_bytes())
"""


def test_memory_peak_on_a_cpu_is_the_process():
    """In a process of its own: this one's may have grown to gigabytes, which the block would take again. A shell starts
    it, because what starts a process passes its own peak on."""
    command = ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, _PEAK]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    before, after = map(int, done.stdout.split())
    assert 50e6 < before < 64e9  # bytes, not KiB: JAX alone takes more than 50 MB
    assert after >= before + 2**26


def test_memory_peak_on_a_device_is_its_own_count(monkeypatch):
    device = types.SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 123, "bytes_in_use": 5})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert memory_peak_bytes() == 123


def test_device_peak_flops():
    bf16 = {
        "NVIDIA H200": 989e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA B200": 2250e12,
        "NVIDIA L4": 121e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA GeForce RTX 4090": 165.2e12,
        "NVIDIA GeForce RTX 3060": 25.5e12,
        "NVIDIA GeForce RTX 3090": 71e12,
        "Tesla T4": None,
        "NVIDIA GeForce RTX 3090 Ti": 80e12,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
        "NVIDIA A10": 125e12,
        "cpu": None,
    }
    assert {kind: device_peak_flops(kind, "bfloat16") for kind in bf16} == bf16
    assert device_peak_flops("NVIDIA H200", "float8_e4m3fn") == 1979e12
    assert device_peak_flops("NVIDIA H200", "float32") == 67e12
    assert device_peak_flops("NVIDIA A100-SXM4-80GB", "float8_e4m3fn") is None
    assert device_peak_flops("NVIDIA H200", "int32") is None


def test_model_flops_are_those_of_the_derivatives():
    """The dot products that JAX's own derivatives contain, without attention, equal the formula."""
    tokens, width, hidden, rank = 64, 48, 80, 4
    x = jnp.ones((tokens, width))
    frozen = (jnp.ones((width, hidden)), jnp.ones((hidden, width)))
    adapters = (
        (jnp.ones((width, rank)), jnp.ones((rank, hidden))),
        (jnp.ones((hidden, rank)), jnp.ones((rank, width))),
    )

    def forward(x, weights, adapters):
        for w, (a, b) in zip(weights, adapters or [(None, None)] * 2):
            x = x @ w if a is None else x @ w + (x @ a) @ b
        return x.sum()

    def counted(f, *arguments) -> float:
        """FLOPs of the dot products in the jaxpr."""
        total = 0
        for equation in jax.make_jaxpr(f)(*arguments).jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                ((contracted, _), _) = equation.params["dimension_numbers"]
                left = equation.invars[0].aval.shape
                total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[i] for i in contracted)
        return total

    params, small = 2 * width * hidden, 2 * rank * (width + hidden)
    shape = {"attention": 0, "tokens": tokens}
    full = counted(jax.value_and_grad(lambda x, weights: forward(x, weights, None), (0, 1)), x, frozen)
    assert full == model_flops_per_step(matmul_params=params, trained_matmul_params=params, **shape)
    assert full == 6 * params * tokens
    lora = counted(jax.value_and_grad(forward, (0, 2)), x, frozen, adapters)
    assert lora == model_flops_per_step(matmul_params=params, trained_matmul_params=0, adapter_params=small, **shape)


def test_model_flops_of_attention():
    """Llama-3.1-8B at 8 rows x 2,048 in LoRA: 4 N T, and causal attention over whole rows."""
    layers, heads, head_dim, rows, length = 32, 32, 128, 8, 2048
    none = {"matmul_params": 0, "trained_matmul_params": 0, "tokens": rows * length}
    width = layers * heads * head_dim
    whole = model_flops_per_step(**none, attention=width * rows * length**2)
    # 2 products forward and 4 backward, 2 FLOPs a multiply-add, half of the square visible
    assert whole == (2 + 4) * 2 * layers * heads * head_dim * rows * length**2 / 2
    halves = model_flops_per_step(**none, attention=width * 2 * rows * (length // 2) ** 2)
    assert halves == whole / 2
