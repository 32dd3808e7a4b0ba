"""The command line from outside: one line and exit code 2 for what is refused, a frozen list of flags, a fast --help.

Run: pytest tests/cli
"""

import errno
import gc
import json
import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headrace.cli import main, runs
from headrace.cli.configuration import config_of
from headrace.cli.machine_sheet import machine_sheet, sheet_text
from headrace.cli.plain_errors import plainly
from headrace.cli.samples import marked
from headrace.process import SPIN_COUNT, cache_directory, heavy_imports, set_process_defaults
from headrace.terms.errors import ConfigError, DiskFull, StepFailed
from headrace.terms.options.run_options import RunOptions


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["water"], trainer)
    directory = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(str(directory))
    (directory / "config.json").write_text('{"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 128}')
    return directory


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return int(left.value.code or 0)


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.fixture
def something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model `m` and data `d.jsonl` where the command runs: without them, nothing else is looked at."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "d.jsonl").touch()


class TestRefusals:
    @pytest.mark.usefixtures("something")
    def test_an_unknown_key_names_the_nearest(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "run.yaml").write_text("model: m\ndata: d\nlearning_rat: 1e-4\n")
        assert "'learning_rate'" in refusal(capsys, "train", tmp_path / "run.yaml")
        assert "'learning_rate'" in refusal(capsys, "train", "m", "d.jsonl", "lr=1e-4")

    @pytest.mark.usefixtures("something")
    def test_sixteen_is_no_size(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "'sixteen' is not a size" in refusal(capsys, "train", "m", "d.jsonl", "--host-memory", "sixteen")

    @pytest.mark.parametrize("words", [("train", "model-only"), ("train", "nowhere", "d.jsonl"), ("resume", "nowhere")])
    def test_missing_places(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert words[1] in refusal(capsys, *words)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.usefixtures("something")
    def test_a_run_directory_in_use_is_left_alone(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "precious").write_text("x")
        assert "--output" in refusal(capsys, "train", "m", "d.jsonl", "--output", tmp_path / "run")
        assert (tmp_path / "run" / "precious").read_text() == "x"

    def test_export_never_overwrites(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "exists" in refusal(capsys, "export", tmp_path / "run", tmp_path)
        assert "no such directory" in refusal(capsys, "export", tmp_path / "run", tmp_path / "out")

    @pytest.mark.parametrize(
        "words",
        [
            ("resume", "PLACE"),
            ("report", "PLACE"),
            ("export", "PLACE", "out"),
            ("train", "PLACE", "d.jsonl"),
            ("train", "m", "d.jsonl", "output=PLACE"),
            ("data", "PLACE", "--model", "m"),
            ("clean", "PLACE"),
            ("plan", "PLACE"),
            ("bench", "machine", "--ssd", "PLACE"),
        ],
    )
    @pytest.mark.parametrize("reason", [errno.ENAMETOOLONG, errno.EACCES])
    @pytest.mark.usefixtures("something")
    def test_a_place_that_the_system_does_not_look_at(
        self,
        words: tuple[str, ...],
        reason: int,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        really, place = os.stat, tmp_path / ("a" * 300 if reason == errno.ENAMETOOLONG else "theirs") / "x"

        def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
            if isinstance(path, str | Path) and Path(path).is_relative_to(tmp_path / "theirs"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return really(path, *arguments, **options)

        monkeypatch.setattr(os, "stat", stat)
        assert run(*(word.replace("PLACE", str(place)) for word in words)) == 2
        said = capsys.readouterr().err.splitlines()  # `bench` says before what it is about to do
        assert [line for line in said if "Traceback" in line or line.startswith("error: ")] == said[-1:]
        assert str(place) in said[-1]
        assert os.strerror(reason) in said[-1]

    def test_the_doctor_tells_of_one_among_the_rest(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        place = tmp_path / ("a" * 300)
        assert run("doctor", "--no-measure", "--ssd", place, "--ssd", tmp_path) == 0
        said = capsys.readouterr().out
        assert f"{place}: File name too long" in said
        assert f"{tmp_path}: " in said

    def test_the_doctor_says_where_nobody_listens(self, capsys: pytest.CaptureFixture[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            there = f"127.0.0.1:{free.getsockname()[1]}"
            said = refusal(capsys, "doctor", "--no-measure", "--node", there)
        assert f"node {there}: nothing listens there; start it there: headrace node RUN.YAML --listen {there}" in said

    def test_a_worker_is_given_no_run_of_its_own(self, capsys: pytest.CaptureFixture[str]) -> None:
        said = refusal(capsys, "train", "model", "data", "--node", "127.0.0.1:1", "--seed", "3")
        assert "node: model, data, seed: a worker's run comes from the node; only device_memory, host_memory, " in said

    def test_an_unknown_option_is_exit_code_2(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("train", "m", "d", "--lerning-rate", "1") == 2
        assert "lerning-rate" in capsys.readouterr().err

    def test_data_of_a_file_needs_a_model(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "--model" in refusal(capsys, "data", tmp_path / "d.jsonl")

    def test_cleaning_a_missing_directory(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "no such directory" in refusal(capsys, "clean", tmp_path / "nothing")


class TestErrorsToWords:
    def test_a_full_disk_in_the_middle_of_a_step_is_said_plainly(self, capsys: pytest.CaptureFixture[str]) -> None:
        @plainly
        def command() -> None:
            try:
                raise DiskFull("/nvme0: 10 bytes needed,\n0 free")
            except DiskFull as cause:
                raise StepFailed("step 7, lane ssd-write") from cause

        with pytest.raises(SystemExit) as left:
            command()
        assert left.value.code == 2
        words = capsys.readouterr().err
        assert "step 7, lane ssd-write" in words
        assert "10 bytes needed, 0 free" in words
        assert "headrace resume" in words

    def test_a_failed_step_says_once_what_happened_and_which_run_to_resume(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(*arguments: object, **options: object) -> None:
            try:
                raise DiskFull("/nvme0: 10 bytes needed, 0 free")
            except DiskFull as cause:
                raise StepFailed(f"the step failed: {cause}; the last committed step is untouched") from cause

        monkeypatch.setattr(runs, "resume", fail)
        words = refusal(capsys, "resume", tmp_path / "run")
        assert words.count("10 bytes needed") == 1
        assert words.count("committed") == 1
        assert f"headrace resume {tmp_path / 'run'}" in words

    @pytest.mark.parametrize("error", [StepFailed("lane compute failed"), ZeroDivisionError("ours")])
    def test_our_own_mistakes_keep_their_traceback(self, error: Exception) -> None:
        @plainly
        def command() -> None:
            raise error

        with pytest.raises(type(error)):
            command()

    @pytest.mark.parametrize("found", ["x y/run", "x y/run/a/b", "x y", "link/a", b"x y/run"])
    @pytest.mark.parametrize("word", ["{}", "output={}", "ssd=[/nvme0, '{}']"])
    def test_what_the_system_refuses_of_a_place_that_was_named_is_one_line(
        self, found: str | bytes, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "x y" / "run").mkdir(parents=True)
        (tmp_path / "link").symlink_to(tmp_path / "x y" / "run")

        @plainly
        def command(words: list[str], ssd: list[Path], count: int, nothing: None) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), found)

        with pytest.raises(SystemExit) as left:
            command(words=["m", word.format(tmp_path / "x y" / "run")], ssd=[Path("/nvme1")], count=1, nothing=None)
        assert left.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {os.fsdecode(found)}: {os.strerror(errno.EACCES)}; change its permissions")
        assert said.count("\n") == 1

    @pytest.mark.parametrize("found", ["/elsewhere/file", "/nvme00", 3, None])
    def test_what_the_system_refuses_elsewhere_keeps_its_traceback(self, found: str | int | None) -> None:
        @plainly
        def command(ssd: list[Path]) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), found)

        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            command(ssd=[Path("/nvme0")])

    def test_an_interrupt_is_130(self, capsys: pytest.CaptureFixture[str]) -> None:
        @plainly
        def command() -> None:
            raise KeyboardInterrupt

        with pytest.raises(SystemExit) as left:
            command()
        assert left.value.code == 130

    @pytest.mark.parametrize("place", ["", "typer", "torch"])
    def test_an_interrupt_is_one_line_whenever_it_comes(self, place: str, tmp_path: Path) -> None:
        """While the command line itself is imported, while a command imports what it needs, and between."""
        code = (
            "import sys\nplace = sys.argv[1]\n"
            "class Stop:\n def find_spec(self, name, path=None, target=None):\n"
            "  if name == place: raise KeyboardInterrupt\n"
            "sys.meta_path.insert(0, Stop())\nfrom headrace.cli import main\n"
            "if not place:\n"
            " import headrace.cli.app as a\n a.asked_of = lambda *b: lambda *c, **d: 130  # as Typer has it\n"
            "main(['doctor', '--no-measure'])"
        )
        done = subprocess.run([sys.executable, "-c", code, place], capture_output=True, text=True, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


class TestWords:
    def test_options_win_over_words_over_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "run.yaml"
        path.write_text("model: m\ndata: d\nseed: 1\nepochs: 2\nmax_steps: 3\n")
        config = config_of([str(path), "epochs=4", "max-steps=5"], {"max_steps": 6}, RunOptions)
        assert (config.seed, config.epochs, config.max_steps) == (1, 4, 6)
        assert config.cache == cache_directory()

    def test_model_and_several_data_files(self) -> None:
        config = config_of(["m", "a.jsonl", "b.jsonl", "ssd=[/x, /y]"], {}, RunOptions)
        assert (config.model, config.data, config.ssd) == (Path("m"), ("a.jsonl", "b.jsonl"), (Path("/x"), Path("/y")))

    def test_a_lone_word_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"RUN\.YAML"):
            config_of(["m"], {}, RunOptions)

    def test_every_key_can_be_a_word(self) -> None:
        words = ["model=m", "data=[a, b]", "shuffle=false", "optimizer=adamw:eps=1e-6", "interpreter=plain"]
        config = config_of([*words, "parameter_groups=[{pattern: norm}]", "cache=/c"], {}, RunOptions)
        assert (config.data, config.shuffle, config.optimizer) == (("a", "b"), False, "adamw:eps=1e-06")
        assert (config.parameter_groups[0].pattern, config.cache) == ("norm", Path("/c"))

    def test_the_help_of_train_says_how_often_is_committed(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("train", "--help") == 0
        words = "Commit every so many steps, for resuming; it makes no checkpoint-N (--save-steps). Default: 1."
        assert words in " ".join(capsys.readouterr().out.split())


class TestStart:
    def test_help_is_fast_and_imports_nothing_heavy(self) -> None:
        code = (
            "import sys\nfrom headrace.cli import main\n"
            "try:\n main(['--help'])\nexcept SystemExit:\n pass\n"
            "print([m for m in ('torch', 'transformers', 'numba', 'numpy', 'pydantic', 'datasets') if m in sys.modules])"
        )
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.stdout.rstrip().endswith("[]")
        # Of a core, however busy: 0.2 s measured; with torch it would be many seconds.
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3

    @pytest.mark.parametrize(("before", "after"), [(0.005, 0.001), (0.0002, 0.0002)])
    def test_threads_of_drives_wait_a_millisecond_at_most_for_python(self, before: float, after: float) -> None:
        interval = sys.getswitchinterval()
        try:
            sys.setswitchinterval(before)
            set_process_defaults()
            assert sys.getswitchinterval() == pytest.approx(after, rel=0.05)  # kept in whole microseconds
        finally:
            sys.setswitchinterval(interval)

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ({}, ["PASSIVE", SPIN_COUNT]),
            ({"OMP_WAIT_POLICY": "ACTIVE"}, ["ACTIVE", "None"]),  # a spin count of ours would overrule it
            ({"GOMP_SPINCOUNT": "7"}, ["PASSIVE", "7"]),
        ],
    )
    def test_the_environment_is_set_but_never_overruled(self, given: dict[str, str], expected: list[str]) -> None:
        code = (
            "import os, sys, headrace\nheadrace.set_process_defaults()\nassert 'torch' not in sys.modules\n"
            "print(os.environ['OMP_WAIT_POLICY'], os.environ.get('GOMP_SPINCOUNT'))"
        )
        environment = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment | given)
        assert done.stdout.split() == expected

    @pytest.mark.wide
    @pytest.mark.parametrize(("given", "forgets"), [({}, True), ({"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024"}, False)])
    def test_onednn_keeps_few_compiled_products(self, given: dict[str, str], forgets: bool) -> None:
        """Forty shapes twice: of so many it makes all anew the second time, but where a user lets it keep them."""
        code = (
            "import headrace\nheadrace.set_process_defaults()\nimport torch\nfor turn in range(2):\n"
            " print('turn', flush=True)\n for width in range(16, 56):\n"
            "  torch.mkldnn_convolution(torch.ones(1, 16, 8, width), torch.ones(16, 16, 3, 3), None, (0, 0), (1, 1), (1, 1), 1)"
        )
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ONEDNN_")}
        environment |= {"ONEDNN_VERBOSE": "profile_create", **given}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        first, second = (turn.count("cache_miss") for turn in done.stdout.split("turn\n")[1:])
        assert first >= 40, "oneDNN did not compute it"
        assert (second > 0) is forgets

    @pytest.mark.parametrize(
        ("quota", "given", "expected"),
        [(None, None, None), (2.5, None, "2"), (0.5, None, "1"), (8.0, None, None), (2.0, "4", "4")],
    )
    def test_no_more_threads_than_a_container_may_run(
        self, quota: float | None, given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("headrace.process.quota_cores", lambda: quota)
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
        monkeypatch.setenv("OMP_NUM_THREADS", given or "")  # put back afterwards, whatever happens to it
        if given is None:
            monkeypatch.delenv("OMP_NUM_THREADS")
        set_process_defaults()
        assert os.environ.get("OMP_NUM_THREADS") == expected

    def test_the_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("--version") == 0
        assert re.fullmatch(r"headrace \d+\.\d+\.\d+\n", capsys.readouterr().out)


class TestDoctor:
    def test_json_has_what_the_issue_names(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("doctor", "--json", "--no-measure", "--ssd", tmp_path) == 0
        sheet = json.loads(capsys.readouterr().out)
        assert {"headrace", "python", "torch", "transformers", "numba"} <= sheet["versions"].keys()
        assert sheet["memory"]["total_bytes"] > sheet["memory"]["available_bytes"] > 0
        assert sheet["cpu"]["usable_cores"] >= 1
        (directory,) = sheet["ssd"]
        assert directory["is_directory"]
        assert directory["writable"]
        assert directory["free_bytes"] > 0
        assert list(tmp_path.iterdir()) == []

    def test_text_says_the_same(self, tmp_path: Path) -> None:
        sheet = machine_sheet((tmp_path, tmp_path / "missing"), measure=False)
        text = sheet_text(sheet)
        assert f"{tmp_path}: {sheet['ssd'][0]['file_system']}" in text
        assert "missing: no such directory" in text
        assert sheet["versions"]["torch"] in text


class TestData:
    def test_trained_parts_are_marked_and_totals_given(
        self, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rows = [{"prompt": f"question {i}? ", "completion": f"answer {i}"} for i in range(5)]
        (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert run("data", tmp_path / "d.jsonl", "--model", model, "--show", 2) == 0
        out = capsys.readouterr().out
        assert "question 0? ⟦answer 0<eos>⟧" in out
        assert "question 2" not in out
        assert "samples   5" in out

    def test_json_for_scripts(self, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "d.jsonl").write_text('{"text": "water [bold] flows"}\n')
        assert run("data", tmp_path / "d.jsonl", "--model", model, "--json") == 0
        values = json.loads(capsys.readouterr().out)
        assert values["summary"]["samples"] == 1
        assert "".join(segment["text"] for segment in values["samples"][0]) == "water [bold] flows<eos>"
        (stretch,) = values["stretches"][0]
        # Nothing predicts the first token.
        assert (stretch["text"], stretch["begin"]) == (" [bold] flows<eos>", 1)

    def test_a_malformed_line_is_named(self, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "d.jsonl").write_text('{"text": "good"}\n{"text": \n')
        words = refusal(capsys, "data", tmp_path / "d.jsonl", "--model", model)
        assert "d.jsonl" in words
        assert "2" in words

    @pytest.mark.wide
    @given(st.lists(st.tuples(st.text(max_size=20), st.booleans()), max_size=6))
    def test_marking_keeps_every_character(self, segments: list[tuple[str, bool]]) -> None:
        text = "".join(piece for piece, _ in segments)
        assert marked(segments, colour=True).plain == Text(text).plain
        assert re.sub("[⟦⟧]", "", marked(segments, colour=False).plain) == re.sub("[⟦⟧]", "", Text(text).plain)


def test_clean_says_when_there_is_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("clean", tmp_path) == 0
    assert capsys.readouterr().out == "0 leftovers removed, 0 B freed\n"


def test_imports_of_torch_are_not_searched_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_freeze_count()
    with heavy_imports():
        assert gc.isenabled(), "this process has torch, and objects of its own"
    assert gc.get_freeze_count() == before
    monkeypatch.delitem(sys.modules, "torch")
    try:
        with pytest.raises(KeyboardInterrupt), heavy_imports():
            raise KeyboardInterrupt
        assert (gc.isenabled(), gc.get_freeze_count()) == (True, before)
        with heavy_imports():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


@pytest.mark.wide
def test_what_was_imported_leaves_quietly() -> None:
    """Triton's library prints pages at the end of objects that are not freed: those that no collection looks at."""
    program = (
        "from headrace.process import heavy_imports\nwith heavy_imports():\n    from transformers import LlamaForCausalLM\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stderr) == (0, "")
