"""What a generation needs: a model, the source of its weights, and the settings of its `generate`."""

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from headrace.ask.model_config import position_limit
from headrace.ask.place import RunPlace, runtime_here
from headrace.data.batches.open_data import open_tokenizer, tokenizer_for_data
from headrace.engine.open_model import Check, OpenModel, Purpose, open_model, open_run
from headrace.files.model_directory import GENERATION_CONFIG, has_tokenizer
from headrace.generate.passes.sources import GenerationSource, RunSource, ShardSource
from headrace.generate.plan.block_tables import without_embedding, without_tables
from headrace.machine.here import this_machine
from headrace.machine.protocol import Machine
from headrace.model import Chain, WeightMap
from headrace.model.adapters.beside_reading import read_beside
from headrace.model.blocks.beside import StoredBeside
from headrace.model.seats.generation_check import check_generation, ready_to_generate
from headrace.model.seats.generation_keys import SettingError, check_file, resolved, try_generation_settings
from headrace.store.model_here import Kind, ModelHere, directory_at, lone_configuration
from headrace.terms.errors import ConfigError, DataError, ModelError, in_one_line, shortened
from headrace.terms.events import Event, Sink
from headrace.terms.json_text import parse_json
from headrace.terms.options.budget import Budget

# New tokens of an answer where neither the model nor the user says how many.
_NEW_TOKENS = 512


@dataclass
class GenerationModel:
    """A model that is ready to generate. `source` has its weights; `here` says where its files are.

    `generation_config` is what these say, or transformers' own.
    """

    here: ModelHere
    chain: Chain
    source: GenerationSource
    machine: Machine
    generation_config: Any
    notes: tuple[str, ...] = ()
    closers: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _tried: str = ""

    @classmethod
    def of_directory(
        cls,
        place: Path | ModelHere,
        budget: Budget,
        compute_dtype: str | None,
        sink: Sink | None,
        check: Check = check_generation,
        *,
        adapters: Callable[[Chain, WeightMap], StoredBeside] | None = None,
        kept: tuple[str, ...] | None = None,
    ) -> "GenerationModel":
        """Open what is in a directory, whose weights stay where they are. `check` tries its architecture; `adapters` gives what
        is computed beside its blocks, in the place of an adapter there. Of generation_config.json only the keys `kept` count,
        or all.

        Raises:
            ModelError: it cannot be read, its architecture cannot generate block by block, or adapters belong to another model.
        """
        here = place if isinstance(place, ModelHere) else directory_at(place)
        if adapters is None and here.adapter is not None:
            adapters = partial(read_beside, here.adapter)
        opened = open_to_generate(here.directory, budget, compute_dtype, check)
        chain, weights, machine = opened.chain, opened.weights, opened.machine
        with contextlib.ExitStack() as closers:
            stored = adapters(chain, weights) if adapters is not None else None
            if stored is not None:
                closers.enter_context(chain.adapted(stored.adapters))
            hardware = RunPlace.here(machine, runtime_here(), torch.get_num_threads())
            without_tables(chain, weights, hardware, budget)
            notes = without_embedding(chain, weights, hardware, budget)
            source = ShardSource(chain, weights, sink or _silent, on_cpu=not machine.separate_device, adapters=stored)
            found = cls.of(here, chain, source, machine, (*here.notes, *opened.checkpoint.notes, *source.notes, *notes), kept)
            found.closers = closers.pop_all()
        return found

    @classmethod
    def of_store(
        cls,
        place: Path | ModelHere,
        budget: Budget,
        compute_dtype: str | None,
        sink: Sink | None,
        check: Check = check_generation,
    ) -> "GenerationModel":
        """Open the last commit of the run at `place`; its store is only read. `check` tries the architecture.

        Raises:
            RunDirectoryError: the run is in progress, has no commit, or was begun with seams that no option names.
            ModelError: the model with which it began is gone.
            ConfigError: the run computes in another dtype than is asked for.
        """
        if isinstance(place, Path):  # a program's run, without options
            place = ModelHere(directory=place, kind=Kind.RUN, tokenizer=place, generation_config=place)
        run = open_run(place.directory, compute_dtype, sink or _silent)
        try:
            base = run.directory
            notes = lone_configuration(base)
            here = replace(place, directory=base, tokenizer=base, generation_config=base, notes=notes)
            if run.adapters is not None:
                with run.store:
                    dtype = run.options.compute_dtype
                    found = cls.of_directory(here, budget, dtype, sink, check, adapters=run.adapters)
                    found.notes += (f"the run is unfinished: adapters are those after step {run.num_steps}",)
                    return found
            options = run.options
            leave_out = options.leave_out_blocks
            opened = open_to_generate(run.directory, budget, options.compute_dtype, check, leave_out_blocks=leave_out)
            source = RunSource(run.store, run.maker(opened))
            notes = (
                *notes,
                f"the run is unfinished: weights are those after step {run.num_steps}",
            )
            return cls.of(here, opened.chain, source, opened.machine, notes)
        except BaseException:
            run.store.close()
            raise

    @classmethod
    def of(
        cls,
        here: ModelHere,
        chain: Chain,
        source: GenerationSource,
        machine: Machine,
        notes: tuple[str, ...],
        kept: tuple[str, ...] | None = None,
    ) -> "GenerationModel":
        """Return the model of a chain, laid out like `source`."""
        chain.lay_out(source.layouts)
        config = read_generation_config(here.generation_config, chain.model, kept)
        # Settings of a call are whole: transformers puts nothing into them.
        chain.model.generation_config = GenerationConfig()
        return cls(here, chain, source, machine, config, notes)

    @property
    def directory(self) -> Path:
        """The directory with the model's configuration."""
        return self.here.directory

    def tokenizer(self, *, for_data: bool = False) -> Any:
        """Return the tokenizer: the adapter's before the model's, with the chat template of the adapter or run before theirs.

        With `for_data`, something that takes token ids alone where there is none.

        Raises:
            ModelError: there is none, it cannot be read, or the model has no embedding for a token that an adapter's brings.
        """
        here = self.here
        found = (tokenizer_for_data if for_data else open_tokenizer)(here.tokenizer, here.template)
        if here.tokenizer == here.directory:
            return found
        own = open_tokenizer(here.directory) if has_tokenizer(here.directory) else None
        known = {} if own is None else own.get_vocab()
        vocabulary, padding = self.chain.vocabulary, found.pad_token_id  # nothing computes with padding
        words = {token: word for word, token in found.get_vocab().items() if token >= vocabulary and token != padding}
        new = sorted(token for token, word in words.items() if known.get(word) != token)
        if new:
            raise ModelError(
                f"{here.tokenizer}: its tokenizer has token {new[0]} ({shortened(repr(words[new[0]]), 40)}), and "
                f"{here.directory} has embeddings for 0 to {vocabulary - 1} only; the adapter is of a larger model: give that"
            )
        if found.chat_template is None and own is not None:
            found.chat_template = own.chat_template
        return found

    def settings(self, longest: int, config: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `generate` for prompts of up to `longest` tokens: a whole configuration, and the others.

        Raises:
            ConfigError: a setting is refused, a token that ends texts is not the model's, or it has too few positions.
        """
        own, rest = self.checked(config, changes)
        if own.max_new_tokens is None:
            limit = position_limit(self.chain.config)
            own.max_new_tokens = min(_NEW_TOKENS, limit - longest) if limit else _NEW_TOKENS
            if own.max_length is not None:
                own.max_new_tokens = own.max_length - longest
                if own.max_new_tokens < 1:
                    raise ConfigError(
                        f"max_length: it is {own.max_length}, the prompt has {longest} tokens; give more, or max_new_tokens"
                    )
        own.max_length = None
        self.check_positions(longest, own.max_new_tokens)
        return {"generation_config": own, **rest}

    def checked(self, config: Any, changes: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return a whole configuration and the other arguments of `generate`, whose values have been tried together.

        Raises:
            ConfigError: a setting is refused, or a token that ends texts is not the model's.
        """
        try:
            own, rest = resolved(self.generation_config, config, changes)
            self._check_ends(own)
            if own.pad_token_id is None or not 0 <= own.pad_token_id < self.chain.vocabulary:
                own.pad_token_id = min(end_tokens(own), default=0)  # no answer shows it
            key = repr((sorted(vars(own).items()), sorted((name, id(value)) for name, value in rest.items())))
            if key != self._tried:
                try_generation_settings(self.chain.model, own, rest, self.chain.vocabulary)
                self._tried = key
        except SettingError as error:
            if error.key in changes or (config is not None and getattr(config, error.key, None) is not None):
                raise ConfigError(f"generation: {error}") from error
            raise ConfigError(f"{self.here.generation_config / GENERATION_CONFIG}: {error}") from error
        return own, rest

    def check_tokens(self, tokens: Sequence[int], name: str = "the prompt") -> None:
        """Refuse a prompt, called `name`, that the model cannot read.

        Raises:
            DataError: it has no tokens, or one that the model has no embedding for.
        """
        if not tokens:
            raise DataError(f"{name} is empty: it has no tokens; give a text")
        vocabulary = self.chain.vocabulary
        wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise DataError(
                f"{name} has token {wrong}, but the model's embedding has {vocabulary} tokens; the tokenizer is another "
                "model's, or has tokens added that the embedding lacks"
            )

    def _check_ends(self, config: Any) -> None:
        vocabulary = self.chain.vocabulary
        for token in sorted(end_tokens(config)):
            if not 0 <= token < vocabulary:
                raise SettingError(
                    "eos_token_id",
                    f"{token} is no token of the model, which has {vocabulary}; correct it, or name the token that ends a text",
                )

    def check_positions(self, prompt_length: int, new_tokens: int) -> None:
        """Refuse more tokens than the model has positions.

        Raises:
            ConfigError: there are fewer positions.
        """
        limit = position_limit(self.chain.config)
        if limit and prompt_length + max(1, new_tokens) > limit:
            raise ConfigError(
                f"prompt: {prompt_length} tokens and {max(1, new_tokens)} new ones are more than the {limit} positions of "
                f"the model. Shorten the prompt, or give --max-new-tokens {max(0, limit - prompt_length)}"
                if prompt_length < limit
                else f"prompt: {prompt_length} tokens are as many as the model has positions ({limit}), or more; shorten it"
            )

    def close(self) -> None:
        """Close the weights."""
        self.source.close()
        self.closers.close()


def open_to_generate(
    directory: Path, budget: Budget, compute_dtype: str | None, check: Check, *, leave_out_blocks: bool = False
) -> OpenModel:
    """Return the model of a directory, ready to generate. `check` tries the architecture of a configuration.

    Raises:
        ModelError: it cannot be read, or its architecture cannot generate block by block.
    """
    purpose = Purpose(compute_dtype=compute_dtype, check=check, leave_out_blocks=leave_out_blocks)
    opened = open_model(directory, this_machine(budget.device_bytes), purpose)
    ready_to_generate(opened.chain.model)
    return opened


def read_generation_config(directory: Path, model: Any, kept: tuple[str, ...] | None = None) -> Any:
    """Return the generation configuration in a model directory, or the one that transformers derives from the model's own. With
    `kept`, these keys are in it, and the others are as if nobody had written them.

    Raises:
        ModelError: the file exists, and cannot be read.
    """
    path = directory / GENERATION_CONFIG
    if not path.exists():
        found = copy.deepcopy(model.generation_config)
        if kept is not None:
            return GenerationConfig(**{name: getattr(found, name, None) for name in kept})
        for name in ("output_attentions", "output_hidden_states", "return_dict_in_generate"):
            setattr(found, name, None)  # config.json asks training for these
        return found
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ModelError(f"{path}: expected an object, found {type(values).__name__}")
        if kept is not None:
            values = {name: values[name] for name in kept if name in values}
        check_file(values)
        return (
            GenerationConfig.from_pretrained(directory, local_files_only=True) if kept is None else GenerationConfig(**values)
        )
    except ConfigError as error:
        raise ModelError(f"{path}: {error}") from error
    except ModelError:
        raise
    except Exception as error:  # whatever JSON and transformers raise for what a file may hold
        raise ModelError(f"{path}: transformers does not accept it: {in_one_line(error)}") from error


def end_tokens(config: Any) -> frozenset[int]:
    """Return the tokens that end a text under a generation configuration."""
    ends = config.eos_token_id
    if isinstance(ends, torch.Tensor):
        ends = ends.tolist()
    return frozenset() if ends is None else frozenset(ends) if isinstance(ends, list | tuple) else frozenset({int(ends)})


def _silent(event: Event) -> None:
    """The sink of a model that was given none."""
