"""Several processes make the run that one makes; what happens to one of them happens to all, and nothing is lost.

Real processes over loopback, on CPUs. Starting them takes most of the time, so few tests ask for much of each.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from jaxtune import cli
from jaxtune.system import joining, processes, shared_folders
from jaxtune.train.config import MeshConfig
from jaxtune.train.folder import record
from jaxtune.train.folder.checkpoint import saved_steps
from jaxtune.train.trainer import Trainer
from tests.faults.command import make_folder
from tests.train import sampling_of_processes
from tests.train.tiny_runs import dataset, documents, lora_model, make_config

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "examples" / "launch"
PATIENCE_SECONDS = 900  # of a machine that does much else; a process that hangs fails the test
ADAPTER = Path("adapter") / "adapter_model.safetensors"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("several"))


@pytest.fixture(scope="module")
def alone(recipe) -> Path:
    """The run of one process with two devices."""
    output = recipe.parent / "alone"
    assert cli.main(["train", str(recipe), f"output={output}", "mesh.data=2"]) == 0
    return output


def environment(**changes: str) -> dict[str, str]:
    """Of a process with one device that finds jaxtune, and programs that another test has compiled."""
    folders = [ROOT, ROOT / "tests" / "models", Path(__file__).with_name("every_process_keeps")]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    # One device a process, whatever this one has; and a process that waits for a busy machine is not ended.
    flags = re.sub(r"--xla_force_host_platform_device_count=\S*", "", os.environ["XLA_FLAGS"])
    return os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"} | changes


@contextlib.contextmanager
def port() -> Iterator[int]:
    """A port that the system chose, and gives nobody else while the context lasts."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def run_all(recipe: Path, output: Path, wanted: list[str], faults: list[tuple[str, int]]) -> list[tuple[int, str]]:
    """(exit code, words) of processes to which these things happen, one each, started by hand."""
    script = str(Path(__file__).with_name("one_of_several.py"))
    run = [str(recipe), f"output={output}", *wanted]
    return run_together([[script, fault, str(step), *run] for fault, step in faults])


def run_together(commands: list[list[str]]) -> list[tuple[int, str]]:
    """(exit code, words) of processes of one run, each with what Python is to run in it."""
    with port() as number:
        started = [
            subprocess.Popen(
                [
                    sys.executable,
                    *command,
                    f"--coordinator=127.0.0.1:{number}",
                    f"--processes={len(commands)}",
                    f"--process={index}",
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment(),
            )
            for index, command in enumerate(commands)
        ]
        try:
            said = [process.communicate(timeout=PATIENCE_SECONDS) for process in started]
        finally:
            for process in started:
                process.kill()
    return [(process.returncode, words) for process, (words, _) in zip(started, said, strict=True)]


def steps(output: Path) -> list[dict]:
    """What metrics.jsonl says of each step and evaluation, but for times."""
    kept = ("step", "loss", "grad_norm", "eval_loss", "target_tokens", "epoch", "skipped")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in kept if key in line} for line in lines if "loss" in line or "eval_loss" in line]


def shares(output: Path) -> list[float]:
    """Of each step the share of tokens in its rows, without padding."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["real_tokens_per_second"] / line["tokens_per_second"] for line in lines if "loss" in line]


def same_tensors(ours: Path, theirs: Path, tolerance: float = 0.0) -> None:
    a, b = load_file(ours), load_file(theirs)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(np.float32(a[name]), np.float32(b[name]), rtol=0, atol=tolerance, err_msg=name)


AT_THE_END = """
    import os, signal, sys
    import jax
    from jaxtune.system import ending, joining

    fault, address, count, index = sys.argv[1], *(word.split("=")[1] for word in sys.argv[2:])
    joining.HEARTBEAT_SECONDS = 20
    joining.join(address, int(count), int(index))
    jax.devices()
    if fault == "kill":
        jax.distributed.shutdown = lambda: os.kill(os.getpid(), signal.SIGKILL)
    ending.leave(0)
"""


@pytest.mark.full
def test_one_that_is_killed_once_the_run_is_complete_leaves_the_others_their_code():
    script = textwrap.dedent(AT_THE_END)
    ended = run_together([["-c", script, fault] for fault in ("wait", "kill", "wait")])
    assert [code for code, _ in ended] == [0, -signal.SIGKILL, 0], ended
    assert all("the run is complete; at its end another process was gone" in ended[index][1] for index in (0, 2))


@pytest.mark.full
def test_two_processes_of_slurm_make_the_run_of_one(recipe, alone, tmp_path):
    """Through the SLURM script, with an srun that starts two tasks of one host."""
    output, tools = tmp_path / "run", tmp_path / "tools"
    tools.mkdir()
    (tools / "jaxtune").write_text(f'#!/bin/sh\nexec {sys.executable} -m jaxtune "$@"\n')
    (tools / "srun").write_text(
        "#!/bin/bash\n"
        "while [[ $1 == --* ]]; do shift; done\n"
        "for i in 0 1; do\n"
        '  SLURM_PROCID=$i SLURM_LOCALID=$i "$@" > "$LOGS/$i" 2>&1 & pids+=($!)\n'
        "done\n"
        'code=0; for pid in "${pids[@]}"; do wait "$pid" || code=$?; done; exit $code\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    with port() as number:
        step = dict(
            SLURM_JOB_ID="1",
            SLURM_STEP_NODELIST="localhost",
            SLURM_NTASKS="2",
            SLURM_STEP_NUM_TASKS="2",
            SLURM_STEP_TASKS_PER_NODE="2",
            SLURM_NODEID="0",
            JAX_COORDINATOR_PORT=str(number),
            LOGS=str(tmp_path),
        )
        path = f"{tools}{os.pathsep}{os.environ['PATH']}"
        # No mesh: on CPUs, too, several processes are all used.
        done = subprocess.run(
            ["bash", LAUNCH / "slurm.sh", recipe, f"output={output}"],
            env=environment(PATH=path, **step),
            timeout=PATIENCE_SECONDS,
        )
    said = [(tmp_path / str(index)).read_text() for index in range(2)]
    assert done.returncode == 0, said
    assert steps(output) == steps(alone)
    same_tensors(output / ADAPTER, alone / ADAPTER)
    same_tensors(output / "merged" / "model.safetensors", alone / "merged" / "model.safetensors")
    assert f"done: {output}" in said[0] and "training rows" not in said[1]  # one of them speaks


@pytest.mark.full
def test_two_processes_evaluate_what_one_does(alone, capsys):
    """A base that is divided over them; the first one says the numbers."""
    score = ["evaluate", str(alone / "config.yaml"), "mesh={data: 1, fsdp: 2}"]
    capsys.readouterr()
    assert cli.main(score) == 0
    want = json.loads(capsys.readouterr().out)
    (code, said), (other_code, nothing) = run_together([["-m", "jaxtune", *score]] * 2)
    assert (code, other_code) == (0, 0), said + nothing
    got = json.loads(said[said.index("{") :])
    assert (got["weights"], got["eval_targets"]) == (want["weights"], want["eval_targets"])
    assert got["eval_loss"] == pytest.approx(want["eval_loss"], rel=1e-6)
    assert "eval_loss" not in nothing


@pytest.mark.full
def test_what_happens_to_one_process_ends_both_and_the_same_command_goes_on(recipe, tmp_path):
    """All parameters are trained, and divided: a checkpoint holds parts that each process has written."""
    wanted = ["adapter=null", "mesh.fsdp=2"]
    whole, output = tmp_path / "whole", tmp_path / "run"
    assert cli.main(["train", str(recipe), f"output={whole}", *wanted]) == 0
    wanted.append("checkpoint.every_steps=1")
    # The first one's disk is full: both say so, before they begin.
    (first, _), (second, words) = run_all(recipe, output, wanted, [("full", 0), ("none", 0)])
    assert (first, second) == (2, 2) and "no room for a checkpoint" in words
    # A signal to one of them: both save the same step.
    ended = run_all(recipe, output, wanted, [("none", 0), ("term", 2)])
    assert [code for code, _ in ended] == [75, 75], ended
    assert "SIGTERM after step" in ended[0][1] and "; saved in" in ended[0][1]
    # One process with as many devices goes on, to the same bits.
    assert cli.main(["train", str(recipe), f"output={output}", *wanted]) == 0
    assert steps(output) == steps(whole)
    same_tensors(output / "merged" / "model.safetensors", whole / "merged" / "model.safetensors")


@pytest.mark.full
def test_an_error_and_a_signal_while_one_process_waits_for_rows_save_in_both(recipe, tmp_path):
    """No process has given up the state of the last step before all have the rows of the next one."""
    wanted, output = ["adapter=null", "mesh.fsdp=2", "checkpoint.every_minutes=null"], tmp_path / "run"
    whole = tmp_path / "whole"
    assert cli.main(["train", str(recipe), f"output={whole}", *wanted]) == 0
    (first, said), (second, words) = run_all(recipe, output, wanted, [("none", 0), ("no rows", 2)])
    assert first == 2 and second and "this process has no rows" in said and "no rows" in words, said + words
    assert saved_steps(output / "checkpoints") == [1]
    ended = run_all(recipe, output, wanted, [("stall", 2), ("none", 0)])
    assert [code for code, _ in ended] == [75, 75] and "SIGTERM after step 2; saved in" in ended[0][1], ended
    assert saved_steps(output / "checkpoints") == [1, 2]
    assert cli.main(["train", str(recipe), f"output={output}", *wanted]) == 0
    same_tensors(output / "merged" / "model.safetensors", whole / "merged" / "model.safetensors")


@pytest.mark.full
def test_an_error_in_a_callback_or_an_evaluation_of_one_process_saves_in_both(recipe, tmp_path):
    wanted, whole = ["adapter=null", "mesh.fsdp=2", "checkpoint.every_minutes=null", "steps=4"], tmp_path / "whole"
    assert cli.main(["train", str(recipe), f"output={whole}", *wanted]) == 0
    output, wanted = tmp_path / "run", [*wanted, "evaluation.every_steps=3"]
    (first, said), (second, words) = run_all(recipe, output, wanted, [("callback", 0), ("bad callback", 1)])
    assert first == 2 and second and "this callback fails" in said and "this callback fails" in words, said + words
    assert saved_steps(output / "checkpoints") == [2]
    (first, said), (second, words) = run_all(recipe, output, wanted, [("none", 0), ("bad rows", 0)])
    assert first == 2 and second and "this process has no held-out rows" in said, said + words
    assert saved_steps(output / "checkpoints") == [2, 3]
    assert cli.main(["train", str(recipe), f"output={output}", *wanted]) == 0
    same_tensors(output / "merged" / "model.safetensors", whole / "merged" / "model.safetensors")


@pytest.mark.full
def test_processes_that_are_started_differently_are_refused(recipe, tmp_path):
    """Each would train its own weights, and nobody would see it."""
    run = ["-m", "jaxtune", "train", str(recipe), f"output={tmp_path}", "mesh.data=2"]
    ended = run_together([run, [*run, "optim.learning_rate=0.02"]])
    for code, words in ended:
        assert code == 2, words
        assert "optim.learning_rate: process 1 has 0.02, the first process 0.01; start all of them with" in words


@pytest.mark.full
def test_a_template_and_an_adapter_may_lie_elsewhere_on_each_host(recipe, alone, tmp_path):
    """Their contents are compared; results and checkpoints name those of the first process."""
    commands, settings = [], yaml.safe_load(recipe.read_text())
    for host in ("one", "two"):
        (tmp_path / host).mkdir()
        shutil.copytree(alone / "adapter", tmp_path / host / "adapter")
        shutil.copy(
            ROOT / "jaxtune/train/data/rendering/chat_templates/chatml.jinja", tmp_path / host / f"{host}.jinja"
        )
        data = settings["data"] | {"template": str(tmp_path / host / f"{host}.jinja"), "length": 64}
        changes = dict(adapter={"path": str(tmp_path / host / "adapter")}, data=data, output=str(tmp_path / "run"))
        (tmp_path / f"{host}.yaml").write_text(yaml.safe_dump(settings | changes | {"mesh": {"data": 2}, "steps": 2}))
        commands.append(["-m", "jaxtune", "train", str(tmp_path / f"{host}.yaml"), "checkpoint.every_steps=1"])
    said = run_together(commands)
    assert [code for code, _ in said] == [0, 0], said
    shutil.rmtree(tmp_path / "run" / "merged")
    (first, words), (second, _) = said = run_together(commands)
    assert (first, second) == (0, 0) and "resuming from step 2 of 2" in words, said
    with open(tmp_path / "two" / "two.jinja", "a") as file:
        file.write(" ")
    for code, words in run_together(commands):
        assert code == 2 and "data.template: process 1 has [{'bytes': " in words, words


def test_what_the_first_raises_all_raise():
    """While the others wait for what it reads, writes or fills in first; and what another one raises, too."""
    ended = run_together([[str(Path(__file__).with_name("first_fails.py"))]] * 2)
    full = "OSError 28 [Errno 28] No space left on device: 'out/adapter'"
    for code, words in ended:
        said = [line for line in words.splitlines() if ": " in line]
        assert code == 0, words
        for line in (
            "reading: ValueError None data.train: no such rows",
            "no JSON: TypeError None Object of type set is not JSON serializable",
            f"writing: {full}",
            f"in turns: {full}",
            "the last: ValueError None data.train: no such rows",
        ):
            assert line in said, words
        assert "entered" not in words


def test_the_service_forgets_what_all_have_read():
    """Of 200 exchanges in a drawn order, some of which fail; meanwhile it has the keys of three at most."""
    for code, words in run_together([[str(Path(__file__).with_name("many_exchanges.py"))]] * 2):
        [(keys, most)] = re.findall(r"keys: (.*) at most (\d+)", words)
        assert code == 0 and keys == "[]" and int(most) <= 12, words


def test_what_must_be_the_same_is_named(monkeypatch):
    """Of the third process, which sees it itself; all of them say it."""
    monkeypatch.setattr(processes, "count", lambda: 3)
    monkeypatch.setattr(processes, "of_first", lambda value: {"jax": "1", "rows": ["a", 2]})
    monkeypatch.setattr(processes, "all_of", lambda value: [None, None, value])
    processes.require_same({"jax": "1", "rows": ("a", 2)}, "unused")
    with pytest.raises(ValueError, match=r"rows: process 2 has \['b', 2\], the first process \['a', 2\]; share them"):
        processes.require_same({"jax": "1", "rows": ("b", 2)}, "share them")


def test_rows_and_weights_that_differ_are_refused(tmp_path, monkeypatch):
    """A folder of each host's own may hold others. Here the first process is another run."""
    said = []
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "of_first", lambda value: said[0])
    monkeypatch.setattr(processes, "all_of", lambda value: [None, value])

    def rows(seed):
        return {"data.train": dataset(documents(9, seed=seed)), "data.eval": None}

    def first_saw(what, fix):
        said[:] = [json.loads(json.dumps(what))]

    with monkeypatch.context() as patch:
        patch.setattr(processes, "require_same", first_saw)
        record.require_same_rows(rows(0))
    record.require_same_rows(rows(0))
    with pytest.raises(ValueError, match="data.train: process 1 has '9 documents, .* all of them need the same rows"):
        record.require_same_rows(rows(1))
    given, said[:] = lora_model(), [{"the base model": "abc"}]
    given.base_digest = "abd"
    with monkeypatch.context() as patch:  # it is made as the only process
        patch.setattr(processes, "count", lambda: 1)
        patch.setattr(processes, "all_of", lambda value: [value])
        patch.setattr(processes, "of_first", lambda value: value())
        trainer = Trainer(given, None, make_config(tmp_path, mesh=MeshConfig(1, 1)), dataset(documents(9)))
    with pytest.raises(ValueError, match="the base model: process 1 has 'abd', the first process 'abc'; give all"):
        trainer.model.placed_frozen(trainer.engine)


@pytest.mark.full
def test_four_processes_divide_a_base_and_rows_and_go_on_when_one_was_killed(recipe, tmp_path):
    """What is trained is whole, what it is merged with lies in parts, or whole on each as a plan says; sums of four
    have another order than in one."""
    wanted = ["mesh.data=2", "mesh.fsdp=2", "rows_per_step=4", "precision=fp32", "steps=2", "data.eval=null"]
    wanted.append("checkpoint.every_steps=1")
    whole, output = tmp_path / "whole", tmp_path / "run"
    assert cli.main(["train", str(recipe), f"output={whole}", *wanted]) == 0
    wanted.append("memory.plan=keep; resident=1")
    # One is killed: the others end, when the service misses it or in the sum that they wait for. Then they go on.
    ended = run_all(recipe, output, wanted, [("outlive", 0), ("outlive", 0), ("kill", 2), ("outlive", 0)])
    codes = [code for code, _ in ended]
    assert codes.pop(2) == -9 and not {0, 75} & set(codes), ended
    done = subprocess.run(
        [sys.executable, "-m", "jaxtune", "launch", "--processes=4", str(recipe), f"output={output}", *wanted],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for file in (ADAPTER, Path("merged") / "model.safetensors"):
        same_tensors(output / file, whole / file, 1e-5)


@pytest.mark.full
@pytest.mark.parametrize("streaming", ["true", "false"])
def test_two_processes_mix_the_rows_of_one_and_go_on_when_one_was_killed(recipe, tmp_path, streaming):
    """The files differ in size, and one device goes on with the rows of two."""
    lines = (recipe.parent / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "shards").mkdir()
    for shard, rows in enumerate((lines[:3], lines[3:])):
        (tmp_path / "shards" / f"{shard}.jsonl").write_text("\n".join(rows))
    mixed = f"[[{tmp_path}/shards, 3], [{recipe.parent}/eval.jsonl, 1]]"
    wanted = [f"data.train={mixed}", f"data.streaming={streaming}", "data.buffer_size=6", "data.eval=null"]
    wanted += ["mesh.data=2", "steps=8", "checkpoint.every_steps=1", "schedule.name=constant"]
    whole, output = tmp_path / "whole", tmp_path / "run"
    assert cli.main(["train", str(recipe), f"output={whole}", *wanted]) == 0
    ended = run_all(recipe, output, wanted, [("outlive", 0), ("kill", 5)])
    assert ended[1][0] == -9 and ended[0][0] not in (0, 75), ended
    ended = run_all(recipe, output, wanted, [("none", 0), ("none", 0)])
    assert [code for code, _ in ended] == [0, 0] and "resuming from step" in ended[0][1], ended
    assert steps(output)[-8:] == steps(whole)[-8:]
    same_tensors(output / ADAPTER, whole / ADAPTER)
    assert shares(output)[-3:] == pytest.approx(shares(whole)[-3:])
    for result in ("adapter", "merged"):
        shutil.rmtree(output / result)
    assert cli.main(["train", str(recipe), f"output={output}", *wanted, "mesh.data=1", "steps=9"]) == 0


@pytest.mark.full
def test_preferences_and_qat_are_those_of_one_process(tmp_path):
    """Rounded weights, and a reference that is looked up once for all rows, which every process fills in."""
    recipe = make_folder(tmp_path, hidden_size=32, head_dim=16)
    rows = [{"prompt": "Name a colour:", "chosen": f" red {i}", "rejected": f" {i} or blue"} for i in range(16)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = ["objective=dpo", "objective.precompute_ref_log_probs=true", f"data.train={tmp_path}/pairs.jsonl"]
    wanted += ["data.eval=null", "steps=3", "mesh.data=2", "adapter.lora_dropout=0", "qat=int4", "qat.group_size=32"]
    whole, output = tmp_path / "whole", tmp_path / "run"
    assert cli.main(["train", str(recipe), f"output={whole}", f"data.cache_dir={tmp_path}/own", *wanted]) == 0
    ended = run_all(recipe, output, wanted, [("none", 0), ("none", 0)])
    assert [code for code, _ in ended] == [0, 0], ended
    assert "log-probabilities of the reference: one pass over" in ended[0][1]
    assert steps(output) == steps(whole)
    for file in (ADAPTER, Path("merged") / "model.safetensors"):
        same_tensors(output / file, whole / file)


@pytest.mark.full
def test_a_teacher_runs_in_all_processes_and_the_first_stores_what_all_train_on(recipe, tmp_path):
    """A full disk of the first one ends both; then one file has what one process computes, and both read it."""
    wanted = ["objective=distill", f"objective.teacher={recipe.parent}/model", "objective.teacher_top_k=4"]
    wanted += ["objective.on_policy=0", "objective.beta=0", "steps=2", "mesh.data=2", "export.adapter=false"]
    whole, output, cache = tmp_path / "whole", tmp_path / "run", tmp_path / "cache"
    assert cli.main(["train", str(recipe), f"output={whole}", f"data.cache_dir={tmp_path}/own", *wanted]) == 0
    wanted.append(f"data.cache_dir={cache}")
    (first, words), (second, heard) = run_all(recipe, output, wanted, [("full cache", 0), ("none", 0)])
    assert (first, second) == (2, 2) and "cannot be written ([Errno 28]" in words and "process 0" in heard, (
        words + heard
    )
    ended = run_all(recipe, output, wanted, [("none", 0), ("none", 0)])
    assert [code for code, _ in ended] == [0, 0], ended
    assert "log-probabilities of the teacher: one pass over" in ended[0][1]
    assert steps(output) == steps(whole)
    ours, theirs = (sorted(folder.glob("*teacher_*")) for folder in (cache, tmp_path / "own"))
    assert len(ours) == 2 and [path.read_bytes() for path in ours] == [path.read_bytes() for path in theirs]


REWARDS = """
import os

def even(completion_ids, **columns):
    with open(os.path.join(os.path.dirname(__file__), "callers"), "a") as file:
        file.write(f"{os.getpid()} ")
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]
"""


def rewards_of(output: Path) -> list[dict]:
    """What metrics.jsonl says of answers, and the answers themselves."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "loss", "grad_norm", "reward", "completions/mean_length", "eval_answers/even")
    answers = [json.loads(line)["answer"] for line in (output / "rollouts.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in kept if name in line} for line in lines] + [{"answers": answers}]


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("grpo", "{fsdp: 2}"),
        pytest.param("grpo", "{data: 2}", marks=pytest.mark.full),
        pytest.param("distill", "{fsdp: 2}", marks=pytest.mark.full),
    ],
)
def test_two_processes_sample_what_one_does(name, mesh, recipe, tmp_path):
    """Tokens, losses, and answers to held-out rows; the first process alone calls the rewards."""
    (tmp_path / "mine.py").write_text(REWARDS)
    even = f"{tmp_path}/mine.py:even"
    own = "teacher: base" if name == "distill" else f"reward_funcs: ['{even}'], num_generations: 4"
    wanted = [f"objective={{name: {name}, {own}, max_completion_length: 6}}"]
    wanted += ["rows_per_step=8", "steps=3", "precision=fp32", "memory.plan=keep", "adapter.lora_dropout=0"]
    wanted += [f"evaluation={{generate: ['{even}'], generate_rows: 5, temperature: 0.9, max_new_tokens: 4}}"]
    wanted += ["data.train_on=responses", "data.length=64", "export.adapter=false"]
    alone, output = tmp_path / "alone", tmp_path / "run"
    assert cli.main(["train", str(recipe), f"output={alone}", *wanted, "mesh={data: 1, fsdp: 1}"]) == 0
    (tmp_path / "callers").unlink()
    ended = run_all(recipe, output, [*wanted, f"mesh={mesh}"], [("none", 0), ("none", 0)])
    assert [code for code, _ in ended] == [0, 0], ended
    assert len(set((tmp_path / "callers").read_text().split())) == 1
    found, expected = rewards_of(output), rewards_of(alone)
    assert found[-1] == expected[-1] and len(found) == len(expected)
    for line, other in zip(found[:-1], expected[:-1], strict=True):
        assert line == pytest.approx(other, rel=1e-3, abs=1e-5)


@pytest.mark.full
def test_a_sampler_of_two_processes_gives_the_rows_of_one():
    """Of weights that each has whole, prompts that share a beginning, and long ones."""
    command = [str(Path(__file__).with_name("sampling_of_processes.py"))]
    model = sampling_of_processes.model_of()
    expected = [sampling_of_processes.rows_of(model, way, 4) for way in sampling_of_processes.WAYS]
    for code, words in run_together([command] * 2):
        found = [json.loads(line) for line in re.findall(r"^rows (.*)$", words, re.M)]
        assert code == 0 and found == expected, words


@pytest.mark.parametrize("index", range(5))
def test_what_all_need_is_written_once_for_each_folder(index, monkeypatch):
    """Processes 0, 1 and 4 share the first one's folder; 2 and 3, on another host, share another one."""
    answers = iter([["a", "a", "b", "b", "b"], [True, True, False, False, True]])
    monkeypatch.setattr(processes, "count", lambda: 5)
    monkeypatch.setattr(processes, "index", lambda: index)
    monkeypatch.setattr(processes, "first", lambda: False)  # the first one's file is not there to be removed
    monkeypatch.setattr(processes, "all_of", lambda value: next(answers))
    monkeypatch.setattr(processes, "of_first", lambda value: ".")
    assert shared_folders.must_write(Path("/")) == (index in (0, 2))


def test_launch_ends_with_the_code_of_the_first_that_failed(recipe):
    done = subprocess.run(
        [sys.executable, "-m", "jaxtune", "launch", "--processes=2", str(recipe), "stps=2"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 2 and "unknown key stps" in done.stderr


@pytest.mark.parametrize("override", ["evaluation.exact_match_rows=4", "optim.offload=true"])
def test_what_several_processes_cannot_do_is_refused(recipe, override, monkeypatch, capsys):
    monkeypatch.setattr(processes, "count", lambda: 2)
    assert cli.main(["train", str(recipe), "adapter=null", override]) == 2
    assert override.split("=")[0] in capsys.readouterr().err


def test_the_kubernetes_job_names_each_process(tmp_path):
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    spec, name = job["spec"], job["metadata"]["name"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    assert service["spec"]["selector"] == {"job-name": name} and service["metadata"]["name"] == pod["subdomain"]
    (tmp_path / "jaxtune").write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    (tmp_path / "jaxtune").chmod(0o755)
    places = []
    for index in range(spec["completions"]):
        variables = {entry["name"]: entry["value"] for entry in container["env"]}
        variables |= {"JOB_COMPLETION_INDEX": str(index), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
        said = subprocess.run(
            [*container["command"], *container["args"]], env=variables, capture_output=True, text=True, check=True
        ).stdout
        given = dict(word[2:].split("=", 1) for word in said.split() if word.startswith("--"))
        places.append(joining._place(given["coordinator"], int(given["processes"]), int(given["process"])))
    count = spec["parallelism"]
    assert places == [joining.Place(f"{name}-0.{pod['subdomain']}:8476", count, index) for index in range(count)]


@pytest.mark.parametrize(
    ("surroundings", "found"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, None),  # of a batch script
        (
            {
                "SLURM_STEP_NUM_TASKS": "11",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
                "SLURM_NODEID": "2",
                "SLURM_PROCID": "9",
                "SLURM_LOCALID": "1",
            },
            (11, 9, 1, 3),
        ),
        (
            {
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            (4, 3, 1, 2),
        ),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
    ],
)
def test_where_a_process_stands_is_read_from_its_surroundings(surroundings, found):
    assert joining._by_surroundings(surroundings) == found


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ("", "--xla_gpu_shard_autotuning=false"),
        ("--xla_dump_to=x", "--xla_dump_to=x --xla_gpu_shard_autotuning=false"),
        ("--xla_gpu_shard_autotuning=true", "--xla_gpu_shard_autotuning=true"),
    ],
)
def test_each_process_times_algorithms_for_itself(given, flags, monkeypatch):
    """Whatever it compiles: a check of a kernel that the others remember, or a product that the first one makes."""
    monkeypatch.setenv("XLA_FLAGS", given)
    joining._compile_alone()
    assert os.environ["XLA_FLAGS"] == flags


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("a:1", 2, None), "give all three"),
        (("a", 2, 0), "must be host:port"),
        (("a:1", 2, 2), "from 0 to 1"),
        (("a:1", None, None), "give --processes and --process too"),
    ],
)
def test_flags_that_do_not_fit_are_refused(given, words, monkeypatch):
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=words):
        joining._place(*given)
