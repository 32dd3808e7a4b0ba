"""How fast do experts come when only some fit in memory: here, and in llama.cpp, which maps its file?

    PYTHONPATH=DIR python bench/residency.py --scratch DISK [--tokens 48] [--rounds 3] [--output RESULTS.json]

where `pip install --no-deps --target DIR xllamacpp` has put a built llama.cpp into DIR. A random mixture of 64 experts in each
of eight blocks, in bfloat16, answers one row token by token; llama.cpp is led along our tokens, so that it computes the same.
It reads a GGUF file of the same weights. All weights but experts stay in memory; of the experts 100, 50, 25 or 12.5 % do.

Tokens are drawn at random: greedy ones of a random model soon go round in a circle. "Same choices" are llama.cpp's likeliest
tokens beside those of plain transformers in float32.

* Headrace keeps the experts that most tokens were sent to (`terms/shelf.py`, `most-wanted`). The rest is read with O_DIRECT.
* llama.cpp has what the page cache holds. A page cache that holds so much is made here: before each token the experts that were
  used longest ago are dropped from it. So it is exact for whole experts, where the kernel's would guess at pages; and it may
  hold a token's experts too many while that token runs. Which experts a token uses is known from our run. What is in the page
  cache is measured, too ("cached").

Measured are the tokens after the first half, when both caches are full. Hits there are those of that cache on our choices of
experts. llama.cpp's own cache of experts (`moe_cache_size`) lies on a GPU. `--expert-cache` sets it all the
same, to see whether it does anything here.
"""

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from launch import environment, machine_facts, require_disk, scratch_directory
from mixture_files import Sizes, make_model

MIB = 2**20
SHARES = (1.0, 0.5, 0.25, 0.125)
PROMPT, END = tuple(range(10, 26)), 0
OURS, THEIRS = "headrace", "llama.cpp"
POLICIES = {OURS: "those most wanted", THEIRS: "those last used"}
Row = dict[str, Any]


class LastUsed:
    """The experts that a cache of `room` holds, where those used longest ago go."""

    def __init__(self, room: int) -> None:
        self._room = room
        self.held: OrderedDict[Any, None] = OrderedDict()

    def use(self, experts: Iterable[Any]) -> int:
        """Use experts; return how many were held. Afterwards at most `room` are."""
        found = 0
        for expert in experts:
            found += expert in self.held
            self.held[expert] = None
            self.held.move_to_end(expert)
        while len(self.held) > self._room:
            self.held.popitem(last=False)
        return found


class CachedExperts:
    """The experts of the GGUF file `file` in the page cache, from which it drops what is told."""

    def __init__(self, file: Path, sizes: Sizes) -> None:
        import gguf

        self._file, self._descriptor = file, os.open(file, os.O_RDONLY)
        self.ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for tensor in gguf.GGUFReader(file).tensors:
            if "_exps." in tensor.name:
                each = tensor.n_bytes // sizes.experts
                for expert in range(sizes.experts):
                    start = int(tensor.data_offset) + expert * each
                    self.ranges.setdefault((int(tensor.name.split(".")[1]), expert), []).append((start, start + each))

    def hold(self, held: Iterable[tuple[int, int]]) -> None:
        """Drop experts that are not `held`. What this process has mapped is unmapped: mapped pages would stay.

        The kernel drops a large folio, as reading ahead makes, only as a whole. Where too much stays, the file is read anew.
        """
        kept = set(held)
        self._unmap()
        for expert, ranges in self.ranges.items():
            for start, stop in ranges if expert not in kept else ():
                os.posix_fadvise(self._descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)
        if self.share() > len(kept) / len(self.ranges) + 0.03:
            self.read_anew(kept)

    def read_anew(self, held: Iterable[tuple[int, int]]) -> None:
        """Drop the whole file, and read what is no expert, and experts that are `held`, in single pages."""
        self._unmap()
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        kept, at = set(held), 0
        for (start, stop), expert in sorted((each, expert) for expert, ranges in self.ranges.items() for each in ranges):
            self._read(at, start)
            self._read(start, stop if expert in kept else start)
            at = stop
        self._read(at, self._file.stat().st_size)

    def _read(self, start: int, stop: int) -> None:
        for place in range(start, stop, MIB):
            os.pread(self._descriptor, min(MIB, stop - place), place)

    def share(self) -> float:
        """Return the share of the experts' bytes that is in the page cache."""
        size = mmap.PAGESIZE
        flags = (ctypes.c_ubyte * -(-self._file.stat().st_size // size))()
        with mmap.mmap(self._descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            place = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            _call("mincore", place, len(mapped), flags)
        there = bytes(flag & 1 for flag in flags)
        pieces = [there[start // size : -(-stop // size)] for ranges in self.ranges.values() for start, stop in ranges]
        return sum(map(sum, pieces)) / sum(map(len, pieces))

    def _unmap(self) -> None:
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            words = line.split(maxsplit=5)
            if len(words) == 6 and words[5] == str(self._file):
                start, stop = (int(word, 16) for word in words[0].split("-"))
                _call("madvise", start, stop - start, mmap.MADV_DONTNEED)


def _call(name: str, place: int, num_bytes: int, last: Any) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(ctypes.c_void_p(place), ctypes.c_size_t(num_bytes), last):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def our_run(directory: Path, sizes: Sizes, room: int, tokens: int) -> Row:
    """Generate `tokens` with `room` experts kept; return the answer and what its later half took."""
    import headrace

    headrace.set_process_defaults()
    from headrace import Budget
    from headrace.generate.passes.generator import Generator
    from headrace.generate.passes.micro_batches import SeatRows
    from headrace.plan.value.expert_plan import ExpertPlan
    from headrace.terms.events import GenerationPass
    from headrace.terms.shelf import MostWanted, Part

    passes: list[GenerationPass] = []
    used: list[list[tuple[int, int]]] = []  # by each pass: blocks and experts
    before: Counter[Part] = Counter()

    def note(event: Any) -> None:
        if isinstance(event, GenerationPass):
            passes.append(event)
            experts = generator._pass.experts  # nothing else tells which experts a pass has used
            assert experts is not None
            policy = experts.loads.on_host.policy
            assert isinstance(policy, MostWanted)
            used.append(sorted((part.unit - 1, part.spans[0][0]) for part in policy.times - before))
            before.update(policy.times - before)

    with Generator.open(directory, Budget(host="16GiB"), compute_dtype="bfloat16", sink=note, copy_weights=False) as generator:
        apart = generator.model.source.by_experts
        assert apart is not None
        how = ExpertPlan(figures=apart.expert_figures, choices=sizes.choices, in_round=1, cached=room)
        plan = replace(generator.plan_only(1, len(PROMPT), tokens), units=apart.figures, experts=how)
        generator.use(replace(plan, host_slots=plan.num_blocks, device_slots=1, prefetch=0))
        asked = {"max_new_tokens": tokens, "do_sample": True, "eos_token_id": None, "pad_token_id": 0}
        settings = generator.model.settings(len(PROMPT), None, asked)
        (done,) = generator.run([SeatRows(0, (PROMPT,), 0, settings)])
    later = [each for each in passes if not each.entering][tokens // 2 :]
    answer = [int(token) for token in done.tokens[0]]
    return {
        "tokens": answer,
        "first_choices": first_choices(directory, answer),
        "used": used,
        "seconds": mean(each.seconds for each in later),
        "hits": sum(each.found for each in later) / sum(each.wanted for each in later),
        "read_bytes": mean(each.bytes_read for each in later),
        "router_share": sum(each.router_seconds for each in later) / sum(each.seconds for each in later),
    }


def first_choices(directory: Path, answer: list[int]) -> list[int]:
    """Return the likeliest token at each place of `answer`, by the model in plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        found = model(torch.tensor([[*PROMPT, *answer[:-1]]])).logits[0, len(PROMPT) - 1 :]
    return [int(token) for token in found.argmax(-1)]


def their_run(directory: Path, sizes: Sizes, room: int, found: Row, cache: int) -> Row:
    """Lead llama.cpp along our run, `found`, with a page cache of `room` experts; return what the later half took."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(directory / "model.gguf")
    parameters.n_ctx, parameters.n_parallel, parameters.fit_params, parameters.n_gpu_layers = 512, 1, False, 0
    parameters.no_extra_bufts = True  # weights stay as the file has them, mapped
    parameters.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    parameters.moe_cache_size = cache
    threads = len(os.sched_getaffinity(0))
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    mapped, last, answer = CachedExperts(directory / "model.gguf", sizes), LastUsed(room), found["tokens"]
    mapped.read_anew(mapped.ranges)
    server = xllamacpp.Server(parameters)
    seconds, hits, read, cached, chosen = [], [], [], [], []
    for number, used in enumerate(found["used"]):
        if room < sizes.all_experts:
            mapped.hold(last.held)
        cached.append(mapped.share())
        before = _read_bytes()
        asked = {"n_predict": 1, "temperature": 0, "cache_prompt": True, "logprobs": 1}
        reply = server.handle_completions({"prompt": [*PROMPT, *answer[:number]], **asked})
        took = reply["timings"]  # of computing, without what its server does around that
        assert took["prompt_n"] == (1 if number else len(PROMPT)), "it goes on where it was"
        seconds.append((took["prompt_ms"] + took["predicted_ms"]) / 1000)
        read.append(_read_bytes() - before)
        hits.append(last.use(map(tuple, used)) / len(used))
        said = reply["choices"][0]["logprobs"]
        chosen.append(said["content"][0]["id"] if said else END)  # a reply that ends has no token
    half = 1 + len(answer) // 2
    return {
        "same": mean(one == other for one, other in zip(chosen, found["first_choices"], strict=True)),
        "seconds": mean(seconds[half:]),
        "hits": mean(hits[half:]) if room < sizes.all_experts else 1.0,
        "cached": mean(cached[half:]),
        "read_bytes": mean(read[half:]),
    }


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def run(name: str, directory: Path, room: int, options: argparse.Namespace, found: Row | None = None) -> Row:
    """Run a contestant in a process of its own."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        result, task = Path(folder) / "result.json", Path(folder) / "task.json"
        job = {"name": name, "room": room, "found": found, "tokens": options.tokens, "cache": options.expert_cache}
        job |= {"model": str(directory), "result": str(result), "sizes": vars(options.sizes)}
        task.write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, str(Path(__file__)), "--work", str(task)]
        done = subprocess.run(command, env=environment(omp_wait_policy="passive"), capture_output=True, text=True)
        if done.returncode or not result.exists():
            raise SystemExit(f"{name} ended with exit code {done.returncode}: {done.stderr[-2000:]}")
        return dict(json.loads(result.read_text(encoding="utf-8")))


def work(job: Row) -> None:
    """Do what `run` asks."""
    directory, sizes = Path(job["model"]), Sizes(**job["sizes"])
    if job["name"] == OURS:
        found = our_run(directory, sizes, job["room"], job["tokens"])
    else:
        found = their_run(directory, sizes, job["room"], job["found"], job["cache"])
    Path(job["result"]).write_text(json.dumps(found), encoding="utf-8")


def winner(ours: float, theirs: float, *, least: bool) -> str:
    """Return who has the better figure, the least or the largest one; within 2 % nobody."""
    if abs(ours - theirs) <= 0.02 * max(abs(ours), abs(theirs)):
        return "equal"
    return OURS if (ours < theirs) is least else THEIRS


def table(runs: list[Row]) -> str:
    """Return the table of the log: medians of rounds, and which policy won, by time and by hits."""
    lines = [
        "| experts in memory | Headrace, ms a token | llama.cpp | its time over ours | hits here | there | "
        "MB read a token here | there | cached there | waited for routers here | faster | more hits | same choices |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for share in dict.fromkeys(run["share"] for run in runs):
        of = {name: [run for run in runs if (run["share"], run["name"]) == (share, name)] for name in (OURS, THEIRS)}

        def middle(name: str, what: str, of: dict[str, list[Row]] = of) -> float:
            return median(run[what] for run in of[name])

        took, hits = ({name: middle(name, what) for name in of} for what in ("seconds", "hits"))
        read = {name: middle(name, "read_bytes") / 1e6 for name in of}
        more = winner(hits[OURS], hits[THEIRS], least=False)
        lines.append(
            f"| {share:.1%} | {1000 * took[OURS]:.1f} | {1000 * took[THEIRS]:.1f} | {took[THEIRS] / took[OURS]:.2f} | "
            f"{hits[OURS]:.0%} | {hits[THEIRS]:.0%} | {read[OURS]:.1f} | {read[THEIRS]:.1f} | {middle(THEIRS, 'cached'):.0%} | "
            f"{middle(OURS, 'router_share'):.0%} | "
            f"{winner(took[OURS], took[THEIRS], least=True)} | {POLICIES.get(more, more)} | {middle(THEIRS, 'same'):.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print a table, and write each run as JSON where asked."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--scratch", type=Path)
    arguments.add_argument("--tokens", type=int, default=48)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--shares", default=",".join(map(str, SHARES)))
    arguments.add_argument("--sizes", type=json.loads, default={}, help="JSON: hidden, width, blocks, experts, choices")
    arguments.add_argument("--expert-cache", type=int, default=0, help="llama.cpp's moe_cache_size")
    arguments.add_argument("--output", type=Path)
    arguments.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.work:
        work(json.loads(options.work.read_text(encoding="utf-8")))
        return
    if options.scratch is None or options.tokens < 4:
        arguments.error("--scratch says where the model is made; at least 4 tokens are measured")
    options.sizes = Sizes(**options.sizes)
    runs: list[Row] = []
    with scratch_directory(options.scratch) as scratch:
        require_disk(scratch, 4 * 10**9, "the model, twice")
        make_model(scratch, options.sizes)
        os.sync()
        for number in range(options.rounds):
            for share in map(float, options.shares.split(",")):
                room = round(share * options.sizes.all_experts)
                ours = run(OURS, scratch, room, options)
                theirs = run(THEIRS, scratch, room, options, ours)
                runs += [{"round": number, "share": share, "name": OURS, **ours}]
                runs += [{"round": number, "share": share, "name": THEIRS, **theirs}]
            if options.output is not None:
                found = {"machine": machine_facts(options.scratch), "runs": runs}
                options.output.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(table(runs))


if __name__ == "__main__":
    main()
