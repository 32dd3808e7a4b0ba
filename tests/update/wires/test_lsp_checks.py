"""When LSP looks at its projectors, what it compares, and when it takes others: `update.wires.lsp` without an engine."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from headrace.terms.layout import lay_out, part
from headrace.update.projectors import relative_error
from headrace.update.wires import Lsp, LspWire
from headrace.update.wires.wire import Moment, Proposal, UnitGradients

ROWS, COLUMNS, CHECK = 24, 32, 4
LAYOUT = lay_out("block", [("w", (ROWS, COLUMNS), (1.0, 0.0)), ("norm", (8,), (1.0, 0.0))])


class OneUnit:
    """One matrix under LSP, with the basis that was proposed last."""

    def __init__(self, alpha: float) -> None:
        self.wire = LspWire(Lsp(dimension=16, nonzeros=4, check=CHECK, alpha=alpha))
        trained = self.wire.trained(1, LAYOUT, is_block=True)
        assert trained is not None
        self.trained = trained
        (self.subspace,) = self.wire._of(1, LAYOUT)
        self.basis = torch.zeros(self.wire.basis(1, LAYOUT, trained).num_elements)

    def step(self, number: int, gradients: Sequence[Tensor]) -> tuple[Proposal | None, Tensor]:
        """Return what a step over micro-batches with these gradients proposes, and the compressed sum."""
        proposals: list[Proposal] = []
        flat, delivered, kept = torch.zeros(self.trained.num_elements), set[str](), dict[str, Tensor]()
        for micro, gradient in enumerate(gradients):
            moment = Moment(number, 1, micro, len(gradients), 0, self.basis, kept, proposals.append)
            sums = UnitGradients(self.trained, flat, delivered, moment)
            with self.wire.catch(1, LAYOUT, torch.zeros(LAYOUT.num_elements), sums) as caught:
                for spec in LAYOUT.parameters:
                    caught.sink(spec, gradient if spec.name == "w" else torch.ones(8))
        assert not kept, "nothing of a step is left to the next"
        (own,) = (spec for spec in self.trained.parameters if spec.name == "w")
        return (proposals[0] if proposals else None), part(flat, own).view(self.subspace.core)

    def compressed(self, gradient: Tensor) -> Tensor:
        return self.subspace.pair(self.wire._kind, self.basis).compress(gradient[None])


def planted(seed: int, place: int) -> list[Tensor]:
    """Return gradients of three micro-batches that are alike but for noise, of rank one in each eighth of rows."""
    generator = torch.Generator().manual_seed(place)
    common = torch.randn(ROWS, 1, generator=generator) @ torch.randn(1, COLUMNS, generator=generator)
    noise = torch.Generator().manual_seed(1000 + seed)
    return [common + 0.1 * torch.randn(ROWS, COLUMNS, generator=noise) for _ in range(3)]


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_projectors_are_looked_at_in_turn_and_changed_where_that_pays(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are fitted in the first step; then unit 1 is looked at each fourth step. Where the error is below alpha nothing is
    tried, else one fit, which is taken if it is better on the micro-batch that it has not seen. The step goes by the old ones.
    """
    unit, fits = OneUnit(alpha), 0
    fit = type(unit.subspace).fit

    def counted(*given: object) -> None:
        nonlocal fits
        fits += 1
        fit(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(type(unit.subspace), "fit", counted)
    for number in range(2 * CHECK + 1):
        gradients = planted(number, place=0 if number < 2 * CHECK else 1)  # at the second look it has turned
        before, fits = unit.basis.clone(), 0
        proposal, core = unit.step(number, gradients)
        if number == 0:
            assert proposal is not None
            assert (fits, proposal.replaces) == (1, False)
            unit.basis = proposal.basis
            torch.testing.assert_close(core, unit.compressed(sum(gradients)))  # type: ignore[arg-type]
            continue
        torch.testing.assert_close(core, unit.compressed(sum(gradients)), rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]
        assert torch.equal(unit.basis, before)
        if number % CHECK:
            assert (fits, proposal) == (0, None)
            continue
        assert proposal is not None
        error, after = proposal.errors["w"]
        held_out = gradients[-1][None]
        assert error == pytest.approx(float(relative_error(unit.subspace.pair(unit.wire._kind, before), held_out)), rel=1e-5)
        assert fits == (error > alpha), "one fit at a look, or none"
        if number == 2 * CHECK and alpha == 0:
            assert after is not None
            assert after < 0.95 * error
            assert proposal.replaces
            found = unit.subspace.pair(unit.wire._kind, proposal.basis)
            assert after == pytest.approx(float(relative_error(found, held_out)), rel=1e-5)
        else:  # still good, or below alpha
            assert proposal.basis.numel() == 0


def test_what_is_not_finite_is_seen_in_the_subspace_and_changes_no_projectors() -> None:
    unit = OneUnit(alpha=0.0)
    first, _ = unit.step(0, planted(0, 0))
    assert first is not None
    unit.basis = first.basis
    broken = planted(1, 1)
    broken[0][3, 5] = torch.inf
    proposal, core = unit.step(CHECK, broken)
    assert not core.isfinite().all()
    assert proposal is not None
    assert proposal.basis.numel() == 0


def test_micro_batches_add_up_to_one_batch() -> None:
    """Compression is linear: k micro-batches give the sum of one large one, but for the order of sums."""
    unit = OneUnit(alpha=1.0)
    first, _ = unit.step(0, planted(0, 0))
    assert first is not None
    unit.basis = first.basis
    gradients = planted(1, 1)
    _, several = unit.step(1, gradients)
    _, one = unit.step(1, [torch.stack(gradients).sum(dim=0)])
    torch.testing.assert_close(several, one, rtol=1e-4, atol=1e-4)
