"""What scripts sample: anew at each call, with vLLM's names too; and prompts that are cut at their left."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxtune.compat import (
    DPOConfig,
    DPOTrainer,
    FastLanguageModel,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    LoraConfig,
    ORPOConfig,
    ORPOTrainer,
    PeftModel,
    RLOOConfig,
    RLOOTrainer,
    SamplingParams,
    get_peft_model,
)
from jaxtune.compat.seeds import next_seed, set_seed
from jaxtune.models.generation import generate
from jaxtune.models.generation.sampler import Sampler
from jaxtune.models.lora import linears
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.objectives.policy import GRPO
from jaxtune.train.sampled import answering
from tests.test_compat import folder, load  # noqa: F401

PROMPT = "Who are you?"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path / "cache"))


@pytest.mark.full
def test_every_call_draws_anew(folder):  # noqa: F811
    model, tokenizer = load(folder)
    ids = tokenizer([PROMPT], return_tensors="np")["input_ids"]

    def draw():
        return model.generate(ids, max_new_tokens=8, do_sample=True, temperature=5.0, top_k=0, eos_token_id=[])[
            0
        ].tolist()

    first = [draw() for _ in range(3)]
    assert len({tuple(row) for row in first}) == 3
    set_seed(11)
    again, dice = [draw(), draw()], np.random.rand()
    set_seed(11)
    assert [draw(), draw()] == again != first[:2] and np.random.rand() == dice
    load(folder)  # which sets the seed, as Unsloth's does
    assert draw() == first[0]
    greedy = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=[])
    np.testing.assert_array_equal(greedy.detach().cpu().numpy(), greedy)
    set_seed(2**40 - 1)
    assert 0 <= next_seed() < 2**32


def test_fast_generate_answers_with_the_adapter_that_is_named(folder, tmp_path):  # noqa: F811
    model, tokenizer = load(folder)
    for _, linear in linears(model.module):
        if linear.lora is not None:
            linear.lora.b[...] = linear.lora.b[...] + 2.0
    model.save_lora(tmp_path / "lora")
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, skip_special_tokens=False)
    ids = tokenizer(PROMPT)["input_ids"]

    def plain(of):
        out = of.generate(np.array([ids]), max_new_tokens=8, do_sample=False, eos_token_id=[])
        return out[0, len(ids) :].tolist()

    base, _ = load(folder, peft=False)
    [without] = model.fast_generate([PROMPT], sampling_params=greedy, lora_request=None)
    [with_it] = model.fast_generate(PROMPT, greedy, lora_request=model.load_lora(str(tmp_path / "lora")))
    assert without.outputs[0].token_ids == plain(base) != plain(model) == with_it.outputs[0].token_ids
    assert without.outputs[0].text == tokenizer.decode(plain(base)) and without.prompt == PROMPT
    assert without.prompt_token_ids == ids and without.outputs[0].finish_reason == "length"
    with pytest.raises(ValueError, match="load_lora: .* has no adapter"):
        model.load_lora(tmp_path)

    several = SamplingParams(n=3, temperature=5.0, max_tokens=5, ignore_eos=True, logprobs=1, top_k=-1)
    [one, two] = model.fast_generate([PROMPT, {"prompt_token_ids": ids[:2]}], several)
    assert [len(each.outputs) for each in (one, two)] == [3, 3] and two.prompt is None
    assert len({tuple(answer.token_ids) for answer in one.outputs}) == 3
    assert np.isclose(sum(one.outputs[0].logprobs), one.outputs[0].cumulative_logprob)
    stop = one.outputs[0].text.strip()[:1] or "x"
    fixed = SamplingParams(temperature=5.0, max_tokens=5, ignore_eos=True, seed=3)
    [free, same] = (model.fast_generate([PROMPT], fixed)[0].outputs[0] for _ in range(2))
    assert free.token_ids == same.token_ids
    assert stop and SamplingParams(stop=stop).stop == [stop]
    ended = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop_token_ids=[plain(base)[1]])
    answer = model.fast_generate([PROMPT], ended)[0].outputs[0]
    assert answer.finish_reason == "stop" and answer.token_ids[-1] == answer.stop_reason == plain(base)[1]
    for wrong in (dict(presence_penalty=0.5), dict(temprature=1.0), dict(n=0)):
        with pytest.raises(ValueError, match=f"SamplingParams: {next(iter(wrong))} = "):
            SamplingParams(**wrong)
    with pytest.raises(ValueError, match="1 prompts and 2 sampling_params"):
        model.fast_generate([PROMPT], [greedy, greedy])
    with pytest.raises(ValueError, match="give texts, such as those of tokenizer.apply_chat_template"):
        model.fast_generate([[{"role": "user", "content": "x"}]])


def test_float8_kv_cache_is_that_of_fast_generate_and_of_rewards(folder, tmp_path, monkeypatch):  # noqa: F811
    model, _ = load(folder, peft=False, fast_inference=True, float8_kv_cache=True)
    model = FastLanguageModel.get_peft_model(model, r=4)
    model.save_lora(tmp_path / "lora")
    caches = []

    class Seen(Sampler):
        def step(self):
            pieces = super().step()
            caches.append({str(leaf.dtype) for leaf in jax.tree.leaves(self._caches.states)})
            return pieces

    for module in (generate, answering):
        monkeypatch.setattr(module, "Sampler", Seen)
    model.fast_generate([PROMPT], SamplingParams(max_tokens=4))
    args = GRPOConfig(max_steps=1, num_generations=4, max_completion_length=8, output_dir=str(tmp_path / "run"))
    rows = [{"prompt": PROMPT}] * 4
    trainer = GRPOTrainer(
        model=model, reward_funcs=[lambda completions, **_: [1.0] * len(completions)], args=args, train_dataset=rows
    )
    assert trainer.config().objective.cache == model.cache == "fp8"
    before = len(caches)
    trainer.train()
    assert 0 < before < len(caches) and set.union(*caches) == {"float8_e4m3fn"}
    assert load(folder, peft=False)[0].cache is None


LONG = ("Name a colour. " * 8).strip()


def test_float8_kv_cache_is_vllms_and_stays_with_a_model(folder, tmp_path, capsys):  # noqa: F811
    model, _ = load(folder, peft=False, float8_kv_cache=True)
    assert model.cache is None and "float8_kv_cache does nothing here: it is vLLM's" in capsys.readouterr().out
    model, _ = load(folder, peft=False, fast_inference=True, float8_kv_cache=True)
    assert "float8_kv_cache" not in capsys.readouterr().out
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(str(tmp_path / "adapter"))
    loaded = PeftModel.from_pretrained(model, tmp_path / "adapter")
    made = [model, adapted, loaded, adapted.merge_and_unload(), FastLanguageModel.get_peft_model(model, r=2)]
    assert [each.cache for each in made] == ["fp8"] * 5


@pytest.mark.parametrize("told", [{}, {"vllm_importance_sampling_mode": "sequence_mask"}, None])
def test_the_mode_of_a_script_is_followed_else_the_caches(told, folder, tmp_path):  # noqa: F811
    def mode_of(trainer) -> str | None:
        objective = objective_of(trainer.config().objective)
        assert isinstance(objective, GRPO)
        return objective.importance_sampling_mode

    run = dict(num_generations=4, max_completion_length=8, output_dir=str(tmp_path / "run"))
    for cache in (False, True):
        model, _ = load(folder, fast_inference=True, float8_kv_cache=cache)
        args = GRPOConfig(**run, vllm_importance_sampling_correction=True, **(told or {}))
        if told is None:
            args.vllm_importance_sampling_mode = "sequence_truncate"  # set later
        trainer = GRPOTrainer(model, [lambda completions, **_: [1.0]], args, [{"prompt": PROMPT}] * 4)
        others = "sequence_truncate" if told is None else "sequence_mask"
        assert mode_of(trainer) == ("token_truncate" if cache and told == {} else others)
    rloo = RLOOTrainer(model, [lambda completions, **_: [1.0]], RLOOConfig(**run), [{"prompt": PROMPT}] * 4)
    assert mode_of(rloo) == "token_truncate"


@pytest.mark.full
def test_prompts_lose_their_first_tokens(folder, tmp_path, capsys):  # noqa: F811
    """GRPO's and DPO's all, KTO's and ORPO's only where the text is longer than a row."""
    model, tokenizer = load(folder)
    row = {"prompt": LONG, "chosen": " It is blue.", "rejected": " four"}
    whole = [tokenizer(LONG + row[side])["input_ids"] + [tokenizer.eos_token_id] for side in ("chosen", "rejected")]
    asked = len(tokenizer(LONG)["input_ids"])
    kto = [{"prompt": LONG, "completion": " It is blue.", "label": True}] * 2
    for kind, settings, rows, fits in (
        (DPOTrainer, DPOConfig, [row] * 2, asked - 10),
        (ORPOTrainer, ORPOConfig, [row] * 2, 0),
        (KTOTrainer, KTOConfig, kto, 0),
    ):
        for length in (24, 64):
            args = settings(str(tmp_path / "run"), max_prompt_length=10, max_length=length, max_steps=1)
            trainer = kind(model, args=args, train_dataset=rows)
            documents = trainer._prepared.train_data.documents
            cut = asked - 10 if length == 24 else fits
            assert documents[0].tokens.tolist() == whole[0][cut:]
            assert int(np.argmax(documents[0].mask)) == asked - cut
            told = capsys.readouterr().out
            assert ("max_prompt_length = 10: 2 prompts lose their first tokens" in told) == bool(cut)
    args = GRPOConfig(str(tmp_path / "grpo"), max_prompt_length=10, max_completion_length=4, num_generations=2)
    trainer = GRPOTrainer(
        model, lambda completions, **_: [0.0] * len(completions), args, [{"prompt": LONG}, {"prompt": "four"}]
    )
    prompts = trainer._prepared.batches.prompts
    assert "1 of 2 prompts have more than 10 tokens: they lose their first ones" in capsys.readouterr().out
    chat = [{"role": "user", "content": LONG}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    plain = tokenizer(LONG)["input_ids"]
    assert list(prompts[0].ids) in (ids[-10:], plain[-10:]) and prompts[0].turns == LONG
