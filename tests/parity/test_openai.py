"""`jaxtune serve`, asked by the openai package."""

from __future__ import annotations

import openai
import pytest

import jaxtune
from tests.serve.running import engine_of, served_models, serving

QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
KEY = "open sesame"


@pytest.fixture(scope="module")
def models():
    return served_models()


@pytest.fixture(scope="module")
def client(models):
    engine = engine_of(models)
    with (
        serving(models, engine, KEY) as (port, _),
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0) as client,
    ):
        yield client
    assert engine.close(30)


@pytest.mark.full
def test_a_chat_is_answered_whole_and_in_pieces(models, client):
    tokenizer = models["mine"].tokenizer
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    [ids] = jaxtune.generate(models["mine"].model, [prompt], 16)
    settings = dict(model="mine", messages=QUESTION, temperature=0, max_tokens=16, logprobs=True)
    whole = client.chat.completions.create(**settings)
    assert whole.choices[0].message.content == tokenizer.decode(ids, skip_special_tokens=True)
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens == len(ids)
    chunks = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage and chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    with client.chat.completions.stream(model="base", messages=QUESTION, temperature=0, stop=".") as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert stream.get_final_completion().choices[0].message.content == text


def test_sampled_answers_repeat_by_seed(client):
    settings = dict(model="base", messages=QUESTION, n=2, seed=5, temperature=1.5, max_tokens=12, stop=["zzz"])
    more = {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1}
    one, other = (client.chat.completions.create(**settings, extra_body=more) for _ in range(2))
    assert one.choices == other.choices and one.choices[0].message.content != one.choices[1].message.content


def test_plain_prompts_are_continued(client):
    settings = dict(model="base", prompt=["Once", "The number"], max_tokens=8, temperature=0, logprobs=0)
    answer = client.completions.create(**settings)
    assert [choice.index for choice in answer.choices] == [0, 1] and answer.choices[0].text
    assert len(answer.choices[0].logprobs.token_logprobs) == 8
    chunks = list(client.completions.create(**settings, stream=True))
    for choice in answer.choices:
        parts = [part.text for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(parts) == choice.text


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["base", "mine"]
    assert client.models.retrieve("mine").owned_by == "jaxtune"


def test_errors_are_those_that_the_package_knows(client):
    with pytest.raises(openai.NotFoundError) as found:
        client.chat.completions.create(model="other", messages=QUESTION)
    assert found.value.code == "model_not_found" and found.value.param == "model"
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(model="base", messages=QUESTION, max_tokens=4000)
    assert found.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(model="base", messages=QUESTION, presence_penalty=3)
    assert found.value.param == "presence_penalty"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="other").models.list()
