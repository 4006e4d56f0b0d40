"""A kernel is compared with the reference at its first use on a GPU; here the CPU says that it is one."""

import contextlib
import functools
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxtune.pallas import dispatch, one_order, targets, versions
from jaxtune.pallas.attention import (
    attention,
    attention_forward,
    cudnn,
    first_use,
    mosaic,
    packed_layout,
    reference,
)
from jaxtune.pallas.formats import NF4
from jaxtune.pallas.grouped_matmul import api as grouped_api
from jaxtune.pallas.grouped_matmul import reference as grouped_reference
from jaxtune.pallas.grouped_matmul.layout import groups_of
from jaxtune.pallas.quant_matmul import mosaic as quant_mosaic
from jaxtune.pallas.quant_matmul import triton as quant_triton
from jaxtune.pallas.quant_matmul.reference import exact_product
from tests import patience


def as_on_a_gpu(monkeypatch, cache):
    monkeypatch.setenv("JAXTUNE_CACHE", str(cache))
    monkeypatch.setattr(targets, "_device_capability", lambda platform: (9, 0))
    monkeypatch.setattr(dispatch, "first_uses", {})


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    as_on_a_gpu(monkeypatch, tmp_path)


class Counted:
    """A kernel: the reference, but for what `spoil` does to its output."""

    def __init__(self, spoil=lambda out: out, is_wrong=True):
        self.spoil, self.is_wrong, self.calls = spoil, is_wrong, 0

    def compare(self):
        self.calls += 1
        x = jnp.arange(4.0)
        assert isinstance(x + 1, jax.Array) and not isinstance(x + 1, jax.core.Tracer)
        return [self.spoil(x)], [x]


def check(kernel, call="bfloat16"):
    return dispatch.first_use("op", "kernel", call, kernel.compare)


def test_a_right_kernel_is_checked_once_for_each_kind_of_call(gpu):
    kernel = Counted()
    assert [check(kernel), check(kernel), check(kernel, "float16")] == [None] * 3
    assert kernel.calls == 2


def test_a_pass_is_remembered_by_later_processes_until_a_kernel_changes(gpu, monkeypatch):
    kernel, wrong = Counted(), Counted(lambda out: out * 1.5)

    def in_a_new_process():
        monkeypatch.setattr(dispatch, "first_uses", {})
        return check(kernel), dispatch.first_use("op", "wrong", "bfloat16", wrong.compare)

    results = [in_a_new_process(), in_a_new_process()]
    assert (kernel.calls, wrong.calls) == (1, 2) and results[0] == results[1]
    assert results[0][0] is None and "relative error 0.5" in str(results[0][1])
    monkeypatch.setattr(dispatch.sources, "digest", lambda folder: "others")
    in_a_new_process()
    assert kernel.calls == 2


@pytest.mark.parametrize("stored", ["before", "meanwhile"])
def test_no_pass_is_of_a_kernel_that_changed_after_its_digest_was_made(gpu, monkeypatch, stored):
    """Neither is one stored before believed, nor is one stored."""
    kernel, changed = Counted(), []
    monkeypatch.setattr(dispatch.sources, "are_unchanged", lambda folder: folder == "pallas" and not changed)
    if stored == "before":
        check(kernel)
        monkeypatch.setattr(dispatch, "first_uses", {})
        changed.append(True)
    else:
        kernel.spoil = lambda out: changed.append(True) or out
    check(kernel)
    assert kernel.calls == (2 if stored == "before" else 1)
    assert dispatch._pass("op", "kernel", "bfloat16").is_file() == (stored == "before")
    wrong = Counted(lambda out: out * 1.5)
    monkeypatch.setattr(dispatch, "first_uses", {})
    assert "relative error 0.5" in str(check(wrong))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda out: out * 1.5, "relative error 0.5 in result 0"),
        (lambda out: out * jnp.nan, "relative error nan in result 0"),
        (lambda out: out[:2], "failed in the check at its first use on this GPU: ValueError: result of shape"),
        (lambda out: out[:1], "GPU: ValueError: result of shape"),  # would broadcast
        (lambda out: [][0], "failed in the check at its first use on this GPU: IndexError"),
    ],
)
def test_a_wrong_kernel_is_disabled_loudly(gpu, caplog, spoil, reason):
    kernel = Counted(spoil)
    assert reason in check(kernel) and reason in check(kernel)
    assert kernel.calls == 1
    assert [reason in record.getMessage() for record in caplog.records] == [True]
    table = {"kernel": lambda: check(kernel), "reference": lambda: None}
    assert dispatch.choose("op", table, None) == "reference"
    assert reason in dispatch.record["op"][1]["kernel"]
    with pytest.raises(ValueError, match="implementation 'kernel' cannot serve this call"):
        dispatch.choose("op", table, "kernel")


def test_a_case_is_the_same_under_jax_enable_x64(gpu):
    """Of random numbers in float64 NF4 would make nothing, and its kernels would be disabled."""
    made = []

    def compare():
        made.append(jax.random.normal(jax.random.key(0), (4,)))
        return made, made

    jax.config.update("jax_enable_x64", True)  # not for this thread alone
    try:
        assert dispatch.first_use("op", "kernel", "bfloat16", compare) is None
    finally:
        jax.config.update("jax_enable_x64", False)
    assert [each.dtype for each in made] == [jnp.float32]


def test_it_runs_outside_of_whatever_is_being_traced(gpu):
    """Inside jit, grad, scan and shard_map; the comparison sees plain arrays and leaves nothing in the trace."""
    kernel = Counted()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(x):
        assert check(kernel) is None
        return (x * x).sum()

    def scanned(x):
        return jax.lax.scan(lambda total, row: (total + body(row), None), 0.0, x)[0]

    x = jnp.ones((2, 3))
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(jax.grad(scanned), in_specs=P("data"), out_specs=P("data"), check_vma=False)
        np.testing.assert_array_equal(jax.jit(mapped)(x), 2 * x)
    assert kernel.calls == 1
    assert "callback" not in str(jax.make_jaxpr(scanned)(x))


def built(kernels, compiled=lambda: None, lowered=lambda: None):
    """Of a program that doubles by `wrong`, a kernel that triples, or by the first that is not refused."""

    def double(x):
        table = {name: lambda kernel=kernel, name=name: check(kernel, name) for name, kernel in kernels.items()}
        name = dispatch.choose("op", {**table, "reference": lambda: None}, None)
        if name == "unlowerable":
            raise NotImplementedError
        return x * (3 if name == "wrong" else 2)

    program = jax.jit(lambda x: jax.jit(double)(x))

    def build():
        module = program.lower(jnp.ones(2))
        lowered()
        dispatch.begin_checks()
        found = module.compile()
        compiled()
        return found

    return dispatch.built(build)(jnp.ones(2)).tolist()


def test_a_programs_checks_run_while_it_is_compiled(gpu):
    """A check begins only once the program is lowered, and ends only after it is there."""
    begun, ended = threading.Event(), threading.Event()

    def spoil(out):
        begun.set()
        return out if ended.wait(patience.SECONDS) else [][0]

    def lowered():
        assert not begun.wait(0.2)

    def compiled():
        assert begun.wait(patience.SECONDS)
        ended.set()

    kernel = Counted(spoil)
    assert built({"right": kernel}, compiled, lowered) == [2, 2]
    assert dispatch.record["op"] == ("right", {}) and kernel.calls == 1 and check(kernel, "right") is None


def test_shapes_alone_wait_for_no_check_and_a_program_waits_for_theirs(gpu):
    """It is one that fails."""
    ended, wrong = threading.Event(), Counted(lambda out: out * 1.5 if ended.wait(patience.SECONDS) else out)
    with dispatch.unchecked():
        assert check(wrong, "wrong") is None and not ended.is_set()
    assert not wrong.calls
    assert built({"wrong": wrong}, ended.set) == [2, 2]
    assert dispatch.record["op"][0] == "reference" and wrong.calls == 1


def test_a_check_that_another_thread_asks_for_meanwhile_is_waited_for_by_the_next_program(gpu, monkeypatch):
    """Between the start of the checks and the wait for them."""
    wrong, begin, programs = Counted(lambda out: out * 1.5), dispatch.begin_checks, []

    def shapes():
        with dispatch.unchecked():
            check(wrong)

    def begins():
        monkeypatch.setattr(dispatch, "begin_checks", begin)
        begin()
        other = threading.Thread(target=shapes)
        other.start()
        other.join(patience.SECONDS)

    monkeypatch.setattr(dispatch, "begin_checks", begins)
    builder = threading.Thread(target=lambda: programs.append(dispatch.built(lambda: "first")), daemon=True)
    builder.start()
    builder.join(patience.SECONDS)
    assert programs == ["first"] and not wrong.calls
    builds = []
    dispatch.built(lambda: builds.append("second"))
    assert len(builds) == 2 and wrong.calls == 1


@pytest.mark.parametrize("name", ["wrong", "unlowerable"])
def test_a_program_is_built_again_without_a_kernel_that_fails_meanwhile(gpu, name):
    """Of the one in its place too, whose check begins then."""
    wrong, other = Counted(lambda out: out * 1.5), Counted(lambda out: out * jnp.nan)
    assert built({name: wrong, "other": other}) == [2, 2]
    assert dispatch.record["op"][0] == "reference" and dispatch.record["op"][1].keys() == {name, "other"}
    assert (wrong.calls, other.calls) == (1, 1)


def of_shared(kernels):
    """A function that doubles for each of the kernels, by which a wrong one triples; traced once for all programs."""

    def doubling(name, kernel):
        table = {name: lambda: check(kernel, name), "reference": lambda: None}
        return jax.jit(lambda x: x * (3 if dispatch.choose("op", table, None) == name and kernel.is_wrong else 2))

    shared = {name: doubling(name, kernel) for name, kernel in kernels.items()}

    def program(names):
        return jax.jit(lambda x: functools.reduce(lambda x, name: shared[name](x), names, x))

    return program


def test_a_program_whose_kernel_another_thread_asked_for_waits_for_the_check(gpu):
    """It gets the other's trace from JAX's caches, and asks for nothing."""
    lowered, ended = threading.Event(), threading.Event()
    wrong = Counted(lambda out: out * 1.5 if ended.wait(patience.SECONDS) else out)
    program, results = of_shared({"wrong": wrong}), []

    def build():
        module = program(["wrong"]).lower(1.0)
        lowered.set()
        dispatch.begin_checks()
        return module.compile()

    first = threading.Thread(target=lambda: results.append(dispatch.built(build)(1.0)))
    first.start()
    assert lowered.wait(patience.SECONDS)
    second = threading.Thread(target=lambda: results.append(dispatch.built(build)(1.0)))
    second.start()
    second.join(1.0)
    ended.set()
    first.join(patience.SECONDS)
    second.join(patience.SECONDS)
    assert results == [2, 2] and wrong.calls == 1


def test_what_one_thread_had_of_a_wrong_kernel_gets_into_no_other_s_program(gpu):
    """The caches are cleared when nobody traces."""
    begun, failed, over = threading.Event(), threading.Event(), threading.Event()
    wrong = Counted(lambda out: out * 1.5)
    program = of_shared({"wrong": wrong})

    @jax.jit
    def slowly_traced(x):
        x = program(["wrong"])(x)
        begun.set()
        failed.wait(1.0)  # a clearing of the caches waits for this thread, and this thread not for ever for it
        return x

    def slow():
        module = jax.jit(lambda x: slowly_traced(x)).lower(1.0)
        over.set()
        return module.compile()

    def quick():
        if wrong.calls:
            assert over.wait(patience.SECONDS)
        module = jax.jit(lambda x: slowly_traced(x) if wrong.calls else program(["wrong"])(x)).lower(1.0)
        return module.compile()

    results = []
    clear = jax.clear_caches
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "clear_caches", lambda: [clear(), failed.set()])
        other = threading.Thread(target=lambda: results.append(dispatch.built(slow)(1.0)))
        other.start()
        assert begun.wait(patience.SECONDS)
        results.append(dispatch.built(quick)(1.0))
        other.join(patience.SECONDS)
    assert results == [2, 2]


@settings(max_examples=20, phases=(Phase.explicit, Phase.generate))  # a search for smaller ones takes minutes
@given(st.data())
def test_no_program_of_many_threads_has_a_kernel_that_fails(data):
    seconds = st.floats(0.0, 0.05)
    kernels = {}
    for index in range(data.draw(st.integers(1, 3))):
        wait, is_wrong = data.draw(seconds), data.draw(st.booleans())

        def spoil(out, wait=wait, is_wrong=is_wrong):
            time.sleep(wait)
            return out * 1.5 if is_wrong else out

        kernels[f"kernel {index}"] = Counted(spoil, is_wrong)
    program = of_shared(kernels)
    of_threads = [
        (data.draw(st.lists(st.sampled_from(sorted(kernels)), min_size=1)), data.draw(seconds), data.draw(seconds))
        for _ in range(data.draw(st.integers(2, 4)))
    ]

    def result(names, before, between):
        def build():
            time.sleep(before)
            module = program(names).lower(1.0)
            dispatch.begin_checks()
            time.sleep(between)
            return module.compile()

        return dispatch.built(build)(1.0)

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor() as pool:
        as_on_a_gpu(patch, cache)
        results = [pool.submit(result, *each) for each in of_threads]
        assert [each.result() for each in results] == [2 ** len(names) for names, *_ in of_threads]
    assert all(kernel.calls <= 1 for kernel in kernels.values())


def test_a_check_that_raises_ends_what_asks_for_it_alone(gpu, monkeypatch):
    """It is neither a right kernel nor a wrong one, and no matter of other programs."""
    checked = dispatch._checked

    def full(op, name, *others):
        if name == "full":
            raise OSError("no space left")
        return checked(op, name, *others)

    monkeypatch.setattr(dispatch, "_checked", full)
    ask = functools.partial(dispatch.first_use, "op", "full", "bfloat16", Counted().compare)
    for _ in range(2):
        with pytest.raises(OSError, match="no space left"):
            dispatch.built(ask)
    builds = []
    assert dispatch.built(lambda: builds.append("other")) is None and builds == ["other"]
    with pytest.raises(ZeroDivisionError):
        dispatch.built(lambda: 1 / 0)
    with pytest.raises(OSError, match="no space left"):
        ask()


def test_a_build_s_own_error_is_not_hidden_by_that_of_a_check(gpu, monkeypatch):
    def full(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr(dispatch, "_checked", full)

    def build():
        with contextlib.suppress(OSError):
            check(Counted())
        raise NotImplementedError

    with pytest.raises(NotImplementedError):
        dispatch.built(build)


def test_a_kernel_refused_before_any_trace_had_it_clears_nothing(gpu, monkeypatch):
    cleared, builds = [], []
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(1))
    assert "relative error 0.5" in check(Counted(lambda out: out * 1.5))  # waited for
    dispatch.built(lambda: builds.append(check(Counted())))
    assert not cleared and len(builds) == 1
    with dispatch.unchecked():
        assert check(Counted(lambda out: out * 1.5), "float16") is None  # not waited for
    dispatch.built(lambda: builds.append(1))
    assert len(cleared) == 1 and len(builds) == 3


@pytest.mark.parametrize("exact", [False, True])
def test_a_case_runs_in_one_order_as_its_call_does_but_for_the_reference(gpu, exact):
    """In the check's own thread; the other kind of call has a check of its own."""
    seen = {}

    def compare():
        seen["kernel"] = one_order.is_exact(), jax.jit(lambda x: x * one_order.is_exact())(1.0)
        seen["reference"] = dispatch.exactly(lambda x: x * one_order.is_exact())(1.0)
        return [jnp.ones(2)], [jnp.ones(2)]

    for expected in (exact, not exact):
        with one_order.exact(expected):
            assert dispatch.first_use("op", "kernel", "bfloat16", compare) is None
        assert seen == {"kernel": (expected, float(expected)), "reference": 0.0}
        seen.clear()
        with one_order.exact(expected), dispatch.unchecked():
            assert dispatch.first_use("op", "kernel", "bfloat16", compare) is None
    assert not seen and len(dispatch.first_uses) == 2


def test_nothing_is_run_without_a_gpu_or_for_another_one(monkeypatch):
    kernel = Counted()
    assert check(kernel) is None
    monkeypatch.setattr(targets, "_device_capability", lambda platform: (9, 0))
    with targets.compile_for((9, 0)):
        assert check(kernel) is None
    assert kernel.calls == 0


def test_attention_leaves_a_wrong_kernel_alone(gpu, monkeypatch, tmp_path):
    """The real small case, with the reference in the kernels' place: right as it is, refused once a gradient is off."""
    query = jnp.ones((1, 8, 2, 64), jnp.bfloat16)
    layout = packed_layout((1, 8), jnp.ones((1, 8), jnp.int32))
    monkeypatch.setattr(mosaic, "forward", reference.forward)
    monkeypatch.setattr(mosaic, "backward", reference.backward)

    def chosen(cache):
        dispatch.first_uses.clear()
        monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path / cache))
        jax.jit(lambda q: attention(q, q, q, layout, scale=1.0))(query)
        return dispatch.record["attention"]

    assert chosen("right") == ("mosaic", {})

    def wrong(*arguments, **options):
        dquery, dkey, dvalue, dsinks = reference.backward(*arguments, **options)
        return dquery, dkey, dvalue.at[0, 70].mul(3), dsinks

    monkeypatch.setattr(mosaic, "backward", wrong)
    name, refused = chosen("wrong")
    assert name == "reference" and "differs from the reference" in refused["mosaic"]
    with pytest.raises(ValueError, match="differs from the reference in the check at its first use"):
        attention_forward(query, query, query, layout, scale=1.0, implementation="mosaic")


NF4_WEIGHT = NF4.encode(jnp.ones((4096, 4096), jnp.bfloat16))


@pytest.mark.full
@pytest.mark.parametrize("wrong", [False, True])
def test_decoding_kernels_and_those_of_few_tokens_are_checked(gpu, monkeypatch, wrong):
    """Each on small cases: the decoding pass, one for each plan of up to 16 tokens, of Mosaic and of Triton."""
    by = 1.1 if wrong else 1.0
    for module in (quant_mosaic, quant_triton):
        monkeypatch.setattr(module, "dequantize", lambda weight, dtype=None: weight.decode(dtype))

    def product(x, weight, *_):
        return (exact_product(x, weight) * by).astype(x.dtype)

    monkeypatch.setattr(quant_mosaic, "_small_matmul", product)
    monkeypatch.setattr(quant_triton, "small_matmul", product)
    monkeypatch.setattr(quant_triton.compat, "triton_refusal", lambda: None)
    for module, name in ((quant_mosaic, "mosaic, few tokens"), (quant_triton, "triton, up to 16 tokens")):
        for tokens in (1, 16):
            reason = module.small_refusal(NF4_WEIGHT, jnp.bfloat16, tokens)
            assert "differs" in reason if wrong else reason is None, reason
        assert module.refusal(NF4_WEIGHT, jnp.bfloat16) is None
        assert sum(key[1] == name for key in dispatch.first_uses) == 2
    for module in (quant_mosaic, quant_triton):
        monkeypatch.setattr(module, "dequantize", lambda weight, dtype=None: weight.decode(dtype) * 1.1)
        reason = module.refusal(NF4_WEIGHT, jnp.float16)
        assert "differs" in reason


@pytest.mark.parametrize("wrong", [False, True])
def test_the_grouped_product_of_arrays_is_checked(gpu, monkeypatch, wrong):
    def product(x, weight, groups, contract, extra=None, tokens=None):
        out = grouped_reference.product(x, weight, groups, contract, extra)
        return out * 1.1 if wrong else out

    monkeypatch.setattr(grouped_api.mosaic, "product", product)
    groups = groups_of(jnp.asarray((128, 0, 5), jnp.int32), 133)
    reason = grouped_api.implementations(jnp.dtype("bfloat16"), 256, 128, groups)["mosaic"]()
    assert "differs" in reason if wrong else reason is None, reason


def test_the_small_case_has_every_kind_of_token():
    runs = dict(first_use._RUNS[1:])
    assert first_use._RUNS[0][0] == 0 and 1 in runs.values()
    assert max(runs.values()) > first_use._WINDOW


@pytest.mark.full
def test_cudnn_is_checked_with_as_many_documents_as_a_call_has(gpu, monkeypatch, caplog, tmp_path):
    """Here dq is wrong from 24 documents a row on, and right with fewer, as cuDNN 9.19's is from somewhere above 32."""
    monkeypatch.setattr(targets, "_device_capability", lambda platform: (10, 0))
    monkeypatch.setattr(cudnn, "forward", reference.forward)

    def backward(*arguments, **options):
        dquery, *others = reference.backward(*arguments, **options)
        return dquery * (1 if arguments[6].max_documents < 24 else 0.5), *others

    monkeypatch.setattr(cudnn, "backward", backward)
    query, key = jnp.ones((2, 96, 4, 64), jnp.bfloat16), jnp.ones((2, 96, 2, 64), jnp.bfloat16)

    def chosen(most, **options):
        layout = packed_layout((2, 96), jnp.ones((2, 96), jnp.int32), most)
        jax.jit(lambda q, k: attention(q, k, k, layout, scale=1.0, **options))(query, key)
        return dispatch.record["attention"]

    assert [chosen(most)[0] for most in (1, 2, 16)] == ["cudnn"] * 3 and chosen(2, window=30)[0] == "cudnn"
    assert "ERROR" not in [record.levelname for record in caplog.records]
    name, refused = chosen(24)
    assert name == "reference" and "differs from the reference in the check" in refused["cudnn"]
    assert "result 2" in refused["cudnn"]  # dq
    said = caplog.records[-1].getMessage()  # after the error
    assert said.startswith("attention runs on plain JAX (") and "cudnn: differs from the reference" in said
    assert "implementation cudnn is disabled for bfloat16, 2 x 96 x 4 over 2 heads x 64, up to 24" in caplog.text
    with pytest.raises(ValueError, match="'cudnn' cannot serve this call: differs from the reference"):
        chosen(24, implementation="cudnn")


@pytest.mark.parametrize("wrong", range(5))
def test_cudnn_check_sees_each_wrong_result(gpu, monkeypatch, wrong):
    """Of one document of the second row: out, lse, dq, dk, dv; and what is written at padding."""
    monkeypatch.setattr(targets, "_device_capability", lambda platform: (10, 0))
    token = 0 if wrong % 2 else 31  # a document's, or padding behind one of 24 tokens

    def forward(*arguments, **options):
        out, lse = reference.forward(*arguments, **options)
        out = out.at[1, 16].mul(3) if wrong == 0 else out
        return out, lse.at[1, :, 16].add(9) if wrong == 1 else lse

    def backward(*arguments, **options):
        gradients = list(reference.backward(*arguments, **options))
        if wrong > 1:
            gradients[wrong - 2] = gradients[wrong - 2].at[1, token + 16].add(2)
        return tuple(gradients)

    monkeypatch.setattr(cudnn, "forward", forward)
    monkeypatch.setattr(cudnn, "backward", backward)
    layout = packed_layout((2, 96), jnp.ones((2, 96), jnp.int32), 6)
    query = jax.ShapeDtypeStruct((2, 96, 2, 64), jnp.bfloat16)
    assert "differs from the reference" in first_use.cudnn_refusal(query, 2, layout, None)


def test_a_pass_is_forgotten_with_another_version_of_what_makes_kernels(gpu, monkeypatch, tmp_path):
    """Of Triton, jax-triton, cuDNN (a package's or the system's), the CUDA packages and the driver; not of others."""
    kernel, installed, loaded = Counted(), {"numpy": "2", "triton": "3.6"}, {"cudnn": 91900}
    driver = tmp_path / "version"

    class Loaded:
        cudnn_get_version = staticmethod(lambda: loaded["cudnn"])

    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    monkeypatch.setattr("jax._src.lib.cuda_versions", Loaded)
    monkeypatch.setattr(versions, "_DRIVER", driver)

    def checks_of_a_new_process():
        shutil.rmtree(tmp_path / "site", ignore_errors=True)
        for name, version in installed.items():
            (tmp_path / "site" / f"{name.replace('-', '_')}-{version}.dist-info").mkdir(parents=True)
        versions.of_kernels.cache_clear()
        monkeypatch.setattr(dispatch, "first_uses", {})
        before = kernel.calls
        assert check(kernel) is None
        return kernel.calls - before

    try:
        assert [checks_of_a_new_process() for _ in range(2)] == [1, 0]
        for changed, name, version in [
            (installed, "triton", "3.7"),
            (installed, "jax_triton", "0.4.1"),
            (installed, "nvidia-cudnn-cu13", "9.20"),
            (installed, "nvidia-cuda-nvcc", "13.1"),
            (installed, "jax-cuda13-plugin", "0.11.2"),
            (loaded, "cudnn", 92000),
        ]:
            changed[name] = version
            assert [checks_of_a_new_process() for _ in range(2)] == [1, 0], name
        driver.write_text("NVRM version: 580.95.05")
        assert [checks_of_a_new_process() for _ in range(2)] == [1, 0]
        installed["numpy"] = "3"
        assert checks_of_a_new_process() == 0
    finally:
        versions.of_kernels.cache_clear()
