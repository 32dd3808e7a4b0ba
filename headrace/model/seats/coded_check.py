"""Find out by trying whether matrices of an architecture can stay in their codes (see `stored/operand.py`).

Invariant: an architecture whose tiny instance gave other bits with decoded matrices, or used one otherwise than in a product,
has its weights decoded before blocks run.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from headrace.codec.published import GgufBlocks
from headrace.model.blocks.binding import parameter_owners
from headrace.model.parts.banks import find_experts
from headrace.model.parts.runner import Runner
from headrace.model.seats.bank_check import BankTrial
from headrace.model.seats.generation_check import GREEDY, generated, ready_to_generate
from headrace.model.stored.decoding import Decoding, PartPlace
from headrace.model.stored.operand import CodedOperand, Workspace
from headrace.model.trials.instance import tiny_samples
from headrace.model.trials.trial import Found, tried, unless_alike, why_other


@tried
def why_not_coded(runner: Runner) -> str:
    """Return why weights of an architecture are decoded before its blocks run; "" if they need not be."""
    model = runner.model
    ready_to_generate(model)
    experts = find_experts(model, runner.blocks)
    workspace = Workspace(torch.float32)
    linears = [module for block in runner.blocks for module in block.modules() if type(module) is nn.Linear]
    singles = {module: in_code(module.weight.detach(), workspace) for module in linears}

    def own() -> list[Found]:
        return [generated(model, {"input_ids": sample.input_ids}, GREEDY) for sample in tiny_samples(model)]

    def with_codes() -> list[Found]:
        for module, operand in singles.items():
            module.__dict__["weight"] = operand
        try:
            if not any(experts):
                return own()
            with BankTrial(experts, lambda matrix: in_code(matrix, workspace) if matrix.dim() == 2 else matrix):
                return own()
        finally:
            for module in singles:
                del module.__dict__["weight"]

    return why_other(own, with_codes, unless_alike("its logits differ with them"), own_fails="its own generate raises {}")


def may_stay(chain_model: Any, blocks: Sequence[nn.Module]) -> frozenset[str]:
    """Return the parameters of blocks that the trial puts into a code: those of linear modules, and stacks of experts."""
    owners = parameter_owners(chain_model)
    found = {name for name, places in owners.items() if all(type(module) is nn.Linear for module, _ in places)}
    return frozenset(found.union(*(each.names.values() for each in find_experts(chain_model, blocks) if each is not None)))


def in_code(matrix: torch.Tensor, workspace: Workspace) -> CodedOperand:
    """Return a matrix of float32 in a code that loses nothing."""
    rows, columns = matrix.shape
    place = PartPlace(0, matrix.nbytes, torch.uint8, (rows, 4 * columns))
    decoding = Decoding(GgufBlocks("F32"), rows, columns, 0, torch.float32, {"blocks": place}, {})
    return CodedOperand(decoding, matrix.contiguous().view(torch.uint8).view(-1), matrix.shape, workspace)
