"""Early refusals: missing places and impossible choices are refused before transformers is imported, which takes seconds.
Places are checked even before torch.

Invariant: nothing is refused here that would be accepted later, and the words are the same: all is looked at again.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from headrace.terms.errors import ModelError
from headrace.terms.options.data_source import DataSource
from headrace.terms.options.options import Options
from headrace.terms.options.plan_options import PlanOptions
from headrace.terms.options.run_options import RunOptions

_Config = TypeVar("_Config", bound=RunOptions)

_CHANGE = re.compile(r"^[A-Za-z_-]+=")


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the places among the words of a command, and its key=value words."""
    changes = [word for word in words if _CHANGE.match(word)]
    return [word for word in words if not _CHANGE.match(word)], changes


def look_at_words(words: Sequence[str]) -> None:
    """Look at MODEL DATA...; a YAML file's places are looked at once it is read.

    Raises:
        ModelError, DataError: a place does not exist, or is of another kind.
    """
    places, _ = split_words(words)
    if len(places) > 1:
        look_at_model(places[0], aloud=False)
        look_at_data(places[1:])


def is_gguf(model: str | Path) -> bool:
    """Return whether `model` is a file that calls itself GGUF."""
    return Path(model).suffix == ".gguf" and Path(model).is_file()


def model_here(model: str | Path) -> Path:
    """Return the directory of a model, or of a run; a model of the Hub is fetched if it is not there, a GGUF file is read.

    Raises:
        ModelError: it cannot be fetched, or read.
    """
    from headrace.files.hub import fetched_model, is_hub_name

    if is_gguf(model):
        from headrace.model.gguf.gguf_directory import gguf_directory  # late: it brings torch
        from headrace.process import cache_directory

        return gguf_directory(Path(model), cache_directory())
    if not is_hub_name(model):
        return Path(model)
    return fetched_model(str(model), lambda words: print(words, file=sys.stderr, flush=True))


def with_model_here(config: _Config) -> _Config:
    """Return the configuration with the directory of its model. The run keeps the name of a model of the Hub as its own.

    Raises:
        ModelError: it cannot be fetched.
    """
    from headrace.files.hub import is_hub_name

    if not (is_hub_name(config.model) or is_gguf(config.model)):
        look_at_model(config.model)
        return config
    model = model_here(config.model)  # first: without a network that is said before torch is imported, which takes seconds
    from headrace.runs.job import default_output

    return replace(config, model=model, output=config.output or default_output(config))


def look_at_model(model: str | Path, *, aloud: bool = True) -> None:
    """Look at a model directory whose model is trained or compressed; for a name of the Hub, whether that answers. Notes on it
    are said if `aloud`.

    Raises:
        ModelError: it is none, or an adapter acts beside it.
    """
    from headrace.files.hub import is_hub_name, refuse_unanswered

    if is_gguf(model):
        return
    if is_hub_name(model):
        refuse_unanswered(str(model))
        return
    from headrace.store.model_here import whole_model_at

    here = whole_model_at(Path(model))
    for note in here.notes if aloud else ():
        print(f"note: {note}", file=sys.stderr, flush=True)


def look_at_configuration(model: str) -> None:
    """Look at a model's directory or its configuration alone; names of the Hub are not asked for.

    Raises:
        ModelError: it is none.
    """
    from headrace.files.model_directory import refuse_no_configuration

    refuse_no_configuration(model)


def look_at_plan_names(options: PlanOptions, compress: str | None) -> None:
    """Look at the names of machines and codes that a plan is asked for: this needs neither torch nor transformers.

    Raises:
        ConfigError: there is no such machine or code.
    """
    from headrace.codec.table import code_to_write
    from headrace.plan.clock.machine_profiles import load_profile

    for name in (options.machine, options.node_machine):
        if isinstance(name, str):
            load_profile(name)
    if compress is not None:
        code_to_write("compress", compress)


def look_at_place(place: str | Path) -> None:
    """Look at the directory of a model or run.

    Raises:
        ModelError: it cannot be reached.
    """
    from headrace.files.model_directory import why_unreachable

    if reason := why_unreachable(Path(place)):
        raise ModelError(f"model: {place}: {reason}")


def look_at_choices(options: Options, *, at_node: bool = False) -> None:
    """Look at what a run combines: this needs torch, but not transformers. Before it, whether the Hub answers for its model.

    Raises:
        ModelError: it does not.
        ConfigError: there is no such rule, gradient or adapter, or two choices exclude one another.
    """
    from headrace.files.hub import is_hub_name, refuse_unanswered

    if isinstance(options, RunOptions) and is_hub_name(options.model):
        refuse_unanswered(str(options.model))
    from headrace.update.combinations import refuse_combination

    refuse_combination(options, at_node=at_node)


def look_at_data(paths: Sequence[str | DataSource]) -> None:
    """Look at data: a data set of the Hub must be there, or the Hub must answer.

    Raises:
        DataError: one does not exist, or its kind is not read.
    """
    from headrace.data.read.sources import refuse_unreachable, refuse_unread
    from headrace.process import cache_directory

    for path in paths:
        refuse_unread(path)
        refuse_unreachable(path, cache_directory())
