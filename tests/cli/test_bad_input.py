"""Bad input, item by item: exit code 2, one line that says what was found and what to do, and no file left or changed.

Run: pytest tests/cli/test_bad_input.py
"""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from bad_worlds import POSITIONS, VOCABULARY, World, check_refusal, listing, save_model
from safetensors.torch import load_file, save_file
from tiers import sampled
from transformers import T5Config

from headrace.cli import main
from headrace.cli.configuration import config_of
from headrace.files import describe_directory
from headrace.store import StateStore, read_manifest
from headrace.store.manifest import MANIFEST_NAME, RECORD_NAMES
from headrace.store.places import place_units
from headrace.store.record import unpack_record
from headrace.terms.options.run_options import RunOptions


class TestModel:
    def test_a_missing_shard(self, world: World) -> None:
        missing = world.shards()[1]
        missing.unlink()
        said = world.train_refused()
        assert f"{missing.name}, named in model.safetensors.index.json, is missing" in said
        assert "fetch" in said

    @pytest.mark.parametrize("kept", [0, 5, 300, -1])
    def test_a_truncated_shard(self, world: World, kept: int) -> None:
        shard = world.shards()[1]
        whole = shard.read_bytes()
        shard.write_bytes(whole[:kept])
        said = world.train_refused()
        assert str(shard) in said
        assert f"{len(whole[:kept])}" in said
        assert "fetch" in said

    def test_a_shard_that_holds_less_than_its_index_says(self, world: World) -> None:
        shard = world.shards()[1]
        tensors = load_file(shard)
        lost = sorted(tensors)[0]
        del tensors[lost]
        save_file(tensors, shard, metadata={"format": "pt"})
        said = world.train_refused()
        assert str(shard) in said
        assert lost in said
        assert "fetch" in said

    def test_an_unknown_architecture(self, world: World) -> None:
        world.edit_config(model_type="river", architectures=["RiverForCausalLM"])
        said = world.train_refused()
        assert "'river'" in said
        assert "transformers" in said

    def test_an_encoder_decoder_model(self, world: World) -> None:
        T5Config(d_model=32, d_ff=64, num_layers=2, num_heads=4, vocab_size=VOCABULARY).save_pretrained(world.model)
        said = world.train_refused()
        assert "encoder-decoder" in said
        assert "decoder-only" in said

    def test_no_config_and_a_broken_one(self, world: World) -> None:
        (world.model / "config.json").write_text('{"model_type": ')
        assert "not JSON" in world.train_refused()
        (world.model / "config.json").unlink()
        assert "no Hugging Face model directory" in world.train_refused()

    def test_a_missing_tokenizer(self, world: World) -> None:
        for path in world.model.glob("*token*"):
            path.unlink()
        said = world.train_refused()
        assert "the tokenizer is missing" in said
        assert "copy the tokenizer files" in said

    def test_a_broken_tokenizer(self, world: World) -> None:
        (world.model / "tokenizer.json").write_text("{broken")
        assert "tokenizer cannot be read" in world.train_refused()

    @pytest.mark.wide
    def test_weights_that_are_no_numbers(self, world: World) -> None:
        """Found last of all, while the state is being made: nothing of it may stay."""
        shard = world.shards()[-1]
        tensors = load_file(shard)
        name = sorted(tensors)[-1]
        tensors[name].view(-1)[3] = float("nan")
        save_file(tensors, shard, metadata={"format": "pt"})
        assert f"{name}: NaN or infinity" in world.train_refused()


class TestData:
    def test_an_empty_file(self, world: World) -> None:
        world.data.write_text("")
        said = world.train_refused()
        assert str(world.data) in said
        assert "empty" in said

    @pytest.mark.parametrize("line", ['{"text": ', "no json", '["a list"]', '{"text": 5}', '{"prose": "x"}'])
    def test_a_malformed_line_is_named(self, world: World, line: str) -> None:
        good = '{"text": "water"}\n'
        world.data.write_text(good + good + line + "\n" + good)
        assert f"{world.data}, line 3" in world.train_refused()

    def test_every_sample_masked(self, world: World) -> None:
        world.write_rows(*[{"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}] * 3)
        said = world.train_refused()
        assert "no token of the data set is trained: of 3 samples" in said
        assert str(world.data) in said

    def test_no_such_file(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        world.data.unlink()
        assert "data.jsonl" in world.train_refused()

    def test_token_ids_beyond_the_embeddings(self, world: World) -> None:
        world.write_rows({"input_ids": [5, VOCABULARY, 7]}, {"input_ids": [1, 2, 3]})
        said = world.train_refused()
        assert f"token {VOCABULARY}" in said
        assert f"0 to {VOCABULARY - 1}" in said

    def test_a_tokenizer_larger_than_the_embeddings(self, world: World) -> None:
        world.edit_config(vocab_size=100)
        assert "0 to 99" in world.train_refused()


class TestLengths:
    def test_tokens_that_are_no_whole_rows(self, world: World) -> None:
        said = world.train_refused(tokens_per_step=70)
        assert "70 is no multiple of sequence_length 32" in said
        assert "use 64" in said

    def test_more_than_the_models_positions(self, world: World) -> None:
        said = world.train_refused(sequence_length=2 * POSITIONS, tokens_per_step=2 * POSITIONS)
        assert f"{2 * POSITIONS} is more than the {POSITIONS} positions" in said


class TestWaysToRunBlocks:
    @pytest.mark.wide
    def test_compiling_without_a_compiler(self, world: World) -> None:
        import torch._inductor.config as inductor

        with inductor.patch({"cpp.cxx": ("no-such-compiler",)}):
            said = world.train_refused("--compile-blocks")
        assert "compile_blocks: torch.compile was asked for, but does not work on cpu here" in said
        assert "it needs a C++ compiler (g++ or clang++): install it, or leave compile_blocks out" in said

    @pytest.mark.skipif(torch.cuda.is_available(), reason="the next question is then whether the package is there")
    def test_liger_without_a_gpu(self, world: World) -> None:
        assert "liger: its kernels run on a GPU, but this run computes on the cpu" in world.train_refused("--liger")


class TestSsdDirectories:
    def test_missing(self, world: World) -> None:
        said = world.train_refused(ssd=world.folder / "nvme7")
        assert f"{world.folder / 'nvme7'}: SSD directory does not exist; create it" in said

    def test_a_file(self, world: World) -> None:
        assert "expected a directory, found a file" in world.train_refused(ssd=world.data)

    def test_read_only(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        really = os.open

        def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            if flags & os.O_CREAT and str(path).startswith(str(world.ssd)):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
            return really(path, flags, *rest, **options)

        monkeypatch.setattr(os, "open", refuse)
        said = world.train_refused()
        assert f"{world.ssd}: SSD directory cannot be written to (Read-only file system)" in said
        assert "name another" in said

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_without_permission(self, world: World) -> None:
        world.ssd.chmod(0o555)
        assert "Permission denied" in world.train_refused()

    def test_where_nobody_can_write(self, world: World) -> None:
        assert "/proc: SSD directory cannot be written to" in world.train_refused(ssd="/proc")

    @pytest.mark.wide
    def test_full(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        def nearly_full(directory: Path) -> object:
            return dataclasses.replace(describe_directory(directory), free_bytes=10 << 10)

        monkeypatch.setattr("headrace.store.run_folders.describe_directory", nearly_full)
        said = world.train_refused()
        assert "10 KiB free" in said
        assert "needed" in said
        assert "free some space or add a directory" in said

    def test_a_name_that_is_too_long(self, world: World) -> None:
        assert "cannot be looked at (File name too long)" in world.train_refused(ssd=world.folder / ("x" * 256))

    def test_in_memory(self, world: World) -> None:
        shared = Path("/dev/shm")
        if not shared.is_dir() or describe_directory(shared).file_system != "tmpfs":
            pytest.skip("no tmpfs at /dev/shm")
        with tempfile.TemporaryDirectory(dir=shared) as folder:
            assert "tmpfs lies in memory" in world.train_refused(ssd=folder)
            assert list(Path(folder).iterdir()) == []

    def test_named_twice(self, world: World) -> None:
        link = world.folder / "link"
        link.symlink_to(world.ssd)
        for twin in (world.ssd, world.ssd / ".." / "ssd", link):
            said = world.train_refused(ssd=[world.ssd, twin])
            assert "same directory" in said
            assert "once" in said


class TestOptions:
    @pytest.mark.parametrize("tier", sampled(["host", "device"]))
    def test_a_budget_below_the_largest_unit(self, world: World, tier: str) -> None:
        said = world.train_refused(**{f"{tier}_memory": "70KiB"})
        assert f"{tier} memory: at least" in said
        assert "70 KiB are allowed" in said
        assert "The largest unit is" in said
        assert f"--{tier}-memory" in said

    def test_an_unknown_key(self, world: World) -> None:
        path = world.folder / "run.yaml"
        path.write_text(f"model: {world.model}\ndata: {world.data}\nlearning_rat: 1e-4\n")
        assert "did you mean 'learning_rate'?" in world.refused("train", path)
        assert "did you mean 'host_memory'?" in world.train_refused("host_memroy=1GiB")

    def test_an_unknown_option(self, world: World) -> None:
        said = world.train_refused(lerning_rate=1)
        assert "--lerning-rate" in said
        assert "--help" in said

    @pytest.mark.parametrize("words", [("train",), ("resume",), ("fly",), ("train", "m", "d", "--max-steps", "many")])
    def test_words_that_are_no_command(self, world: World, words: tuple[str, ...]) -> None:
        assert "--help" in world.refused(*words)

    @pytest.mark.parametrize("size", ["sixteen", "16 bananas", "GiB", "-1GiB", "0"])
    def test_wrong_units(self, world: World, size: str) -> None:
        said = world.train_refused(host_memory=size)
        assert f"host_memory: {size!r} is not a" in said
        assert "size" in said

    @pytest.mark.parametrize(
        ("size", "num_bytes"), [("16G", 16 << 30), ("16GiB", 16 << 30), ("16gib", 16 << 30), ("16gb", 16 * 10**9)]
    )
    def test_units_that_are_understood(self, size: str, num_bytes: int) -> None:
        assert config_of(["m", "d"], {"host_memory": size}, RunOptions).host_memory == num_bytes

    @pytest.mark.parametrize(
        "option",
        ["learning_rate=fast", "max_grad_norm=-1", "epochs=-1", "lr_schedule=sawtooth", "compute_dtype=int3", "seed=-1"],
    )
    def test_values_that_make_no_sense(self, world: World, option: str) -> None:
        assert option.partition("=")[0] in world.train_refused(option)

    def test_a_yaml_file_that_is_none(self, world: World) -> None:
        path = world.folder / "run.yaml"
        path.write_text("model: [\n")
        assert "not YAML" in world.refused("train", path)
        assert "cannot be read" in world.refused("train", world.folder / "absent.yaml")


class TestPlacesInAFile:
    """What the system refuses of a place that a YAML file names is a line, as of one among the words."""

    @pytest.mark.parametrize("name", ["model", "data", "output", "ssd", "plan", "cache"])
    def test_that_a_run_begins_with(self, world: World, name: str) -> None:
        options = {"model": str(world.model), "data": str(world.data), "output": str(world.run), "ssd": [str(world.ssd)]}
        (world.folder / "run.yaml").write_text(yaml.safe_dump(options | {name: str(world.folder / ("x" * 256))}))
        assert "File name too long" in world.refused("train", world.folder / "run.yaml")

    @pytest.mark.wide
    def test_that_a_run_began_with(self, ran: World) -> None:
        path, gone = ran.run / "config.yaml", ran.folder / ("x" * 256)
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"model": str(gone)}))
        assert "File name too long; give a shorter name" in ran.refused("resume", ran.run)


class TestRunDirectories:
    def test_one_that_holds_other_files(self, world: World) -> None:
        world.run.mkdir()
        (world.run / "precious").write_text("x")
        assert "holds other files" in world.train_refused()

    def test_a_file(self, world: World) -> None:
        world.run.write_text("x")
        assert "is a file" in world.train_refused()

    def test_one_that_cannot_be_made(self, world: World) -> None:
        said = world.train_refused(output="/proc/headrace/run")
        assert "/proc/headrace/run cannot be written" in said
        assert "--output" in said

    @pytest.mark.wide
    def test_directories_above_it_go_too_when_nothing_was_begun(self, world: World) -> None:
        world.train_refused(output=world.folder / "runs" / "deep" / "run", host_memory="70KiB")

    def test_one_that_is_no_run(self, world: World) -> None:
        for command in (("resume", world.ssd), ("export", world.ssd, world.folder / "out")):
            assert "no run" in world.refused(*command)
        assert "no such directory" in world.refused("resume", world.folder / "absent")


class TestResume:
    def test_a_directory_that_exists_is_not_trained_into(self, ran: World) -> None:
        said = ran.train_refused()
        assert "holds a run" in said
        assert "headrace resume" in said

    def test_a_directory_of_another_models_run_names_that_model(self, ran: World, template: Path) -> None:
        other = ran.folder / "other"
        shutil.copytree(template, other)
        words = ran.train_words()
        words[1] = str(other)
        said = ran.refused(*words)
        assert f"a run of {ran.model}" in said
        assert "--output" in said

    def test_a_config_that_was_pointed_at_another_model(self, ran: World) -> None:
        other = save_model(ran.folder / "other", tie_word_embeddings=True)
        path = ran.run / "config.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"model": str(other)}))
        said = ran.refused("resume", ran.run)
        assert str(other) in said
        assert str(ran.model) in said

    @pytest.mark.parametrize(
        ("name", "now", "then"),
        [
            ("max_steps", 9, 2),
            ("learning_rate", 0.5, 1e-05),
            ("max_grad_norm", 0, 1.0),
            ("host_memory", 5 << 30, 4 << 30),
            ("tokens_per_step", 128, 64),
            ("parameter_groups", [{"pattern": "embed"}], ()),
            ("optimizer", "adamw:moments=int8", "adamw"),
        ],
    )
    def test_an_option_that_was_changed_after_the_run_began(self, name: str, now: object, then: object, ran: World) -> None:
        path = ran.run / "config.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {name: now}))
        said = ran.refused("resume", ran.run)
        assert f"config.yaml has {name} " in said
        assert f"the run began with {then} and keeps that" in said

    def test_an_export_asks_for_no_options(self, ran: World) -> None:
        """It trains nothing; and the refusal of edited options names it as the way out."""
        path = ran.run / "config.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"learning_rate": 0.25}))
        assert "headrace export" in ran.refused("resume", ran.run)
        with pytest.raises(SystemExit) as left:
            main(["export", str(ran.run), str(ran.folder / "out")])
        assert not left.value.code
        provenance = json.loads((ran.folder / "out" / "headrace.json").read_text())
        assert provenance == {"run_id": read_manifest(ran.run).run_id, "steps": 2}

    def test_an_export_to_where_the_finished_model_goes(self, ran: World) -> None:
        shutil.rmtree(ran.run / "final")
        assert "where the finished model of this run goes" in ran.refused("export", ran.run, ran.run / "final")

    def test_an_export_of_a_run_that_imports(self, ran: World) -> None:
        shutil.rmtree(ran.run / "final")
        with StateStore.open(ran.run, sink=lambda event: None):
            for name in RECORD_NAMES:
                (ran.run / name).write_bytes(bytes((ran.run / name).stat().st_size))
            said = ran.refused("export", ran.run, ran.folder / "out")
        assert f"process {os.getpid()} imports the model" in said

    def test_a_model_directory_that_was_replaced(self, ran: World) -> None:
        shutil.rmtree(ran.model)
        save_model(ran.model, tie_word_embeddings=True)
        said = ran.refused("resume", ran.run)
        assert str(ran.model) in said
        assert "another model" in said

    def test_another_version(self, ran: World) -> None:
        path = ran.run / MANIFEST_NAME
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
        said = ran.refused("resume", ran.run)
        assert "format 99" in said
        assert "use the version that wrote it" in said

    def test_an_option_of_another_version(self, ran: World) -> None:
        with (ran.run / "config.yaml").open("a") as file:
            file.write("option_of_tomorrow: 1\n")
        assert "option_of_tomorrow" in ran.refused("resume", ran.run)

    def test_a_damaged_manifest(self, ran: World) -> None:
        (ran.run / MANIFEST_NAME).write_text('{"format": 1')
        assert MANIFEST_NAME in ran.refused("resume", ran.run)

    @pytest.mark.parametrize("kind", ["weights", "states"])
    def test_a_flipped_byte(self, ran: World, kind: str) -> None:
        manifest = read_manifest(ran.run)
        places = place_units(manifest.units)
        chunks = [place.num_chunks for place in places.committed]
        records = [unpack_record((ran.run / name).read_bytes(), manifest.run_id, chunks) for name in RECORD_NAMES]
        newest = max((record for record in records if record), key=lambda record: record.sequence)
        place, version = next(pair for pair in zip(places.committed, newest.groups, strict=True) if pair[0].family == kind)
        offset = place.offset(version.slot, 0)
        (path,) = manifest.data_paths()
        with path.open("r+b") as file:
            file.seek(offset + 77)
            byte = file.read(1)[0]
            file.seek(offset + 77)
            file.write(bytes([byte ^ 16]))
        said = ran.refused("resume", ran.run)
        assert f"unit {place.unit_name}, {kind}" in said
        assert f"{path} at offset {offset}" in said
        assert f"stored checksum {version.checksums[0]:#018x}, computed 0x" in said

    def test_damaged_commit_records(self, ran: World) -> None:
        for name in RECORD_NAMES:
            content = np.fromfile(ran.run / name, dtype=np.uint8)
            content[100] ^= 1
            content.tofile(ran.run / name)
        said = ran.refused("resume", ran.run)
        assert "damaged commit records in commit.0 and commit.1" in said

    def test_a_missing_and_a_short_data_file(self, ran: World) -> None:
        (path,) = read_manifest(ran.run).data_paths()
        os.truncate(path, 8192)
        assert f"{path} has 8192 bytes" in ran.refused("resume", ran.run)
        path.unlink()
        assert f"{path} is missing" in ran.refused("resume", ran.run)

    def test_data_that_changed(self, ran: World) -> None:
        ran.write_rows({"text": "other water"})
        assert "data" in ran.refused("resume", ran.run)

    def test_a_second_process(self, ran: World) -> None:
        code = (
            "import sys, pathlib\nfrom headrace.store.lock import RunLock\n"
            "lock = RunLock(pathlib.Path(sys.argv[1]))\nprint('held', flush=True)\nsys.stdin.read()"
        )
        command = [sys.executable, "-c", code, str(ran.run)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout
            assert holder.stdout.readline() == "held\n"
            said = ran.refused("resume", ran.run)
            assert f"in use by process {holder.pid}" in said
            assert "in use" in ran.refused("export", ran.run, ran.folder / "out")
            holder.communicate("")


@pytest.mark.wide
def test_from_a_shell(world: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same through a process of its own: nothing else reaches stderr, such as warnings of libraries."""
    world.shards()[1].unlink()
    before = listing(world.folder)
    command = [sys.executable, "-m", "headrace", *world.train_words()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path_factory.mktemp("elsewhere"), timeout=280)
    check_refusal(done.returncode, done.stderr)
    assert done.stdout == ""
    assert listing(world.folder) == before
