"""lm-eval's own package over a model of jaxtune, beside its Hugging Face model: a task of shared rows."""

from __future__ import annotations

import json

import lm_eval
import numpy as np
import pytest
import reference
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tiny import CONFIGS
from tiny_models import adapted_model, over, tiny_model

from jaxtune.models.adapters.adapter_files import save_adapter
from jaxtune.models.config import RopeConfig
from jaxtune.models.files.quant import stored_in
from jaxtune.models.generation.generate import generate
from jaxtune.models.generation.harness import JaxtuneLM
from jaxtune.models.hf import from_pretrained
from jaxtune.models.reward import reward_model
from tests.train.data.conftest import make_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("lm_eval") / "base", make_tokenizer()
    shape = dict(vocab_size=len(tokenizer), max_position_embeddings=96)
    reference.make_checkpoint(folder, CONFIGS["qwen2"] | shape)
    tokenizer.pad_token = tokenizer.eos_token  # lm-eval would add one, past the end of the vocabulary
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(test_data, tmp_path_factory):
    """Questions with four answers to choose from, texts to continue, and texts whose perplexity counts."""
    lines = (test_data / "datasets/gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines()[:6]
    rows = [json.loads(line) for line in lines]
    file = tmp_path_factory.mktemp("task") / "rows.jsonl"
    with file.open("w", encoding="utf-8") as out:
        for index, row in enumerate(rows):
            choices = [" " + other["question"][: 12 + 5 * number] for number, other in enumerate(rows[:4])]
            question = row["question"][: 40 + 30 * index]
            out.write(json.dumps({"question": question, "choices": choices, "answer": index % 4}) + "\n")
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
    return [
        data
        | {
            "task": "choosing",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        },
        data
        | {
            "task": "continuing",
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{choices[0]}}",
            "metric_list": [{"metric": "exact_match"}],
            "generation_kwargs": {"until": ["e"], "max_gen_toks": 8, "do_sample": False},
        },
        data
        | {
            "task": "reading",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{question}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
    ]


@pytest.mark.full
def test_scores_and_texts_are_those_of_its_hugging_face_model(base, tasks):
    model, tokenizer = from_pretrained(base, dtype="float32")
    theirs = HFLM(
        transformers.AutoModelForCausalLM.from_pretrained(base, dtype="float32"),
        tokenizer=tokenizer,
        batch_size=3,
        max_length=96,
        device="cpu",
    )
    found = []
    for lm in (JaxtuneLM(model, tokenizer, batch_size=4), theirs):
        results = lm_eval.simple_evaluate(lm, tasks=tasks, bootstrap_iters=0, log_samples=True)
        found.append(results)
    ours, wanted = found
    for task in ("choosing", "continuing", "reading"):
        for one, other in zip(ours["samples"][task], wanted["samples"][task], strict=True):
            if task == "continuing":
                assert one["resps"] == other["resps"]
                continue
            flat = [np.asarray([np.ravel(np.float64(r)) for r in each["filtered_resps"]]) for each in (one, other)]
            np.testing.assert_allclose(*flat, rtol=1e-4, err_msg=task)
    assert ours["results"]["choosing"]["acc,none"] == wanted["results"]["choosing"]["acc,none"]
    assert any(text for sample in ours["samples"]["continuing"] for text in sample["resps"][0])


def test_texts_without_any_end_token_end_at_their_length(base):
    """Neither the model nor its tokenizer names one."""
    _, tokenizer = from_pretrained(base)
    tokenizer.eos_token = None
    lm = JaxtuneLM(tiny_model(vocab_size=len(tokenizer), max_position_embeddings=96), tokenizer)
    (text,) = lm.generate_until([Instance("generate_until", {}, ("Two and two", {"until": [], "max_gen_toks": 8}), 0)])
    ids = generate(lm.model, [tokenizer.encode("Two and two")], 8, eos_token_ids=())[0]
    assert text == tokenizer.decode(ids, skip_special_tokens=True) and len(ids) == 8


def test_devices_of_a_mesh_share_the_texts(base):
    """More requests than two devices have slots."""
    model, tokenizer = from_pretrained(base, dtype="float32")
    words = {"until": [], "max_gen_toks": 8, "temperature": 1.0, "do_sample": True}
    requests = [Instance("generate_until", {}, (text, words), 0) for text in ("Two", "Two and two", "One", "a", "b")]
    texts = [JaxtuneLM(each, tokenizer, batch_size=2).generate_until(requests) for each in (over(model, 2), model)]
    assert texts[0] == texts[1] and len(set(texts[0])) > 1


def test_what_it_refuses(base):
    model, tokenizer = from_pretrained(base, dtype="float32")
    for make, message in (
        (lambda: JaxtuneLM(model), "tokenizer is missing"),
        (lambda: JaxtuneLM(model, tokenizer, batch_size="auto"), "batch_size = 'auto': must be a positive number"),
        (lambda: JaxtuneLM(model, tokenizer, max_length=97), "max_length = 97: must be between 2 and the model's 96"),
        (lambda: JaxtuneLM(model, tokenizer, peft="x"), "peft is unknown"),
        (lambda: JaxtuneLM(reward_model(model), tokenizer), "this model scores texts"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_a_stretched_model_is_scored_over_all_positions_that_it_was_trained_for(base):
    _, tokenizer = from_pretrained(base, dtype="float32")
    yarn = RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=128)
    model = tiny_model(vocab_size=len(tokenizer), rotary=(yarn,))
    assert JaxtuneLM(model, tokenizer).max_length == 512 > model.config.max_position_embeddings
    with pytest.raises(ValueError, match="max_length = 513: must be between 2 and the model's 512"):
        JaxtuneLM(model, tokenizer, max_length=513)


def test_an_adapter_is_scored_over_what_it_was_trained_over(base, tmp_path):
    model = adapted_model(from_pretrained(base, load_in="nf4")[0], r=2)
    save_adapter(model, tmp_path / "adapter")
    tokens = np.arange(8)[None]
    loaded = JaxtuneLM(tmp_path / "adapter").model
    assert stored_in(loaded) == "nf4"
    np.testing.assert_array_equal(loaded(tokens), model(tokens))
    assert stored_in(JaxtuneLM(tmp_path / "adapter", load_in="stored").model) is None
