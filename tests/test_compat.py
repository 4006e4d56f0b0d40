"""Unsloth's and TRL's names: a whole script, and what each argument becomes."""

from __future__ import annotations

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import tiny_config

import jaxtune
from jaxtune import from_pretrained, save_pretrained
from jaxtune.compat import (
    DPOConfig,
    DPOTrainer,
    FastLanguageModel,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    LoraConfig,
    ORPOConfig,
    ORPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
    arguments,
    measures,
    train_on_responses_only,
)
from jaxtune.compat.seeds import begin_at, next_seed
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import stored_in
from jaxtune.models.lora import linears
from jaxtune.train.config.objective import ObjectiveConfig
from tests.train.data.conftest import make_tokenizer

QUESTIONS = {"Who are you?": "I am a bot.", "Name a colour.": "It is blue.", "The sum of two and two?": "four"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder with a tokenizer, as a script would name it."""
    tokenizer = make_tokenizer()
    config = tiny_config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        head_dim=16,
        num_kv_heads=2,
        max_position_embeddings=256,
    )
    path = tmp_path_factory.mktemp("compat") / "model"
    save_pretrained(Decoder(config, jax.random.key(0), "bfloat16"), path, tokenizer=tokenizer)
    return str(path)


def rows(count=24):
    pairs = list(QUESTIONS.items())
    return [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in (pairs[i % len(pairs)] for i in range(count))
    ]


def load(folder, peft=True, **settings):
    model, tokenizer = FastLanguageModel.from_pretrained(
        folder, **(dict(max_seq_length=64, load_in_4bit=False) | settings)
    )
    return (FastLanguageModel.get_peft_model(model, r=2) if peft else model), tokenizer


def trainer_of(folder, tmp_path, dataset=None, model=None, **settings):
    args = SFTConfig(**(dict(output_dir=str(tmp_path / "run"), save_strategy="no") | settings))
    return SFTTrainer(model or load(folder)[0], args=args, train_dataset=dataset or rows())


@pytest.mark.full
def test_a_script_for_unsloth_runs(folder, tmp_path, monkeypatch):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"conversations": row["messages"]}) + "\n" for row in rows(48)))
    monkeypatch.setenv("MODEL", folder)
    monkeypatch.setenv("DATA", str(data))
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    from tests import compat_script  # which runs it

    names = vars(compat_script)
    assert names["supervised"] == "I am a bot.<|im_end|>\n"
    stats, history = names["trainer_stats"], names["trainer"].state.log_history
    assert stats.global_step == 12 and stats.metrics["train_runtime"] > 0
    losses = [line["loss"] for line in history if "loss" in line]
    assert len(losses) == 12 and losses[-1] < 0.5 * losses[0]
    # The model that the script held all along has learnt; what it saved and loaded again says the same.
    assert "I am a bot.<|im_end|>" in names["text"]
    assert not np.array_equal(names["before"], names["after"])
    np.testing.assert_array_equal(names["after"], names["again"])
    assert {"adapter_config.json", "adapter_model.safetensors"} < set(os.listdir(tmp_path / "lora_model"))
    merged, tokenizer = from_pretrained(tmp_path / "merged")
    assert tokenizer is not None and all(linear.lora is None for _, linear in linears(merged))


@pytest.mark.full
def test_four_bits_are_the_default(folder, tmp_path, capsys):
    model, tokenizer = FastLanguageModel.from_pretrained(folder, max_seq_length=64)
    assert stored_in(model.module) is not None
    model = FastLanguageModel.get_peft_model(model, r=2)
    plain = load(folder)[0]
    for one in (model, plain):
        one.print_trainable_parameters()
    four_bit, sixteen_bit = capsys.readouterr().out.splitlines()
    assert four_bit == sixteen_bit  # a parameter in four bits is one too
    trainer = trainer_of(folder, tmp_path, model=model, max_steps=6, learning_rate=1e-2)
    assert trainer.config().model.load_in == "nf4"
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < 0.9 * losses[0]
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    merged, _ = from_pretrained(tmp_path / "merged")
    assert stored_in(merged) is None
    # Without adapters too, merged_16bit is 16-bit; and full fine-tuning turns four bits off.
    bare, _ = FastLanguageModel.from_pretrained(folder, max_seq_length=64)
    bare.save_pretrained_merged(tmp_path / "bare", tokenizer)
    assert stored_in(from_pretrained(tmp_path / "bare")[0]) is None
    assert stored_in(FastLanguageModel.from_pretrained(folder, 64, full_finetuning=True)[0].module) is None


@pytest.mark.full
def test_a_base_in_four_bits_is_on_a_device(folder):
    model, _ = load(folder, peft=False, load_in_4bit=True)
    assert model.device == jax.devices()[0]


def test_arguments_become_a_train_config(folder, tmp_path):
    config = trainer_of(
        folder,
        tmp_path,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=4,
        max_steps=7,
        learning_rate=1e-3,
        weight_decay=0.02,
        optim="sgd",
        adam_beta1=0.8,
        adam_beta2=0.95,
        adam_epsilon=1e-7,
        max_grad_norm=0.5,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        logging_steps=5,
        seed=11,
        fp16=True,
        report_to=["tensorboard", "trackio"],
        neftune_noise_alpha=5,
        max_length=48,
        packing=True,
        save_strategy="steps",
        save_steps=20,
        save_total_limit=3,
        dataset_num_proc=1,
    ).config()
    assert (config.rows_per_step, config.micro_batches, config.steps, config.epochs) == (12, 4, 7, None)
    assert (config.precision, config.seed, config.max_grad_norm) == ("fp16", 11, 0.5)
    assert config.neftune_noise_alpha == 5
    optim = config.optim
    assert (optim.name, optim.learning_rate, optim.weight_decay, optim.momentum) == ("sgd", 1e-3, 0.02, 0.0)
    assert (optim.beta1, optim.beta2, optim.eps) == (0.8, 0.95, 1e-7)
    assert (config.schedule.name, config.schedule.warmup_steps, config.schedule.warmup_ratio) == ("cosine", 3, None)
    data = config.data
    assert (data.length, data.packing, data.format, data.num_workers, data.overflow) == (
        48,
        True,
        "messages",
        1,
        "truncate",
    )
    assert (config.checkpoint.every_steps, config.checkpoint.every_minutes, config.checkpoint.keep) == (20, None, 3)
    metrics = config.metrics
    assert (metrics.log_every, metrics.tensorboard, metrics.wandb_project) == (5, True, None)
    assert metrics.trackio_project == "huggingface"
    assert config.memory.plan is None and config.adapter.r == 2 and config.model.path == folder
    assert config.output == str(tmp_path / "run")


def test_a_file_is_trained_on_as_its_rows_are(folder, tmp_path):
    made = {"prompt_completion": {"prompt": "2 + 2 =", "completion": " 4"}, "messages": rows()[0]}
    for form, row in made.items():
        (tmp_path / f"{form}.jsonl").write_text(json.dumps(row) + "\n")
        trainers = [trainer_of(folder, tmp_path, dataset) for dataset in ([row], str(tmp_path / f"{form}.jsonl"))]
        inside, of_file = (trainer.train_dataset[0] for trainer in trainers)
        assert inside == of_file and trainers[1].config().data.format == form
        assert (-100 in of_file["labels"]) == (form == "prompt_completion")


def test_steps_may_be_shares_of_all_as_in_transformers(folder, tmp_path):
    shares = dict(save_strategy="steps", save_steps=0.5, eval_strategy="steps", eval_steps=0.21, logging_steps=0.1)
    args = SFTConfig(output_dir=str(tmp_path), max_steps=10, **shares)
    made = SFTTrainer(load(folder)[0], args=args, train_dataset=rows(), eval_dataset=rows()).config()
    assert (made.checkpoint.every_steps, made.evaluation.every_steps, made.metrics.log_every) == (5, 3, 1)
    trainer = trainer_of(folder, tmp_path, max_steps=0, num_train_epochs=4, save_strategy="steps", save_steps=0.3)
    assert (trainer.config().steps, trainer.config().checkpoint.every_steps) == (12, 4)
    with pytest.raises(ValueError, match=r"eval_steps = 2.5: must be a whole number, or below 1"):
        SFTTrainer(load(folder)[0], args=SFTConfig(eval_steps=2.5), train_dataset=rows())


def test_defaults_are_unsloths(folder, tmp_path):
    made = SFTTrainer(load(folder)[0], args=SFTConfig(run_name="mine"), train_dataset=rows())
    config = made.config()
    assert made.args.run_name == "mine"  # a callback may look at it
    assert (config.rows_per_step, config.micro_batches, config.steps, config.seed) == (8, None, 9, 3407)
    assert (config.optim.learning_rate, config.optim.weight_decay, config.optim.name) == (5e-5, 0.001, "adamw_8bit")
    assert (config.schedule.name, config.schedule.warmup_steps) == ("linear", 1)
    assert (config.data.packing, config.data.length, config.precision) == ("step", 64, "bf16")
    assert (config.checkpoint.every_steps, config.metrics.log_every, config.output) == (500, 1, "trainer_output")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (dict(max_length=1024), 64),  # the model's max_seq_length is the ceiling
        (dict(max_seq_length=32), 32),
        (dict(max_length=None), 64),
    ],
)
def test_length_is_the_smallest(folder, tmp_path, settings, expected):
    assert trainer_of(folder, tmp_path, **settings).config().data.length == expected


@pytest.mark.full
def test_schedules_are_transformers(folder, tmp_path):
    model = load(folder)[0]

    def schedule(**settings):
        made = trainer_of(folder, tmp_path, model=model, **settings).config().schedule
        return made.name, made.warmup_steps, made.zero_start

    assert schedule(lr_scheduler_type="constant", warmup_steps=5) == ("constant", 0, False)
    assert schedule(lr_scheduler_type="constant_with_warmup", warmup_steps=5) == ("constant", 5, True)
    assert schedule(warmup_ratio=0.2) == ("linear", 2, True)  # of 9 steps, rounded up
    assert schedule(warmup_steps=0.05) == ("linear", 1, True)
    assert schedule(warmup_ratio=0.2, max_steps=21) == ("linear", 5, True)
    restarts = dict(lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 3})
    assert trainer_of(folder, tmp_path, model=model, **restarts).config().schedule.cycles == 3


@pytest.mark.full
def test_gradient_checkpointing_is_what_becomes_of_residuals(folder, tmp_path):
    for choice, expected in (("unsloth", None), (True, None), (False, "keep")):
        plain, _ = load(folder, peft=False)
        model = FastLanguageModel.get_peft_model(plain, r=2, use_gradient_checkpointing=choice)
        assert trainer_of(folder, tmp_path, model=model).config().memory.plan == expected
        assert trainer_of(folder, tmp_path, model=model, gradient_checkpointing=False).config().memory.plan == "keep"


PROMPTED = [{"prompt": "Who are you?", "completion": " I am a bot."}] * 4
CONVERSED = [
    {
        "prompt": [{"role": "user", "content": "Who are you?"}],
        "completion": [{"role": "assistant", "content": "I am a bot."}],
    }
] * 4


@pytest.mark.parametrize(
    ("dataset", "settings", "form", "supervised"),
    [
        ([{"text": "I am a bot.", "messages": []}], {}, "text", "I am a bot.<|im_end|>"),
        ([{"body": "I am a bot."}], dict(dataset_text_field="body"), "text", "I am a bot.<|im_end|>"),
        (
            rows(1),
            {},
            "messages",
            "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\nI am a bot.<|im_end|>\n",
        ),
        (rows(1), dict(assistant_only_loss=True), "messages", "I am a bot.<|im_end|>\n"),
        (PROMPTED, {}, "prompt_completion", " I am a bot.<|im_end|>"),
        (CONVERSED, {}, "prompt_completion", "I am a bot.<|im_end|>\n"),
        (CONVERSED, dict(assistant_only_loss=True), "prompt_completion", "I am a bot.<|im_end|>\n"),
        (PROMPTED, dict(completion_only_loss=False), "prompt_completion", "Who are you? I am a bot.<|im_end|>"),
    ],
)
def test_what_is_trained_on(folder, tmp_path, dataset, settings, form, supervised):
    trainer = trainer_of(folder, tmp_path, dataset=dataset, **settings)
    assert trainer.config().data.format == form
    example = trainer.train_dataset[0]
    assert trainer.tokenizer.decode([token for token in example["labels"] if token != -100]) == supervised
    assert len(trainer.train_dataset) == len(dataset) == len(trainer.train_dataset[:]["labels"])


def test_responses_only_by_markers_of_the_template(folder, tmp_path):
    trainer = train_on_responses_only(trainer_of(folder, tmp_path))
    labels = trainer.train_dataset[1]["labels"]
    assert trainer.tokenizer.decode([token for token in labels if token != -100]) == "It is blue.<|im_end|>\n"
    for one, other in (("instruction_part", "response_part"), ("response_part", "instruction_part")):
        with pytest.raises(ValueError, match=f"train_on_responses_only: {other} = None: give both parts, or neither"):
            train_on_responses_only(trainer, **{one: "x"})
    assert trainer.train_dataset[1]["labels"] == labels


def test_formatting_func(folder, tmp_path):
    trainer = SFTTrainer(load(folder)[0], train_dataset=[{"a": "x"}], formatting_func=lambda row: [f"{row['a']}y"])
    assert trainer.tokenizer.decode(trainer.train_dataset[0]["input_ids"]) == "xy<|im_end|>"
    with pytest.raises(ValueError, match="formatting_func returned dict"):
        SFTTrainer(load(folder)[0], train_dataset=[{"a": "x"}], formatting_func=lambda row: row)


@pytest.mark.full
def test_full_finetuning_and_evaluation(folder, tmp_path):
    model, _ = load(folder, peft=False, full_finetuning=True, dtype="float32")
    args = SFTConfig(
        output_dir=str(tmp_path / "run"),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
    )
    trainer = SFTTrainer(model, args=args, train_dataset=rows(8), eval_dataset=rows(3))
    before = model.module
    first = trainer.evaluate()["eval_loss"]
    assert np.isfinite(trainer.train().training_loss)
    assert trainer.evaluate()["eval_loss"] < first
    assert model.module is not before and model.module.embedding.weight.get_value().dtype == jnp.float32
    assert [line["step"] for line in trainer.state.log_history if "eval_loss" in line] == [2]
    assert trainer.train().global_step == 3  # once more, from these weights
    model.save_pretrained_merged(tmp_path / "merged", model.tokenizer)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    model.save_pretrained(tmp_path / "whole")
    np.testing.assert_array_equal(
        from_pretrained(tmp_path / "whole", dtype="float32")[0].norm.weight[...], model.module.norm.weight[...]
    )


def test_embedding_and_head_among_targets_are_trained_whole(folder):
    plain, _ = load(folder, peft=False)
    model = FastLanguageModel.get_peft_model(plain, r=2, target_modules=["q_proj", "embed_tokens", "lm_head"])
    assert isinstance(model.module.embedding.weight, nnx.Param) and isinstance(model.module.head.weight, nnx.Param)
    assert {name.rsplit(".", 1)[1] for name, linear in linears(model.module) if linear.lora} == {"q_proj"}
    assert isinstance(plain.module.head.weight, nnx.Param) and plain.module.layers[0].mixer.q_proj.lora is None


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_biases_do_not_train_beside_adapters(folder, bias):
    """A model without biases asks for nothing by it, in PEFT neither."""
    plain = load(folder, peft=False)[0]
    module = FastLanguageModel.get_peft_model(plain, r=2, bias=bias).module
    assert {type(lora.a) for _, linear in linears(module) if (lora := linear.lora)} == {nnx.Param}
    plain.module = Decoder(tiny_config(qkv_bias=True), jax.random.key(0), "float32")
    with pytest.raises(ValueError, match=rf"bias = '{bias}' would train \S+bias and 5 more"):
        FastLanguageModel.get_peft_model(plain, r=2, bias=bias)


@pytest.mark.full
def test_generate_takes_and_gives_what_transformers_does(folder):
    model, tokenizer = load(folder)
    tokenizer.pad_token = tokenizer.eos_token
    prompts = ["Who are you?", "Name a colour: blue, red or green."]
    outputs = []
    for side in ("left", "right"):
        inputs = tokenizer(prompts, return_tensors="np", padding=True, padding_side=side)
        ids = model.generate(
            **{k: inputs[k] for k in ("input_ids", "attention_mask")}, max_new_tokens=5, eos_token_id=[]
        )
        np.testing.assert_array_equal(ids[:, :-5], inputs["input_ids"])
        outputs.append(ids[:, -5:])
    np.testing.assert_array_equal(*outputs)
    ids = tokenizer(prompts[0], return_tensors="np")["input_ids"]
    sampled = model.generate(ids, max_new_tokens=5, eos_token_id=[], do_sample=True, temperature=5.0)
    assert not np.array_equal(sampled[0, -5:], outputs[0][0])


@pytest.mark.full
def test_generate_takes_what_generation_config_says(folder):
    """As transformers does, with its own top_k of 50 where nothing says one."""
    model, _ = load(folder)
    module, prompt = model.module, [3, 4, 5, 6]

    def by(given=None, **said):
        module.source = dataclasses.replace(module.source, generation_config=json.dumps(said))
        begin_at(5)
        return model.generate([prompt], max_new_tokens=24, eos_token_id=[], **(given or {}))[0, 4:].tolist()

    begin_at(5)
    seed = next_seed()

    def wanted(**settings):
        return jaxtune.generate(module, [prompt], 24, seed=seed, eos_token_ids=[], **settings)[0]

    greedy, hot = wanted(), dict(do_sample=True, temperature=3.0, top_k=7, min_p=None)
    assert by() == by(dict(do_sample=False), **hot) == by(dict(temperature=0), **hot) == greedy
    assert by(repetition_penalty=2.0) == wanted(repetition_penalty=2.0) != greedy
    assert by(**hot) == wanted(temperature=3.0, top_k=7) != greedy
    assert by(dict(temperature=9.0)) == wanted(temperature=9.0, top_k=50) != wanted(temperature=9.0)
    assert by(dict(temperature=9.0, top_k=0), **hot) == wanted(temperature=9.0)


def from_(**settings):
    return lambda folder, tmp_path: load(folder, **settings)


def peft_(**settings):
    return lambda folder, tmp_path: FastLanguageModel.get_peft_model(load(folder, peft=False)[0], **settings)


def config_(**settings):
    return lambda folder, tmp_path: trainer_of(folder, tmp_path, **settings).config()


def trainer_(**settings):
    def make(folder, tmp_path):
        return SFTTrainer(**(dict(model=load(folder)[0], train_dataset=rows(2)) | settings))

    return make


def test_four_bits_are_turned_off_for_full_fine_tuning_with_a_line(folder, capsys, monkeypatch):
    """As Unsloth does, which prints it too; four bits by default need no line."""
    monkeypatch.setattr(arguments, "_printed", set())
    for asked, lines in ((None, 0), (True, 1)):
        model, _ = load(folder, peft=False, load_in_4bit=asked, full_finetuning=True)
        assert stored_in(model.module) is None
        assert capsys.readouterr().out.count("load_in_4bit does nothing here: full_finetuning=True trains") == lines


@pytest.mark.full
def test_eight_bits_of_bitsandbytes_are_asked_for_as_there(folder, tmp_path):
    """load_in_8bit turns off four bits, the default; an adapter's folder records the format of its base."""
    model, tokenizer = load(folder, load_in_4bit=None, load_in_8bit=True)
    assert (
        stored_in(model.module) == "int8" and trainer_of(folder, tmp_path, model=model).config().model.load_in == "int8"
    )
    model.save_pretrained(tmp_path / "adapter")
    again, _ = FastLanguageModel.from_pretrained(str(tmp_path / "adapter"), max_seq_length=64)
    assert stored_in(again.module) == "int8"
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    assert stored_in(from_pretrained(tmp_path / "merged")[0]) is None
    assert stored_in(load(folder, load_in_8bit=False)[0].module) is None


ERRORS = [
    (
        from_(load_in_4bit=True, load_in_16bit=True),
        "load_in_16bit = True contradict each other: pass load_in_4bit=False",
    ),
    (from_(load_in_fp8=True, load_in_4bit=True), "load_in_fp8 = True and load_in_4bit = True contradict each other"),
    (from_(load_in_fp8=True, load_in_16bit=True), "load_in_fp8 = True and load_in_16bit = True contradict each other"),
    (from_(load_in_fp8=True, full_finetuning=True), "load_in_fp8 = True and full_finetuning = True contradict"),
    (from_(load_in_fp8="block"), "load_in_fp8 = 'block' is not supported. Instead: True"),
    (from_(load_in_8bit=True, load_in_4bit=True), "load_in_8bit = True and load_in_4bit = True contradict each other"),
    (
        from_(load_in_4bits=True),
        "load_in_4bits = True is not an argument that jaxtune.compat knows; did you mean load_in_4bit",
    ),
    (from_(dtype="int8"), "dtype = 'int8' is not supported"),
    (from_(use_gradient_checkpointing="sometimes"), "use_gradient_checkpointing = 'sometimes' is not supported"),
    (from_(full_finetuning=True), "loaded with full_finetuning=True"),
    (peft_(bias="some"), "bias = 'some' is not supported; supported: 'none'"),
    (peft_(loftq_config={"bits": 4}), "loftq_config = "),
    (peft_(init_lora_weights="pissa"), "init_lora_weights = 'pissa'"),
    (peft_(target_modules=["c_attn"]), "'c_attn' matches no linear"),
    (peft_(max_seq_length=17), "max_seq_length = 17 belongs to from_pretrained"),
    (config_(optim="galore_adamw"), "optim = 'galore_adamw' is not supported; supported: 'adamw_8bit'"),
    (config_(neftune_noise_alpha=-5), "neftune_noise_alpha = -5: must be greater than 0"),
    (
        config_(lr_scheduler_type="cosine", lr_scheduler_kwargs={"power": 2}),
        "lr_scheduler_type = 'cosine' with {'power': 2} is not supported; it takes num_cycles",
    ),
    (config_(packing_strategy="wrapped"), "packing_strategy = 'wrapped'"),
    (
        config_(lr_scheduler_type="reduce_lr_on_plateau"),
        "lr_scheduler_type = 'reduce_lr_on_plateau' is not supported. Instead: a schedule that is known before",
    ),
    (config_(lr_scheduler_type="warmup_stable_decay"), "'warmup_stable_decay' needs num_decay_steps"),
    (config_(lr_scheduler_type="cosine_with_min_lr"), "'cosine_with_min_lr' needs min_lr or min_lr_rate"),
    (config_(save_strategy="best"), "save_strategy = 'best' is not supported; supported: 'steps', 'no', 'epoch'"),
    (config_(eval_strategy="steps"), "eval_strategy = 'steps' needs eval_dataset"),
    (config_(report_to="comet_ml"), "report_to = 'comet_ml'"),
    (config_(bf16=True, fp16=True), "bf16 and fp16 are both True"),
    (config_(load_best_model_at_end=True), "load_best_model_at_end = True needs eval_strategy"),
    (config_(deepspeed="zero3.json"), "deepspeed = 'zero3.json' is not supported; leave it at None. Instead: several"),
    (config_(packing_strategy="wrapped"), "Instead: 'bfd': whole documents"),
    (config_(completion_only_loss=True), "completion_only_loss = True needs prompt and completion"),
    (
        config_(learning_rat=1),
        "learning_rat = 1 is not an argument that jaxtune.compat knows; did you mean learning_rate",
    ),
    (config_(learning_rate=-1.0), "learning_rate = -1.0: must"),
    (trainer_(data_collator=object()), "SFTTrainer: data_collator = "),
    (trainer_(callbacks=[1]), "SFTTrainer: callbacks = "),
    (trainer_(train_dataset=None), "train_dataset is missing"),
    (trainer_(train_dataset=[{"a": 1}]), "dataset_text_field = 'text' is not a column of the data set"),
    (trainer_(model=3), "model is a int; give a name or folder, or load it with FastLanguageModel"),
    (trainer_(eval_dataset=[{"text": "x"}]), "train_dataset is messages, eval_dataset is text"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[message[:50] for _, message in ERRORS])
def test_what_is_not_followed_is_an_error(folder, tmp_path, call, message):
    with pytest.raises(ValueError) as error:
        call(folder, tmp_path)
    assert message in str(error.value)


def test_a_model_without_adapter_is_not_trained_by_accident(folder, tmp_path):
    with pytest.raises(ValueError, match="the model has no adapter: call FastLanguageModel.get_peft_model"):
        SFTTrainer(load(folder, peft=False)[0], train_dataset=rows(2))
    with pytest.raises(ValueError, match="save_method = 'merged_8bit' is not supported"):
        load(folder)[0].save_pretrained_merged(tmp_path / "x", save_method="merged_8bit")


PREFERENCES = [{"prompt": q, "chosen": a, "rejected": "no"} for q, a in QUESTIONS.items()] * 4
LABELLED = [
    {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
    for row in PREFERENCES
    for side in ("chosen", "rejected")
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("trainer", "config", "options", "objective"),
    [
        (
            DPOTrainer,
            DPOConfig,
            dict(loss_type=["ipo"], precompute_ref_log_probs=True),
            ObjectiveConfig("dpo", 0.2, "ipo", precompute_ref_log_probs=True),
        ),
        (ORPOTrainer, ORPOConfig, dict(), ObjectiveConfig("orpo", 0.2)),
        (KTOTrainer, KTOConfig, dict(undesirable_weight=1.5), ObjectiveConfig("kto", 0.2, undesirable_weight=1.5)),
    ],
)
def test_preference_trainers(folder, tmp_path, monkeypatch, trainer, config, options, objective):
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path / "cache"))
    model, _ = load(folder)
    args = config(
        output_dir=str(tmp_path / "run"),
        save_strategy="no",
        max_steps=6,
        learning_rate=1e-2,
        beta=0.2,
        eval_strategy="steps",
        eval_steps=6,
        **options,
    )
    rows = LABELLED if trainer is KTOTrainer else PREFERENCES
    made = trainer(model, args=args, train_dataset=rows, eval_dataset=rows[:4], ref_model=None)
    assert made.config().objective == objective
    made.train()
    history = made.state.log_history
    assert history[-2]["eval_rewards/margins"] > 0 and "rewards/margins" in history[0] and "logps/chosen" in history[0]


@pytest.mark.full
@pytest.mark.parametrize(("trainer", "rows"), [(KTOTrainer, LABELLED), (DPOTrainer, PREFERENCES)])
def test_rows_are_evaluated_alike_however_they_are_given(folder, tmp_path, trainer, rows):
    """KTO's mismatched answers come from the rows of one batch, and its kl depends on them."""
    args = trainer.config_type(output_dir=str(tmp_path / "run"), per_device_train_batch_size=2)
    made = trainer(load(folder)[0], args=args, train_dataset=rows, eval_dataset=rows[:7])
    for _, matrix in linears(made.model.module):
        if matrix.lora is not None:
            matrix.lora.b.set_value(matrix.lora.b[...] + 0.1)
    known = made.evaluate()
    assert made.evaluate(eval_dataset=rows[:7]) == known
    found = made.predict(rows[:7]).metrics
    assert {name.replace("test_", "eval_"): value for name, value in found.items()} == known
    if trainer is KTOTrainer:
        assert known["eval_kl"] > 0


@pytest.mark.parametrize(
    ("trainer", "rows", "options"),
    [
        (SFTTrainer, [{"text": "a b"}] * 4, {}),
        (DPOTrainer, PREFERENCES, {}),
        (KTOTrainer, LABELLED, {}),
        (GRPOTrainer, [{"prompt": "a"}] * 4, {"reward_funcs": len}),
    ],
)
def test_several_data_sets_by_name_are_refused(folder, tmp_path, trainer, rows, options):
    """Such as all splits of one, as datasets.load_dataset gives them without `split`."""
    args = trainer.config_type(output_dir=str(tmp_path / "run"), eval_strategy="epoch")
    rewards = trainer is GRPOTrainer  # whose evaluations answer one set
    for argument in ("train_dataset", *(["eval_dataset"] if rewards else [])):
        sets = {"train_dataset": rows, "eval_dataset": rows} | {argument: {"a": rows, "b": rows}}
        with pytest.raises(TypeError, match=f"{trainer.__name__}: `{argument}` must be .*, with the keys a, b"):
            trainer(load(folder)[0], args=args, **sets, **options)


def test_a_dict_of_evaluation_sets_is_evaluated_in_the_run(folder, tmp_path):
    """Each has its own line, with its name in the keys, and what `evaluate` says of it afterwards."""
    sets = {"a": [{"text": "a b"}] * 2, "a_b": [{"text": "c d e"}, {"text": "f"}]}
    settings = dict(output_dir=str(tmp_path / "run"), max_steps=2, eval_strategy="steps", eval_steps=2)
    args = SFTConfig(**settings, metric_for_best_model="a_b_loss", load_best_model_at_end=True)
    measured = []
    made = SFTTrainer(
        load(folder)[0],
        args=args,
        train_dataset=[{"text": "a b c"}] * 4,
        eval_dataset=sets,
        compute_metrics=lambda prediction: measured.append(len(prediction.predictions)) or {"rows": len(measured)},
    )
    made.train()
    lines = [line for line in made.state.log_history if any(key.startswith("eval_") for key in line)]
    assert [line["step"] for line in lines] == [2, 2] and len(measured) == 2
    assert "eval_a_loss" in lines[0] and not any(key.startswith("eval_a_b") for key in lines[0])
    assert {"eval_a_b_loss", "eval_a_b_rows", "epoch"} <= lines[1].keys() and "eval_a_loss" not in lines[1]
    assert made.state.best_metric == lines[1]["eval_a_b_loss"]
    known = made.evaluate()
    assert {name: known[f"eval_{name}_loss"] for name in sets} == {
        name: pytest.approx(line[f"eval_{name}_loss"], rel=1e-5) for name, line in zip(sets, lines, strict=True)
    }
    assert known["eval_a_loss"] == made.evaluate(sets["a"])["eval_loss"]
    assert {name: len(rows) for name, rows in made.eval_dataset.items()} == {"a": 2, "a_b": 2}
    with pytest.raises(ValueError, match="metric_for_best_model = 'loss' is not in an evaluation; set one of eval_a_"):
        SFTTrainer(
            load(folder)[0],
            args=SFTConfig(**settings, metric_for_best_model="loss"),
            train_dataset=sets["a"],
            eval_dataset=sets,
        )


def test_each_of_several_data_sets_is_evaluated(folder, tmp_path):
    args = SFTTrainer.config_type(output_dir=str(tmp_path / "run"))
    rows = [{"text": text} for text in ("a b", "c d e", "f", "g h")]
    made = SFTTrainer(load(folder)[0], args=args, train_dataset=rows, eval_dataset=rows)
    parts = {"a": rows[:1], "b": rows[1:]}
    alone = {name: made.evaluate(part) for name, part in parts.items()}
    found = made.evaluate(parts)
    assert found["eval_a_loss"] == alone["a"]["eval_loss"] and found["eval_b_loss"] == alone["b"]["eval_loss"]
    assert len(found) == 2 * len(alone["a"])


LONG = "I am a bot. " * 5
LONG_PAIRS = [{"prompt": "Who?", "chosen": LONG, "rejected": f"{LONG}no"}] * 3
LONG_ANSWERS = [
    {"prompt": prompt, "completion": answer, "label": label}
    for prompt, answer, label in ((LONG, "no", True), ("x", LONG, False), ("x", "yes", True), ("x", "no", True))
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("trainer", "rows", "expected"),
    [
        (DPOTrainer, LONG_PAIRS, [f"{LONG}{LONG}no"] * 3),
        # the answer of the other row of two, after a prompt that is longer than that of the row before
        (KTOTrainer, LONG_ANSWERS, [f"no{LONG}", f"{LONG}no", "yesno", "noyes"]),
    ],
)
def test_compute_metrics_gets_the_rows_of_the_loss(folder, tmp_path, monkeypatch, trainer, rows, expected):
    """In a run and after it: max_length limits each answer with its prompt, and not the two of a pair."""
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path / "cache"))
    settings = dict(max_steps=1, eval_strategy="steps", eval_steps=1, save_strategy="no", max_length=60)
    args = trainer.config_type(str(tmp_path / "run"), per_device_train_batch_size=2, **settings)
    seen, model = [], load(folder)[0]

    def measure(prediction):
        labels = [row[row != -100] for row in prediction.label_ids]
        seen.append([model.tokenizer.decode(row, skip_special_tokens=True) for row in labels])
        return {}

    given = dict(compute_metrics=measure, preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1))
    made = trainer(model, args, rows[-2:], rows, **given)
    made.train()
    made.evaluate()
    made.predict(rows)
    assert seen == [expected] * 3


def test_rows_of_preference_trainers_may_be_a_path(folder, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PREFERENCES))
    args = DPOConfig(output_dir=str(tmp_path / "run"))
    made = [
        DPOTrainer(load(folder)[0], args=args, train_dataset=rows) for rows in (PREFERENCES, tmp_path / "rows.jsonl")
    ]
    assert [*made[0].train_dataset] == [*made[1].train_dataset]


@pytest.mark.full
def test_dropout_of_preference_trainers(folder, tmp_path, monkeypatch, capsys):
    """Off, as TRL turns it, unless it is asked for."""
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path / "cache"))

    def losses(name, rate, **options):
        model = FastLanguageModel.get_peft_model(load(folder, peft=False)[0], r=2, lora_dropout=rate)
        args = DPOConfig(str(tmp_path / name), save_strategy="no", max_steps=3, learning_rate=1e-2, **options)
        made = DPOTrainer(model, args=args, train_dataset=PREFERENCES)
        made.train()
        return [row["loss"] for row in made.state.log_history if "loss" in row]

    without = losses("without", 0.0)
    assert "lora_dropout" not in capsys.readouterr().out
    assert losses("off", 0.5) == without
    assert "DPOTrainer: lora_dropout = 0.5 is turned off, as in TRL; disable_d" in capsys.readouterr().out
    assert losses("on", 0.5, disable_dropout=False) != without
    assert "lora_dropout" not in capsys.readouterr().out


@pytest.mark.full
def test_reward_trainer(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path / "cache"))
    args = RewardConfig(
        output_dir=str(tmp_path / "run"),
        save_strategy="no",
        max_steps=6,
        learning_rate=1e-2,
        center_rewards_coefficient=0.01,
        eval_strategy="steps",
        eval_steps=6,
        max_length=128,
    )
    made = RewardTrainer(
        str(folder), args=args, train_dataset=PREFERENCES, eval_dataset=PREFERENCES[:4], peft_config=LoraConfig(r=2)
    )
    assert made.config().objective == ObjectiveConfig("reward", center_rewards_coefficient=0.01)
    made.train()
    assert made.state.log_history[-2]["eval_margin"] > 0 and made.model.module.config.head.name == "score"
    made.save_model(str(tmp_path / "saved"))
    settings = dict(load_in_4bit=False, max_seq_length=128)
    again, _ = FastLanguageModel.from_pretrained(str(tmp_path / "saved"), **settings)
    assert again.module.config.head.name == "score"
    model, _ = FastLanguageModel.from_pretrained(str(folder), num_labels=1, **settings)
    assert model.module.config.head.name == "score"
    with pytest.raises(ValueError, match="RewardTrainer: the model has an adapter and no head"):
        RewardTrainer(load(folder)[0], args=args, train_dataset=PREFERENCES)
    with pytest.raises(ValueError, match="num_labels = 2: it can be 1"):
        FastLanguageModel.from_pretrained(str(folder), num_labels=2, **settings)


def test_a_reference_that_is_the_model_itself_is_taken(folder, tmp_path):
    args = DPOConfig(output_dir=str(tmp_path / "run"), max_length=64)
    settings = dict(args=args, train_dataset=PREFERENCES[:4])
    made = DPOTrainer(model=folder, ref_model=folder, **settings)
    assert made._precomputes
    with pytest.raises(ValueError, match="another: no folder of that name"):
        DPOTrainer(model=folder, ref_model="another", **settings)
    model, _ = load(folder)
    with pytest.raises(ValueError, match="ref_model is the model itself, which trains"):
        DPOTrainer(model, model, **settings)


@pytest.mark.full
def test_predictions_of_a_reward_model_fit_into_memory(folder, tmp_path, monkeypatch):
    """It gives each token one number, and not one for each token of the vocabulary."""
    args = RewardConfig(output_dir=str(tmp_path / "run"), max_length=64)
    made = RewardTrainer(folder, args, PREFERENCES[:4], peft_config=LoraConfig(r=2))
    tokens = 4 * made._prepared.batches.length
    for memory, message in ((8 * tokens, None), (8 * tokens - 1, f"of {tokens // 4:,} tokens, which are 0 GB")):
        monkeypatch.setattr(measures.os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": memory}.__getitem__)
        if message is None:
            assert made.predict(PREFERENCES[:4]).predictions.shape == (4, tokens // 4, 1)
        else:
            with pytest.raises(ValueError, match=message):
                made.predict(PREFERENCES[:4])


def test_what_preference_trainers_refuse(folder, tmp_path):
    def make(kind, config, rows=PREFERENCES, model=None, **arguments):
        return kind(model or load(folder)[0], args=config, train_dataset=rows, **arguments)

    settings = dict(output_dir=str(tmp_path / "run"))
    trained, _ = load(folder)
    _, matrix = next(linears(trained.module))
    matrix.lora.b.set_value(matrix.lora.b[...] + 0.1)
    make(ORPOTrainer, ORPOConfig(**settings), model=trained)  # without a reference
    for call, message in (
        (lambda: DPOConfig(use_weighting=True), "DPOConfig: use_weighting = True"),
        (lambda: make(KTOTrainer, KTOConfig(loss_type="bco", **settings), LABELLED), "loss_type = 'bco' is not"),
        (lambda: make(DPOTrainer, DPOConfig(loss_type="aot", **settings)), "loss_type = 'aot' is not supported"),
        (lambda: make(DPOTrainer, DPOConfig(loss_type="exo_pair", **settings)), "label_smoothing"),
        (lambda: make(DPOTrainer, DPOConfig(loss_type=["ipo", "hinge"], **settings)), "several losses"),
        (lambda: make(DPOTrainer, ORPOConfig(**settings)), "DPOTrainer: args is a ORPOConfig; use DPOConfig"),
        (lambda: make(DPOTrainer, DPOConfig(**settings), ref_model=object()), "DPOTrainer: ref_model"),
        (
            lambda: make(KTOTrainer, KTOConfig(**settings), [{"prompt": "a"}]),
            "KTOTrainer: the data set has no column completion, label",
        ),
        (lambda: make(DPOTrainer, DPOConfig(**settings), formatting_func=str), "DPOTrainer: it has no formatting_func"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_sampled_answers_are_not_evaluated_by_call(call):
    """Whatever the arguments are that transformers' methods take."""
    trainer = object.__new__(GRPOTrainer)
    with pytest.raises(ValueError, match="GRPOTrainer: evaluate and predict are not supported. Instead: the rewards"):
        getattr(trainer, call)([{"prompt": "a"}], metric_key_prefix="test")
