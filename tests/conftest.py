"""Settings that every test shares. They must be in the environment before jax is imported."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import signal
import tempfile
import zlib
from pathlib import Path

import hypothesis
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
# The second is a mere number here, which keeps programs of the two settings apart: JAX looks for a function's compiled
# program before it looks at the first.
WITHOUT_PASSES = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_XLA_PROFILE_VERSION")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    # Eight virtual devices, so that meshes can be tested without any accelerator.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
if "xla_cpu_collective_call_terminate_timeout_seconds" not in os.environ["XLA_FLAGS"]:
    # XLA ends the process when a virtual device lets the others wait for 40 s, which on a busy machine it may.
    os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_terminate_timeout_seconds=1200"
if "xla_cpu_disable_new_fusion_emitters" not in os.environ["XLA_FLAGS"]:
    # XLA's older code generator for fusions, which has no pipeline of MLIR passes for each of them. Without the costly
    # passes (below) it compiles in a third to a half of the time. With them the gain is 10 to 20 % over many small
    # programs, and a large one may take longer: 98 tests of tests/train took 331 s of processor time, and 449 s before.
    os.environ["XLA_FLAGS"] += " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Without XLA's costly passes on a CPU, which are two thirds of the time that it takes to compile a tiny model's
    # program: a test that trains one and evaluates it took 7.4 s of processor time, and 14.4 s with them. Processes
    # that tests start compile so too. Two different programs that must give the same bits may need the passes, which
    # contract and order sums in the same way in both: their tests use the fixture `compiled_in_full`. tests/golden and
    # tests/gpu/aot compile as runs do.
    for name in WITHOUT_PASSES:
        os.environ.setdefault(name, "1")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".pytest_cache" / "jax"))
# Small programs too: thousands of them take a minute to compile, and the workers of a run share what one has compiled.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# No lines of source files beside a program's operations: a tenth of the time that it takes to be traced and lowered.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches for the network
# Tokenised rows and what was measured: each process of a run has its own, and none meets what another run left.
os.environ["JAXTUNE_CACHE"] = tempfile.mkdtemp(prefix="jaxtune-tests-")
atexit.register(shutil.rmtree, os.environ["JAXTUNE_CACHE"], ignore_errors=True)

# Processes that tests of signals start ignore what this one ignores, as a shell's jobs in the background and nohup do.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)

# No limit of time: a busy machine is no finding. In CI the examples are the same on every run, so that a red one can be
# repeated; `make full` draws others, and more.
_UNHURRIED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("ci", derandomize=True, database=None, max_examples=20, **_UNHURRIED)
hypothesis.settings.register_profile("full", max_examples=300, print_blob=True, **_UNHURRIED)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    """`-m "not full"` runs one case of each parametrised test; the others are marked `full`. A checksum of the test's
    name picks it: tests take different families, formats and kernels, and the same ones on each run."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("full") is None:
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for test, unmarked in cases.items():
        chosen = unmarked[zlib.crc32(test.encode()) % len(unmarked)]
        for item in unmarked:
            if item is not chosen:
                item.add_marker(pytest.mark.full)


_imported = contextlib.ExitStack()


def pytest_collection_finish():
    """What is imported stays: the garbage collector need not look through it again and again (a tenth of the time)."""
    from jaxtune.system.heap import frozen_heap

    _imported.enter_context(frozen_heap())
    gc.set_threshold(20_000, 20, 20)


def pytest_unconfigure():
    _imported.close()  # or libraries say at the end that they were not tidied up


@pytest.fixture(scope="session", autouse=True)
def programs_are_kept_as_the_command_keeps_them():
    """From the first test on, whichever it is: else the first one that runs the command would begin another cache."""
    from jaxtune.models.programs import kept as kept_programs
    from jaxtune.system.program_cache import use_program_cache

    use_program_cache()
    # In this process JAX alone keeps them: no test depends on what another one has lowered.
    kept_programs.cache_of_programs = lambda: None


@pytest.fixture(scope="module", autouse=True)
def programs_end_with_their_module():
    """No other module needs a module's programs, and thousands of them take gigabytes."""
    import jax  # not before the settings above

    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def with_costly_passes():
    """A context in which programs are compiled with XLA's costly passes."""
    import jax

    @contextlib.contextmanager
    def compiled():
        before = {name: jax.config.values[name.lower()] for name in WITHOUT_PASSES}
        jax.config.update("jax_disable_most_optimizations", False)
        jax.config.update("jax_xla_profile_version", 0)
        try:
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name.lower(), value)

    return compiled if jax.default_backend() == "cpu" else contextlib.nullcontext


@pytest.fixture
def compiled_in_full(with_costly_passes):
    """For a test in which two programs must agree in more digits than they do without XLA's costly passes."""
    with with_costly_passes():
        yield


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real models, tokenizers and datasets that nobody here made."""
    folder = os.environ.get("JAXTUNE_TEST_DATA")
    if not folder:
        pytest.skip("JAXTUNE_TEST_DATA is not set: it names the unpacked folder of real test data")
    path = Path(folder)
    if not path.is_dir():
        pytest.fail(f"JAXTUNE_TEST_DATA={folder} is not a folder")
    return path
