"""Chrome traces of PyTorch's profiler: kernels under the operators, ranges and phases that launched them."""

from __future__ import annotations

import json

import pytest
from programs import TorchTrace, torch_trace

from jaxtune.profile import TraceError, show

# A step of the trace that programs.torch_trace builds, in us.
ATTENTION, PRODUCT, COPY, LOSS, BACKWARD, SILU, WAIT, ADAM = 50, 100, 20, 20, 110, 30, 10, 40
STEP = ATTENTION + PRODUCT + COPY + LOSS + BACKWARD + SILU + WAIT + ADAM
HALF = "c10::BFloat16"


@pytest.fixture
def report(tmp_path):
    return show(torch_trace().write(tmp_path / "run.pt.trace.json"))


def test_time_by_category_is_exact_and_sums_to_the_step(report):
    found = {row.name: row.ms * 1e3 for row in report.categories}
    assert found == pytest.approx(
        {
            "GEMM": PRODUCT + BACKWARD,
            "attention": ATTENTION,
            "elementwise and norms": SILU,
            "loss": LOSS,
            "optimizer": ADAM,
            "copies to device": COPY,
            "idle": WAIT,
        }
    )
    assert report.steps_ms == pytest.approx([STEP / 1e3] * 2)
    assert sum(row.share for row in report.categories) == pytest.approx(1.0)


def test_time_by_scope_and_phase(report):
    found = {(row.name, row.phase): row.ms * 1e3 for row in report.scopes}
    assert found == pytest.approx(
        {
            ("attention", "forward"): ATTENTION,
            ("mlp", "forward"): PRODUCT + COPY,
            ("mlp", "backward"): BACKWARD,
            ("mlp", "recompute"): SILU,
            ("cross_entropy_loss", "forward"): LOSS,
            ("optimizer", "forward"): ADAM,
            ("idle", ""): WAIT,
        }
    )


def test_rates_follow_from_the_recorded_shapes(report):
    rows = {row.name: row for row in report.kernels}
    assert rows["nvjet_tst_128x256"].tflops == pytest.approx(2 * 256 * 512 * 1024 / 100e-6 / 1e12)
    assert rows["nvjet_tst_128x256"].shape == "bf16[256,512], bf16[512,1024] -> bf16[256,1024]"
    # two products of which causality leaves half
    attention = rows["pytorch_flash::flash_fwd_kernel"]
    assert attention.tflops == pytest.approx(2 * 2 * 2 * 4 * 128 * 128 * 64 / 2 / 50e-6 / 1e12)
    silu = next(row for name, row in rows.items() if "vectorized_elementwise" in name)
    assert silu.tbps == pytest.approx(2 * 2 * 1024 * 1024 / 30e-6 / 1e12)


def test_a_copy_under_compute_is_told_from_a_wait(report):
    (copy,) = report.transfers
    assert (copy.name, copy.count) == ("copies to device", 1)
    assert [copy.ms, copy.hidden_ms, copy.exposed_ms] == pytest.approx([0.04, 0.02, 0.02])
    assert copy.gb_per_s == pytest.approx(4000 / 40e-6 / 1e9)
    assert (report.idle.launch_gaps, report.idle.launch_gap_ms) == pytest.approx((1, 0.01))


def test_what_an_operator_does_counts_before_the_range_that_it_stands_in(tmp_path):
    trace = TorchTrace()
    bf16 = "c10::BFloat16"
    trace.call("attention", 0, 100, "user_annotation")
    calls = [
        ("aten::mm", "nvjet_q_proj", {"Input Dims": [[64, 64], [64, 64]], "Input type": [bf16, bf16]}),
        ("aten::mul", "rotary_kernel", {"Input Dims": [[64, 64], [64, 64]], "Input type": [bf16, bf16]}),
        ("aten::copy_", "cast_kernel", {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", bf16]}),
        ("aten::copy_", "copy_kernel", {"Input Dims": [[64, 64], [64, 64]], "Input type": [bf16, bf16]}),
        ("aten::_scaled_dot_product_flash_attention", "some_kernel", {}),
        ("aten::_foreach_norm", "norm_kernel", {}),
    ]
    for index, (operator, kernel, arguments) in enumerate(calls):
        trace.call(operator, 10 * index, 9, **arguments)
        trace.kernel(kernel, 10 * index + 1, 500 + 10 * index, 5)
    trace.call("aten::copy_", 70, 9)
    trace.kernel("Memcpy DtoD (Device -> Device)", 71, 570, 5, category="gpu_memcpy", bytes=100)
    found = {row.name: row.category for row in show(trace.write(tmp_path / "run.json")).kernels}
    assert found == {
        "nvjet_q_proj": "GEMM",
        "rotary_kernel": "elementwise and norms",
        "cast_kernel": "elementwise and norms",
        "copy_kernel": "device copies",
        "some_kernel": "attention",
        "norm_kernel": "optimizer",
        "Memcpy DtoD (Device -> Device)": "device copies",
    }


@pytest.mark.parametrize(
    ("operator", "types", "dims", "strides", "moved"),
    [
        ("copy_", [HALF, "float"], [[64, 32], [64, 32]], [[32, 1], [32, 1]], 64 * 32 * (2 + 4)),  # casts
        ("copy_", ["float", HALF], [[64, 32], [64, 32]], [[32, 1], [32, 1]], 64 * 32 * (4 + 2)),
        ("add", [HALF, "float"], [[64, 32], [64, 32]], [[32, 1], [32, 1]], 64 * 32 * (2 + 4 + 4)),
        ("add_", [HALF, "float"], [[64, 32], [64, 32]], [[32, 1], [32, 1]], 64 * 32 * (2 + 4 + 2)),  # in place
        ("fill_", [HALF], [[64, 32]], [[32, 1]], 64 * 32 * 2),
        ("masked_fill", [HALF, "bool"], [[64, 32], [64, 32]], [[32, 1], [32, 1]], 64 * 32 * (2 + 1 + 2)),
        ("copy_", [HALF, HALF], [[4, 8, 32], [4, 8, 32]], [[256, 32, 1], [32, 0, 1]], 2 * (4 * 8 * 32 + 4 * 32)),
        # An embedding: of the table only what is looked up is read, by one number for each row.
        (
            "gather",
            [HALF, "long int", HALF],
            [[5000, 32], [64, 32], [64, 32]],
            [[32, 1], [1, 0], [32, 1]],
            64 * (8 + 2 * 32 * 2),
        ),
    ],
)
def test_bytes_are_those_of_each_array_in_its_own_type(tmp_path, operator, types, dims, strides, moved):
    trace = TorchTrace()
    arguments = {"Input Dims": [*dims, []], "Input type": [*types, "Scalar"], "Input Strides": [*strides, []]}
    trace.call(f"aten::{operator}", 0, 9, **arguments)
    trace.kernel("kernel", 1, 500, 5)
    (row,) = show(trace.write(tmp_path / "run.json")).kernels
    assert row.tbps * 5e6 == pytest.approx(moved)
    short = {HALF: "bf16", "float": "f32", "long int": "s64", "bool": "bool"}
    words = [f"{short[kind]}[{','.join(map(str, own))}]" for own, kind in zip(dims, types, strict=True)]
    assert row.shape.startswith(", ".join(words))


def test_the_longest_kernel_of_an_operator_bears_its_work(tmp_path):
    """As of attention's backward, which cuDNN begins with a small kernel and ends with others."""
    trace, shape = TorchTrace(), [2, 4, 128, 64]
    arguments = {"Input Dims": [shape] * 4, "Input type": [HALF] * 4}
    trace.call("aten::_scaled_dot_product_cudnn_attention_backward", 0, 50, **arguments)
    for index, (name, length) in enumerate([("compute_dot_do_o", 10), ("bprop", 90), ("convert_dq", 20)]):
        trace.kernel(name, index, 500 + 100 * index, length)
    rows = {row.name: (row.tflops, row.tbps > 0) for row in show(trace.write(tmp_path / "run.json")).kernels}
    rate = pytest.approx(5 * 2 * 2 * 4 * 128 * 128 * 64 / 90e6)
    assert rows == {"compute_dot_do_o": (0, False), "bprop": (rate, True), "convert_dq": (0, False)}


def test_the_backward_of_causal_attention_on_a_cpu_is_causal_too(tmp_path):
    trace, shape = TorchTrace(), [2, 4, 128, 64]
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    for operator, arrays in ((name, 3), (f"{name}_backward", 6)):
        arguments = {"Input Dims": [shape] * arrays, "Input type": ["float"] * arrays}
        trace.call(operator, 10 * arrays, 9, **arguments, **{"Concrete Inputs": [""] * arrays + ["0.", "True"]})
    (tmp_path / "run.json").write_text(json.dumps(trace.rows))
    assert show(tmp_path / "run.json").flops_per_step == (2 + 5) * 2 * 2 * 4 * 128 * 128 * 64 / 2


@pytest.mark.parametrize(("ending", "arrays"), [("", 1), ("_backward", 1), ("_backward", 2)])
def test_attention_that_recorded_too_few_arrays_has_no_flops(tmp_path, ending, arrays):
    trace = TorchTrace()
    arguments = {"Input Dims": [[2, 4, 128, 64]] * arrays, "Input type": [HALF] * arrays}
    trace.call(f"aten::_scaled_dot_product_flash_attention{ending}", 0, 50, **arguments)
    trace.kernel("flash_kernel", 1, 500, 90)
    report = show(trace.write(tmp_path / "run.json"))
    assert (report.flops_per_step, report.kernels[0].category) == (0, "attention")


def test_collectives_whose_size_is_unknown_have_no_size(tmp_path):
    trace = TorchTrace()
    trace.kernel("nvjet_tst_128x256", 0, 500, 100)
    trace.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 1, 500, 2100, stream=11)
    report = show(trace.write(tmp_path / "run.json"))
    assert report.losses[0].text.startswith("Collectives take 2.1 ms, for which the step waits 2.0 ms: won by")
    rows = [line.split() for line in report.to_text(width=160).split("\nTransfers")[1].splitlines()]
    assert ["collectives", "1", "2.10", "4.8", "%", "2.00", "2.00", "ms,"] in [row[:8] for row in rows]
    assert '<td class="n">2.00</td><td class="n"></td><td>2.00 ms, nccl' in report.to_html()


def test_gzip_reads_the_same(tmp_path, report):
    again = show(torch_trace().write(tmp_path / "run.json.gz"))
    assert again.categories == report.categories


def test_without_profiler_steps_they_end_with_the_optimizer(tmp_path):
    trace = torch_trace()
    trace.rows = [row for row in trace.rows if not row["name"].startswith("ProfilerStep")]
    report = show(trace.write(tmp_path / "run.json"))
    assert len(report.steps_ms) == 2
    assert any("ends with the optimizer" in note for note in report.notes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not whole JSON"),
        ('{"a": 1}', "no Chrome trace"),
        ('{"traceEvents": 3}', "no Chrome trace"),
        ('{"traceEvents": []}', "no GPU kernels"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k"}]}', "lacks or breaks 'ts'"),
        ('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "k"}]}', "lacks or breaks 'ts'"),
        (
            '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": "soon"}]}',
            "lacks or breaks could not convert",
        ),
        (
            '{"deviceProperties": [{"name": "H200"}], "traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm",'
            ' "ts": 1}]}',
            "no GPU kernels",
        ),
    ],
)
def test_foreign_json_is_refused_by_name(tmp_path, content, message):
    file = tmp_path / "trace.json"
    file.write_text(content)
    with pytest.raises(TraceError, match=message) as caught:
        show(file)
    assert str(file) in str(caught.value)


def test_with_checkpointing_the_backward_finds_the_second_forward(tmp_path):
    """Numbers count by thread: 40 on the engine's thread is another operator than 40 on the main one."""
    trace = TorchTrace()
    main, engine = trace.MAIN, trace.AUTOGRAD
    mm = {"Input Dims": [[8, 8], [8, 8]], "Input type": ["float", "float"]}
    for number in (40, 41):  # the forward, whose inner nodes checkpointing throws away
        trace.call("embed", number, 1, "user_annotation")
        trace.call("aten::embedding", number, 1, **{"Sequence number": number})
        trace.kernel("embedding_kernel", number + 0.2, number * 10, 5)
    node = "autograd::engine::evaluate_function: MmBackward0"
    marks = {"Sequence number": 41, "Fwd thread id": 2}
    trace.call(node, 50, 20, thread=engine, **marks)
    trace.call("MmBackward0", 51, 18, thread=engine, **marks)
    trace.call("mlp", 52, 8, "user_annotation", thread=engine)
    for number in (40, 41):
        trace.call("aten::mm", 53 + number - 40, 0.9, thread=engine, **mm, **{"Sequence number": number})
    trace.kernel("nvjet_again", 54.2, 600, 7, thread=engine)
    trace.call("aten::mm", 65, 2, thread=engine, **mm)
    trace.kernel("nvjet_gradient", 65.2, 700, 11, thread=engine)
    trace.call(
        "autograd::engine::evaluate_function: EmbeddingBackward0",
        80,
        5,
        thread=engine,
        **{"Sequence number": 40, "Fwd thread id": 1},
    )
    trace.kernel("embedding_backward_kernel", 81, 800, 3, thread=engine)
    assert main != engine
    report = show(trace.write(tmp_path / "run.json"))
    found = {row.name: (row.scope, row.phase) for row in report.kernels}
    assert found == {
        "embedding_kernel": ("embed", "forward"),
        "nvjet_again": ("mlp", "recompute"),
        "nvjet_gradient": ("mlp", "backward"),
        "embedding_backward_kernel": ("embed", "backward"),
    }


def test_only_the_busiest_device_is_read(tmp_path):
    trace = torch_trace()
    trace.kernel("nvjet_other_device", 10, 2000, 5)
    trace.rows[-1]["args"]["device"] = 1
    report = show(trace.write(tmp_path / "run.json"))
    assert report.num_devices == 2
    assert not any(row.name == "nvjet_other_device" for row in report.kernels)
    json.dumps(report.to_dict())


def test_the_device_that_is_read_is_named_where_gpus_differ(tmp_path):
    """The busiest is the second here, and neither the first in the list of properties nor, by number, in its place."""
    trace = torch_trace()
    for number in range(5):
        trace.kernel("nvjet_other_device", 10, 2000 + number * 1000, 900)
        trace.rows[-1]["args"]["device"] = 2
    content = trace.content() | {
        "deviceProperties": [
            {"id": number, "name": name} for number, name in enumerate(("NVIDIA H200", "NVIDIA A40", "NVIDIA L4"))
        ][::-1]
    }
    file = tmp_path / "run.json"
    for properties, name in (
        (content["deviceProperties"], "NVIDIA L4"),
        (content["deviceProperties"][::-1], "NVIDIA L4"),
        ([{"name": "NVIDIA A40"}], "NVIDIA A40"),
        ([], ""),
    ):
        file.write_text(json.dumps(content | {"deviceProperties": properties}))
        report = show(file)
        assert (report.device, report.num_devices) == (name, 2)
        assert [row.name for row in report.kernels] == ["nvjet_other_device"]
