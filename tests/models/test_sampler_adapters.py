"""One sampler for a base and many adapters: a row has the tokens that it has alone, by the model with its adapter."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampler import finished
from tiny_models import adapted_model, golden_model, tiny_model

from jaxtune import Sampler, merge_adapter, save_adapter
from jaxtune.models.files.quant import prepare_qat, quantize
from jaxtune.models.generation import sampler as sampler_module
from jaxtune.models.generation.adapters import Adapter, AdapterBank
from jaxtune.models.lora import freeze, linears

# Of unequal ranks and targets; each a third or more of an answer's tokens are other than the base's.
ADAPTERS = {
    "q": dict(r=4, lora_alpha=8, target_modules=["q_proj"]),
    "all": dict(r=64, lora_alpha=24, target_modules="all-linear"),
    "mlp": dict(r=8, lora_alpha=8, target_modules=["gate_proj", "up_proj", "down_proj"]),
    "rs": dict(r=16, lora_alpha=4, use_rslora=True, target_modules=["o_proj", "v_proj"]),
    "ranks": dict(r=6, lora_alpha=9, target_modules="all-linear", rank_pattern={"down_proj": 12}),
    "alphas": dict(r=32, lora_alpha=20, target_modules=["k_proj", "up_proj"], alpha_pattern={"k_proj": 50}),
    "layer": dict(r=5, lora_alpha=10, target_modules=r".*layers\.1\..*"),
    "down": dict(r=9, lora_alpha=18, target_modules=["down_proj"]),
}
NAMES = [None, *ADAPTERS]


@functools.cache
def base(dtype: str = "float32"):
    return freeze(tiny_model(dtype))


@functools.cache
def adapted(name: str | None, dtype: str = "float32"):
    """The base with an ordinary adapter."""
    if name is None:
        return base(dtype)
    return adapted_model(base(dtype), seed=1 + NAMES.index(name), **ADAPTERS[name])


def adapters_of(names=ADAPTERS, dtype: str = "float32") -> dict[str, Adapter]:
    return {name: Adapter.of(adapted(name, dtype)) for name in names}


@functools.cache
def together() -> Sampler:
    return Sampler(base(), 6, 64, adapters=adapters_of())


@functools.cache
def alone(name: str | None) -> Sampler:
    return Sampler(adapted(name), 1, 64)


def answers(sampler: Sampler, rows) -> list[tuple[list[int], list[float], str]]:
    """rows: (prompt, new tokens, adapter)."""
    numbers = [sampler.submit(prompt, new, eos_token_ids=(), adapter=name) for prompt, new, name in rows]
    ended = finished(sampler)
    return [ended[number] for number in numbers]


def assert_as_alone(found, rows, sampler_of=alone, atol=2e-5):
    for (ids, logprobs, reason), (prompt, new, name) in zip(found, rows, strict=True):
        [(own, own_logprobs, own_reason)] = answers(sampler_of(name), [(prompt, new, None)])
        assert (ids, reason) == (own, own_reason), name
        np.testing.assert_allclose(logprobs, own_logprobs, atol=atol)


PROMPTS = st.lists(st.integers(0, 47), min_size=1, max_size=40)
ROWS = st.lists(st.tuples(PROMPTS, st.integers(1, 12), st.sampled_from(NAMES)), min_size=1, max_size=14)


@settings(max_examples=12, deadline=None)
@given(ROWS)
def test_rows_of_all_adapters_are_rows_alone(rows):
    assert_as_alone(answers(together(), rows), rows)


def test_adapters_change_tokens():
    """Otherwise equal answers would say nothing."""
    rows = [([5, 3, 9], 12, name) for name in NAMES]
    found = [tuple(ids) for ids, *_ in answers(together(), rows)]
    assert len(set(found)) == len(NAMES)


def test_rows_are_those_of_merged_models():
    rows = [([7, 1, 2, 40], 10, name) for name in ("all", "alphas")]
    merged = functools.cache(lambda name: Sampler(merge_adapter(adapted(name)), 1, 64))
    assert_as_alone(answers(together(), rows), rows, merged, atol=2e-4)


@settings(max_examples=6, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("load"), st.sampled_from(list(ADAPTERS))),
            st.tuples(st.just("drop"), st.sampled_from(list(ADAPTERS))),
            st.tuples(st.just("ask"), st.sampled_from(NAMES), PROMPTS, st.integers(1, 12)),
            st.tuples(st.just("step"), st.integers(1, 3)),
        ),
        max_size=24,
    )
)
def test_adapters_come_and_go_while_rows_decode(events):
    sampler, loaded, asked, ended = Sampler(base(), 3, 64, tokens_per_round=4), set(), {}, {}

    def step():
        for piece in sampler.step():
            ids, logprobs, _ = ended.get(piece.request, ([], [], ""))
            ended[piece.request] = ids + piece.ids, logprobs + piece.logprobs, piece.finish_reason or ""

    for what, *rest in events:
        if what == "load" and rest[0] not in loaded:
            sampler.load_adapter(rest[0], Adapter.of(adapted(rest[0])))
            loaded.add(rest[0])
        elif what == "drop" and rest[0] in loaded:
            sampler.drop_adapter(rest[0])
            loaded.remove(rest[0])
        elif what == "ask" and (rest[0] is None or rest[0] in loaded):
            name, prompt, new = rest
            asked[sampler.submit(prompt, new, eos_token_ids=(), adapter=name)] = prompt, new, name
        elif what == "ask":
            with pytest.raises(ValueError, match="not loaded"):
                sampler.submit(rest[1], rest[2], adapter=rest[0])
        elif what == "step":
            for _ in range(rest[0]):
                step()
    for name in sorted(loaded):
        sampler.drop_adapter(name)
    while sampler.pending:
        step()
    assert_as_alone([ended[number] for number in asked], list(asked.values()))
    assert sampler.adapters == [] and not sampler._model.bank and sampler._model.bank.bytes == 0
    assert sampler._model.weights.structure is Sampler(base(), 3, 64)._model.weights.structure


def test_a_dropped_adapter_stays_for_the_rows_that_have_it():
    rows = [([3, 4], 20, "all"), ([3, 4], 20, None), ([9] * 30, 20, "all")]
    with Sampler(base(), 2, 64, adapters=adapters_of(["all", "q"])) as sampler:
        numbers = [sampler.submit(prompt, new, eos_token_ids=(), adapter=name) for prompt, new, name in rows]
        pieces = [*sampler.step(), *sampler.step()]
        sampler.drop_adapter("all")  # one row decodes, and one waits
        assert sampler.adapters == ["q"] and sampler._model.bank.ranks == 64 + 4
        other = Adapter.of(adapted_model(base(), seed=99, **ADAPTERS["all"]))
        sampler.load_adapter("all", other)  # the name is free at once
        again = sampler.submit([3, 4], 20, eos_token_ids=(), adapter="all")
        while sampler.pending:
            pieces += sampler.step()
        assert sampler._model.bank.ranks == 64 + 4
        of_numbers = [
            [token for piece in pieces if piece.request == number for token in piece.ids] for number in numbers
        ]
        assert of_numbers == [answers(alone(name), [(prompt, new, None)])[0][0] for prompt, new, name in rows]
        assert [token for piece in pieces if piece.request == again for token in piece.ids] != of_numbers[0]


def test_columns_are_as_many_as_adapters_need():
    """Buckets: an adapter that fits in the free columns of the others has the same programs."""
    bank, widths = AdapterBank(base()), {}
    for number, name in enumerate(("q", "mlp", "down", "layer", "ranks"), 1):
        bank = bank.with_adapter(number, Adapter.of(adapted(name)))
        loras = {module: linear.lora for module, linear in linears(bank.model()) if linear.lora is not None}
        widths[name] = {module.rsplit(".", 1)[1]: lora.rank for module, lora in loras.items() if ".1." in module}
    assert widths["q"] == {"q_proj": 16}
    assert widths["mlp"] == {"q_proj": 16, "gate_proj": 16, "up_proj": 16, "down_proj": 16}
    assert widths["down"] == {**widths["mlp"], "down_proj": 32}
    assert widths["ranks"]["down_proj"] == 64 and widths["ranks"]["o_proj"] == 16
    for number in (5, 3, 2):
        bank = bank.without(number)
    loras = {module: linear.lora for module, linear in linears(bank.model()) if linear.lora is not None}
    assert all(lora.rank == 16 for lora in loras.values()) and "model.layers.0.mlp.down_proj" not in loras


@pytest.mark.parametrize("prefill_tokens", [384, 32])
def test_prompts_that_are_packed_or_prefilled_in_pieces_have_their_adapters(prefill_tokens):
    model = freeze(tiny_model(max_position_embeddings=512))
    models = {name: adapted_model(model, seed=1 + NAMES.index(name), **ADAPTERS[name]) for name in ("all", "mlp", "rs")}
    lengths = [150, 80, 141, 97, 130, 101, 66, 160]
    rows = [
        ([(11 * place + 7 * row) % 48 for place in range(length)], 4, (None, *models)[row % 4])
        for row, length in enumerate(lengths)
    ]
    with Sampler(
        model, 8, 256, prefill_tokens=prefill_tokens, adapters={name: Adapter.of(one) for name, one in models.items()}
    ) as sampler:
        found = answers(sampler, rows)
    own = functools.cache(lambda name: Sampler(model if name is None else models[name], 1, 256))
    assert_as_alone(found, rows, own, atol=5e-5)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen2_moe", "gemma4", "phi3"])
def test_families_with_other_linears(name):
    """Shared experts, delta nets, per-layer inputs and joined matrices."""
    model = freeze(golden_model(name))
    models = {str(r): adapted_model(model, seed=r, r=r, lora_alpha=3 * r) for r in (2, 12)}
    rows = [([3, 5, 7 + row], 6, (None, *models)[row % 3]) for row in range(5)]
    with Sampler(model, 5, 64, adapters={key: Adapter.of(one) for key, one in models.items()}) as sampler:
        found = answers(sampler, rows)
    own = functools.cache(lambda key: Sampler(model if key is None else models[key], 1, 64))
    assert_as_alone(found, rows, own, atol=2e-4)


@pytest.mark.parametrize("form", ["nf4", "int8", "bfloat16"])
def test_bases_in_other_formats(form):
    """Converted layers too: of 17 slots or more."""
    dtype = "float32" if form != "bfloat16" else form
    model = freeze(tiny_model(dtype, hidden_size=64, intermediate_size=64))
    model = model if form == "bfloat16" else quantize(model, form)
    models = {name: adapted_model(model, seed=1 + NAMES.index(name), **ADAPTERS[name]) for name in ("all", "mlp", "rs")}
    rows = [([2 + row, 9, 4], 6, (None, *models)[row % 4]) for row in range(8)]
    with Sampler(model, 20, 64, adapters={name: Adapter.of(one) for name, one in models.items()}) as sampler:
        found = answers(sampler, rows)
    own = functools.cache(lambda name: Sampler(model if name is None else models[name], 20, 64))
    assert_as_alone(found, rows, own, atol=2e-5 if form != "bfloat16" else 0.05)


def test_prompts_are_scored_with_their_adapter():
    prompt = [4, 8, 15, 16, 23, 42]
    for name in (None, "all", "layer"):
        found, tops = together().score(prompt, 3, adapter=name)
        own, own_tops = alone(name).score(prompt, 3)
        np.testing.assert_allclose(found, own, atol=2e-5)
        assert [[token for token, _ in top] for top in tops] == [[token for token, _ in top] for top in own_tops]


def test_other_weights_under_the_adapters():
    with Sampler(base(), 2, 64, adapters=adapters_of(["all"])) as sampler:
        model = freeze(tiny_model(seed=5))
        sampler.update(model)
        own = Sampler(adapted_model_of(model, adapted("all")), 1, 64)
        rows = [([5, 6], 8, "all"), ([5, 6], 8, None)]
        found = answers(sampler, rows)
    assert_as_alone(found, rows, lambda name: own if name else Sampler(model, 1, 64))


def adapted_model_of(model, other):
    """The adapter of another model over this one."""
    adapted = adapted_model(model, **ADAPTERS["all"])
    for (_, linear), (_, source) in zip(linears(adapted), linears(other), strict=True):
        linear.lora.a.set_value(source.lora.a.get_value())
        linear.lora.b.set_value(source.lora.b.get_value())
    return adapted


def test_memory_of_adapters_is_planned(monkeypatch):
    size = sum(sum(linear.sizes) for _, linear in linears(base())) * 4
    assert Sampler(base(), 2, 64, adapters=adapters_of(["all"])).plan.adapter_bytes == 64 * size
    assert Sampler(base(), 2, 64, adapter_ranks=100).plan.adapter_bytes == 128 * size
    assert Sampler(base(), 2, 64).plan.adapter_bytes == 0
    monkeypatch.setattr(sampler_module, "room_bytes", lambda share: 2.5e6)
    few, many = (Sampler(base(), None, 128, adapter_ranks=ranks).plan for ranks in (16, 1024))
    assert many.slots < few.slots and "adapters: " in str(many)


def test_folders_are_read_and_faults_lose_nothing(tmp_path):
    save_adapter(adapted("mlp"), tmp_path / "mlp")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "bad" / name).write_bytes((tmp_path / "mlp" / name).read_bytes()[:-40])
    rows = [([8, 8], 10, "mlp"), ([8, 8], 10, None), ([8, 8], 10, "q")]
    with Sampler(base(), 3, 64, adapters={"mlp": tmp_path / "mlp"}) as sampler:
        sampler.load_adapter("q", adapters_of(["q"])["q"])
        number = sampler.submit([8, 8], 30, eos_token_ids=(), adapter="mlp")
        pieces = sampler.step()
        for folder in ("empty", "bad", "none"):
            with pytest.raises(ValueError, match=folder):
                sampler.load_adapter("other", tmp_path / folder)
        assert sampler.adapters == ["mlp", "q"]
        while sampler.pending:
            pieces += sampler.step()
        ids = [token for piece in pieces if piece.request == number for token in piece.ids]
        assert ids == answers(alone("mlp"), [([8, 8], 30, None)])[0][0]
        assert_as_alone(answers(sampler, rows), rows)


def not_finite():
    model = adapted_model(base("bfloat16"), **ADAPTERS["q"])
    for _, linear in linears(model):
        if linear.lora is not None:
            linear.lora.b.set_value(linear.lora.b.get_value().at[0, 0].set(3.4e38))  # bfloat16 has no such number
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: adapted_model(base(), r=2, use_dora=True), r"DoRA \(use_dora\).*jaxtune export"),
        (lambda: adapted_model(base(), r=2, modules_to_save=["embed_tokens"]), "modules_to_save.*jaxtune export"),
        (
            lambda: adapted_model(
                freeze(golden_model("qwen3_moe")), r=2, target_modules=[], target_parameters=["experts.down_proj"]
            ),
            "adapters of experts.*jaxtune export",
        ),
        (lambda: prepare_qat(adapted_model(base(), r=2), "int8"), "QAT.*jaxtune export"),
        (not_finite, "q_proj is not finite in bfloat16"),
        (base, "no adapter"),
    ],
)
def test_what_rows_of_one_batch_cannot_have_apart_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        Adapter.of(make())


def test_errors_of_adapters():
    q = adapters_of(["q", "all"])
    with pytest.raises(ValueError, match="has one already.*without_adapter"):
        Sampler(adapted("q"), 1, 64).load_adapter("other", q["q"])
    with Sampler(base(), 1, 64, adapters={"q": q["q"]}, adapter_ranks=20) as sampler:
        with pytest.raises(ValueError, match="'q' is loaded already"):
            sampler.load_adapter("q", q["all"])
        with pytest.raises(ValueError, match="ranks are 68 in sum, and adapter_ranks is 20"):
            sampler.load_adapter("all", q["all"])
        with pytest.raises(ValueError, match="'all' is not loaded: there are q"):
            sampler.drop_adapter("all")
        with pytest.raises(ValueError, match="'x' is not loaded"):
            sampler.score([1, 2], adapter="x")
    with pytest.raises(ValueError, match="after close"):
        sampler.load_adapter("all", q["all"])
    with pytest.raises(ValueError, match="adapter_ranks = 0"):
        Sampler(base(), 1, 64, adapter_ranks=0)
