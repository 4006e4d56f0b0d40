"""Rewards that people use, in the run: TRL's accuracy_reward, and math_verify in its usual form, with their own limits
of time, by SIGALRM; and a judge asked by openai's asynchronous client over three generations."""

from __future__ import annotations

import http.server
import json
import threading

import numpy as np
import openai
import pytest
from math_verify import parse, verify
from trl.rewards import accuracy_reward

from jaxtune.train.sampled.reward_functions import RewardError, RewardFunctions, Sampled
from jaxtune.train.user_code import calling

# Gold answers and answers in the forms of math_verify's readme: sets, fractions, units, text around, and wrong ones.
EXAMPLES = [
    ("${1,3} \\cup {2,4}$", "${1,2,3,4}$", 1.0),
    ("$\\frac{1}{3}$", "My answer is $\\boxed{\\frac{1}{3}}$", 1.0),
    ("$\\frac{1}{3}$", "My answer is $\\boxed{\\frac{1}{2}}$", 0.0),
    ("$x = 5$", "so $x=5$", 1.0),
    ("1/2", "it is 0.5", 1.0),
    ("$12$", "it is 13", 0.0),
]
ENDLESS = r"\boxed{10^{10^{10}}}"

USUAL = """
from math_verify import parse, verify

def right(completions, answer, **columns):
    found = []
    for text, gold in zip(completions, answer, strict=True):
        try:
            found.append(float(verify(parse(gold), parse(text))))
        except Exception:
            found.append(0.0)
    return found
"""


@pytest.fixture(autouse=True)
def ended():
    yield
    calling.close()


def turns(*texts: str) -> list:
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize("isolation", [None, "process"])
def test_math_verify_in_its_usual_form_scores_right(tmp_path, isolation):
    (tmp_path / "usual.py").write_text(USUAL)
    rewards = RewardFunctions.named([f"{tmp_path / 'usual.py'}:right"], isolation=isolation)
    gold, answers, want = zip(*EXAMPLES, strict=True)
    sampled = Sampled([""] * len(gold), list(answers), [[1]] * len(gold), {"answer": list(gold)})
    np.testing.assert_array_equal(rewards(sampled)[:, 0], want)
    assert [float(verify(parse(g), parse(a))) for g, a, _ in EXAMPLES] == list(want)


@pytest.mark.parametrize("isolation", [None, "process"])
def test_trls_accuracy_reward_keeps_its_own_limits(isolation):
    rewards = RewardFunctions.of([accuracy_reward], isolation=isolation)
    answers = turns(r"\boxed{\frac{1}{3}}", ENDLESS, r"\boxed{4}")
    sampled = Sampled([[]] * 3, answers, [[1]] * 3, {"solution": [r"$\frac{1}{3}$", "$4$", "$4$"]})
    np.testing.assert_array_equal(rewards(sampled)[:, 0], [1, 0, 1])  # only its limits end the second


def test_a_limit_of_the_run_ends_accuracy_reward_beside_its_own():
    sampled = Sampled([[]], turns(ENDLESS), [[1]], {"solution": ["$4$"]})
    with pytest.raises(RewardError, match="accuracy_reward took longer than .* = 1 s.*\n.*\n.*10"):
        RewardFunctions.of([accuracy_reward], isolation="process", timeout_seconds=1.0)(sampled)


class Stub(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept, and belong to the client's loop

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "0.5"}}
        body = json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_): ...


def test_a_judge_with_an_asynchronous_client_answers_over_three_generations():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="x", max_retries=0)

    async def judge(completions, **columns):
        found = []
        for completion in completions:
            answer = await client.chat.completions.create(model="m", messages=completion)
            found.append(float(answer.choices[0].message.content or "nan"))
        return found

    rewards = RewardFunctions.of([judge])
    try:
        for _ in range(3):
            sampled = Sampled([[]] * 2, turns("a", "b"), [[1]] * 2, {})
            np.testing.assert_array_equal(rewards(sampled), [[0.5]] * 2)
    finally:
        server.shutdown()
        server.server_close()
