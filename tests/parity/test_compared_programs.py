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
    found = made["comparison"].to_dict()
    assert "times" in capsys.readouterr().out
    sides = [found[side] for side in ("a", "b")] if "a" in found else []
    print(found.keys(), sides)
