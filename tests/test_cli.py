"""The console command: what it hands on, and how it tells a mistake from a fault."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import jaxtune
from jaxtune import cli
from jaxtune.models.lora import linears
from jaxtune.pallas import targets
from jaxtune.train.config.file import config_keys, packaged_recipes

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "model: {path: some/model}\ndata: {train: rows.jsonl}\n"


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n')
    monkeypatch.chdir(tmp_path)
    return str(path)


@pytest.fixture
def runs(monkeypatch) -> list:
    """Stands in for the training application: records what the command hands to it."""
    calls = []

    def run(config, *, check, plan):
        calls.append((config, check, plan))
        return 0

    monkeypatch.setitem(sys.modules, "jaxtune.train.app", types.SimpleNamespace(run=run))
    return calls


PROCESS = """
import atexit, sys, threading, time
from jaxtune import cli
class Held:
    def __del__(self):
        print("taken apart")
held = Held()
def run(words):
    atexit.register(print, "a handler runs")
    threading.Thread(target=lambda: (time.sleep(0.3), print("a thread ends"))).start()
    return {"0": 0, "75": 75}[words[0]]
cli.COMMANDS["info"] = run
sys.argv[0] = "jaxtune"
cli.process(["info"])
"""


@pytest.mark.parametrize(
    ("word", "code", "watcher"),
    [("0", 0, ""), ("75", 75, ""), ("75", 75, "nowhere.yaml"), ("unknown", 1, ""), ("unknown", 1, "nowhere.yaml")],
)
def test_a_process_takes_no_objects_apart_and_waits_for_threads_after_success_unless_it_is_watched(word, code, watcher):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COVERAGE_PROCESS_START": watcher}
    command = [sys.executable, "-c", PROCESS, word]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == code, done.stderr
    ends = "a thread ends\na handler runs\n"
    expected = f"{ends}taken apart\n" if watcher else "" if code == 1 else ends
    assert done.stdout == expected and ("KeyError" in done.stderr) == (code == 1)


@pytest.mark.parametrize(
    ("flags", "check", "plan"), [([], False, False), (["--check"], True, False), (["--plan"], False, True)]
)
def test_train_hands_on_the_config(recipe, runs, flags, check, plan):
    assert cli.main(["train", recipe, "steps=3", *flags, "adapter.r=2"]) == 0
    [(config, *given)] = runs
    assert given == [check, plan]
    assert (config.steps, config.adapter.r, config.output) == (3, 2, "runs/mine")


def test_the_exit_code_of_a_run_is_the_command_s(recipe, runs, monkeypatch):
    monkeypatch.setattr(sys.modules["jaxtune.train.app"], "run", lambda *_, **__: 75)
    assert cli.main(["train", recipe]) == 75


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["zzz"], "unknown command 'zzz'; commands: train, generate, chat, serve, evaluate, export, profile, info"),
        (["train"], "the first argument is a recipe: a YAML file or one of "),
        (["train", "steps=3"], "the first argument is a recipe"),
        (["train", "lora-8"], "no packaged recipe 'lora-8' (nearest: lora-8b)"),
        (["train", "none.yaml"], "no recipe file none.yaml"),
        (["train", "lora-8b", "data.train=x", "optm.name=sgd"], "unknown key optm (override 'optm.name=sgd'); did you"),
        (["train", "lora-8b", "data.train=x", "stray"], "cannot read override 'stray'"),
        (["evaluate", "lora-8b"], "data.train is missing"),
        (["export", ".", "out"], ". is not an adapter folder: it has no adapter_config.json"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"jaxtune: error: {message}") and err.count("\n") == 1


def test_a_traceback_on_request(monkeypatch):
    monkeypatch.setenv("JAXTUNE_TRACEBACK", "1")
    with pytest.raises(ValueError, match="no packaged recipe"):
        cli.main(["train", "lora-8"])


def test_a_fault_keeps_its_traceback(recipe, runs, monkeypatch, capsys):
    def from_a_library(*_, **__):
        raise ValueError("shapes do not match")

    monkeypatch.setattr(sys.modules["jaxtune.train.app"], "run", from_a_library)
    with pytest.raises(ValueError, match="shapes do not match"):
        cli.main(["train", recipe])

    def missing_file(*_, **__):
        (Path(recipe).parent / "gone.jsonl").read_text()

    monkeypatch.setattr(sys.modules["jaxtune.train.app"], "run", missing_file)
    assert cli.main(["train", recipe]) == 2
    assert "gone.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["-m", "jaxtune.train"], ["-m", "jaxtune", "train"]])
def test_train_help_lists_recipes_and_every_key(command):
    result = subprocess.run(
        [sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=600
    )
    assert result.stdout.startswith("usage: jaxtune train RECIPE [key.sub=value ...] [--check | --plan]")
    words = result.stdout.split()
    assert not [key.name for key in config_keys() if key.name not in words]
    assert not [name for name in packaged_recipes() if name not in words]
    assert "modules_to_save" in result.stdout and "[lm_head]" in result.stdout  # brackets are not markup


def test_a_want_of_memory_is_a_sentence(recipe, runs, monkeypatch, capsys):
    def starve(*_, **__):
        raise MemoryError("Unable to allocate 9.8 TiB for an array")

    monkeypatch.setattr(sys.modules["jaxtune.train.app"], "run", starve)
    assert cli.main(["train", recipe]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxtune: error: out of host memory (Unable to allocate 9.8 TiB for an array): this ")

    class JaxRuntimeError(RuntimeError):
        pass

    def starve_the_device(*_, **__):
        raise JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12 bytes.\nmore")

    monkeypatch.setattr(sys.modules["jaxtune.train.app"], "run", starve_the_device)
    assert cli.main(["train", recipe]) == 2
    assert "out of device memory (RESOURCE_EXHAUSTED: Out of memory while" in capsys.readouterr().err


def test_names_cannot_steer_the_terminal(capsys):
    assert cli.main(["profile", "show", "no\x1b[2Jtrace"]) == 2
    assert capsys.readouterr().err == "jaxtune: error: no\\x1b[2Jtrace does not exist\n"


@pytest.mark.parametrize("columns", ["80", "140"])
def test_no_summary_of_a_command_or_recipe_is_cut(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:-2]
    assert len(lines) == len(cli.COMMANDS) and all(line.endswith(".") for line in lines)
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    recipes = text[text.index("\nrecipes\n") :].splitlines()[2:]
    width = max(map(len, packaged_recipes()))
    assert [line[2 : 2 + width].strip() for line in recipes] == list(packaged_recipes())
    assert all(line[2 + width : 4 + width] == "  " for line in recipes)


def test_help_of_the_commands(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("train", "generate", "evaluate", "export", "info"))
    assert cli.main([]) == 2
    capsys.readouterr()
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxtune {jaxtune.__version__}\n"
    for name in ("generate", "evaluate", "export", "info"):
        with pytest.raises(SystemExit) as caught:
            cli.main([name, "--help"])
        assert caught.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: jaxtune {name}")


def test_abbreviated_options_are_refused(capsys, monkeypatch):
    """By each command, and each command of a command: --hel is not --help."""
    commands = [[name] for name in cli.COMMANDS]
    add = argparse._SubParsersAction.add_parser

    def noted(self, name, **options):
        if [command[0], name] not in commands:
            commands.append([command[0], name])
        return add(self, name, **options)

    monkeypatch.setattr(argparse._SubParsersAction, "add_parser", noted)
    for command in commands:  # to which the loop adds
        try:
            code = cli.main([*command, "--hel"])
        except SystemExit as caught:
            code = caught.code
        assert code == 2, command
        assert "error:" in capsys.readouterr().err
    assert ["profile", "ceilings"] in commands


def test_info(capsys):
    assert cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["versions", f"  jaxtune           {jaxtune.__version__}".ljust(len(lines[1]))]
    assert any(line.split() == ["jax", "0.11.2"] for line in lines)
    assert lines.count("  cpu") == 8  # the virtual devices of the tests
    assert any(line.split()[:1] == ["lora-8b"] for line in lines)


def kernels(capsys) -> list[str]:
    """What info --kernels says of each call."""
    assert cli.main(["info", "--kernels"]) == 0
    return capsys.readouterr().out.rstrip("\n").split("\n\n")


def test_info_on_kernels(capsys):
    whole, packed, wide, matmul, four_bits, few_rows, pair, gated, thin, gated_rows, *rest = kernels(capsys)
    grouped, grouped_four_bits, sort, spread, loss, normed, stream, rule = rest
    title, *lines = whole.splitlines()
    assert title == "attention: bfloat16, head dim 128, 8 rows of 2,048 tokens, one document a row"
    assert [line.split(maxsplit=1) for line in lines] == [
        ["cudnn", "refuses: no NVIDIA GPU"],
        ["mosaic", "refuses: needs a Hopper GPU (compute capability 9.0)"],
        ["triton", "refuses: no NVIDIA GPU"],
        ["reference", "chosen"],
    ]
    assert "packed, up to 16 documents" in packed
    assert [line.split()[0] for line in packed.splitlines()[1:]] == ["mosaic", "cudnn", "triton", "reference"]
    assert "head dim 256" in wide and wide.split()[-2:] == ["reference", "chosen"]
    assert "weights in NF4" in four_bits and "mosaic refuses: needs a Hopper" in " ".join(four_bits.split())
    assert "8 tokens, weights in FP8" in few_rows and "triton refuses: no NVIDIA GPU" in " ".join(few_rows.split())
    assert "experts" in grouped and "weights in NF4" in grouped_four_bits
    assert "mosaic_ahead refuses: needs a Hopper" in " ".join(grouped_four_bits.split())
    assert "triton refuses: no NVIDIA GPU" in " ".join(grouped.split())
    reason = "mosaic refuses: slower than XLA's for fewer than 128 experts: runs where it is asked for by name"
    assert sort.startswith("routing sort: ") and reason in " ".join(sort.split())
    assert "mosaic refuses: needs a Hopper GPU" in " ".join(spread.split())
    shown = (("quant_matmul", matmul), ("quant_matmul", four_bits), ("grouped_matmul", grouped))
    for op, text in (*shown, ("gated_backward", gated), ("linear_cross_entropy", loss)):
        assert text.splitlines()[0].startswith(f"{op}: ") and text.split()[-2:] == ["reference", "chosen"]
    assert pair.startswith("thin_pair: bfloat16, rank 16") and pair.endswith("reference       chosen")
    assert thin.startswith("gated_thin: bfloat16, silu, rank 16") and thin.endswith("reference       chosen")
    assert gated_rows.startswith("gated_rows_backward: ") and gated_rows.endswith("reference       chosen")
    assert normed.startswith("normed_heads: bfloat16") and normed.endswith("reference       chosen")
    assert stream.startswith("normed_stream: bfloat16") and stream.endswith("reference       chosen")
    assert rule.startswith("gated_delta_rule: ")
    assert "triton refuses: no NVIDIA GPU chunked chosen" in " ".join(rule.split())


def test_there_is_nothing_to_tune_without_a_hopper_gpu(capsys):
    assert cli.main(["tune"]) != 0
    assert "tune: only kernels for Hopper GPUs have blocks to measure" in capsys.readouterr().err


@pytest.mark.full
def test_tune_prints_a_line_for_each_candidate_and_keeps_the_fastest(monkeypatch, tmp_path, capsys):
    """On a GPU of this test's making: the interpreter runs the kernels, a table is the clock."""
    from jaxtune.pallas import gpu_kernel, tuning
    from jaxtune.pallas.attention import tune as attention_tune

    lean = dict(own=64, step=64, stages=2, turns=False, lean=True)
    plain = dict(own=64, step=128, stages=2, turns=False)
    broken = dict(own=64, step=128, stages=2, turns=True, rows=3)
    times = iter([3.0, 2.0, 2.0, 3.0])
    monkeypatch.setattr(attention_tune, "candidates", lambda kernel, dim: [plain, broken, lean])
    monkeypatch.setattr(tuning, "_milliseconds", lambda programs: [next(times) for _ in programs])
    monkeypatch.setattr(targets, "here", lambda: targets.HOPPER)
    monkeypatch.setattr(targets, "device_kind", lambda: "NVIDIA H200")
    output = tmp_path / "nvidia_h200.json"
    shape = ["--head-dim", "64", "--heads", "2", "--kv-heads", "1", "--rows", "1", "--length", "128"]
    shape += ["--window", "50", "--documents", "whole"]
    with gpu_kernel.interpreted():
        assert cli.main(["tune", *shape, "--kernels", "forward", "dquery", "--output", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    where = "attention forward, head_dim=64, window up to 128"
    assert lines[0] == f"{where}: own 64, step 128, stages 2, turns False: runs"
    assert lines[1].startswith(f"{where}: own 64, step 128, stages 2, turns True, rows 3: ")
    assert lines[2] == f"{where}: own 64, step 64, stages 2, turns False, lean True: runs"
    assert lines[3:5] == [lines[0].replace("runs", "3.0000 ms"), lines[2].replace("runs", "2.0000 ms")]
    assert len(lines) == 12 and lines[5] == lines[0].replace("forward", "dquery")
    assert lines[8] == lines[3].replace("forward", "dquery").replace("3.0000", "2.0000")
    assert lines[10:] == [
        "attention forward, head dim 64: fastest own 64, step 64, stages 2, turns False, lean True: 2.0000 ms",
        "attention dquery, head dim 64: fastest own 64, step 128, stages 2, turns False: 2.0000 ms",
    ]
    entry = json.loads(output.read_text())["entries"][f"{where}, bfloat16"]
    assert entry["blocks"] == lean and [result for _, result in entry["tried"]][0::2] == [3.0, 2.0]
    assert isinstance(entry["tried"][1][1], str)  # why not


@pytest.mark.parametrize(
    ("capability", "whole", "packed"),
    [
        ((9, 0), ["mosaic chosen", "cudnn not needed"], ["mosaic chosen", "cudnn not needed"]),
        (
            (8, 0),
            ["cudnn chosen", "mosaic refuses: needs a Hopper GPU (compute capability 9.0)"],
            [
                "mosaic refuses: needs a Hopper GPU (compute capability 9.0)",
                "cudnn refuses: packed rows need compute capability 9.0",
            ],
        ),
    ],
)
@pytest.mark.parametrize("has_triton", [False, True])
def test_info_on_kernels_of_a_gpu(capability, whole, packed, has_triton, capsys, monkeypatch):
    from jaxtune.pallas import compat

    monkeypatch.setattr(compat, "_has_jax_triton", lambda: has_triton)
    with targets.compile_for(capability):
        found = kernels(capsys)
    assert [" ".join(line.split()) for line in found[0].splitlines()[1:3]] == whole
    assert [" ".join(line.split()) for line in found[1].splitlines()[1:3]] == packed
    none = capability == (8, 0) and not has_triton
    assert " ".join(found[1].split()[-2:]) == ("reference chosen" if none else "not needed")


def tiny_model():
    import jax

    from jaxtune.models.config import DecoderConfig, LayerSpec
    from jaxtune.models.decoder import Decoder

    config = DecoderConfig(
        family="llama",
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        layers=(LayerSpec(),) * 2,
        max_position_embeddings=64,
        attention_scale=8**-0.5,
        initializer_range=0.2,
    )
    return Decoder(config, jax.random.key(0), "float32")


def word_tokenizer(chat_template: str | None):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.mark.full
def test_generate_puts_prompts_into_the_chat_template(tmp_path, capsys):
    template = "{% for m in messages %}w7 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w8{% endif %}"
    model = tiny_model()
    for name, chat_template in (("chat", template), ("plain", None)):
        jaxtune.save_pretrained(model, tmp_path / name, tokenizer=word_tokenizer(chat_template))

    def expected(*prompts: list[int], **settings) -> str:  # w0, the unknown word, is special and not printed
        answers = jaxtune.generate(model, prompts, max_new_tokens=5, **settings)
        return "".join(" ".join(f"w{i}" for i in answer if i != 0) + "\n" for answer in answers)

    def output(folder: str, *flags: str) -> str:
        arguments = ["generate", str(tmp_path / folder), "--max-new-tokens", "5", "--dtype", "float32", *flags]
        assert cli.main(arguments) == 0
        return capsys.readouterr().out

    assert output("chat", "--prompt", "w1 w2") == expected([7, 1, 2, 8])
    assert output("chat", "--prompt", "w1 w2", "--raw") == output("plain", "--prompt", "w1 w2") == expected([1, 2])
    assert expected([7, 1, 2, 8]) != expected([1, 2])
    two = output("plain", "--prompt", "w1 w2", "--prompt", "w3", "--temperature", "1.0", "--seed", "3")
    first, second = expected([1, 2], [3], temperature=1.0, seed=3).splitlines()
    assert two == f"--- w1 w2\n{first}\n--- w3\n{second}\n"


@pytest.mark.full
def test_generate_takes_the_template_beside_the_adapter(tmp_path, capsys):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    jaxtune.save_pretrained(tiny_model(), base, tokenizer=word_tokenizer(None))
    model = jaxtune.get_peft_model(jaxtune.from_pretrained(base, dtype="float32")[0], r=2)
    jaxtune.save_adapter(model, adapter, word_tokenizer("w7 {{ messages[0]['content'] }} w8"))

    def output(folder: Path, *flags: str) -> tuple[str, str]:
        arguments = ["generate", str(folder), "--prompt", "w1 w2", "--max-new-tokens", "5", "--dtype", "float32"]
        assert cli.main([*arguments, *flags]) == 0
        return capsys.readouterr()

    [chat, raw] = jaxtune.generate(model, [[7, 1, 2, 8]], 5) + jaxtune.generate(model, [[1, 2]], 5)
    words = [" ".join(f"w{i}" for i in answer if i != 0) + "\n" for answer in (chat, raw)]
    assert output(adapter) == (words[0], "")
    assert output(base)[0] == words[1]
    assert "base has no chat template: the prompt is used as it is" in output(base)[1]
    assert output(base, "--raw")[1] == ""


def test_chat_keeps_what_was_said_and_turns_the_adapter_off(tmp_path, capsys, monkeypatch):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    template = "{% for m in messages %}{{ 'w7' if m['role'] == 'user' else 'w9' }} {{ m['content'] }} {% endfor %}w8"
    jaxtune.save_pretrained(tiny_model(), base, tokenizer=word_tokenizer(None))
    model = jaxtune.get_peft_model(jaxtune.from_pretrained(base, dtype="float32")[0], r=2)
    for _, linear in linears(model):
        linear.lora.b.set_value(linear.lora.b.get_value() + 0.3)
    jaxtune.save_adapter(model, adapter, word_tokenizer(template))

    def answer(prompt: list[int], adapted: bool = True) -> tuple[list[int], str]:
        new = jaxtune.generate(model if adapted else jaxtune.without_adapter(model), [prompt], 5)[0]
        return [i for i in new if i != 0], " ".join(f"w{i}" for i in new if i != 0)

    first, first_text = answer([9, 3, 7, 1, 2, 8])
    second = answer([9, 3, 7, 1, 2, 9, *first, 7, 4, 8])[1]
    off = answer([9, 3, 7, 1, 2, 8], adapted=False)[1]
    assert len({first_text, second, off}) == 3
    lines = iter(["w1 w2", "w4", "/reset", "/adapter", "w1 w2", "/what", "w1 " * 200, "/exit", "w5"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    arguments = ["--system", "w3", "--max-new-tokens", "5", "--temperature", "0", "--dtype", "float32"]
    assert cli.main(["chat", str(adapter), *arguments]) == 0
    out, err = capsys.readouterr()
    assert out == f"{first_text}\n{second}\n{off}\n\n"
    assert "the adapter is off" in err and "/what: unknown; there are /reset, /adapter, /exit" in err
    assert "the model has 64" in err  # positions, and the conversation goes on
    assert next(lines) == "w5"


def test_a_template_that_refuses_the_messages_ends_no_conversation(tmp_path, capsys, monkeypatch):
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}w8"
    jaxtune.save_pretrained(tiny_model(), tmp_path / "model", tokenizer=word_tokenizer(template))
    lines = iter(["w1", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert cli.main(["chat", str(tmp_path / "model"), "--system", "w3"]) == 0
    assert "the chat template refuses these messages: no system role" in capsys.readouterr().err


def test_chat_needs_a_template(tmp_path, capsys):
    jaxtune.save_pretrained(tiny_model(), tmp_path / "model", tokenizer=word_tokenizer(None))
    assert cli.main(["chat", str(tmp_path / "model")]) == 2
    assert "chat: the model has no chat template" in capsys.readouterr().err


def test_generate_takes_settings_of_sampling(tmp_path, capsys):
    model = tiny_model()
    jaxtune.save_pretrained(model, tmp_path / "model", tokenizer=word_tokenizer(None))
    settings = dict(temperature=1.2, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.3, seed=5)
    [answer] = jaxtune.generate(model, [[1, 2]], 16, **settings)
    flags = [part for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    arguments = ["generate", str(tmp_path / "model"), "--prompt", "w1 w2", "--max-new-tokens", "16", *flags]
    arguments += ["--dtype", "float32", "--stop", f"w{answer[4]}"]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out == " ".join(f"w{i}" for i in answer[:5] if i != 0) + "\n"


def test_generate_needs_a_tokenizer(tmp_path, capsys):
    jaxtune.save_pretrained(tiny_model(), tmp_path / "model")
    assert cli.main(["generate", str(tmp_path / "model"), "--prompt", "x"]) == 2
    assert "has no tokenizer: copy its tokenizer files into the model's folder" in capsys.readouterr().err


def test_export_merges_an_adapter_into_its_base(tmp_path, capsys, monkeypatch):
    import jax
    import numpy as np

    base, adapter, merged = (str(tmp_path / name) for name in ("base", "adapter", "merged"))
    jaxtune.save_pretrained(tiny_model(), base)
    model, _ = jaxtune.from_pretrained(base, dtype="float32")
    model = jaxtune.get_peft_model(model, r=2, target_modules=["q_proj", "down_proj"])
    for _, linear in linears(model):
        if linear.lora is not None:
            linear.lora.b.set_value(jax.random.normal(jax.random.key(1), linear.lora.b.get_value().shape))
    jaxtune.save_adapter(model, adapter)

    assert cli.main(["export", adapter, merged, "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == f"merged model: {merged} (read back: config.json, model.safetensors)\n"
    tokens = np.arange(12).reshape(2, 6)
    logits = [jaxtune.from_pretrained(path, dtype="float32")[0](tokens) for path in (base, merged)]
    np.testing.assert_allclose(logits[1], model(tokens), atol=1e-4)
    assert np.abs(logits[0] - logits[1]).max() > 0.1

    assert cli.main(["export", adapter, str(tmp_path / "again"), "--to", "adapter"]) == 0
    assert "note: PEFT, vLLM, SGLang and TGI load this adapter" in capsys.readouterr().out
    for arguments, message in (
        (["--to", "onnx"], "to = 'onnx' is unknown; it can be merged,"),
        (["--outtype", "q8_0"], "outtype = 'q8_0' is an option of gguf"),
        (["--to", "gguf", "--outtype", "q5_k_m"], "it can be f32, f16, bf16, q8_0, q6_k, q4_k_m, q4_0"),
        (["--to", "gguf-adapter", "--outtype", "q8_0"], "adapters are written in f32"),
    ):
        monkeypatch.setattr("jaxtune.commands.common.load", None)  # it is said before a model is loaded
        assert cli.main(["export", adapter, str(tmp_path / "no"), *arguments]) == 2
        assert message in capsys.readouterr().err
