"""Answers in several turns: parsing calls, calling tools and environments, and the tokens that are trained on."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import re
import time

import jax
import numpy as np
import pytest
from flax import nnx
from tiny_models import adapted_model, over, tiny_model

from jaxtune.conversations import answers
from jaxtune.conversations.calls import Call, CallForm
from jaxtune.conversations.templates import render
from jaxtune.models.config import LayerSpec
from jaxtune.models.generation.requests import Piece
from jaxtune.models.lora import get_peft_model
from jaxtune.train.callbacks import Callback
from jaxtune.train.config import CheckpointConfig, ConfigError, DataConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.data.rendering.packaged import PACKAGED
from jaxtune.train.objectives.loss import Forward
from jaxtune.train.objectives.policy import GRPO
from jaxtune.train.objectives.sampling import Settings
from jaxtune.train.sampled.answering import Prompt, Sampling, ToolTurns
from jaxtune.train.sampled.reward_functions import RewardFunctions
from jaxtune.train.sampled.rollout_function import RolloutFunction
from jaxtune.train.sampled.rollouts import SampledAnswers
from jaxtune.train.sampled.tool_formats import ToolFormat
from jaxtune.train.sampled.tools import Tools
from jaxtune.train.trainer import Trainer
from jaxtune.train.user_code.errors import UserCodeError
from tests import patience
from tests.train.data.conftest import make_tokenizer
from tests.train.tiny_runs import make_config

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: a number.
        b: another.
    """
    return a * b


async def later(text: str) -> str:
    """Returns a text.

    Args:
        text: the text.
    """
    await asyncio.sleep(0.01)
    return text.upper()


def slow() -> str:
    """Takes long."""
    time.sleep(5)
    return "late"


def fails(a: int) -> int:
    """Fails.

    Args:
        a: a number.
    """
    raise KeyError("no such thing")


class Game:
    """Counts to a goal."""

    made = 0

    def __init__(self):
        Game.made += 1

    def reset(self, goal: int = 3, **row) -> str:
        self.goal, self.count = goal, 0
        return f" Goal {goal}."

    def add(self, number: int) -> int:
        """Adds to the count.

        Args:
            number: what is added.
        """
        self.count += number
        return self.count

    def get_reward(self) -> float:
        return float(self.count == self.goal)

    def _hidden(self):
        raise AssertionError


# ---- what models write


@pytest.mark.parametrize("name", ["qwen-2.5", "qwen-3", "qwen-3-instruct"])
def test_the_suffix_is_what_the_template_writes_after_the_models_turn(name):
    tokenizer = make_tokenizer()
    form = ToolFormat(tokenizer, name, [tokenizer.eos_token_id])
    answers = [{"role": "tool", "name": "f", "content": content} for content in ("4", "five")]
    text = form.decode(form.suffix(answers))
    assert text == (
        "\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\nfive\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_templates_that_cannot_call_tools_are_refused():
    for template, told in (
        (None, "no known form"),
        ("{{ '<tool_call>' }}", "no token that ends"),
    ):
        with pytest.raises(ConfigError, match=told):
            ToolFormat(make_tokenizer(), template, [3])
    hides = TEMPLATE.replace("{{ m.content }}", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}")
    with pytest.raises(ConfigError, match="does not write what a tool answers"):
        ToolFormat(make_tokenizer(), hides, [3])
    assert "qwen-3" in PACKAGED


# ---- tools


def called(tools: Tools, *calls: Call, environment=None):
    return tools.answer(calls, tools.of(environment))


def test_tools_are_called_and_their_failures_are_answers():
    tools = Tools([multiply, later, slow, fails], timeout_seconds=0.2)
    found = called(
        tools,
        Call("later", {"text": "a"}),
        Call("multiply", {"a": 6, "b": 7}),
        Call("fails", {"a": 1}),
        Call("nothing", {}),
        Call("multiply", {"c": 1}),
        Call("slow", {}),
    )
    contents = [message["content"] for message in found.messages]
    assert contents[:4] == ["A", "42", "{'error': \"'no such thing'\"}", "{'error': 'Tool nothing not found.'}"]
    assert "unexpected keyword argument 'c'" in contents[4] and "longer than 0.2 s" in contents[5]
    assert found.failures == 4
    assert [message["name"] for message in found.messages][:2] == ["later", "multiply"]
    assert [schema["function"]["name"] for schema in tools.schemas({})] == ["multiply", "later", "slow", "fails"]


def test_a_tool_that_ends_python_is_a_failure_of_its_own():
    """Such as one that runs what a model wrote, `sys.exit()` among it."""

    def leave() -> str:
        """Leaves."""
        raise SystemExit(3)

    async def leave_later() -> str:
        """Leaves later."""
        await asyncio.sleep(0)
        raise SystemExit(4)

    tools = Tools([leave, leave_later, multiply])
    found = called(tools, Call("leave", {}), Call("leave_later", {}), Call("multiply", {"a": 6, "b": 7}))
    assert [message["content"] for message in found.messages] == [
        "{'error': 'SystemExit: 3'}",
        "{'error': 'SystemExit: 4'}",
        "42",
    ]
    assert found.failures == 2


def test_environments_are_reset_for_each_answer_and_used_again():
    Game.made = 0
    tools = Tools([multiply], Game)
    prompt = [{"role": "user", "content": "Count."}]
    for _ in range(2):
        (one, shown), (other, _) = tools.reset([prompt, prompt], [{"goal": 5}, {}])
        assert shown == [{"role": "user", "content": "Count. Goal 5."}] and prompt[0]["content"] == "Count."
        assert called(tools, Call("add", {"number": 5}), environment=one).messages[0]["content"] == "5"
        assert (one.get_reward(), other.get_reward()) == (1.0, 0.0)
    assert Game.made == 2 and tools.names == ["add", "multiply"]
    rewards = tools.rewards(None)
    assert rewards.names == ("Game",)
    given = RewardFunctions.of([Game().get_reward, Game])  # a function that is called as the class is
    assert tools.rewards(given).names == ("get_reward", "Game", "Game_2")
    several = Tools([], {"game": Game})
    assert several.schemas({"environment": "game"})[0]["function"]["name"] == "add"
    for name in ("other", ["game"]):
        with pytest.raises(ConfigError, match=re.escape(f"environment = {name!r}")):
            several.schemas({"environment": name})


class Slow:
    def reset(self, **row):
        for _ in self.sleep.pieces():
            pass


class SlowLater:
    async def reset(self, **row):
        await self.sleep.later()


@pytest.mark.parametrize("kind", [Slow, SlowLater])
def test_a_reset_that_takes_too_long_is_ended_by_name(kind):
    kind.sleep = patience.Sleep()
    tools = Tools([], kind, reset_seconds=0.3)
    words = rf"reset of {kind.__name__}: .*took longer than 0.3 s \(objective.reset_timeout\)"
    with pytest.raises(UserCodeError, match=words):
        tools.reset([[{"role": "user", "content": "Go."}]], [{}])
    assert not kind.sleep.over


def test_what_is_no_tool_or_environment_is_refused():
    def untyped(a):
        return a

    with pytest.raises(ConfigError, match="untyped has no JSON schema"):
        Tools([untyped])
    with pytest.raises(ConfigError, match="two tools have one name"):
        Tools([multiply, multiply])
    with pytest.raises(ConfigError, match="object has no method reset"):
        Tools([], object)
    client = type("EchoEnv", (), {"__module__": "openenv.core.client", "reset": lambda self: None})
    with pytest.raises(ConfigError, match="EchoEnv is a client of OpenEnv"):
        Tools([], client)
    with pytest.raises(ConfigError, match="reward_funcs"):
        Tools([multiply]).rewards(None)


# ---- turns


class Scripted:
    """A sampler that writes given texts: {text of the row so far: text of the next turn}."""

    def __init__(self, tokenizer, script):
        self.tokenizer, self.script, self.waiting, self.prompts = tokenizer, script, [], []

    @property
    def pending(self):
        return len(self.waiting)

    def submit(self, ids, new, *_, **__):
        self.prompts.append(list(ids))
        self.waiting.append((len(self.prompts) - 1, ids, new))
        return len(self.prompts) - 1

    def step(self):
        if not self.waiting:
            return []
        number, ids, new = self.waiting.pop(0)
        shown = self.tokenizer.decode(ids)
        text = next(answer for end, answer in self.script.items() if shown.endswith(end))
        made = self.tokenizer.encode(text, add_special_tokens=False)
        reason = "length" if len(made) > new else "stop"
        made = made[:new]
        return [Piece(number, made[:1], [-1.0], None), Piece(number, made[1:], [-1.0] * (len(made) - 1), reason)]


def test_a_turn_prefills_what_follows_the_prompt_before():
    """And has the tokens and log-probabilities that it has after nothing."""
    model = tiny_model(initializer_range=0.5, max_position_embeddings=1024)
    sampling = Sampling(Settings(max_completion_length=200, temperature=1.0, slots=2), (), str)
    first = [(7 * place + 3) % 48 for place in range(600)]

    def turn(sampler, prompt):
        sampling.submit(sampler, prompt, 4, 3)
        pieces = []
        while sampler.pending:
            pieces += sampler.step()
        ids = [token for piece in pieces for token in piece.ids]
        return ids, [value for piece in pieces for value in piece.logprobs], sum(piece.reused for piece in pieces)

    with sampling.sampler(model, [first], turns=True) as sampler:
        ids, _, nothing = turn(sampler, first)
        second = [*first, *ids, *range(5, 30)]
        answer = turn(sampler, second)
    with sampling.sampler(model, [first], turns=True) as sampler:
        alone = turn(sampler, second)
    assert answer[:2] == alone[:2] and (nothing, answer[2], alone[2]) == (0, 512, 0)


ASK = [{"role": "user", "content": "6 times 7?"}]
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call><|im_end|>'


def turns_of(tokenizer, tools, script, most=200, **options):
    """(ToolTurns with a scripted sampler, the sampler)."""
    scripted = Scripted(tokenizer, script)

    class Written(Sampling):
        def sampler(self, model, prompts, turns=False):
            assert turns
            return scripted

    settings = Settings(max_completion_length=most)
    sampling = Written(settings, (tokenizer.eos_token_id,), lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    form = ToolFormat(tokenizer, None, sampling.ends)

    def encode(messages, columns):
        text = render(tokenizer, form._template, messages, tools.schemas(columns), add_generation_prompt=True)
        return tuple(form._ids(text))

    return ToolTurns(sampling, tools, form, encode, 400, **options), scripted


def prompt_of(turns, messages=ASK, **columns):
    return Prompt(messages, turns.encode(messages, columns), columns)


def test_turns_keep_their_token_ids_and_tools_tokens_are_not_trained_on():
    tokenizer = make_tokenizer(TEMPLATE)
    script = {"tool\n42<|im_end|>\n<|im_start|>assistant\n": "It is 42.<|im_end|>", "assistant\n": CALL}
    turns, sampler = turns_of(tokenizer, Tools([multiply]), script)
    prompt = prompt_of(turns)
    (one, other), metrics = turns(None, [prompt, prompt], [1, 2])
    assert tokenizer.decode(one.ids) == (
        CALL + "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\nIt is 42.<|im_end|>"
    )
    assert one.ids == other.ids and one.finish_reason == "stop"
    written = tokenizer.decode([token for token, own in zip(one.ids, one.sampled, strict=True) if not own])
    assert written == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    assert [logp != 0 for logp in one.logps] == one.sampled and len(one.logps) == len(one.ids)
    assert [message["role"] for message in one.completion] == ["assistant", "tool", "assistant"]
    assert one.completion[0]["tool_calls"][0]["function"]["name"] == "multiply"
    assert one.completion[2] == {"role": "assistant", "content": "It is 42."}
    # What is sampled next continues the very tokens that were sampled before.
    before = len(one.sampled) - one.sampled[::-1].index(False)
    assert sampler.prompts[2] == [*prompt.ids, *one.ids[:before]]
    assert metrics == {"tools/call_frequency": 1.0, "tools/failure_frequency": 0.0}


def test_limits_of_turns_and_of_length():
    tokenizer = make_tokenizer(TEMPLATE)
    tools = Tools([multiply, fails])
    bad = CALL.replace("multiply", "fails").replace('"a": 6, "b": 7', '"a": 1')
    turns, _ = turns_of(tokenizer, tools, {"assistant\n": bad}, most_iterations=2)
    (one,), metrics = turns(None, [prompt_of(turns)], [0])
    assert metrics == {"tools/call_frequency": 2.0, "tools/failure_frequency": 1.0}
    assert [message["role"] for message in one.completion] == ["assistant", "tool", "assistant", "tool", "assistant"]
    length = len(tokenizer.encode(CALL, add_special_tokens=False))
    turns, _ = turns_of(tokenizer, tools, {"assistant\n": CALL}, most=length + 2)
    (one,), _ = turns(None, [prompt_of(turns)], [0])  # no room for what the tool answered
    assert one.finish_reason == "stop" and len(one.ids) == length and all(one.sampled)
    assert [message["role"] for message in one.completion] == ["assistant"]
    turns, _ = turns_of(tokenizer, tools, {"assistant\n": CALL}, most=length - 1)
    (one,), metrics = turns(None, [prompt_of(turns)], [0])
    assert one.finish_reason == "length" and metrics["tools/call_frequency"] == 0.0


def test_an_answer_has_an_environment_which_rewards_get():
    tokenizer = make_tokenizer(TEMPLATE)
    call = '<tool_call>{"name": "add", "arguments": {"number": 2}}</tool_call><|im_end|>'
    script = {"tool\n2<|im_end|>\n<|im_start|>assistant\n": "Done.<|im_end|>", "assistant\n": call}
    turns, sampler = turns_of(tokenizer, Tools([], Game), script)
    found, _ = turns(None, [prompt_of(turns, goal=2), prompt_of(turns, goal=4)], [0, 1])
    assert [one.columns["environments"].get_reward() for one in found] == [1.0, 0.0]
    assert "6 times 7? Goal 2.<|im_end|>" in tokenizer.decode(sampler.prompts[0])
    assert found[0].shown[0]["content"].endswith("Goal 2.") and len(found[0].prompt_ids) > len(prompt_of(turns).ids)
    cramped = dataclasses.replace(turns, length=202)
    with pytest.raises(ConfigError, match="with what Game.reset added"):
        cramped(None, [prompt_of(turns)], [0])


# ---- sampled from a model


@dataclasses.dataclass(frozen=True)
class EveryTurnCalls:
    """A parser by which every turn calls `wait` with the number of its characters."""

    def __call__(self, text, schemas):
        return [Call("wait", {"count": len(text)})]


class Waits:
    """Tools that take a random time."""

    def __init__(self, seed):
        self.draw = np.random.default_rng(seed)

    def wait(self, count: int) -> str:
        """Waits.

        Args:
            count: what is returned.
        """
        time.sleep(float(self.draw.uniform(0.0, 0.02)))
        return str(count)


def sampled_with_tools(seed: int, tokenizer, monkeypatch) -> SampledAnswers:
    """A source whose answers have several turns: a third of all tokens end a turn."""
    monkeypatch.setattr(answers, "FORMS", (CallForm("all", (), "", "", EveryTurnCalls(), leading=("",)),))
    objective = GRPO.of(num_generations=4, max_completion_length=64)
    ends = tuple(range(0, len(tokenizer), 8))
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    sampling = Sampling(dataclasses.replace(objective.settings, slots=3), ends, decode)
    form = ToolFormat(tokenizer, None, [tokenizer.eos_token_id])
    answering = ToolTurns(
        sampling, Tools([Waits(seed).wait]), form, lambda messages, columns: (), 80, most_iterations=3
    )
    rewards = RewardFunctions.of([lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids]])
    prompts = [Prompt([{"role": "user", "content": "x"}], (5, 6, 7 + index), {}) for index in range(3)]
    advantages = functools.partial(objective.advantages, weights=np.ones(1))
    return SampledAnswers(
        prompts, rewards, objective.settings, advantages, answering, answers_per_step=8, length=160, seed=1
    )


@pytest.mark.full
def test_what_is_sampled_between_tools_does_not_depend_on_their_time(monkeypatch):
    tokenizer = make_tokenizer(TEMPLATE)
    model = adapted_model(tiny_model(vocab_size=len(tokenizer)), r=2)
    first, second = (sampled_with_tools(seed, tokenizer, monkeypatch) for seed in (0, 1))
    assert first.sampled_rows is not None and first.sampled_rows.prefixes
    batch, again = first.batch_at(0, lambda: model), second.batch_at(0, lambda: model)
    for a, b in zip(jax.tree.leaves(batch), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    answered = [answer for answer in first._generation[1] if not all(answer.sampled)]
    assert len(answered) >= 4 and any(np.diff(answer.sampled).sum() > 2 for answer in answered)
    # The sampler's log-probabilities of every turn are those of one pass over the whole row.
    objective = GRPO.of(num_generations=4, max_completion_length=64)
    _, _, sums = objective.loss(model, batch, Forward())
    assert objective.metrics(sums)["sampling/sampling_logp_difference/mean"] < 1e-5
    assert sums["tokens"] == sum(answer.length for answer in first._generation[1])
    metrics = first.metrics_at(0)
    assert metrics["tools/call_frequency"] > 0.5 and metrics["completions/max_length"] <= 64
    kept = dataclasses.replace(answered[0], advantage=0.5)
    assert type(kept).from_json(json.loads(json.dumps(kept.to_json()))) == kept


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)])
def test_devices_share_answers_with_tools(sizes, monkeypatch):
    """Whose tokens do not depend on how long tools take, nor on the devices."""
    tokenizer = make_tokenizer(TEMPLATE)
    model = adapted_model(tiny_model(vocab_size=len(tokenizer), initializer_range=0.5), r=2)
    sources = [sampled_with_tools(seed, tokenizer, monkeypatch) for seed in range(3)]
    for source, each in zip(sources, (model, over(model, *sizes), over(model, *sizes)), strict=True):
        source.batch_at(0, lambda each=each: each)
    alone, divided, again = ([answer.ids for answer in source._generation[1]] for source in sources)
    assert divided == again == alone and max(map(len, alone)) > 20


def trainer_of(folder, objective: dict, template=TEMPLATE, rows=None, **changes) -> Trainer:
    tokenizer = make_tokenizer(template)
    model = get_peft_model(tiny_model(vocab_size=len(tokenizer), layers=(LayerSpec(),)), r=4, lora_alpha=8)
    rows = rows or [{"prompt": [{"role": "user", "content": text}], "goal": index} for index, text in enumerate("abcd")]
    settings = dict(
        steps=3,
        rows_per_step=8,
        objective=ObjectiveConfig("grpo", num_generations=4, max_completion_length=12, **objective),
        data=DataConfig(train="rows that the test made", length=192),
    )
    return Trainer(model, tokenizer, make_config(folder, **(settings | changes)), rows)


OWN = """
import random

def roll(sides: int) -> int:
    '''Rolls a die.

    Args:
        sides: of the die.
    '''
    return sides // 2

class Game:
    def reset(self, goal, **row):
        self.goal = goal
        return f" Goal {goal}."

    def add(self, number: int) -> int:
        '''Adds.

        Args:
            number: what is added.
        '''
        return number

    async def get_reward(self):
        return float(self.goal)

def even(completion_ids, environments, **columns):
    assert len(environments) == len(completion_ids)
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

def play(prompts, model):
    ids = [model.encode(prompt) for prompt in prompts]
    rows = model.generate(ids, 5)
    more = model.generate([[*own, *row.ids, 9] for own, row in zip(ids, rows)], 5)
    return {
        "prompt_ids": ids,
        "completion_ids": [[*a.ids, 9, *b.ids] for a, b in zip(rows, more)],
        "logprobs": [[*a.logprobs, 0.0, *b.logprobs] for a, b in zip(rows, more)],
        "env_mask": [[1] * len(a.ids) + [0] + [1] * len(b.ids) for a, b in zip(rows, more)],
        "reward": [float(len(a.ids)) for a in rows],
    }
"""


@pytest.mark.full
def test_a_recipes_tools_and_environment_run_and_go_on_after_a_cut_to_the_same_bits(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    objective = dict(reward_funcs=(f"{file}:even",), tools=(f"{file}:roll",), environment_factory=f"{file}:Game")
    checkpoint = CheckpointConfig(every_steps=1, every_minutes=None)
    whole, cut, again = (
        trainer_of(tmp_path / name, objective, checkpoint=checkpoint) for name in ("whole", "cut", "cut")
    )
    want = whole.train()

    class Cut(Callback):
        def between(self, moment):
            if moment.step == 2:
                raise KeyboardInterrupt

    cut.callbacks = (Cut(),)
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    got = again.train()
    for a, b in zip(jax.tree.leaves(nnx.state(got)), jax.tree.leaves(nnx.state(want)), strict=True):
        np.testing.assert_array_equal(a, b)
    line = whole.history[0]
    assert {"tools/call_frequency", "tools/failure_frequency", "rewards/Game/mean", "rewards/even/mean"} <= set(line)
    assert line["sampling/sampling_logp_difference/mean"] < 1e-4
    assert whole.batches.identity()["tools"] == ["add", "roll"]
    assert "roll" in whole.tokenizer.decode(whole.batches.prompts[0].ids)  # the template describes the tools


def test_what_no_parser_or_tokenizer_takes_does_not_end_a_run():
    """JSON that is nested more deeply than Python reads is no call; half of a surrogate pair in an answer is "?"."""
    tokenizer = make_tokenizer(TEMPLATE)
    form = ToolFormat(tokenizer, None, (tokenizer.eos_token_id,))
    nested = "<tool_call>" + "[" * 100_000
    message, calls = form.parsed(tokenizer.encode(nested, add_special_tokens=False), {})
    assert calls == [] and message == {"role": "assistant", "content": nested}
    answer = {"role": "tool", "name": "tool", "content": "half \ud83d"}
    assert form.suffix([answer]) == form.suffix([answer | {"content": "half ?"}])


@pytest.mark.full
def test_a_rollout_function_samples_in_its_own_turns(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    trainer = trainer_of(tmp_path / "run", dict(rollout_func=f"{file}:play"), steps=2)
    trainer.train()
    line = trainer.history[0]
    assert line["sampling/sampling_logp_difference/mean"] < 1e-4 and line["rewards/rollout_reward/mean"] > 0
    assert line["completions/max_length"] == 10  # without the token that was not sampled


@pytest.mark.parametrize(
    "returned, told",
    [
        (None, "returned no prompt_ids"),
        (dict(prompt_ids=[[1]], completion_ids=[[2]], logprobs=[[-1.0]]), "prompt_ids has 1 entries for 2 answers"),
        (
            dict(prompt_ids=[[1]] * 2, completion_ids=[[2]] * 2, logprobs=[[-1.0]] * 2, reward=1.0),
            "reward is 1.0, and no",
        ),
        (dict(prompt_ids=[[1]] * 2, completion_ids=[[2]] * 2, logprobs=[[]] * 2), "another number of logprobs"),
        (dict(prompt_ids=[[1]] * 2, completion_ids=[[]] * 2, logprobs=[[]] * 2), "answer 0 has no tokens"),
        (
            dict(prompt_ids=[[1]] * 2, completion_ids=[[2] * 9] * 2, logprobs=[[0.0] * 9] * 2),
            "max_completion_length = 8",
        ),
    ],
)
def test_a_rollout_function_that_returns_something_else_is_refused(returned, told):
    sampling = Sampling(Settings(max_completion_length=8), (1,), str)
    function = RolloutFunction(lambda prompts, model: returned, sampling, lambda prompt: (3,), 32)
    with pytest.raises(ConfigError, match=told):
        function(tiny_model(), [Prompt("x", (3,), {})] * 2, [0, 1])


def test_a_rollout_function_may_return_arrays():
    def play(prompts, model):
        return dict(prompt_ids=[np.array([1, 3])] * 2, completion_ids=[np.array([2])] * 2, logprobs=[np.zeros(1)] * 2)

    sampling = Sampling(Settings(max_completion_length=8), (1,), str)
    answers, _ = RolloutFunction(play, sampling, lambda prompt: (3,), 32)(
        tiny_model(), [Prompt("x", (3,), {})] * 2, [0, 1]
    )
    assert [list(one.ids) for one in answers] == [[2], [2]] and [list(one.prompt_ids) for one in answers] == [
        [1, 3]
    ] * 2


def test_a_rollout_function_may_ask_for_more_rows_than_prompts():
    """They decode at once, in as many slots as there may be."""
    counts = []

    def play(prompts, model):
        counts.append((model._sampler.plan.slots, len(model.generate([[3, 4]] * 6))))
        return dict(prompt_ids=[[1, 3]] * 2, completion_ids=[[2]] * 2, logprobs=[[0.0]] * 2)

    sampling = Sampling(Settings(max_completion_length=8, slots=7), (1,), str)
    RolloutFunction(play, sampling, lambda prompt: (3,), 32)(tiny_model(), [Prompt("x", (3,), {})] * 2, [0, 1])
    assert counts == [(7, 6)]


def test_devices_share_the_rows_of_a_rollout_function():
    """Two rows on each of three devices, with the tokens of one."""
    found = []

    def play(prompts, model):
        rows, sampler = [*model.generate([[3, 4], [5], [6, 7, 8], [3, 9], [1], [2, 2]])], model._sampler
        found.append((len(sampler._rows.requests), [row.ids for row in rows]))
        return dict(prompt_ids=[[1, 3]] * 2, completion_ids=[[2]] * 2, logprobs=[[0.0]] * 2)

    model = tiny_model(initializer_range=0.5)
    sampling = Sampling(Settings(max_completion_length=8, temperature=1.0, slots=2), (), str)
    for each in (model, over(model, 3, 1)):
        RolloutFunction(play, sampling, lambda prompt: (3,), 32)(each, [Prompt("x", (3,), {})] * 2, [0, 1])
    assert [count for count, _ in found] == [2, 6] and found[0][1] == found[1][1]


def test_what_does_not_go_together_with_tools_is_named(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    with pytest.raises(ConfigError, match="objective.tools: .* must be file.py:name"):
        trainer_of(tmp_path, dict(tools=("roll",), reward_funcs=("brevity",)))
    with pytest.raises(ConfigError, match="a prompt with objective.tools is a list of messages"):
        trainer_of(tmp_path, dict(tools=(f"{file}:roll",), reward_funcs=("brevity",)), rows=[{"prompt": "x"}])
    with pytest.raises(ConfigError, match="objective.rollout_func.*leave out objective.tools"):
        trainer_of(tmp_path, dict(tools=(f"{file}:roll",), rollout_func=f"{file}:play"))
    with pytest.raises(ConfigError, match="reward_funcs.*needs at least one"):
        trainer_of(tmp_path, dict(tools=(f"{file}:roll",)))
