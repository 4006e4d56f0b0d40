"""The same rows, steps and initial adapters in transformers with PEFT and here: losses and adapters, beside each other.

Both sides read the same token ids: TRL's whole completion as the chat template renders it. A row is a document, padded;
a step has 8 of them, in the order of the file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.proof.work import LENGTH, ROOT, conversation, path, read_rows, save

PER_STEP, RANK, ALPHA, RATE, WARMUP = 8, 16, 16, 2e-4, 10
MARKS = (1, 10, 100, 300, 1000)  # steps after which the adapters are compared
SIDES = ("jaxtune", "peft")


def learning_rate(step: int, steps: int) -> float:
    """Of the update number `step` (from 0): linear warm-up, then linearly to zero."""
    return RATE * min((step + 1) / WARMUP, (steps - step) / max(steps - WARMUP, 1))


def start_of_a(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A of the adapter of a linear; B starts at zero."""
    seed = np.frombuffer(name.encode(), np.uint8)
    bound = shape[1] ** -0.5
    return np.random.default_rng(seed).uniform(-bound, bound, shape).astype(np.float32)


def documents(tokenizer: Any, file: Path, count: int) -> list[tuple[list[int], int]]:
    """(tokens, those of the prompt) of the first `count` rows."""
    found = []
    for row in read_rows(file)[:count]:
        messages = conversation(row["question"], row["answer"])
        whole = ids(tokenizer, messages)
        prompt = ids(tokenizer, messages[:1], add_generation_prompt=True)
        assert whole[: len(prompt)] == prompt
        found.append((whole[:LENGTH], len(prompt)))
    return found


def ids(tokenizer: Any, messages: list[dict[str, str]], **options: bool) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def of_step(rows: list[Any], step: int) -> list[Any]:
    return [rows[(step * PER_STEP + index) % len(rows)] for index in range(PER_STEP)]


class Writer:
    """Writes losses as they come, and adapters at the marks."""

    def __init__(self, output: Path, side: str, precision: str, steps: int):
        self.file = output / f"{side}_{precision}.json"
        self.adapters = output / f"{side}_{precision}"
        self.record: dict[str, Any] = {"side": side, "precision": precision, "steps": steps, "losses": []}
        self.began = time.time()

    def loss(self, value: float, norm: float) -> None:
        losses = self.record["losses"]
        losses.append(value)
        self.record.setdefault("grad_norms", []).append(norm)
        if len(losses) % 20 == 0 or len(losses) in MARKS or len(losses) == self.record["steps"]:
            self.record["seconds"] = time.time() - self.began
            self.file.write_text(json.dumps(self.record), encoding="utf-8")

    def adapter(self, step: int, tensors: dict[str, np.ndarray]) -> None:
        self.adapters.mkdir(exist_ok=True)
        np.savez(self.adapters / f"{step}.tmp.npz", **tensors)
        os.replace(self.adapters / f"{step}.tmp.npz", self.adapters / f"{step}.npz")


def jaxtune_side(model_folder: Path, rows: Path, output: Path, precision: str, steps: int) -> None:
    import jax.numpy as jnp

    from jaxtune.models.hf import from_pretrained
    from jaxtune.models.lora import get_peft_model, linears
    from jaxtune.train.callbacks import Callback
    from jaxtune.train.config import (
        CheckpointConfig,
        DataConfig,
        EvaluationConfig,
        ModelConfig,
        OptimConfig,
        TrainConfig,
    )
    from jaxtune.train.data.batches import BatchSource
    from jaxtune.train.data.packing.packing import pack
    from jaxtune.train.data.tokens.documents import Document
    from jaxtune.train.trainer import Trainer

    base, tokenizer = from_pretrained(model_folder, {"fp32": "float32", "bf16": "bfloat16"}[precision])
    found = documents(tokenizer, rows, steps * PER_STEP)
    model = get_peft_model(base, r=RANK, lora_alpha=ALPHA)
    for name, linear in linears(model):
        linear.lora.a.set_value(jnp.asarray(start_of_a(name, linear.lora.a.shape)))
    writer = Writer(output, "jaxtune", precision, steps)

    class Source(BatchSource):
        rows_per_step, length = PER_STEP, LENGTH

        def batch_at(self, step: int, model: Any = None) -> Any:
            pieces = [
                Document(np.asarray(tokens, np.int32), np.arange(len(tokens)) >= prompt)
                for tokens, prompt in of_step(found, step)
            ]
            return pack(pieces, LENGTH, packing=False)[0]

    class Record(Callback):
        def between(self, moment: Any) -> None:
            if moment.step in MARKS or moment.last:
                now = list(linears(moment.model()))
                tensors = {f"{name}.A": np.asarray(linear.lora.a[...], np.float32) for name, linear in now}
                tensors |= {f"{name}.B": np.asarray(linear.lora.b[...], np.float32) for name, linear in now}
                writer.adapter(moment.step, tensors)

        def stepped(self, step: int, metrics: dict[str, Any]) -> None:
            writer.loss(metrics["loss"], metrics["grad_norm"])

    config = TrainConfig(
        model=ModelConfig(path=str(model_folder)),
        data=DataConfig(train="rows", length=LENGTH, packing=False),
        steps=steps,
        rows_per_step=PER_STEP,
        precision=precision,
        max_grad_norm=1.0,
        optim=OptimConfig(learning_rate=RATE),
        checkpoint=CheckpointConfig(every_minutes=None),
        evaluation=EvaluationConfig(at_end=False),
        output=str(output / f"run_{precision}"),
    )
    schedule = rate_of(steps)
    Trainer(model, None, config, train_rows=Source(), schedule=schedule, callbacks=[Record()]).train()


def rate_of(steps: int) -> Any:
    import jax.numpy as jnp

    def rate(count: Any) -> Any:
        return RATE * jnp.minimum((count + 1) / WARMUP, (steps - count) / max(steps - WARMUP, 1))

    return rate


def peft_side(model_folder: Path, rows: Path, output: Path, precision: str, steps: int) -> None:
    import contextlib

    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    found = documents(tokenizer, rows, steps * PER_STEP)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    model = peft.get_peft_model(base, settings).to(device).train()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for name, parameter in trained.items():
            if ".lora_A." in name:
                parameter.copy_(torch.from_numpy(start_of_a(module_of(name), tuple(parameter.shape))))
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    writer = Writer(output, "peft", precision, steps)
    autocast = torch.autocast(device, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    for step in range(steps):
        tokens = torch.zeros(PER_STEP, LENGTH, dtype=torch.long)
        labels = torch.full((PER_STEP, LENGTH), -100)
        for index, (row, prompt) in enumerate(of_step(found, step)):
            tokens[index, : len(row)] = torch.tensor(row)
            labels[index, prompt : len(row)] = torch.tensor(row[prompt:])
        longest = max(len(row) for row, _ in of_step(found, step))
        tokens, labels = tokens[:, :longest].to(device), labels[:, :longest].to(device)
        mask = (torch.arange(longest)[None] < torch.tensor([[len(row)] for row, _ in of_step(found, step)])).long()
        with autocast:
            loss = model(input_ids=tokens, attention_mask=mask.to(device), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        optimizer.step()
        writer.loss(loss.item(), float(norm))
        if step + 1 in MARKS or step + 1 == steps:
            writer.adapter(
                step + 1,
                {
                    f"{module_of(name)}.{'A' if '.lora_A.' in name else 'B'}": parameter.detach().float().cpu().numpy()
                    for name, parameter in trained.items()
                },
            )


def module_of(name: str) -> str:
    return name.removeprefix("base_model.model.").split(".lora_")[0]


def compared(output: Path, precision: str) -> dict[str, Any]:
    """Losses of both sides, and how far apart they and the adapters are."""
    sides = {}
    for side in SIDES:
        file = output / f"{side}_{precision}.json"
        sides[side] = json.loads(file.read_text()) if file.exists() else {"losses": []}
    steps = min(len(each["losses"]) for each in sides.values())
    record: dict[str, Any] = {side: sides[side] for side in SIDES}
    if steps:
        ours, theirs = (np.asarray(sides[side]["losses"][:steps]) for side in SIDES)
        differences = np.abs(ours - theirs)
        record["steps_compared"] = steps
        record["loss_difference"] = {
            "mean": float(differences.mean()),
            "largest": float(differences.max()),
            "largest_of_200": float(differences[:200].max()),
            "mean_signed": float((ours - theirs).mean()),
        }
    record["adapters"] = {}
    for file in sorted((output / f"jaxtune_{precision}").glob("*[0-9].npz"), key=lambda file: int(file.stem)):
        other = output / f"peft_{precision}" / file.name
        if other.exists():
            record["adapters"][file.stem] = cosines(dict(np.load(file)), dict(np.load(other)))
    return record


def cosines(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, float]:
    """Cosines of all adapters as one vector: of A and B, and of what training changed (A less its start, and B); and
    the least of one B."""
    assert ours.keys() == theirs.keys()
    change = [
        {
            name: array - (start_of_a(name[:-2], array.shape) if name.endswith(".A") else 0)
            for name, array in each.items()
        }
        for each in (ours, theirs)
    ]
    b = [name for name in ours if name.endswith(".B") and theirs[name].any()]
    return {
        "all": cosine(ours, theirs, ours),
        "changes": cosine(*change, ours),
        "least_b": min((cosine(ours, theirs, [name]) for name in b), default=1.0),
    }


def cosine(first: dict[str, np.ndarray], second: dict[str, np.ndarray], names: Any) -> float:
    pairs = [(first[name].astype(np.float64).ravel(), second[name].astype(np.float64).ravel()) for name in names]
    both = sum(float(a @ b) for a, b in pairs)
    sizes = [sum(float(each[side] @ each[side]) for each in pairs) for side in (0, 1)]
    return both / max(np.sqrt(sizes[0] * sizes[1]), 1e-30)


def run(model: Path, rows: Path, output: Path, steps: int, precisions: list[str], seconds: float) -> None:
    """Both sides in each precision, all beside each other on one device, each a process."""
    until, folder = time.time() + seconds, output / "model"
    output.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        write_folder(model, folder)
    running = []
    for precision in precisions:
        for side in SIDES:
            words = ["--side", side, "--model", str(folder), "--rows", str(rows), "--output", str(output)]
            command = [sys.executable, "-m", "benchmarks.proof", "curves", *words, "--steps", str(steps)]
            shares = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.25", **os.environ, "PYTHONPATH": path()}
            with open(output / f"{side}_{precision}.log", "w", encoding="utf-8") as log:
                process = subprocess.Popen(
                    [*command, "--precisions", precision], cwd=ROOT, env=shares, stdout=log, stderr=log
                )
            running.append(process)
    while any(process.poll() is None for process in running) and time.time() < until:
        time.sleep(0.5)
    for process in running:
        if process.poll() is None:
            process.kill()
        process.wait()
    record = {precision: compared(output, precision) for precision in precisions}
    for name, each in record.items():
        print(name, json.dumps({key: each.get(key) for key in ("steps_compared", "loss_difference", "adapters")}))
    settings = {"rank": RANK, "alpha": ALPHA, "rate": RATE, "warmup": WARMUP, "rows_per_step": PER_STEP}
    save(output, "curves", {"settings": settings, "length": LENGTH, "precisions": record})


def write_folder(model: Path, folder: Path) -> None:
    """The model as safetensors in float32, which both sides read."""
    program = (
        "import sys; from jaxtune.models.hf import from_pretrained, save_pretrained; "
        "model, tokenizer = from_pretrained(sys.argv[1], 'float32'); save_pretrained(model, sys.argv[2], tokenizer)"
    )
    environment = {**os.environ, "PYTHONPATH": path(), "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", program, str(model), str(folder)], check=True, env=environment, cwd=ROOT)
