"""How fast do experts come when only some fit in memory: here, and in llama.cpp, which maps its file?

    PYTHONPATH=DIR python bench/residency.py --scratch DISK [--tokens 48] [--rounds 3] [--output RESULTS.json]

where `pip install --no-deps --target DIR xllamacpp` has put a built llama.cpp into DIR. A random mixture of 64 experts in each
of eight blocks, in bfloat16, answers one row token by token; llama.cpp is led along our tokens, so that it computes the same. It
reads a GGUF file of the same weights. All weights but experts stay in memory; of the experts 100, 50, 25 or 12.5 % do.

* Headrace keeps the experts that most tokens were sent to (`flow/expert_cache.py`). The rest is read past the page cache.
* llama.cpp has what the page cache holds. A page cache that holds so much is made here: before each token the experts that were
  used longest ago are dropped from it. So it is exact for whole experts, where the kernel's would guess at pages; and it may
  hold a token's experts too many while that token runs. Which experts a token uses is known from our run. What is in the page
  cache is measured, too ("cached").

Measured are the tokens after the first half, when both caches are full. Hits there are those of that cache on our choices of
experts. llama.cpp's own cache of experts (`moe_cache_size`) lies on a GPU. `--expert-cache` sets it all the same, to see whether
it does anything here.
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
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from launch import environment, machine_facts, require_disk, scratch_directory

MIB = 2**20
SHARES = (1.0, 0.5, 0.25, 0.125)
PROMPT, END = tuple(range(10, 26)), 0
OURS, THEIRS = "headrace", "llama.cpp"
POLICIES = {OURS: "those most wanted", THEIRS: "those last used"}
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Of the mixture."""

    hidden: int = 512
    width: int = 512
    blocks: int = 8
    experts: int = 64
    choices: int = 4

    @property
    def all_experts(self) -> int:
        """Experts of all blocks."""
        return self.blocks * self.experts


def make_model(directory: Path, sizes: Sizes) -> None:
    """Write the mixture to `directory`, with a tokenizer and with `model.gguf`, the same weights for llama.cpp."""
    import torch
    from experts import write_tokenizer
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.width,
        moe_intermediate_size=sizes.width,
        num_hidden_layers=sizes.blocks,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.choices,
        norm_topk_prob=True,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=sizes.hidden // 8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    write_gguf(model, directory, sizes)


def write_gguf(model: Any, directory: Path, sizes: Sizes) -> None:
    """Write `model`, a Qwen3-MoE, to `model.gguf`: matrices in bfloat16, norms and routers in float32."""
    import gguf
    import torch

    from headrace.model.gguf_words import WordsOf

    config, writer = model.config, gguf.GGUFWriter(directory / "model.gguf", "qwen3moe")
    writer.add_block_count(sizes.blocks)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(sizes.hidden)
    writer.add_feed_forward_length(sizes.width)
    writer.add_expert_feed_forward_length(sizes.width)
    writer.add_expert_count(sizes.experts)
    writer.add_expert_used_count(sizes.choices)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    WordsOf(directory, config.vocab_size).add_to(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, sizes.blocks)

    def add(name: str, tensor: Any) -> None:
        known = names.get_name(name, try_suffixes=(".weight",))
        assert known is not None, name
        if tensor.dim() == 1 or known.endswith("ffn_gate_inp.weight"):
            writer.add_tensor(known, tensor.float().numpy())
        else:
            bits = tensor.contiguous().view(torch.uint16).numpy().view("uint8")
            writer.add_tensor(known, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)

    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for part, piece in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True):
                add(f"{stem}{part}.weight", piece)
        else:
            add(name if name.endswith(".weight") else f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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

    def drop_all(self) -> None:
        """Drop the whole file: what comes again comes in pages, where writing has left folios that only go as a whole."""
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def drop_all_but(self, held: Iterable[tuple[int, int]]) -> None:
        """Drop experts that are not `held`. What this process has mapped of them is unmapped: mapped pages would stay."""
        kept = set(held)
        self._unmap()
        for expert, ranges in self.ranges.items():
            for start, stop in ranges if expert not in kept else ():
                os.posix_fadvise(self._descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)

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
    from headrace.generate.generator import Generator
    from headrace.generate.micro_batches import MicroBatch
    from headrace.plan.expert_plan import ExpertPlan
    from headrace.terms.events import GenerationPass

    passes: list[GenerationPass] = []
    used: list[list[tuple[int, int]]] = []  # by each pass: blocks and experts
    before: Counter[tuple[int, int]] = Counter()

    def note(event: Any) -> None:
        if isinstance(event, GenerationPass):
            passes.append(event)
            experts = generator._pass.experts  # nothing else tells which experts a pass has used
            assert experts is not None
            used.append(sorted((unit - 1, expert) for unit, expert in experts.cache.tokens - before))
            before.update(experts.cache.tokens - before)

    with Generator.open(directory, Budget(host="16GiB"), compute_dtype="bfloat16", sink=note, copy_weights=False) as generator:
        apart = generator.model.source.by_experts
        assert apart is not None
        how = ExpertPlan(figures=apart.expert_figures, choices=sizes.choices, in_round=1, cached=room)
        plan = replace(generator.plan_only(1, len(PROMPT), tokens), units=apart.figures, experts=how)
        generator.use(replace(plan, host_slots=plan.num_blocks, device_slots=1, prefetch=0))
        asked = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        settings = generator.model.settings(len(PROMPT), None, asked)
        (done,) = generator.run([MicroBatch(0, (PROMPT,), 0, settings)])
    later = [each for each in passes if not each.entering][tokens // 2 :]
    return {
        "tokens": [int(token) for token in done.tokens[0]],
        "used": used,
        "seconds": mean(each.seconds for each in later),
        "hits": sum(each.found for each in later) / sum(each.wanted for each in later),
        "read_bytes": mean(each.bytes_read for each in later),
        "router_share": sum(each.router_seconds for each in later) / sum(each.seconds for each in later),
    }


def their_run(directory: Path, sizes: Sizes, room: int, found: Row, cache: int) -> Row:
    """Lead llama.cpp along our run, `found`, with a page cache of `room` experts; return its choices and what the later half took."""
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
    mapped.drop_all()
    server = xllamacpp.Server(parameters)
    seconds, hits, read, cached, chosen = [], [], [], [], []
    for number, used in enumerate(found["used"]):
        if room < sizes.all_experts:
            mapped.drop_all_but(last.held)
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
        "same": mean(one == other for one, other in zip(chosen, answer, strict=True)),
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
        "MB read a token here | there | cached there | faster | more hits | same choices |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
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
