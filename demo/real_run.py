"""The whole path on a real model: ask it, plan, fine-tune it on Python's own documentation, kill -9, resume, ask it again.

What is claimed is checked: the demo ends with an error if a step is missing or there twice, if more memory was taken than was
allowed, or if the answers that the model was not shown have not become likelier.
"""

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import python_docs
from real_model import NAME, NoRealModel
from stage import Places, answer_of, fail, needed_mib, run_headrace, say, seconds_per_step, text_of, title

SEQUENCE_LENGTH = 256
TRAINING_SECONDS, LEAST_STEPS = 100.0, 15
# Where the least steps would take longer than the most seconds, they are smaller, down to one row.
MOST_TRAINING_SECONDS = 110.0
MOST_TOKENS, LEAST_TOKENS = 1024, SEQUENCE_LENGTH
MEASURE_SECONDS = 12
HOST_MEMORY_MIB = 1024
ROOM = 1.1  # over what is needed, where that is more
LEARNING_RATE = "1e-4"
HELD_OUT = 16  # samples whose loss is taken
NEW_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Asked:
    """What a model answered, and its loss on held-out docstrings in nats per token."""

    answer: str
    loss: float


class RealRun:
    """The steps of this demo, in the order of its methods."""

    def __init__(self, places: Places) -> None:
        self.model, self.data, self.trained, self.ssd = places.model, places.data, places.run, places.ssd
        self.unseen = places.directory / "held-out.jsonl"
        self.samples, held_out = python_docs.python_docs()
        self.asked, self.held_out = held_out[0], held_out[:HELD_OUT]
        self.host_memory = f"{HOST_MEMORY_MIB}MiB"
        self.tokens_per_step, self.steps = MOST_TOKENS, LEAST_STEPS

    def run(self) -> None:
        """Show all of it.

        Raises:
            NoRealModel: nothing was trained, because memory or disk space of this machine do not do.
        """
        before = self.ask_before()
        self.look_at_data()
        self.choose_steps()
        self.train_killed()
        self.check()
        self.ask_after(before)

    def ask_before(self) -> Asked:
        """Show what the model answers as it comes."""
        title(f"1  {NAME}, as it comes: what does it answer?")
        python_docs.write(self.unseen, self.held_out)
        asked = self.ask(self.model)
        say(f"question  {self.asked.question}")
        say(f"answer    {asked.answer}")
        say(
            f"loss      {asked.loss:.3f} a token on {len(self.held_out)} docstrings that training will not see, this among them"
        )
        return asked

    def look_at_data(self) -> None:
        """Write the samples and show one with its trained tokens marked. This also fills the cache of tokens."""
        title("2  What will it be trained on? What Python's library says of itself, as chats")
        python_docs.write(self.data, self.samples)
        run_headrace(
            "data", str(self.data), "--model", str(self.model), "--show", "1", "--sequence-length", str(SEQUENCE_LENGTH)
        )

    def choose_steps(self) -> None:
        """Take as many steps as are forecast to fit into the time, but no sample twice."""
        from headrace.process import machine_profile_path

        title(f"3  How many steps go into {TRAINING_SECONDS:.0f} s? Measure this machine, then plan")
        if not machine_profile_path().exists():
            run_headrace("bench", "machine", "--ssd", str(self.ssd), "--seconds", str(MEASURE_SECONDS))
        plan = self.forecast()
        # Half the tokens take half the time, or somewhat more.
        while LEAST_STEPS * plan["step_seconds"] * self.tokens_per_step / plan["tokens_per_step"] > MOST_TRAINING_SECONDS:
            if self.tokens_per_step == LEAST_TOKENS:
                break
            self.tokens_per_step //= 2
        if self.tokens_per_step < plan["tokens_per_step"]:
            plan = self.forecast()
        seconds = plan["step_seconds"]
        self.steps = max(LEAST_STEPS, min(int(TRAINING_SECONDS / seconds), plan["num_steps"]))
        say(f"so: {self.steps} steps of {self.tokens_per_step} tokens, {seconds:.1f} s each: {self.steps * seconds:.0f} s")

    def forecast(self) -> dict[str, Any]:
        """Return what `headrace plan` says of one pass over the data; with more memory, if it says that more is needed.

        Raises:
            NoRealModel: it does not fit for another reason.
        """
        command = ("plan", str(self.model), "--data", str(self.data), "--json")
        plan = answer_of(*command, *self.step_options())
        if not plan["fits"] and (needed := needed_mib(plan["reason"])) is not None and needed[0] == "host":
            self.host_memory = f"{needed[1] * ROOM:.0f}MiB"
            plan = answer_of(*command, *self.step_options())
        if not plan["fits"]:
            raise NoRealModel(plan["reason"])
        return plan

    def train_killed(self) -> None:
        """Train; kill the process in the middle of a step; resume."""
        last = self.steps // 2
        title(f"4  Fine-tune all parameters through the SSD, and kill -9 in the middle of step {last + 1}")

        def kill(line: str, process: "subprocess.Popen[str]") -> None:
            if re.match(rf"step +{last}/", line):
                time.sleep(seconds_per_step(self.trained) / 2)
                os.kill(process.pid, signal.SIGKILL)

        schedule = ("--learning-rate", LEARNING_RATE, "--lr-schedule", "cosine")
        command = ["train", str(self.model), str(self.data), "--output", str(self.trained), *self.step_options()]
        command += ["--max-steps", str(self.steps), *schedule]
        code = run_headrace(*command, watch=kill, expect=-signal.SIGKILL)
        say(f"killed (exit code {code}); now: resume")
        run_headrace("resume", str(self.trained))

    def check(self) -> None:
        """Check that each step is there once, and that memory was kept to."""
        records = [json.loads(line) for line in (self.trained / "metrics.jsonl").open(encoding="utf-8")]
        if [record["step"] for record in records] != list(range(1, self.steps + 1)):
            fail(f"expected steps 1 to {self.steps}, each once, found {[record['step'] for record in records]}")
        summary = json.loads((self.trained / "summary.json").read_text(encoding="utf-8"))
        memory = summary["planned_and_measured"]["host_peak_bytes"]
        if memory["measured"] > memory["planned"]:
            fail(f"{memory['measured']} bytes of host memory were taken, {memory['planned']} were planned")

    def ask_after(self, before: Asked) -> None:
        """Show what the model answers now, straight from the run."""
        title("5  Ask again, straight from the run")
        after = self.ask(self.trained)
        say(f"question  {self.asked.question}")
        say(f"before    {before.answer}")
        say(f"after     {after.answer}")
        say(f"Python    {self.asked.answer}")
        say(f"loss      {before.loss:.3f} -> {after.loss:.3f} a token on docstrings that training has not seen")
        if not after.loss < before.loss:
            fail("the loss did not fall as it should")

    def ask(self, place: Path) -> Asked:
        """Return what the model at `place` answers to the question, and its loss on the docstrings that are held out."""
        how = ("--host-memory", self.host_memory, "--compute-dtype", "float32")
        greedy = ("--temperature", "0", "--max-new-tokens", str(NEW_TOKENS))
        words = text_of("generate", str(place), "--prompt", self.asked.question, *greedy, *how)
        length = ("--sequence-length", str(SEQUENCE_LENGTH))
        found = answer_of("eval", str(place), "--data", str(self.unseen), *length, *how, "--json")
        return Asked(" ".join(words.split()), float(found["loss"]))

    def step_options(self) -> list[str]:
        """Return the options that plan and training have in common."""
        sizes = ("--tokens-per-step", str(self.tokens_per_step), "--sequence-length", str(SEQUENCE_LENGTH))
        return ["--ssd", str(self.ssd), "--host-memory", self.host_memory, *sizes]
