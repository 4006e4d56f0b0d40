"""Scripts of GRPO for Unsloth and TRL run with their imports changed; the arguments of the reward trainers."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxtune import compat
from jaxtune.compat import arguments
from jaxtune.train.data.packing.answers import REFERENCE_LOGPS, SAMPLED_LOGPS
from tests.docs.test_moved_scripts import run_script


@pytest.fixture
def from_the_hub(workplace, monkeypatch):
    """Data sets of the hub, as the scripts name them, and a fresh memory of what was told."""
    import datasets

    rows = {
        "openai/gsm8k": [{"question": f"What is {n} + {n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(8)],
        "trl-lib/ultrafeedback-prompt": [{"prompt": [{"role": "user", "content": "Go on."}]}] * 8,
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *_, **__: datasets.Dataset.from_list(rows[name]))
    monkeypatch.setattr(arguments, "_printed", set())
    return workplace


@pytest.mark.full
def test_unsloths_notebook(from_the_hub, capsys):
    made = run_script(
        "unsloth_grpo.py", max_seq_length="160", max_prompt_length="144", max_steps="2", num_generations="4"
    )
    trainer, told = made["trainer"], capsys.readouterr().out
    objective = trainer.config().objective
    assert (objective.name, objective.num_generations, objective.max_completion_length) == ("grpo", 4, 16)
    assert trainer.config().rows_per_step == 4 and "num_generations = 4 answers are taken instead" in told
    assert "fast_inference does nothing here: answers come from the sampler" in told and "Question:" in told
    line = trainer.state.log_history[0]
    assert {"reward", "rewards/correctness_reward_func/mean", "completions/mean_length"} <= set(line)
    assert (from_the_hub / "grpo_saved_lora/adapter_config.json").is_file()
    assert len(made["model"].fast_generate(["hello"])[0].outputs[0].token_ids) <= 16


@pytest.mark.full
def test_trls_quick_start(from_the_hub, capsys):
    trainer = run_script("trl_grpo.py", max_completion_length="4", max_steps="1")["trainer"]
    told = capsys.readouterr().out
    assert "use_vllm does nothing here: answers come from the sampler" in told
    config = trainer.config()
    assert config.adapter is None and config.objective.loss_type == "dapo" and config.optim.learning_rate == 1e-6
    assert trainer.state.log_history[0]["rewards/reward_num_unique_chars/mean"] > 0
    assert (from_the_hub / "trainer_output/checkpoint-1/model.safetensors").is_file()


ROWS = [{"prompt": f"Say {n}.", "level": n} for n in range(4)]


def by_level(prompts, completions, level, trainer_state, **columns):
    assert trainer_state.global_step >= 0 and len(level) == len(prompts)
    columns["log_metric"]("mine", 1.0)
    return [float(value) for value in level]


def length(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


def adapted(trained: bool = False):
    model, _ = compat.FastLanguageModel.from_pretrained("base", 64, load_in_4bit=False, dtype="float32")
    model = compat.FastLanguageModel.get_peft_model(model, r=2, target_modules=["q_proj"])
    if trained:
        graph, params, others = nnx.split(model.module, nnx.Param, ...)
        model.module = nnx.merge(graph, jax.tree.map(lambda a: a + 0.5, params), others)
    return model


def trainer_of(
    kind: Any = compat.GRPOTrainer,
    model=None,
    reward_funcs=(by_level, length),
    dataset=ROWS,
    eval_dataset=None,
    tools=None,
    **settings,
):
    usual: dict[str, Any] = dict(max_steps=1, num_generations=2, max_completion_length=4, per_device_train_batch_size=4)
    args = kind.config_type(**(usual | settings))
    return kind(model or adapted(), list(reward_funcs), args, dataset, eval_dataset, tools=tools)


def a_tool():
    """Does nothing."""


@pytest.mark.full
def test_the_best_model_by_the_reward_of_held_out_prompts(workplace):
    best = dict(load_best_model_at_end=True, metric_for_best_model="reward", greater_is_better=True)
    often = dict(max_steps=3, eval_strategy="steps", eval_steps=1, save_strategy="no", learning_rate=1e-2)
    trainer = trainer_of(eval_dataset=ROWS[:2], **best, **often)
    kept = []

    class Kept(compat.TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, model, **others):
            kept.append((metrics["eval_reward"], jax.device_get(nnx.state(model.module, nnx.Param))))

    trainer.add_callback(Kept)
    trainer.train()
    rewards = [reward for reward, _ in kept]
    at = int(np.argmax(rewards))
    assert len(rewards) == 3 and trainer.state.best_metric == rewards[at] and trainer.state.best_global_step == at + 1
    for one, other in zip(
        *map(jax.tree.leaves, (nnx.state(trainer.model.module, nnx.Param), kept[at][1])), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.full
def test_prompts_may_be_a_path(workplace, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    trainer = trainer_of(dataset=tmp_path / "prompts.jsonl")
    trainer.train()
    assert trainer.state.global_step == 1


def test_arguments_become_the_objectives_options(workplace):
    made = trainer_of(
        reward_weights=[1.0, 0.5],
        scale_rewards=False,
        loss_type="dr_grpo",
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        top_k=-1,
        vllm_importance_sampling_correction=False,
        importance_sampling_level="sequence",
        max_prompt_length=20,
    ).config()
    objective = made.objective
    assert (objective.reward_funcs, objective.reward_weights) == (("by_level", "length"), (1.0, 0.5))
    assert (objective.scale_rewards, objective.loss_type, objective.top_k) == ("none", "dr_grpo", 0)
    assert (made.rows_per_step, objective.steps_per_generation, made.data.length) == (8, 2, 24)
    assert objective.importance_sampling_correction is False and objective.importance_sampling_level == "sequence"
    assert (
        trainer_of(generation_batch_size=16, gradient_accumulation_steps=2).config().objective.steps_per_generation == 2
    )


@pytest.mark.parametrize(
    "settings, told",
    [
        (dict(loss_type="vespo"), "loss_type = 'vespo' is not supported; supported: 'grpo'"),
        (dict(steps_per_generation=3, gradient_accumulation_steps=2), "steps_per_generation = 3 is a generation of 12"),
        (dict(eval_strategy="steps"), "eval_strategy = 'steps' needs eval_dataset"),
        (
            dict(load_best_model_at_end=True, metric_for_best_model="reward"),
            "load_best_model_at_end = True needs eval_",
        ),
        (
            dict(load_best_model_at_end=True, eval_strategy="steps", eval_dataset=ROWS),
            "metric_for_best_model = 'loss' is not in an evaluation; set one of eval_reward, ",
        ),
        (
            dict(eval_strategy="steps", tools=[a_tool]),
            "is not supported with tools, environments and rollout_func",
        ),
        (dict(generation_kwargs={"top_k": 1}), "generation_kwargs = .* is not supported"),
        (dict(sync_ref_model=True), "sync_ref_model = True is not supported"),
        (dict(packing=True), "packing = True is not supported"),
        (dict(reward_weights=[1.0]), "there are 2 reward functions"),
        (dict(dataset=[{"text": "x"}]), "the data set has no column prompt"),
        (dict(reward_funcs=["a/reward-model"]), "reward_funcs has 'a/reward-model'; give functions"),
        (dict(reward_funcs=[], dataset=[dict(prompt="x", reward=1.0)]), r"reward_funcs = \[\]: give a function"),
        (dict(reward_funcs=[], tools=[a_tool]), r"reward_funcs = \[\]: give a function"),
    ],
)
def test_what_has_no_counterpart_is_refused(workplace, settings, told):
    with pytest.raises(ValueError, match=told):
        trainer_of(**settings)


@pytest.mark.parametrize("kind", [compat.GRPOTrainer, compat.RLOOTrainer])
@pytest.mark.parametrize("name", ["compute_metrics", "preprocess_logits_for_metrics"])
def test_metrics_of_logits_are_refused(workplace, kind, name):
    """TRL's trainers do not have them either: an evaluation samples answers, and has no logits of held-out rows."""
    args = kind.config_type(per_device_train_batch_size=4, num_generations=2, eval_strategy="steps", eval_steps=1)
    given: dict[str, Any] = dict(args=args, train_dataset=ROWS, eval_dataset=ROWS[:2])
    with pytest.raises(ValueError, match=f"{kind.__name__}: {name} = .* is not supported.* Instead: a reward function"):
        kind(adapted(), [length], **given, **{name: lambda *_: {}})
    kind(adapted(), [length], **given, **{name: None})


TOOLS = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


class Dice:
    """An environment as TRL's, with a reward of its own."""

    def reset(self, **row):
        self.row = row

    def roll(self, sides: int) -> int:
        """Rolls a die.

        Args:
            sides: of the die.
        """
        return sides

    def get_reward(self) -> float:
        return float(self.row["level"])


def asked(**arguments) -> compat.GRPOTrainer:
    """A trainer of two steps whose prompts are messages, with a template that can call tools."""
    rows = [{"prompt": [{"role": "user", "content": "Go."}], "level": level} for level in range(4)]
    args = compat.GRPOConfig(
        num_generations=2, per_device_train_batch_size=4, max_completion_length=6, max_steps=2, output_dir="with_tools"
    )
    model = adapted()
    model.tokenizer.chat_template = TOOLS
    return compat.GRPOTrainer(model, args=args, train_dataset=rows, processing_class=model.tokenizer, **arguments)


def test_tools_and_environments_run(workplace):
    with pytest.raises(ValueError, match="two tools have one name"):
        asked(tools=[Dice().roll], environment_factory=Dice)
    trainer = asked(environment_factory=Dice)
    trainer.train()
    line = trainer.state.log_history[0]
    assert {"rewards/Dice/mean", "tools/call_frequency", "tools/failure_frequency"} <= set(line)
    assert "roll" in trainer.tokenizer.decode(trainer._prepared.batches.prompts[0].ids)


STYLED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{% if enable_thinking is defined and not enable_thinking %}quick {% endif %}"
    "assistant: {% endif %}"
)


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_arguments_of_the_template_are_in_prompts_and_in_the_saved_template(workplace, kind):
    rows = [{"prompt": [{"role": "user", "content": "Go."}]}] * 4
    shown = {}
    for given in (None, {"enable_thinking": False}):
        args = getattr(compat, f"{kind}Config")(
            num_generations=2,
            per_device_train_batch_size=4,
            max_completion_length=6,
            max_steps=1,
            chat_template_kwargs=given,
            output_dir=f"with_{given}",
        )
        model = adapted()
        model.tokenizer.chat_template = STYLED
        functions = dict(reward_funcs=lambda completions, **_: [1.0] * len(completions))
        trainer = getattr(compat, f"{kind}Trainer")(model, args=args, train_dataset=rows, **functions)
        assert trainer.config().data.template_arguments == given
        source = trainer._run(trainer.config()).batches
        shown[bool(given)] = trainer.tokenizer.decode(source.prompts[0].ids)
    assert "quick assistant:" in shown[True] and "quick" not in shown[False]
    trainer.train()
    assert "quick" in trainer._trainer().tokenizer.apply_chat_template(
        rows[0]["prompt"], add_generation_prompt=True, tokenize=False
    )


@pytest.mark.full
def test_a_rollout_function_samples_with_the_trainer(workplace):
    def play(prompts, trainer):
        found = compat.generate_rollout_completions(trainer, prompts)
        return {name: [one[name] for one in found] for name in ("prompt_ids", "completion_ids", "logprobs")} | {
            "reward": [float(len(one["text"])) for one in found]
        }

    trainer = asked(rollout_func=play)
    trainer.train()
    assert "rewards/rollout_reward/mean" in trainer.state.log_history[0]
    with pytest.raises(ValueError, match="called in a trainer's rollout_func"):
        compat.generate_rollout_completions(trainer, ["x"])
    with pytest.raises(ValueError, match="leave out tools and environment_factory"):
        asked(rollout_func=play, environment_factory=Dice)


@pytest.mark.full
def test_the_reference_is_the_base_or_a_copy_of_a_trained_adapter(workplace, capsys):
    new = trainer_of(beta=0.1)
    assert "the reference of beta = 0.1 is the model with its adapter off" in capsys.readouterr().out
    assert REFERENCE_LOGPS not in new._run(new.config()).batches.empty(1).extra
    trained = trainer_of(beta=0.1, model=adapted(trained=True))
    assert "the model with a copy of the adapter that was trained before" in capsys.readouterr().out
    source = trained._run(trained.config()).batches
    batch = source.batch_at(0, lambda: trained.model.module)
    # Before the first update, the model is its reference.
    apart = batch.extra[REFERENCE_LOGPS] - batch.extra[SAMPLED_LOGPS]
    np.testing.assert_allclose(apart * batch.weights, 0.0, atol=1e-4)
    other = adapted(trained=True)
    graph, params, others = nnx.split(other.module, nnx.Param, ...)
    moved = nnx.merge(graph, jax.tree.map(lambda a: a - 0.5, params), others)
    later = source.batch_at(1, lambda: moved)
    assert np.abs((later.extra[REFERENCE_LOGPS] - later.extra[SAMPLED_LOGPS]) * later.weights).max() > 1e-2


@pytest.mark.full
@pytest.mark.parametrize("trained", [False, True])
def test_another_call_of_train_has_the_same_reference(workplace, trained):
    """The one that the constructor found, and not what the first call trained."""
    rates: dict[str, Any] = dict(learning_rate=1e-2, lr_scheduler_type="constant", warmup_steps=0)
    trainer = trainer_of(beta=0.1, model=adapted(trained), save_strategy="no", **rates)
    divergences = []
    for _ in range(2):
        trainer.train()
        divergences += [line["kl"] for line in trainer.state.log_history if "kl" in line]
    first, second = divergences
    assert abs(first) < 1e-6 and second > 1e-4


@pytest.mark.full
def test_rloo_takes_the_divergence_from_the_reward(workplace, capsys):
    trainer = trainer_of(compat.RLOOTrainer, model=adapted(trained=True), beta=0.5, max_steps=2)
    before = capsys.readouterr().out
    assert "RLOOTrainer: the reference of beta = 0.5 is the model with a copy of the adapter" in before
    trainer.train()
    first, second = (line["kl"] for line in trainer.state.log_history if "kl" in line)
    assert abs(first) < 1e-4 and np.isfinite(second)
    assert [line["mine"] for line in trainer.state.log_history if "kl" in line] == [1.0, 1.0]


def graded(completions, log_extra, **columns):
    log_extra("shout", [text.upper() for text in completions])
    return [float("nan") if index % 2 else 1.0 for index in range(len(completions))]


@pytest.mark.full
def test_completions_are_printed_and_kept(workplace, capsys):
    trainer = trainer_of(
        reward_funcs=[graded],
        max_steps=2,
        log_completions=True,
        num_completions_to_print=3,
        log_unique_prompts=True,
        delta=2.0,
        loss_type="cispo",
        epsilon_high=3.0,
        logging_steps=2,
    )
    assert trainer.config().metrics.rollout_tables == "prompts"
    trainer.train()
    printed = capsys.readouterr()
    assert "delta does nothing here: loss_type = cispo has no such bound" in printed.out
    assert "shout" in printed.err and "step 2" in printed.err and "step 1" not in printed.err.replace("step 1/", "")
    kept = (workplace / trainer.args.output_dir / "rollouts.jsonl").read_text()
    rows = [json.loads(line) for line in kept.splitlines()]
    assert {row["step"] for row in rows} == {1, 2} and len(rows) == 2 * trainer.config().rows_per_step
    assert [row["rewards"]["graded"] for row in rows[:2]] == [1.0, None]
    assert rows[0]["extra"]["shout"] == rows[0]["answer"].upper()
    assert not trainer_of(reward_funcs=[graded]).config().metrics.rollout_tables
