"""Match the tensors of a checkpoint with the parameters of a model, by transformers' own rules.

Old and new names, per-expert and packed experts, checkpoints saved without the head class's prefix, tied and duplicated heads.
Invariant: before a weight is read, every parameter has a source of the right shape, and every stored tensor has one known role.
So a model that cannot be imported, or exported in its own layout, is refused at once.
"""

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from headrace.model.blocks.binding import parameter_aliases
from headrace.model.blocks.find_blocks import find_blocks
from headrace.model.blocks.text_part import names_in_whole
from headrace.model.directory.checkpoint import Checkpoint
from headrace.model.stored.safetensors_file import INTEGER_DTYPES, ROW_DTYPES, WEIGHT_DTYPES, StoredTensor, read_tensor_rows
from headrace.terms.errors import ModelError

Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Stored tensor `key` is `parameter[index]`; the empty index stands for all of it."""

    key: str
    parameter: str
    index: Index = ()


@dataclass(frozen=True, slots=True)
class Conversion:
    """Stored tensors become `parameters` by operations of transformers that do more than place them.

    `sources` are stored names by the pattern that they matched. `target` is the rule's name for the result. `renamed` are
    stored names by the names that they have when the rule is applied. `made` are the names that the rule gives the parameters;
    they differ from `parameters` where these are part of a larger model.
    """

    converter: Any
    target: str
    sources: Mapping[str, tuple[str, ...]]
    renamed: Mapping[str, str]
    made: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class WeightMap:
    """The role of every tensor of a checkpoint.

    `pieces` and `copies` (a tied parameter stored a second time) are by parameter; `buffers` map names in the model to stored
    names. `unused` tensors are stored, but not trained. `unknown` are those that belong to no part of the stored model, with
    the names that they would have in it. `stored_model` is what was stored: `model`, or a larger one of which it is a part.
    """

    checkpoint: Checkpoint
    model: Any = field(repr=False)
    stored_model: Any = field(repr=False)
    pieces: Mapping[str, Sequence[Piece]] = field(repr=False)
    copies: Mapping[str, Sequence[Piece]] = field(repr=False)
    conversions: Sequence[Conversion] = field(repr=False)
    buffers: Mapping[str, str] = field(repr=False)
    unused: Sequence[str] = field(repr=False)
    unknown: Mapping[str, str] = field(repr=False)


def match_weights(checkpoint: Checkpoint, model: Any) -> WeightMap:
    """Return the role of each tensor of `checkpoint` in `model` (a skeleton will do).

    Raises:
        ModelError: parameters without a source, or with one of another shape or an unsupported dtype; the message names them.
    """
    stored_model = model if checkpoint.whole is None else checkpoint.whole
    names = {name: name for name in model.state_dict()} if stored_model is model else names_in_whole(model, stored_model)
    roles = _Roles(checkpoint, stored_model, model, names)
    for key in sorted(checkpoint.tensors, key=dot_natural_key):
        roles.add(key)
    pieces, copies, conversions = roles.resolve()
    found = {*pieces, *(name for conversion in conversions for name in conversion.parameters)}
    missing = [name for name, _ in model.named_parameters() if name not in found]
    if missing:
        raise ModelError(
            f"{checkpoint.directory}: {len(missing)} parameters of {type(model).__name__} have no weights: "
            f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}; stored are {len(checkpoint.tensors)} such as "
            f"{', '.join(list(checkpoint.tensors)[:2])}; check that config.json belongs to the weights"
        )
    _check_dtypes(checkpoint, pieces, conversions)
    return WeightMap(checkpoint, model, stored_model, pieces, copies, conversions, roles.buffers, roles.unused, roles.unknown)


def refuse_left_out_blocks(weights: WeightMap) -> None:
    """Refuse weights of blocks that the configuration does not have: the trained model would be shorter than the stored one.

    Weights that transformers itself ignores, such as blocks that predict further tokens, may be there.

    Raises:
        ModelError: there are such weights; the message counts and names them.
    """
    blocks = find_blocks(weights.model)
    own = {name: name for name in weights.model.state_dict()}
    places = own if weights.stored_model is weights.model else names_in_whole(weights.model, weights.stored_model)
    first = next(place for place, name in places.items() if name.startswith(f"{blocks.name}.0."))
    prefix = first[: len(first) - len(places[first]) + len(blocks.name) + 1]
    known = getattr(weights.stored_model, "_keys_to_ignore_on_load_unexpected", None) or ()
    block = re.compile(rf"{re.escape(prefix)}(\d+)\.")
    further: dict[int, dict[str, str]] = {}
    for key, name in weights.unknown.items():
        if (found := block.match(name)) and int(found[1]) >= len(blocks.modules):
            further.setdefault(int(found[1]), {})[key] = name
    # A pattern for single tensors may match a block's tensor by its end; only where a whole block is ignored do all match.
    left_out = [
        key
        for named in further.values()
        if not all(any(re.search(pattern, name) for pattern in known) for name in named.values())
        for key in named
    ]
    if left_out:
        raise ModelError(
            f"{weights.checkpoint.directory}: config.json has {len(blocks.modules)} blocks (num_hidden_layers), but the "
            f"files hold more: {describe_unknown(left_out)}. Correct config.json, or set leave_out_blocks to train the "
            "shorter model; the export then keeps those weights unchanged"
        )


def describe_unknown(keys: Collection[str]) -> str:
    """Return how many stored tensors there are, and the names of some."""
    return f"{len(keys)} stored tensors that the model does not have ({', '.join(list(keys)[:3])}{', ...' * (len(keys) > 3)})"


class _Roles:
    """Sorts stored names into roles. The order of steps is that of transformers' loading.

    Rules use the names of the stored model; `names` maps these to the names in the model that is trained.
    """

    def __init__(self, checkpoint: Checkpoint, model: Any, trained: Any, names: Mapping[str, str]) -> None:
        mapping = get_model_conversion_mapping(model)
        self._checkpoint, self._model = checkpoint, model
        self._renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._state = model.state_dict()
        self._trained = trained.state_dict()
        self._names = names
        self._aliases = parameter_aliases(trained)
        self._groups: dict[str, tuple[Any, dict[str, list[str]]]] = {}
        self._plain: dict[str, list[Piece]] = {}
        self.buffers: dict[str, str] = {}
        self.unused: list[str] = []
        self.unknown: dict[str, str] = {}

    def add(self, key: str) -> None:
        prefix = self._model.base_model_prefix
        name, pattern = rename_source_key(key, self._renamings, self._converters, prefix, self._state)
        if name not in self._state and key in self._state:
            name, pattern = rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=self._state)
        if name not in self._names:
            self.unused.append(key)
            if name not in self._state:
                self.unknown[key] = name
        elif pattern is not None:
            _, sources = self._groups.setdefault(name, (self._by_pattern[pattern], {}))
            sources.setdefault(pattern, []).append(key)
        elif self._names[name] in self._aliases:
            self._plain.setdefault(self._own(name), []).append(Piece(key, self._own(name)))
        else:
            self.buffers[self._names[name]] = key

    def resolve(self) -> tuple[dict[str, list[Piece]], dict[str, list[Piece]], list[Conversion]]:
        """Return pieces and copies by parameter, and conversions, with shapes checked."""
        pieces: dict[str, list[Piece]] = {}
        copies: dict[str, list[Piece]] = {}
        conversions = []
        for parameter, found in self._plain.items():
            for piece in found:
                self._check_shape(parameter, piece.key, self._shape(piece.key))
            pieces[parameter], copies[parameter] = found[:1], found[1:]
        for target, (rule, sources) in self._groups.items():
            placed = self._place(rule, self._own(target), sources)
            if placed is not None:
                pieces[placed[0].parameter] = placed
            else:
                conversions.append(self._convert(rule, target, sources))
        return pieces, {name: found for name, found in copies.items() if found}, conversions

    def _place(self, rule: Any, parameter: str, sources: dict[str, list[str]]) -> list[Piece] | None:
        """Return pieces if `rule` only stacks experts, one stored tensor each, perhaps several kinds one below the other.

        This fast path serves nearly all mixture-of-experts checkpoints: no temporary is larger than a read.
        """
        kinds = [type(operation) for operation in rule.operations]
        dims = [getattr(operation, "dim", None) for operation in rule.operations]
        stacked_only = kinds == [MergeModulelist] and dims == [0] and len(sources) == 1
        if not stacked_only and not (kinds == [MergeModulelist, Concatenate] and dims == [0, 1]):
            return None
        if len(rule.target_patterns) != 1 or getattr(rule.operations[-1], "num_shards_attribute", None):
            return None
        ordered = [sources[pattern] for pattern in rule.source_patterns if pattern in sources]
        shapes = [{self._shape(key) for key in keys} for keys in ordered]
        if any(len(kind) != 1 or len(next(iter(kind))) != 2 for kind in shapes) or len({len(keys) for keys in ordered}) != 1:
            raise ModelError(
                f"{self._checkpoint.directory}: experts of {parameter} differ: "
                f"{[len(keys) for keys in ordered]} tensors of shapes {[sorted(kind) for kind in shapes]}"
            )
        rows = [next(iter(kind))[0] for kind in shapes]
        width = next(iter(shapes[0]))[1]
        self._check_shape(parameter, ordered[0][0], (len(ordered[0]), sum(rows), width))
        placed, start = [], 0
        for keys, height in zip(ordered, rows, strict=True):
            index = slice(start, start + height)
            placed += [Piece(key, parameter, (expert, index)) for expert, key in enumerate(keys)]
            start += height
        return placed

    def _convert(self, rule: Any, target: str, sources: dict[str, list[str]]) -> Conversion:
        """Return a conversion; running it on the meta device shows which parameters it makes."""
        renamed = {rename_source_key(key, self._renamings, [])[0]: key for keys in sources.values() for key in keys}
        grouped = {pattern: tuple(keys) for pattern, keys in sources.items()}
        conversion = Conversion(copy.deepcopy(rule), target, grouped, renamed)
        made = run_conversion(
            conversion, self._model, lambda key: torch.empty(self._shape(key), device="meta", dtype=torch.float32)
        )
        for name, tensor in made.items():
            self._check_shape(self._own(name), next(iter(sources.values()))[0], tuple(tensor.shape))
        conversion = replace(conversion, made=tuple(made), parameters=tuple(self._own(name) for name in made))
        back = reverse_conversion(conversion, self._model, made)
        shapes = {key: tuple(tensor.shape) for key, tensor in back.items()}
        if shapes != {key: self._shape(key) for key in renamed.values()}:
            raise ModelError(
                f"{target}: its stored tensors {sorted(renamed.values())} could not be exported again; found {shapes}"
            )
        return conversion

    def _own(self, name: str) -> str:
        """Return the name in the layouts of what rules call `name`."""
        own = self._names.get(name, name)
        return self._aliases.get(own, own)

    def _shape(self, key: str) -> tuple[int, ...]:
        return self._checkpoint.tensors[key].shape

    def _check_shape(self, parameter: str, key: str, found: tuple[int, ...]) -> None:
        expected = tuple(self._trained[parameter].shape) if parameter in self._trained else None
        if expected != found:
            raise ModelError(
                f"{self._checkpoint.tensors[key].path}: {key}: expected {expected} for {parameter}, found {found}; "
                "check that config.json belongs to the weights"
            )


def load_buffers(weights: WeightMap) -> None:
    """Copy the persistent buffers that the checkpoint holds (router corrections, tables of hashes) into the model."""
    for name, key in weights.buffers.items():
        stored, buffer = weights.checkpoint.tensors[key], weights.model.get_buffer(name)
        kind, known = ("a floating-point", WEIGHT_DTYPES) if buffer.is_floating_point() else ("an integer", INTEGER_DTYPES)
        if tuple(buffer.shape) != stored.shape or stored.dtype not in known:
            raise ModelError(
                f"{stored.path}: {key}: expected shape {tuple(buffer.shape)} and {kind} dtype for buffer {name}, "
                f"found {stored.shape} of {stored.dtype}"
            )
        values = read_whole(stored)
        buffer.copy_(values)
        if not buffer.is_floating_point() and not torch.equal(buffer.to(values.dtype), values):
            raise ModelError(f"{stored.path}: {key}: a value does not fit into buffer {name} of {buffer.dtype}")


def read_whole(stored: StoredTensor) -> torch.Tensor:
    """Return a whole tensor of weights or integers in its stored dtype."""
    out = np.empty(stored.shape or (1,), ROW_DTYPES[stored.dtype])
    for start, stop, rows in read_tensor_rows(stored):
        out[start:stop] = rows
    bits = torch.from_numpy(out.view(np.int16) if stored.dtype == "BF16" else out)
    return (bits.view(torch.bfloat16) if stored.dtype == "BF16" else bits).reshape(stored.shape)


def run_conversion(conversion: Conversion, model: Any, read: Any) -> dict[str, Any]:
    """Run transformers' operations on tensors that `read(stored name)` returns; return results by the names they get."""
    converter = copy.deepcopy(conversion.converter)
    for pattern, keys in conversion.sources.items():
        for key in keys:
            converter.add_tensor(conversion.target, key, pattern, lambda key=key: read(key))
    try:
        made = converter.convert(conversion.target, model=model, config=model.config)
    except Exception as error:  # transformers' operations meet whatever shapes are stored
        raise ModelError(f"{conversion.target}: cannot be made from {dict(conversion.sources)}: {error!r}") from error
    return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


def reverse_conversion(conversion: Conversion, model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored tensors, by stored name, from which `conversion` would make `tensors` (by the names that they get)."""
    reverse = conversion.converter.reverse_transform()
    target = ""
    for name, tensor in tensors.items():
        target, pattern = reverse.rename_source_key(name)
        reverse.add_tensor(target, name, pattern, tensor)
    try:
        made = reverse.convert(target, model=model, config=model.config)
    except Exception as error:  # transformers' operations meet whatever shapes are stored
        raise ModelError(f"{conversion.target}: cannot be turned back into {dict(conversion.sources)}: {error!r}") from error
    stored = {}
    for name, tensor in made.items():
        # Either name may have the base model's prefix; apart from that, names are those to which the rule was applied.
        keys = [
            key for mid, key in conversion.renamed.items() if f".{mid}".endswith(f".{name}") or f".{name}".endswith(f".{mid}")
        ]
        stored[keys[0] if keys else name] = tensor[0] if isinstance(tensor, list) else tensor
    return stored


def _check_dtypes(checkpoint: Checkpoint, pieces: Mapping[str, Sequence[Piece]], conversions: Sequence[Conversion]) -> None:
    keys = [piece.key for found in pieces.values() for piece in found]
    keys += [key for conversion in conversions for found in conversion.sources.values() for key in found]
    for key in keys:
        tensor = checkpoint.tensors[key]
        if tensor.dtype not in WEIGHT_DTYPES:
            raise ModelError(
                f"{tensor.path}: {key} is {tensor.dtype}; weights must be {', '.join(WEIGHT_DTYPES)}: convert them first"
            )
