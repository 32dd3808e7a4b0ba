"""Options that exclude each other, each refused with both names."""

from headrace.terms.errors import ConfigError
from headrace.terms.options.data_source import source_of
from headrace.terms.options.declared import Declared
from headrace.terms.options.optimizer import ALL
from headrace.terms.options.preferences import takes_rewards
from headrace.terms.options.summing import TREE


def refuse_contradictions(options: Declared) -> None:
    """See that no two options contradict one another.

    Raises:
        ConfigError: two do; names both.
    """
    given = vars(options)
    if given["adapter"] is not None:
        refuse_adapters_and_parts(given["train"])
    if given["compile_blocks"] and given["adapter"]:
        raise ConfigError("compile_blocks and adapter: adapters run beside the blocks' own code; give one of them")
    if given["compile_blocks"] and given["liger"]:
        raise ConfigError("compile_blocks and liger: both fuse the same operators of a block; give one of them")
    if given["gradient_sum"] == TREE and given["gradient"] != "dense":
        raise ConfigError(
            f"gradient_sum: tree adds whole gradients, but gradient is {given['gradient']}; leave one of them out"
        )


def refuse_adapters_and_parts(train: str) -> None:
    """Refuse to train adapters and parts of a model's own parameters."""
    if train != ALL:
        raise ConfigError(f"train: {train} and adapter: adapters are trained, and everything else is frozen; give one of them")


def refuse_packed_pairs(options: Declared) -> None:
    """See that a loss of pairs gets each completion in a row of its own.

    Raises:
        ConfigError: packing is asked for, too.
    """
    given = vars(options)
    if given["loss"] is not None and given["packing"]:
        raise ConfigError("loss and packing: such a loss takes one completion a row; leave packing out")


def refuse_without_rewards(options: Declared) -> None:
    """See that a loss of rewards has a function that gives them, and nothing that its rows do not go with.

    Raises:
        ConfigError: it is missing, or there is nothing to reward; or names what does not go with such a loss.
    """
    given = vars(options)
    if not takes_rewards(given["loss"]):
        if given["reward"] and given["data"]:  # a plan needs none
            raise ConfigError("reward: nothing takes it; give loss=grpo, too, or leave it out")
        return
    if not given["reward"] and given["data"]:
        raise ConfigError("loss: grpo needs a reward: FILE.py:NAME, a function that gives each completion a number")
    others = ("eval_split", "eval_data", "streaming", "local_steps")
    if found := next((key for key in others if given.get(key)), None):
        raise ConfigError(f"{found}: a run whose model writes its own rows has none of that; leave it out")


def refuse_unstreamed(options: Declared, streams: bool) -> None:
    """See that a run that reads data as they come asks for nothing that takes all of them.

    Raises:
        ConfigError: it does; or a buffer's size is given without one.
    """
    given = vars(options)
    if not streams:
        if given["buffer_size"] is not None:
            raise ConfigError("buffer_size: it is the buffer of streaming; give streaming, too, or leave it out")
        return
    if given["max_steps"] is None and given["data"]:
        raise ConfigError("streaming: nobody knows how long the data are; give max_steps")
    if given["eval_split"] is not None:
        raise ConfigError("streaming and eval_split: a share is drawn from all samples; give eval_data instead")
    if given["loss"] is not None:
        raise ConfigError(f"streaming and loss: {given['loss']} takes pairs of a whole data set; leave one of them out")
    weighted = next((each for each in map(source_of, given["data"]) if each.weight != 1), None)
    if weighted is not None:
        raise ConfigError(
            f"streaming and weight: {weighted} has {weighted.weight:g}, a share of all its samples; leave one of them out"
        )
    if given["save_total_limit"] is not None and given["save_steps"] is None and not given["eval_data"]:
        raise ConfigError("streaming and save_total_limit: nobody knows where an epoch ends; give save_steps, too")
    if given.get("local_steps") is not None:
        raise ConfigError("streaming and local_steps: learners share out all samples; leave one of them out")


_OF_EVALUATIONS = ("eval_steps", "load_best_model_at_end", "early_stopping_patience")


def refuse_two_held_out(split: float | None, data: tuple[object, ...]) -> None:
    """See that held-out samples come from one place, and are a share or a number.

    Raises:
        ConfigError: they come from two; or a number of samples is no whole number.
    """
    if split is not None and data:
        raise ConfigError("eval_split and eval_data: both say what is held out; give one of them")
    if split is not None and split >= 1 and split != int(split):
        raise ConfigError(f"eval_split: expected a share below 1 or a whole number of samples, found {split:g}")


def refuse_evaluation_of_nothing(options: Declared) -> None:
    """See that a run that is to use evaluations has some.

    Raises:
        ConfigError: it has none.
    """
    given = vars(options)
    asked = [key for key in _OF_EVALUATIONS if given[key]]
    if asked and given["eval_split"] is None and not given["eval_data"]:
        raise ConfigError(f"{asked[0]}: nothing is held out to evaluate; give eval_split or eval_data, too")
