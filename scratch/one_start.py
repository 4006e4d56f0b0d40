"""OUT [CASE]: what one row's beginning and its steps take, in several forms of the programs, in one process.

Milliseconds from submit to the first tokens, of the host in each program's dispatch, and of whole rows of 200 + 256
tokens, in turns. At last a trace of one prefill and two rounds.
"""
import importlib, json, sys, tempfile, time, types
sys.path.insert(0, ".")
began = time.perf_counter()
import jax
import jaxtune
from benchmarks.sampling import CASES, drain, made, prompts_of, warm_up
from benchmarks.sampling_profile import kernels
from jaxtune.models.generation import layer_steps, slots as device
from jaxtune.pallas.decode_attention.triton import Tile
from jaxtune.train.program.program_cache import use_program_cache

normed = importlib.import_module("jaxtune.pallas.few_rows.normed")
attended = importlib.import_module("jaxtune.pallas.few_rows.attended")
use_program_cache()
out, case = sys.argv[1], (sys.argv[2:] or ["8b"])[0]
whole, few = (256, 64) if case == "8b" else (32, 24)
BOTH, T = ("products", "gated"), (128, 8, 3)
# {form: (options of prompts' programs, options of rounds, tile of the attention, whether programs share a head, which
# products norm their input, bytes of the gap)}
FORMS = {
    "main": ({}, {}, T, False, (), 0),
    "shared": ({}, {}, T, True, (), 1 << 16),
    "normed": ({}, {}, T, True, BOTH, 1 << 16),
    "normed_gated": ({}, {}, T, True, ("gated",), 1 << 16),
    "normed64": ({}, {}, (64, 4, 3), True, BOTH, 1 << 16),
}
if len(sys.argv) > 3:
    FORMS = {name: FORMS[name] for name in sys.argv[3].split(",")}
usual_refusal = normed._refusal
usual = device.prompt_options, device.sampler_options, attended._shares
step = layer_steps._plain_step.__wrapped__
result = {"device": jax.devices()[0].device_kind, "forms": {}, "whole": []}
model = made(CASES[case])
jax.block_until_ready(list(jax.live_arrays()))
print("model", round(time.perf_counter() - began, 1), result["device"], flush=True)
prompts = prompts_of(model, 1)


class Timed:
    def __init__(self, name, f, log):
        self.name, self.f, self.log, self.wait = name, f, log, False

    def __call__(self, *a):
        t = time.perf_counter()
        r = self.f(*a)
        u = time.perf_counter()
        if self.wait:
            jax.block_until_ready(r)
        self.log.append((self.name, t, u, time.perf_counter()))
        return r


def run(sampler, log, new, wait=False):
    for t in sampler._programs:
        t.wait = wait
    log.clear()
    began = time.perf_counter()
    sampler.submit(prompts[0], new, temperature=1.0, index=0, eos_token_ids=())
    steps, ids = [], []
    while sampler.pending:
        pieces = sampler.step()
        steps.append((time.perf_counter() - began, sum(len(piece.ids) for piece in pieces)))
        ids += [i for piece in pieces for i in piece.ids]
    total = time.perf_counter() - began
    drain(sampler)
    at = [t for t, n in steps if n]
    events = [
        [n, round(1e3 * (a - began), 2), round(1e3 * (b - a), 2), round(1e3 * (c - a), 2)] for n, a, b, c in log[:5]
    ]
    step_ms = 1e3 * (at[-1] - at[0]) / (8 * (len(at) - 1))
    return {"total": round(1e3 * total, 2), "first": round(1e3 * at[0], 2), "step": round(step_ms, 4), "events": events, "ids": ids}


def save():
    json.dump(result, open(out + "/start.json", "w"))


samplers = {}
for form, (of_prompts, of_rounds, tile, shares, kinds, room) in FORMS.items():
    if time.perf_counter() - began > 75:
        print("no time for", form, flush=True)
        break
    device.programs.cache_clear()
    device.prompt_options = lambda *a, o=of_prompts: {**usual[0](*a), **o}
    device.sampler_options = lambda *a, o=of_rounds: {**usual[1](*a), **o}
    device._GAP = room
    attended._FEW_TILES = {128: Tile(*tile)}
    normed._refusal = lambda x, w, l, a, kinds=kinds: (
        usual_refusal(x, w, l, a) if ("gated" if a else "products") in kinds else "not in this form"
    )
    attended._shares = usual[2] if shares else lambda *a: 1
    again = types.FunctionType(step.__code__, step.__globals__, step.__name__, step.__defaults__, step.__closure__)
    layer_steps._plain_step = jax.jit(again, static_argnums=(0, 1, 2))
    try:
        t = time.perf_counter()
        sampler, log = jaxtune.Sampler(model, 1, 712), []
        timed = [Timed(n, f, log) for n, f in zip(device.Programs._fields, sampler._programs)]
        sampler._programs = sampler._prefills._programs = device.Programs(*timed)
        warm_up(sampler, prompts, 512)
        built = time.perf_counter() - t
        runs = [run(sampler, log, few) for _ in range(4)]
        waits = [run(sampler, log, few, True)]
        result["forms"][form] = {"build_s": built, "runs": runs, "waits": waits}
        samplers[form] = sampler, log
        print(form, "built", round(built, 1), "first", [r["first"] for r in runs], "step", [r["step"] for r in runs])
        print("  host (at, dispatch, .):", runs[-1]["events"], "\n  waiting:", waits[-1]["events"], flush=True)
    except Exception as error:
        print(form, "failed", repr(error)[:400], flush=True)
        result["forms"][form] = repr(error)[:3000]
    save()
first_ids = {}
for turn in range(3):
    for form, (sampler, log) in samplers.items():
        if time.perf_counter() - began > 100:
            break
        r = run(sampler, log, whole)
        result["whole"].append([form, r["total"], r["first"], r["step"]])
        tokens = r["ids"]
        alike = next((i for i, (a, b) in enumerate(zip(tokens, first_ids.setdefault(0, tokens))) if a != b), -1)
        print("whole:", *result["whole"][-1], "differs from", alike, flush=True)
save()
for form in () if len(sys.argv) > 3 else ("shared", "normed"):
    if form in samplers and time.perf_counter() - began < 104:
        sampler, log = samplers[form]
        with tempfile.TemporaryDirectory() as folder:
            jax.profiler.start_trace(folder)
            sampler.submit(prompts[0], 16, temperature=1.0, index=0, eos_token_ids=())
            drain(sampler)
            jax.profiler.stop_trace()
            rows = kernels(folder)
        if rows:
            zero = rows[0][1]
            rows = [[n[:50], round((a - zero) / 1e3, 2), round((b - a) / 1e3, 2)] for n, a, b in rows]
            json.dump(rows[:1400], open(f"{out}/trace_{form}.json", "w"))
print("done", round(time.perf_counter() - began, 1))
