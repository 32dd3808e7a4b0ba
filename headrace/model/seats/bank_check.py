"""Find out by trying whether the experts of an architecture can come one at a time (see `banks`).

Invariant: an architecture gets no banks if its tiny instance gave other bits with them, or asked for other experts than
announced. Its blocks then come whole.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from headrace.model.parts.banks import Banks, BlockExperts, find_experts
from headrace.model.parts.runner import Runner
from headrace.model.seats.generation_check import GREEDY, generated, ready_to_generate
from headrace.model.trials.instance import tiny_samples
from headrace.model.trials.trial import Found, tried, unless_alike, why_other


@tried
def why_no_banks(runner: Runner) -> str:
    """Return why experts of an architecture come with their whole block; "" where they need not."""
    model = runner.model
    ready_to_generate(model)
    experts = find_experts(model, runner.blocks)
    if not any(experts):
        return "it has no stacked experts"
    trial = BankTrial(experts)

    def own() -> list[Found]:
        return [generated(model, {"input_ids": sample.input_ids}, GREEDY) for sample in tiny_samples(model)]

    def one_by_one() -> list[Found]:
        with trial:
            found = own()
            trial.conclude()
        return found

    def differing(expected: Found, found: Found) -> str:
        return trial.failure or unless_alike("its logits differ where experts come one at a time")(expected, found)

    return why_other(own, one_by_one, differing, own_fails="its own generate raises {}")


class BankTrial:
    """Brings the experts of tiny blocks one at a time; the experts brought before are overwritten with NaN.

    A weight may be `lent` in another form.
    """

    def __init__(self, experts: Sequence[BlockExperts | None], lent: Callable[[Any], Any] = lambda weight: weight) -> None:
        self.failure, self._lent = "", lent
        self._whole = {
            id(each): {name: getattr(each.module, name).detach() for name in each.names} for each in experts if each is not None
        }
        self._experts = [each for each in experts if each is not None]
        first = next(iter(self._whole[id(self._experts[0])].values()))
        self._banks = Banks(experts, first.dtype, first.device)
        self._announced: list[int] = []
        self._asked: list[int] = []
        self._running: BlockExperts | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> "BankTrial":
        for each in self._experts:  # these hooks run before the banks' own
            self._hooks.append(each.module.register_forward_pre_hook(self._entering(each)))
        self._banks.install()
        self._banks.visit(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._banks.visit(None)
        self._banks.remove()
        for hook in self._hooks:
            hook.remove()

    def _entering(self, experts: BlockExperts) -> Any:
        def enter(module: Any, args: Any) -> None:
            self.conclude()
            self._running = experts

        return enter

    def conclude(self) -> None:
        """Compare what the last module asked for with what was announced."""
        if self._running is not None and self._asked != self._announced:
            self.failure = f"it asked for experts {self._asked[:8]} and not for {self._announced[:8]}, which its router chose"
        self._running, self._asked, self._announced = None, [], []
        self._drop()

    def announce(self, experts: Mapping[int, int]) -> None:
        """See `Visitor`."""
        self._announced = list(experts)

    def wait_for(self, expert: int) -> None:
        """See `Visitor`."""
        assert self._running is not None, "a module of experts runs"
        self._asked.append(expert)
        self._drop()
        whole = self._whole[id(self._running)]
        self._banks.present[expert] = {name: self._lent(each[expert].clone()) for name, each in whole.items()}

    def _drop(self) -> None:
        for weights in self._banks.present.values():
            for tensor in weights.values():
                if isinstance(tensor, torch.Tensor):
                    tensor.fill_(float("nan"))
        self._banks.present.clear()
