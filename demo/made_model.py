"""The whole path on a model made on the spot: plan, train through all three tiers, kill -9, resume, export, use.

Everything is made of a text that Python brings along; no network, no GPU. What is claimed is checked: the demo ends with an
error if the resumed run differs from the unbroken one in a single byte, or if the loss has not fallen.
"""

import codecs
import contextlib
import importlib
import io
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from stage import Places, fail, needed_mib, refused, run_headrace, say, seconds_per_step, title

STEPS, SEQUENCE_LENGTH, TOKENS_PER_STEP = 32, 128, 1024
KILL_AFTER_STEP = 15
# Above the least that the planner accepts. Host: memory of the process differs by so much from start to start. Device: blocks
# come whole and several sequences pass them at once; with the least, steps took 2.5 times as long on two cores.
SLACK_MIB = {"host": 6, "device": 9}
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"


class MadeModel:
    """The steps of this demo, in the order of its methods."""

    def __init__(self, places: Places) -> None:
        self.directory, self.ssd = places.directory, places.ssd
        self.model, self.data, self.killed = places.model, places.data, places.run
        self.unbroken, self.exported = self.directory / "unbroken", self.directory / "exported"

    def run(self) -> None:
        """Show all of it."""
        self.make_model_and_data()
        self.look_at_data()
        budgets = self.find_least_budgets()
        self.train_unbroken(budgets)
        self.train_killed(budgets)
        self.compare()
        self.use()

    def make_model_and_data(self) -> None:
        """Write what the run starts from."""
        title("1  A small Llama model with random weights, a tokenizer, and a text: the Zen of Python")
        passages = list(texts())
        self.data.write_text("".join(json.dumps({"text": passage}) + "\n" for passage in passages), encoding="utf-8")
        parameters = make_model(self.model, passages)
        size = sum(len(passage) for passage in passages)
        say(f"{parameters / 1e6:.1f} million parameters, {len(passages)} passages of {size / 1000:.0f} kB together")
        say(f"weights {parameters * 2 / 1e6:.0f} MB, with exact AdamW states {parameters * 12 / 1e6:.0f} MB")

    def look_at_data(self) -> None:
        """Show a sample with its trained tokens marked. This also fills the cache of tokens."""
        title("2  What will it be trained on?")
        length = ("--sequence-length", str(SEQUENCE_LENGTH))
        run_headrace("data", str(self.data), "--model", str(self.model), "--show", "1", *length)

    def find_least_budgets(self) -> dict[str, str]:
        """Let the planner refuse until it names budgets that it accepts: little more, so nothing can stay in memory."""
        title("3  How little memory will do? Ask for almost none, and be told")
        budgets = {"host": "1MiB", "device": "1MiB"}
        while "1MiB" in budgets.values():
            refusal = refused(*self.train_command(self.directory / "never", budgets))
            needed = needed_mib(refusal)
            if budgets == {"host": "1MiB", "device": "1MiB"}:
                say(refusal)
            if needed is None or budgets[needed[0]] != "1MiB":
                fail(f"expected to be told how much memory is needed, found: {refusal}")
            tier, mebibytes = needed
            budgets[tier] = f"{int(mebibytes) + 1 + SLACK_MIB[tier]}MiB"
        say(f"so: {budgets['device']} of device memory, {budgets['host']} of host memory (Python and PyTorch included)")
        return budgets

    def train_unbroken(self, budgets: dict[str, str]) -> None:
        """Train from the first step to the last."""
        title("4  Fine-tune: weights, activations and optimizer states all pass through the SSD tier")
        run_headrace(*self.train_command(self.unbroken, budgets))

    def train_killed(self, budgets: dict[str, str]) -> None:
        """Train with the same plan, which means the same bits; kill the process in the middle of a step; resume."""
        title(f"5  The same once more, but kill -9 in the middle of step {KILL_AFTER_STEP + 1}")

        def kill(line: str, process: subprocess.Popen[str]) -> None:
            if re.match(rf"step +{KILL_AFTER_STEP}/", line):
                time.sleep(seconds_per_step(self.unbroken) / 2)
                os.kill(process.pid, signal.SIGKILL)

        command = [*self.train_command(self.killed, budgets), "--plan", str(self.unbroken)]
        code = run_headrace(*command, watch=kill, expect=-signal.SIGKILL)
        say(f"killed (exit code {code}); now: resume")
        run_headrace("resume", str(self.killed))

    def compare(self) -> None:
        """Compare losses and weights of both runs, exactly."""
        title("6  Is the resumed run the unbroken run?")
        losses = [
            [json.loads(line)["loss"] for line in (run / "metrics.jsonl").open(encoding="utf-8")]
            for run in (self.unbroken, self.killed)
        ]
        say(
            f"losses   {'identical' if losses[0] == losses[1] else 'DIFFERENT'}: {len(losses[0])} steps, last {losses[0][-1]!r}"
        )
        names = sorted(path.name for path in (self.unbroken / "final").glob("*.safetensors"))
        same = bool(names) and all(
            (self.unbroken / "final" / name).read_bytes() == (self.killed / "final" / name).read_bytes() for name in names
        )
        say(f"weights  {'identical' if same else 'DIFFERENT'}, byte for byte: {', '.join(names)}")
        if losses[0] != losses[1] or not same:
            fail("the resumed run differs from the unbroken one")
        first, last = losses[0][0], losses[0][-1]
        say(f"loss     {first:.3f} -> {last:.3f}")
        if not last < 0.8 * first:
            fail("the loss did not fall as it should")

    def use(self) -> None:
        """Export, load without Headrace, generate."""
        title("7  Export, load with stock transformers, generate")
        run_headrace("export", str(self.killed), str(self.exported))
        prompt, continuation, loss = generate(self.exported, self.data)
        say(f"loaded by AutoModelForCausalLM; loss on the first passages {loss:.3f}")
        say(f"prompt   {prompt!r}")
        say(f"model    {continuation!r}")

    def train_command(self, run: Path, budgets: dict[str, str]) -> list[str]:
        """Return the command. No clipping: with it, gradients wait for the norm; without, updates start behind backward."""
        return [
            *("train", str(self.model), str(self.data), "--output", str(run), "--ssd", str(self.ssd)),
            *("--host-memory", budgets["host"], "--device-memory", budgets["device"]),
            *("--tokens-per-step", str(TOKENS_PER_STEP), "--sequence-length", str(SEQUENCE_LENGTH)),
            *(
                "--max-steps",
                str(STEPS),
                "--learning-rate",
                "1.5e-3",
                "--warmup-steps",
                "3",
                "--max-grad-norm",
                "0",
                "--seed",
                "7",
            ),
        ]


def texts() -> Iterator[str]:
    """Yield passages of four lines from the Zen of Python, which Python brings along: little enough to be learned."""
    with contextlib.redirect_stdout(io.StringIO()):  # the module prints the poem when it is imported first, and only then
        poem = importlib.import_module("this")
    lines = [line for line in codecs.decode(poem.s, "rot13").splitlines() if line]
    for start in range(len(lines) - 3):
        yield "\n".join(lines[start : start + 4])


def make_model(directory: Path, passages: list[str]) -> int:
    """Write a Llama model with random weights and a byte-level BPE tokenizer, and return its number of parameters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(passages, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def generate(model_directory: Path, data: Path) -> tuple[str, str, float]:
    """Return a prompt, the model's continuation, and its loss on the first passages, all by stock transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).eval()
    passages = [json.loads(line)["text"] for line in data.open(encoding="utf-8")][:16]
    with torch.no_grad():
        losses = []
        for passage in passages:
            ids = tokenizer(passage, return_tensors="pt").input_ids[:, :SEQUENCE_LENGTH]
            losses.append(model(input_ids=ids, labels=ids).loss.item())
        prompt = "Beautiful is better than"
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
    return prompt, tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True), sum(losses) / len(losses)
