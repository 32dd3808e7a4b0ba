"""Rows that the model writes itself, for losses of rewards: completions of a step's prompts, sampled from the newest weights.

The engine writes its weights as a model directory. Another process generates from it (`generate.uses.rollout_worker`), with
as much memory as the engine has. The user's function rewards the texts.
Invariant: a step's rows follow from its weights, prompts and seed, so a run that was killed and resumed takes the same steps.
"""

import json
import math
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from headrace.data import Batch
from headrace.data.batches.open_data import open_tokenizer
from headrace.data.batches.prompt_batches import Prompt, PromptBatches
from headrace.files.model_directory import is_adapter_directory
from headrace.losses.grpo import Grpo
from headrace.report.completions import CompletionsFile
from headrace.report.metrics import FIGURES
from headrace.runs.protocols import RunningEngine
from headrace.runs.rewards import Rewards
from headrace.terms.errors import StepFailed, shortened
from headrace.terms.options.run_options import RunOptions

FOLDER = "headrace-rollouts"
_IGNORED = -100
_LOOK_SECONDS = 0.2
# What reward functions may not log: it is there already.
RESERVED = (*FIGURES, *Grpo.FIGURES, "prompt", "completion")
_SEED_BITS, _STEP_BITS = 20, 16  # micro-batches of a step draw with seeds of their own


@dataclass(frozen=True)
class Beside:
    """What of a run is neither model nor data: the file of `completions`, the fields of transformers' `TrainerState` now, and
    how to `say` a note.
    """

    completions: CompletionsFile
    state: Callable[[], dict[str, Any]]
    say: Callable[[str], None]


class Rollouts:
    """Makes the tensors of a run's steps. `figures` are what reward functions logged for the newest of them."""

    def __init__(
        self, config: RunOptions, stream: PromptBatches, loss: Grpo, engine: RunningEngine, folder: Path, beside: Beside
    ) -> None:
        self._config, self._stream, self._loss, self._engine, self._folder = config, stream, loss, engine, folder
        self._tokenizer = open_tokenizer(config.model, config.chat_template)
        self._rewards = rewards_of(config, stream)
        self._beside, self._has_said = beside, False
        self.figures: Mapping[str, float] = {}
        self._worker: subprocess.Popen[str] | None = None

    def rows(self, batch: Batch, heed: Callable[[], bool]) -> dict[str, torch.Tensor] | None:
        """Return the tensors of a batch of prompts: `num_generations` completions of each, with their rewards; None if the run
        is to stop, as `heed` says.

        Raises:
            StepFailed: nothing could be generated; the last committed step is untouched.
            DataError: see `Rewards.judged`.
        """
        assert batch.samples is not None, "numbers of prompts"
        prompts = [self._stream.prompts[number] for number in batch.samples.tolist() for _ in range(self._loss.num_generations)]
        if (tokens := self._generated(prompts, heed)) is None:
            return None
        rewards = self._judged(prompts, tokens)
        length = max(len(prompt.ids) + len(new) for prompt, new in zip(prompts, tokens, strict=True))
        ids = torch.zeros((len(prompts), length), dtype=torch.int64)
        labels, mask = torch.full_like(ids, _IGNORED), torch.zeros_like(ids)
        for row, (prompt, new) in enumerate(zip(prompts, tokens, strict=True)):
            start, stop = len(prompt.ids), len(prompt.ids) + len(new)
            ids[row, :stop] = torch.tensor((*prompt.ids, *new), dtype=torch.int64)
            labels[row, start:stop], mask[row, :stop] = ids[row, start:stop], 1
        return {"input_ids": ids, "labels": labels, "attention_mask": mask, "rewards": rewards}

    def close(self) -> None:
        """End the process that generates and the loop of reward functions, and remove the weights that it read."""
        self._rewards.close()
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait()
            self._worker = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _generated(self, prompts: Sequence[Prompt], heed: Callable[[], bool]) -> list[list[int]] | None:
        self._engine.flush()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._engine.begin_saving(self._folder).wait()
        beside = is_adapter_directory(self._folder)
        step, seed = self._engine.step_index, self._config.seed % (1 << _SEED_BITS)
        options = {
            "rows": self._loss.num_generations,
            "host_memory": self._config.host_memory,
            "device_memory": self._config.device_memory,
            "compute_dtype": self._config.compute_dtype,
            "adapter": str(self._folder) if beside else None,
        }
        request = {
            "model": str(self._config.model if beside else self._folder),
            "options": options,
            "prompts": [list(prompt.ids) for prompt in prompts],
            "max_new_tokens": self._loss.max_completion_length,
            "seed": ((seed << 24) + step) << _STEP_BITS,
        }
        reply = self._asked(request, heed)
        if reply is None:
            return None
        if error := reply.get("error"):
            raise StepFailed(f"rollouts: {error}")
        return list(reply["tokens"])

    def _asked(self, request: Mapping[str, Any], heed: Callable[[], bool]) -> dict[str, Any] | None:
        if self._worker is None:
            command = [sys.executable, "-m", "headrace.generate.uses.rollout_worker"]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._worker = subprocess.Popen(command, start_new_session=True, **pipes)
        worker = self._worker
        assert worker.stdin is not None, "a pipe"
        assert worker.stdout is not None, "and another one"
        try:
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
            if not _comes(worker.stdout, heed):
                return None
            line = worker.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._worker = None
            raise StepFailed(f"rollouts: the process that generates ended with exit code {worker.wait()}")
        return dict(json.loads(line))

    def _judged(self, prompts: Sequence[Prompt], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        from transformers import TrainerState  # late: the import is slow

        texts = [str(self._tokenizer.decode(list(new), skip_special_tokens=True)) for new in tokens]
        answers: list[Any] = [
            text if isinstance(prompt.text, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        asked = [prompt.text for prompt in prompts]
        given = {"prompts": asked, "completions": answers, "completion_ids": [list(new) for new in tokens]}
        columns = {name: [prompt.columns[name] for prompt in prompts] for name in self._stream.columns}
        step = self._engine.step_index
        trainer = TrainerState(**{**self._beside.state(), "global_step": step})
        judged = self._rewards.judged({**given, "trainer_state": trainer}, columns)
        unjudged = [number for number, each in enumerate(judged.rewards) if math.isnan(each)]
        if unjudged:
            self._say_unjudged(len(unjudged), asked[unjudged[0]])
        self.figures = judged.metrics
        if judged.extra:
            said = [None if math.isnan(each) else each for each in judged.rewards]
            written = {"prompt": asked, "completion": answers, "reward": said, **judged.extra}
            self._beside.completions.add(step + 1, written)
        return torch.tensor(judged.rewards, dtype=torch.float32)

    def _say_unjudged(self, count: int, first: Any) -> None:
        if not self._has_said:
            self._has_said = True
            self._beside.say(
                f"note: reward: all functions returned None for {count} completions, the first of "
                f"{shortened(str(first), 60)!r}: they count in no mean, and nothing is learned from them; said once"
            )


def rewards_of(config: RunOptions, stream: PromptBatches) -> Rewards:
    """Return the reward functions of a run, for the columns of its prompts.

    Raises:
        ConfigError: see `Rewards`.
    """
    return Rewards(config.reward, stream.columns, RESERVED)


def _comes(stream: IO[str], heed: Callable[[], bool]) -> bool:
    """Return True once there is a line to read, False if the run is to stop before that."""
    while not select.select([stream], [], [], _LOOK_SECONDS)[0]:
        if heed():
            return False
    return True
