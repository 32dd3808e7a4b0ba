"""What a block leaves for its backward, as attention on a GPU makes it: outputs that are None, numbers, tensors elsewhere."""

import torch

from headrace.flow.step.step_state import HOLE, Package
from headrace.model.blocks.replay import with_log_sumexp


def test_a_package_survives_being_taken_apart_and_put_together() -> None:
    hidden, out, sums, elsewhere = torch.ones(2), torch.ones(3), torch.ones(4), torch.empty(5, device="meta")
    package = Package(hidden, {3: ("attention", (out, sums, None, None, 7, elsewhere)), 5: ("product", out)}, frozenset({6}))
    taken: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> object:
        taken.append(tensor)
        return HOLE

    skeleton = package.like(take)
    assert [tensor.numel() for tensor in taken] == [2, 3, 4, 3], "None stays, and so does what is not on the block's device"
    back = iter([tensor.clone() for tensor in taken])
    again = skeleton.like(lambda hole: next(back))
    operator, outputs = again.kept[3]
    assert operator == "attention"
    assert torch.equal(outputs[0], out)
    assert torch.equal(outputs[1], sums)
    assert outputs[2:5] == (None, None, 7)
    assert outputs[5] is elsewhere
    assert torch.equal(again.hidden, hidden)
    assert again.skipped == {6}


def test_attention_is_asked_for_what_its_backward_needs() -> None:
    aten = torch.ops.aten
    inputs = (1, 2, 3, None, False, 0.0, True)
    assert with_log_sumexp(aten._scaled_dot_product_efficient_attention.default, inputs) == (1, 2, 3, None, True, 0.0, True)
    assert with_log_sumexp(aten._scaled_dot_product_cudnn_attention.default, inputs)[4] is True
    assert with_log_sumexp(aten._scaled_dot_product_flash_attention.default, (1, 2, 3, 0.0, True)) == (1, 2, 3, 0.0, True)
    assert with_log_sumexp(aten.mm.default, (1, 2)) == (1, 2)
