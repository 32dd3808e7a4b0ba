"""A model of any size as a language model of lm-eval: rows are scored, and texts continued, in passes over its weights.

Invariant: the model is asked what lm-eval's own `hf` model asks of transformers: the same tokens, cut in the same way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    _add_special_kwargs,
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from headrace.generate.passes.copying import Copying
from headrace.generate.passes.opened import GenerationModel
from headrace.generate.passes.whose_weights import open_generator, open_whose_model
from headrace.generate.uses.evaluator import Continuations, Evaluator
from headrace.model import IGNORED, self_check
from headrace.terms.closing import Closing
from headrace.terms.errors import ConfigError
from headrace.terms.events import Sink
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.generate_options import GenerateOptions

# Tokens of a row where neither the model nor its tokenizer has a limit, and of an answer where a task has none: lm-eval's own.
_MAX_LENGTH, _MAX_ANSWER = 2048, 256

# What lm-eval scores: what was asked, which is None for parts of a text, and the tokens before and to score.
_Request = tuple[Any, list[int], list[int]]


@register_model("headrace")
class HeadraceLM(TemplateLM, Closing):  # type: ignore[misc]
    """`pretrained` is a model directory or a run; `options` are those of `headrace generate` that say where and how to compute.

    Attributes:
        bytes_read: bytes of weights read so far.
        max_length: the most tokens of a row; what is longer loses its beginning.
    """

    def __init__(
        self,
        pretrained: str | Path,
        *,
        max_length: int | None = None,
        sink: Sink = lambda event: None,
        machine: str | Ceilings | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        ignored = ("batch_size", "max_batch_size", "device")  # lm-eval gives them to every model; rows and memory are planned
        own = {key: value for key, value in options.items() if key not in ignored}
        self._options = replace(GenerateOptions.of(own), machine=machine)
        self._place, self._sink, self.bytes_read = Path(pretrained), sink, 0
        self._model: GenerationModel | None = self._opened()
        self.tokenizer = self._model.tokenizer()
        config = self._model.chain.model.config.get_text_config()
        known = (getattr(config, "max_position_embeddings", None), getattr(self.tokenizer, "model_max_length", None))
        limit = next((each for each in known if isinstance(each, int) and 0 < each < 1 << 32), None)
        self.max_length = min(max_length or limit or _MAX_LENGTH, limit or max_length or _MAX_LENGTH)

    # -- what lm-eval asks of a model's tokens -----------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        begins = self.tokenizer.bos_token_id
        return self.eot_token_id if begins is None else int(begins)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, for caches of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text, which begins once however often its beginning is said."""
        special = _add_special_kwargs(add_special_tokens, None)
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            special["add_special_tokens"] = False
        return list(self.tokenizer.encode(string, **special))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as the text that the model was trained on."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    # -- scoring -----------------------------------------------------------------------------------------------------------

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in windows of `max_length` tokens."""
        windows, counts = list[_Request](), list[int]()
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            cut = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            found = [(None, *make_disjoint_window(each)) for each in cut]
            windows += found
            counts.append(len(found))
        scores = iter(self._loglikelihood_tokens(windows))
        totals = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(self, requests: list[_Request], **kwargs: Any) -> list[tuple[float, bool]]:
        """Return for each request the log-probability of its continuation, and whether greedy decoding would give it."""
        scores = dict[int, tuple[float, bool]]()
        for _, _, after in requests:
            if not 0 < len(after) <= self.max_length:
                raise ConfigError(f"tasks: {len(after)} tokens are to be scored at once, expected 1 to {self.max_length}")
        rows = [(before + after)[-(self.max_length + 1) :] for _, before, after in requests]
        # Alike ones score once: the longest come first, so that the plan is that of the first.
        order = sorted(range(len(rows)), key=lambda index: (-len(rows[index]), rows[index], len(requests[index][2])))
        unlike = [list(same) for _, same in groupby(order, key=lambda index: (rows[index], len(requests[index][2])))]
        if unlike:
            with self._evaluator(len(rows[order[0]]) - 1) as evaluator:
                plan = evaluator.prepare(len(unlike))
                for row in rows:
                    evaluator.model.check_tokens(row)
                firsts = [(rows[same[0]], len(requests[same[0]][2])) for same in unlike]
                parts = [firsts[start : start + plan.rows] for start in range(0, len(firsts), plan.rows)]
                alike = evaluator.model.chain.padded_together
                parts = [[part[each] for each in own] for part in parts for own in alike([len(row) - 1 for row, _ in part])]
                places = iter(unlike)  # the longest come first, so groups keep their order
                for _, seat in evaluator.continuations(map(_together, parts)):
                    for score, same in zip(seat.scores, places, strict=False):
                        scores |= dict.fromkeys(same, score)
                self.bytes_read += evaluator.bytes_read
        for index, (asked, _, _) in enumerate(requests):
            if asked is not None:
                self.cache_hook.add_partial("loglikelihood", asked, scores[index])
        return [scores[index] for index in range(len(requests))]

    # -- generating --------------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each text, up to what stops it."""
        answers = dict[int, str]()
        groups = dict[str, list[int]]()
        for index, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(index)
        with open_generator(self._place, self._options, self._sink) as generator:
            for members in groups.values():
                asked = dict(normalize_gen_kwargs(requests[members[0]].args[1], _MAX_ANSWER))
                texts = [requests[index].args[0] for index in members]
                for member, answer in zip(members, self._continued(generator, texts, asked), strict=True):
                    answers[member] = answer
            self.bytes_read += generator.model.source.bytes_read
        for index, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, answers[index])
        return [answers[index] for index in range(len(requests))]

    def _continued(self, generator: Any, texts: Sequence[str], asked: dict[str, Any]) -> Iterator[str]:
        stops = handle_stop_sequences(asked.pop("until", None), eos=self.tokenizer.decode(self.eot_token_id))
        tokens = asked.pop("max_gen_toks")
        if tokens >= self.max_length:
            raise ConfigError(f"tasks: a task asks for answers of {tokens} tokens; the model has rows of {self.max_length}")
        if not asked.get("do_sample"):
            asked.pop("temperature", None)
        prompts = [self.tok_encode(text)[-(self.max_length - tokens) :] for text in texts]
        more = {"max_new_tokens": tokens, "stop_strings": stops, "tokenizer": self.tokenizer, **asked}
        found = dict(generator.generate(prompts, seed=self._options.seed, **more))
        for index in range(len(texts)):
            text = self.tokenizer.decode(found[index], skip_special_tokens=True)
            yield postprocess_generated_text(text, stop=stops, think_end_token=None)

    # -- the engine --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the model that waits."""
        if self._model is not None:
            self._model.close()
        self._model = None

    def _opened(self) -> GenerationModel:
        options = self._options
        adapter = None if options.adapter is None else Path(options.adapter)
        return open_whose_model(self._place, options.budget, options.compute_dtype, self._sink, self_check, adapter=adapter)

    def _evaluator(self, length: int) -> Evaluator:
        model, self._model = self._model or self._opened(), None
        copying = Copying(self._options.budget.ssd, self._options.copy_weights, self._sink)
        return Evaluator(model, self._options, length, sink=self._sink, copying=copying)


def _together(rows: Sequence[tuple[list[int], int]]) -> Continuations:
    """Return rows, each with how many of its last tokens are scored, as a micro-batch; what is filled up scores nothing."""
    longest = max(len(row) for row, _ in rows) - 1
    ids = torch.zeros((len(rows), longest), dtype=torch.int64)
    targets = torch.full_like(ids, IGNORED)
    for place, (row, count) in enumerate(rows):
        ids[place, : len(row) - 1] = torch.tensor(row[:-1])
        targets[place, len(row) - 1 - count : len(row) - 1] = torch.tensor(row[-count:])
    return Continuations(ids, targets)
