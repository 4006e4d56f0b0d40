"""SmolLM2-135M-Instruct from its wheel beside transformers, which reads the same GGUF file itself, and PEFT."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from flax import nnx

from benchmarks.proof.curves import module_of, start_of_a
from jaxtune.models.generation.generate import generate
from jaxtune.models.hf import from_pretrained
from jaxtune.models.lora import get_peft_model, linears
from jaxtune.train.objectives.loss import Forward
from jaxtune.train.objectives.sft import SFT
from tests.real.test_real_model import rows_of
from tests.real.weights import documents, gguf_file

RANK, ALPHA = 4, 8


@pytest.fixture(scope="module")
def both():
    """(our model and tokenizer, theirs) in fp32"""
    file = gguf_file()
    ours, tokenizer = from_pretrained(file, "float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    )
    return ours, tokenizer, model.eval()


def test_logits_and_greedy_text(both):
    ours, tokenizer, theirs = both
    tokens = np.asarray(documents(tokenizer)[0][0][:32])[None]
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    graph, state = nnx.split(ours)
    found = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))(state, jnp.asarray(tokens))
    np.testing.assert_allclose(np.asarray(found), expected, atol=2e-3)
    prompt = documents(tokenizer)[2]
    prompt = prompt[0][: prompt[1]]
    theirs.generation_config = transformers.GenerationConfig(eos_token_id=2, pad_token_id=2)
    with torch.no_grad():
        said = theirs.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)[0, len(prompt) :]
    assert generate(ours, [prompt], max_new_tokens=64)[0] == said.tolist()


@pytest.mark.full
def test_loss_and_gradients_of_an_adapter(both):
    ours, tokenizer, theirs = both
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    reference = peft.get_peft_model(theirs, settings)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if parameter.requires_grad:
                values = start_of_a(name if ".lora_B." in name else module_of(name), tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(values))
    rows = documents(tokenizer)
    longest = max(len(tokens) for tokens, _ in rows)
    tokens, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
    for index, (row, prompt) in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
        labels[index, prompt : len(row)] = torch.tensor(row[prompt:])
    lengths = torch.tensor([[len(row)] for row, _ in rows])
    mask = (torch.arange(longest)[None] < lengths).long()
    expected = reference(input_ids=tokens, attention_mask=mask, labels=labels).loss
    expected.backward()

    model = get_peft_model(ours, r=RANK, lora_alpha=ALPHA)
    for name, linear in linears(model):
        if linear.lora is None:
            continue
        linear.lora.a.set_value(jnp.asarray(start_of_a(name, linear.lora.a.shape)))
        b = start_of_a(f"base_model.model.{name}.lora_B.default.weight", linear.lora.b.shape)
        linear.lora.b.set_value(jnp.asarray(b))
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)

    def mean(trainable, frozen, batch):
        loss, count, _ = SFT().loss(nnx.merge(graph, trainable, frozen), batch, Forward())
        return loss / count

    batch = jax.tree.map(jnp.asarray, rows_of(tokenizer))
    loss, slopes = jax.jit(jax.value_and_grad(mean))(trainable, frozen, batch)
    assert float(loss) == pytest.approx(expected.item(), abs=1e-4)
    found = dict(linears(nnx.merge(graph, slopes, frozen)))
    compared = 0
    for name, parameter in reference.named_parameters():
        if parameter.grad is None:
            continue
        lora = found[module_of(name)].lora
        ours_of = np.asarray((lora.a if ".lora_A." in name else lora.b)[...])
        gradient = parameter.grad.numpy()
        assert np.linalg.norm(ours_of - gradient) <= 2e-3 * np.linalg.norm(gradient), name
        compared += 1
    assert compared == 2 * 7 * 30
