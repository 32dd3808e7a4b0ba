"""`bench/peers.py`: which lines run, with which options, and the table with its verdicts."""

from pathlib import Path
from typing import Any

import compare
import peers
import pytest
from peers import LINES, chosen, comparison_of, options_of, row_of, table_of
from test_bench_summary import run as run_of

from headrace.terms.sizes import parse_bytes

FACTS = {"cores": 2, "processor": "p", "memory_bytes": 2**34, "file_system": "ext4"}


def words(*more: str) -> Any:
    return options_of(["--scratch", "s", "--output", "o", *more])


def results_of(line: peers.Line, ours: float, theirs: float, their_memory: float = 5.0) -> dict[str, Any]:
    """Return what `compare.py` writes, for steps of so many seconds; Headrace takes 1 GiB."""
    options = comparison_of(line, words(), Path("p.json"))
    runs = []
    for name, seconds, memory in ((peers.OURS, ours, 1.0), (line.peer, theirs, their_memory)):
        rows = [seconds] * line.steps
        runs.append(run_of(name, 0, rows, losses=[3.0] * line.steps) | {"peak_anonymous_bytes": int(memory * 2**30)})
    return {"machine": FACTS, "runs": runs, "summaries": compare.summaries_of([peers.OURS, line.peer], runs, options)}


def test_three_sizes_and_two_token_counts_are_compared_with_deepspeed():
    compared = {(line.size, line.tokens_per_step) for line in LINES if line.needs_deepspeed}
    assert compared == {(size, tokens) for size in "SML" for tokens in (256, 2048)}


def test_each_line_is_a_comparison_that_compare_takes():
    for line in LINES:
        options = comparison_of(line, words("--deepspeed-python", "python", "--rounds", "3"), Path("p.json"))
        assert [contestant.name for contestant in compare.chosen(options)] == [peers.OURS, line.peer]
        assert (options.size, options.tokens_per_step, options.steps, options.rounds) == (
            line.size,
            line.tokens_per_step,
            line.steps,
            3,
        )
        assert options.warmup < options.steps
        ours = compare.command_of(compare.chosen(options)[0], options, Path("model"))
        assert ours[ours.index("--machine") + 1] == "p.json"
        assert options.output == Path("o") / line.name
        assert parse_bytes(options.host_memory) > 0
        assert line.tokens_per_step % line.sequence_length == 0


def test_without_deepspeed_its_lines_are_left_out_unless_named():
    assert {line.peer for line in chosen(words())} == {"plain"}
    assert chosen(words("--deepspeed-python", "python")) == list(LINES)
    named = chosen(words("--only", "L-256-deepspeed-nvme,S-2048-plain"))
    assert [line.name for line in named] == ["L-256-deepspeed-nvme", "S-2048-plain"]
    with pytest.raises(SystemExit):
        chosen(words("--only", "L-257"))


@pytest.mark.parametrize(
    ("theirs", "memory", "expected"),
    [
        (4.5, 5.0, "**2.25** (2.25-2.25; 2.20) | 0.200 (0.25) |"),
        (4.3, 5.0, "**2.15** (2.15-2.15; 2.20, **short**) | 0.200 (0.25) |"),
        (4.5, 3.0, "**2.25** (2.25-2.25; 2.20) | 0.333 (0.25, **short**) |"),
    ],
)
def test_a_row_says_what_is_short_of_its_aim(theirs: float, memory: float, expected: str):
    line = next(line for line in LINES if line.aim == 2.2)
    assert expected in row_of(line, results_of(line, 2.0, theirs, memory))


def test_a_peer_that_failed_is_in_the_table():
    line = LINES[0]
    results = results_of(line, 2.0, 3.0)
    results["summaries"][1] = {"name": line.peer, "status": "killed by the kernel"}
    assert "plain: killed by the kernel" in table_of(list(LINES), {line.name: results})


def test_results_are_kept_and_failures_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measured: list[str] = []

    def measure(options: Any) -> dict[str, Any]:
        line = next(line for line in LINES if line.name == options.output.name)
        found = results_of(line, 2.0, 3.0) | {"options": vars(options)}
        if measured.count(line.name) == 0 and line is LINES[1]:
            found["runs"][1]["status"] = "failed"
        measured.append(line.name)
        Path(f"{options.output}.json").write_text(peers.json.dumps(found, default=str))
        return found

    def measure_machine(directory: Path, profile: Path, seconds: float) -> None:
        measured.append("machine")
        profile.write_text("{}")

    monkeypatch.setattr(compare, "measure", measure)
    monkeypatch.setattr(peers, "measure_machine", measure_machine)
    words = ["peers.py", "--scratch", str(tmp_path), "--output", str(tmp_path / "results")]
    monkeypatch.setattr("sys.argv", words)
    first, second = LINES[0].name, LINES[1].name
    assert peers.main() == 1
    assert peers.main() == 0
    assert measured == ["machine", first, second, second]
    assert (tmp_path / "results" / "peers.md").read_text().count("\n| ") == 3
    monkeypatch.setattr("sys.argv", [*words, "--rounds", "2", "--only", first])
    assert peers.main() == 0
    assert measured[4:] == [first]  # what is there answers another question
