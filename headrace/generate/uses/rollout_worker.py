"""A process that answers prompts with weights that another process trains: `python -m headrace.generate.uses.rollout_worker`.

It reads a request as a line of JSON and writes a line with the answers' tokens, or an `error`. It ends with its parent. So the
memory of both is apart, and on a GPU each has a limit of its own.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.generate.passes.generator import Generator
from headrace.generate.passes.opened import GenerationModel
from headrace.store.model_here import directory_at
from headrace.terms.errors import InputError, StepFailed
from headrace.terms.options.generate_options import GenerateOptions

_PR_SET_PDEATHSIG = 1
# All that the model's own generation_config.json says of rollouts: which token is drawn is decided by the weights alone.
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")
DRAWING = {"do_sample": True, "top_k": 0}  # without 0, transformers takes 50; all else cuts nothing by itself


def opened(adapter: str | Path | None) -> Callable[..., GenerationModel]:
    """Return what opens the model of rollouts, with an adapter beside it if there is one."""

    def found(place: Path, *given: Any) -> GenerationModel:
        here = directory_at(place, None if adapter is None else Path(adapter))
        return GenerationModel.of_directory(here, *given, kept=_KEPT)

    return found


def new_tokens_of(request: Mapping[str, Any]) -> list[list[int]]:
    """Return the new tokens of each prompt, in their order, `end` tokens included.

    Raises:
        InputError, StepFailed: as a generator does.
    """
    options = GenerateOptions(**request["options"])
    found: dict[int, list[int]] = {}
    with Generator.open(Path(request["model"]), options=options, opened=opened(options.adapter)) as generator:
        settings = DRAWING | {"max_new_tokens": request["max_new_tokens"]}
        for index, tokens in generator.generate(request["prompts"], seed=request["seed"], **settings):
            found[index] = list(tokens)
    return [found[index] for index in range(len(request["prompts"]))]


def answer_requests() -> None:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which then ends this process
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints says it to people
    for line in sys.stdin:
        try:
            reply: dict[str, Any] = {"tokens": new_tokens_of(json.loads(line))}
        except (InputError, StepFailed) as error:
            reply = {"error": str(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    answer_requests()
