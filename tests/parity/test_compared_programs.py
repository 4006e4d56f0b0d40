"""examples/compare_flax_and_torch.py, on the CPU: both programs are recorded, read and set side by side."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_flax_and_a_torch_program_are_compared(tmp_path, monkeypatch, capsys):
    text = (ROOT / "examples/compare_flax_and_torch.py").read_text(encoding="utf-8")
    numbers = "ROWS, WIDTH, STEPS = 4096, 4096, 3"
    assert numbers in text and len(text.splitlines()) <= 65, "short enough to be read at once"
    monkeypatch.chdir(tmp_path)
    made = {"__name__": "__main__"}
    exec(compile(text.replace(numbers, "ROWS, WIDTH, STEPS = 256, 256, 3"), "example", "exec", dont_inherit=True), made)
    comparison = made["comparison"]
    assert capsys.readouterr().out.count(comparison.sentences[0]) == 1
    for report in (comparison.a, comparison.b):
        assert len(report.steps_ms) == 3 and {row.name for row in report.categories} >= {"GEMM", "loss", "optimizer"}
        assert {row.name.split("/")[0] for row in report.scopes} >= {"mlp", "loss", "optimizer"}
        # Two products in the forward, three in the backward: of the first layer's input no gradient is wanted.
        assert report.flops_per_step == 5 * 2 * 256 * 256 * 1024
