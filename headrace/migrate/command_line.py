"""Command lines of other trainers in a shell script: `trl sft ...`, `accelerate launch ...` with a script, `axolotl train ...`.

Invariant: each option, also of a launcher, counts, is named with a reason, or is refused. So are variables of the environment
and other commands.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from headrace.files.yaml_options import parse_changes, read_yaml
from headrace.migrate import axolotl, llama_factory, trl
from headrace.migrate.shell import Command, commands_of
from headrace.migrate.source import MigratedFile, refuse
from headrace.migrate.training_arguments import PLANNED
from headrace.terms.errors import ConfigError

ENDINGS = (".sh", ".bash", ".slurm", ".sbatch")
_WRAPPERS = ("nohup", "exec", "time", "command", "env")
# Launchers, with how each counts processes: the product of these options of its own.
_LAUNCHERS = {
    ("accelerate", "launch"): ("num_processes",),
    ("torchrun",): ("nproc_per_node", "nnodes"),
    ("deepspeed",): ("num_gpus", "num_nodes"),
    ("python", "-m", "torch.distributed.run"): ("nproc_per_node", "nnodes"),
    ("python", "-m", "torch.distributed.launch"): ("nproc_per_node", "nnodes"),
    ("python", "-m", "accelerate.commands.launch"): ("num_processes",),
    ("python",): (),
}
_MODULES = {"trl.scripts.": trl.NAME, "axolotl.cli.": axolotl.NAME}
_SCRIPT = re.compile(r"(?:(?:run|train)_)?(\w+)\.py")
_PROGRAMS = {"trl": trl.NAME, "axolotl": axolotl.NAME, "llamafactory-cli": llama_factory.NAME, "lmf": llama_factory.NAME}
_NOT_TRAINING = ("env", "vllm-serve", "chat", "preprocess", "fetch", "version", "export", "webchat", "api", "eval", "inference")
# Options of launchers that `trl` takes among its own.
_OF_LAUNCHER = re.compile(
    "accelerate_config|config_file|num_processes|num_machines|machine_rank|multi_gpu|main_process_.*|use_deepspeed|zero_stage"
    "|use_fsdp|mixed_precision|num_cpu_threads_per_process|dynamo_backend"
)
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MIXED = "bf16 and fp16 of the training arguments decide"
_UNSEEN = "it is not found here; multiply tokens_per_step by the processes that it names"
# What else a script does that changes neither model nor data.
_QUIET = (
    *("set", "export", "declare", "echo", "tee", "wait", "sleep", "exit", "true", ":", "date", "ulimit", "mkdir"),
    "nvidia-smi",
)
# Options whose values are text, whatever they look like.
_TEXT = re.compile(
    r"(?!use_|do_|overwrite_).*(_name|_path|_dir|_split|_field|_strategy|_type|_config|_token|_id)"
    r"|optim|optimizer|template|dataset|base_model"
)
_WORDS = {"true": True, "t": True, "yes": True, "y": True, "false": False, "f": False, "no": False, "n": False}
_OFF = "no_"


@dataclass
class _Training:
    """A command that trains: whose `tool`, which `trainer` of it, what stands between launcher and script, and the options."""

    command: Command
    tool: str
    trainer: str | None
    options: Sequence[str]
    launcher: Sequence[str] = ()
    counts: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)


def read_script(path: Path) -> tuple[str, MigratedFile]:
    """Return whose command the script `path` runs, and its options as that tool's file.

    Raises:
        ConfigError: it cannot be read, or runs no command that trains here, or several.
    """
    try:
        commands, notes = commands_of(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read ({error})") from error
    found = [(each, _training(each)) for each in commands]
    trainings = [each for _, each in found if each]
    if len(trainings) != 1:
        told = "; ".join(str(each.command) for each in trainings) or "; ".join(map(str, commands)) or "none at all"
        raise ConfigError(
            f"{len(trainings) or 'no'} commands that train were found ({told}); a file has one. "
            "Read are trl sft, dpo and kto; scripts sft.py, dpo.py and kto.py under python, accelerate, torchrun or deepspeed; "
            "axolotl train and llamafactory-cli train"
        )
    training = trainings[0]
    source = MigratedFile(_values(training, path.parent), trainer=training.trainer)
    source.notes += notes + training.notes
    for each, trains in found:
        if not trains and each.words[0] not in _QUIET:
            source.leave(str(each), "a command of its own; what it does to paths, models or data is not known here")
    _take_launcher(source, training, path.parent)
    return training.tool, source


def _program(word: str) -> str:
    name = PurePath(word).name
    return "python" if re.fullmatch(r"python[\d.]*", name) else name


def _training(command: Command) -> _Training | None:
    """Return what a command trains; None if it trains nothing.

    Raises:
        ConfigError: it trains something that is not translated.
    """
    words = list(command.words)
    while words and (words[0] in _WRAPPERS or "=" in words[0]):
        name, _, value = words.pop(0).partition("=")
        if value:
            command.environment[name] = value
    if words[:2] == ["uv", "run"]:
        words = words[2:]
    if not words:
        return None
    words[0] = _program(words[0])
    if words[0] in _PROGRAMS:
        name = words[1] if len(words) > 1 else ""
        if not name or name.startswith("-") or name in _NOT_TRAINING:
            return None
        tool = _PROGRAMS[words[0]]
        return _Training(command, tool, _trainer(command, tool, name), words[2:])
    launcher = next((each for each in _LAUNCHERS if tuple(words[: len(each)]) == each), None)
    return None if launcher is None else _launched(command, launcher, words[len(launcher) :])


def _launched(command: Command, launcher: tuple[str, ...], words: list[str]) -> _Training | None:
    """Return what a script or a module behind a launcher trains."""
    place = next((number for number, word in enumerate(words) if word.endswith(".py") or word in ("-m", "--module")), None)
    counts = _LAUNCHERS[launcher]
    if place is None:
        return None
    if not words[place].endswith(".py"):
        module, options = words[place + 1 : place + 2], words[place + 2 :]
        for begins, tool in _MODULES.items():
            if module and module[0].startswith(begins):
                trainer = _trainer(command, tool, module[0].removeprefix(begins))
                return _Training(command, tool, trainer, options, words[:place], counts)
    elif (found := _SCRIPT.fullmatch(PurePath(words[place]).name)) and found[1] in trl.TRAINERS:
        training = _Training(command, trl.NAME, found[1], words[place + 1 :], words[:place], counts)
        training.notes.append(f"{words[place]}: read as TRL's own {found[1]}.py; what else it does is not known here")
        return training
    if launcher == ("python",):
        return None
    raise ConfigError(f"{command}: a script of its own is not read; sft.py, dpo.py and kto.py are, and `-m trl.scripts.sft`")


def _trainer(command: Command, tool: str, name: str) -> str | None:
    """Return the trainer of TRL's that a command names; other tools say it in their options."""
    if tool == trl.NAME:
        if name not in trl.TRAINERS:
            raise ConfigError(f"{command}: {name} is not translated by this version; {', '.join(trl.TRAINERS)} are")
        return name
    if name != "train":
        raise ConfigError(f"{command}: {name} is not translated by this version; train is")
    return None


def _values(training: _Training, folder: Path) -> dict[str, Any]:
    """Return the options of a command by key: those of its YAML file, and over them its own."""
    before, options = _split(training.options)
    values: dict[str, Any] = {}
    files = [word for word in before if word.endswith((".yaml", ".yml"))]
    if training.tool == trl.NAME and "config" in options:
        files += options.pop("config")
    for name in files:
        values |= read_yaml(_found(name, folder))
    changes = [word for word in before if "=" in word]
    if others := [word for word in before if word not in (*files, *changes)]:
        raise ConfigError(f"{training.command}: {others[0]!r} belongs to no option; a value stands behind its option")
    values |= parse_changes(changes)
    for key, words in options.items():
        if not words and key.startswith(_OFF) and key != "no_cuda":
            values[key.removeprefix(_OFF)] = False
        else:
            values[key] = _value(key, words)
    return values


def _found(name: str, folder: Path) -> Path:
    """Return the path of a file that a script names: from here, or from the script's own folder."""
    return Path(name) if Path(name).exists() else folder / name


def _split(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the words before the first option, and those of each option by its name; the last of a name counts."""
    before: list[str] = []
    options: dict[str, list[str]] = {}
    current = before
    for word in words:
        if word.startswith("-") and not re.match(r"-[\d.]", word) and word.strip("-"):
            name, equals, value = word.lstrip("-").partition("=")
            current = options[name.replace("-", "_")] = [value] if equals else []
        elif word != "--":
            current.append(word)
    return before, options


def _value(key: str, words: Sequence[str]) -> Any:
    """Return the value of an option as YAML would have it: a switch without words is on, several words are a list."""
    is_text = _TEXT.fullmatch(key) is not None
    if not words:
        if is_text:
            raise ConfigError(f"{key}: has no value on the command line; give it one")
        return True
    found = [word if is_text else _scalar(key, word) for word in words]
    return found[0] if len(found) == 1 else found


def _scalar(key: str, word: str) -> Any:
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    if word[:1] in ("{", "["):
        return parse_changes([f"{key}={word}"])[key]
    return word


def _take_launcher(source: MigratedFile, training: _Training, folder: Path) -> None:
    """Take the number of processes, which a step's batch is multiplied by; name all else of launcher and environment."""
    before, options = _split(training.launcher)
    given = MigratedFile({key: _value("", words) for key, words in options.items()} | dict.fromkeys(before, True))
    if training.tool == trl.NAME and not training.launcher:
        values = dict(source.values)
        given.values = {key: values.pop(key) for key in list(values) if _OF_LAUNCHER.fullmatch(key)}
        source.values = values
    parts = [given.take(key) for key in training.counts or ("num_processes",)]
    for key in ("config_file", "accelerate_config"):
        if parts[0] is None and given.has(key):
            file = _found(str(given.take(key)), folder)
            parts = [read_yaml(file).get("num_processes")] if file.is_file() else parts
            given.leave(key, PLANNED if file.is_file() else _UNSEEN)
    visible = training.command.environment.pop(_VISIBLE, None)
    if parts[0] is None and training.counts[:1] != ("nproc_per_node",) and visible:
        parts = [len(visible.split(","))]
    elif visible is not None:
        given.leave(_VISIBLE, PLANNED)
    if parts[0] is not None or training.counts[:1] == ("nproc_per_node",):
        source.processes = _product(training.counts, parts)
    given.finish(dict.fromkeys(given.values, PLANNED) | {"mixed_precision": _MIXED})
    source.left_out |= given.left_out
    for name, value in training.command.environment.items():
        source.leave(name, f"a variable of the environment ({value}): set it where Headrace runs, if a library reads it")


def _product(keys: Sequence[str], parts: Sequence[Any]) -> int | None:
    """Return how many processes train, None where their number follows from the machine."""
    numbers = [1 if part is None else part for part in parts]
    if any(isinstance(each, bool) or not isinstance(each, int) for each in numbers):
        return None
    if any(each < 1 for each in numbers):
        raise refuse(", ".join(keys or ("num_processes",)), numbers, "is no number of processes; give one from 1 on")
    product = 1
    for each in numbers:
        product *= each
    return product
