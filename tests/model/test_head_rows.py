"""The head by ranges of its rows gives the log-probabilities and gradients of the whole head, within the error of rounding."""

from typing import Any

import pytest
import torch
from tiers import sampled
from tiny_architectures import CONFIGS, flats_of, make_batches, make_config, make_plain

from headrace.model import Chain, shift_labels
from headrace.model.blocks.chain_values import IGNORED
from headrace.model.parts import head_rows
from headrace.model.parts.head_rows import rows_of_range
from headrace.model.trials.head_check import takes_head_by_rows
from headrace.model.trials.instance import tiny_runner
from headrace.model.trials.thresholds import architecture_key
from headrace.terms.options.optimizer import Optimizer

_ROWS = 48  # of 160: the last range is smaller


class _Taken:
    """Log-probabilities of a chunk of positions, and the gradients that a backward of any gradient of them makes."""

    def __init__(self, chain: Chain, plain: Any, rows: int) -> None:
        self.gradients: dict[str, torch.Tensor] = {}
        self.largest = 0
        flats = [flat.to(chain.dtype) for flat in flats_of(chain, plain)]
        ends = (0, chain.num_blocks + 1) if chain.has_epilogue_unit else (0,)
        for unit in ends:
            chain.bind(unit, flats[unit], self._whole, rows=self._rows)
        (batch, *_) = make_batches(padded=False)
        self.targets = shift_labels(batch.labels)
        hidden = torch.randn(*batch.input_ids.shape, chain.hidden_size, generator=torch.Generator().manual_seed(1))
        self.hidden = leaf = hidden.to(chain.dtype).requires_grad_()
        chain.take_head_by(rows)
        found = chain.label_log_probs(batch.input_ids, leaf, self.targets)
        self.wanted = torch.linspace(-1.0, 2.0, found.numel()).view(found.shape) * (self.targets != IGNORED)
        found.backward(self.wanted)
        self.log_probs = torch.where(self.targets != IGNORED, found.detach(), 0.0)
        assert leaf.grad is not None
        self.gradients["hidden states"] = leaf.grad.flatten()
        for unit in ends:
            chain.release(unit)

    def _whole(self, spec: Any, gradient: torch.Tensor) -> None:
        self._rows(spec, gradient, 0)

    def _rows(self, spec: Any, gradient: torch.Tensor, start: int) -> None:
        if len(spec.shape) == 2:
            self.largest = max(self.largest, gradient.numel())
        into = self.gradients.setdefault(spec.name, torch.zeros(spec.num_elements, dtype=gradient.dtype))
        into[start : start + gradient.numel()] += gradient.flatten()


def _chain(name: str, dtype: str = "float32", **changes: Any) -> tuple[Chain, Any]:
    kind, values = CONFIGS[name]
    config = make_config((kind, {**values, **changes}))
    return Chain.from_config(config, dtype, Optimizer()), make_plain(config)


@pytest.mark.parametrize("name", sampled(CONFIGS, ("llama", "llama-tied", "gemma2", "cohere-qk-norm")))
def test_ranges_give_log_probabilities_and_gradients_of_the_whole_head(name: str) -> None:
    chain, plain = _chain(name)
    whole, by_rows = _Taken(chain, plain, 0), _Taken(chain, plain, _ROWS)
    assert chain.head_rows == _ROWS
    torch.testing.assert_close(by_rows.log_probs, whole.log_probs, rtol=1e-5, atol=1e-5)
    assert by_rows.gradients.keys() == whole.gradients.keys()
    for key, gradient in whole.gradients.items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(by_rows.gradients[key], gradient, rtol=0.0, atol=1e-5 * largest, msg=key)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranges_are_as_near_to_float64_as_the_whole_head_is(dtype: str) -> None:
    chain, plain = _chain("llama", dtype, vocab_size=4001)
    whole, by_rows = _Taken(chain, plain, 0), _Taken(chain, plain, 512)
    # The definition, in float64, on the same numbers.
    exact = plain.to(chain.dtype).double()
    hidden = whole.hidden.detach().double().requires_grad_()
    log_probs = exact.lm_head(exact.model.norm(hidden)).log_softmax(-1)
    found = log_probs.gather(-1, whole.targets.clamp(min=0)[..., None])[..., 0] * (whole.targets != IGNORED)
    found.backward(whole.wanted.double())
    assert exact.lm_head.weight.grad is not None
    assert hidden.grad is not None
    for one, other, true in (
        (whole.log_probs, by_rows.log_probs, found.detach()),
        (whole.gradients["hidden states"], by_rows.gradients["hidden states"], hidden.grad.flatten()),
        (whole.gradients["lm_head.weight"], by_rows.gradients["lm_head.weight"], exact.lm_head.weight.grad.flatten()),
    ):
        error, usual = (float((each.double() - true).norm()) for each in (other, one))
        assert error <= 1.5 * usual + 1e-9


@pytest.mark.parametrize("kept", [0, 4 * 31 * _ROWS], ids=["none", "last"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_logits_that_are_computed_again_give_the_bits_of_kept_ones(
    name: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, plain = _chain(name)
    expected = _Taken(chain, plain, _ROWS)
    monkeypatch.setattr(head_rows, "_KEPT_BYTES", kept)
    found = _Taken(chain, plain, _ROWS)
    assert torch.equal(found.log_probs, expected.log_probs)
    assert all(torch.equal(found.gradients[key], want) for key, want in expected.gradients.items())


def test_no_gradient_of_the_head_is_larger_than_a_range() -> None:
    chain, plain = _chain("llama")
    assert _Taken(chain, plain, _ROWS).largest == _ROWS * chain.hidden_size


def test_a_sink_of_whole_gradients_gets_their_rows_added_up() -> None:
    chain, plain = _chain("llama")
    expected, flats, summed = _Taken(chain, plain, _ROWS), flats_of(chain, plain), torch.zeros(160, 32)
    for unit in (0, chain.num_blocks + 1):
        chain.bind(unit, flats[unit], lambda spec, gradient: summed.add_(gradient) if spec.name == "lm_head.weight" else None)
    ids = make_batches(padded=False)[0].input_ids
    chain.label_log_probs(ids, expected.hidden.detach(), expected.targets).backward(expected.wanted)
    torch.testing.assert_close(summed.flatten(), expected.gradients["lm_head.weight"])


def test_rows_of_a_range_follow_from_the_model_alone() -> None:
    assert rows_of_range(512, 64) == 0  # one range has all
    assert rows_of_range(49152, 576) == 12288
    for vocabulary, width in ((151936, 1024), (262144, 640), (128256, 4096), (32000, 2048)):
        rows = rows_of_range(vocabulary, width)
        assert rows % 64 == 0
        assert rows * width <= (8 << 20) + 64 * width
    assert Chain.from_config(make_config(CONFIGS["llama"]), "float32", Optimizer()).head_rows == 0


def test_logits_that_need_other_rows_keep_the_head_whole() -> None:
    config = make_config(CONFIGS["llama"])
    runner = tiny_runner(type(config), architecture_key(config))
    assert takes_head_by_rows(runner)
    forward = runner.model.forward

    def normed(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = out.logits / out.logits.norm(dim=-1, keepdim=True)
        return out

    runner.model.forward = normed
    assert not takes_head_by_rows(runner)
    assert runner.head_rows == 0
    assert all(parameter.grad is None for parameter in runner.model.parameters())
