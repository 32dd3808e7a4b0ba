"""A hand-written block-major loop over `Chain`, one unit bound at a time, against plain PyTorch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_architectures import CONFIGS, DROPOUT_GPT2, flats_of, make_batches, make_config, make_plain

from headrace.model import Chain, MicroBatch, block_seed, shift_labels
from headrace.terms.errors import ConfigError, ModelError, StepFailed
from headrace.terms.options.optimizer import Optimizer, ParameterGroup

OPTIMIZER = Optimizer(weight_decay=0.1)


class Stepper:
    """One step over a chain: what the engine does, with everything in memory."""

    def __init__(self, chain: Chain, flats: list[torch.Tensor], chunk: int = 5, seed: int | None = None) -> None:
        self.chain, self.flats, self.chunk, self.seed = chain, flats, chunk, seed
        self.gradients: dict[str, torch.Tensor] = {}
        self.resident = (0, chain.num_blocks + 1) if chain.has_epilogue_unit else (0,)
        for unit in self.resident:
            chain.bind(unit, flats[unit], self.sink)

    def sink(self, spec: Any, gradient: torch.Tensor) -> None:
        assert gradient.shape == spec.shape
        held = self.gradients.get(spec.name)
        self.gradients[spec.name] = gradient.float().clone() if held is None else held + gradient

    def draw(self, unit: int, micro: int) -> None:
        if self.seed is not None:
            torch.manual_seed(block_seed(self.seed, 0, unit, micro))

    def step(self, batches: list[MicroBatch]) -> float:
        chain = self.chain
        trained = sum(int((shift_labels(b.labels) != -100).sum()) for b in batches)
        hidden, calls, inputs, asides = self.forward(batches)
        loss, gradients = 0.0, []
        for batch, final in zip(batches, hidden, strict=True):
            targets, gradient = shift_labels(batch.labels), torch.zeros_like(final)
            for start in range(0, final.shape[1], self.chunk):
                part = slice(start, start + self.chunk)
                leaf = final[:, part].detach().requires_grad_()
                share = chain.loss_sum(batch.input_ids[:, part], leaf, targets[:, part]) / trained
                share.backward()
                loss, gradient[:, part] = loss + float(share.detach()), leaf.grad
            gradients.append(gradient)
        loss_of_asides, aside_gradients = self.aside_gradients(asides, batches)
        for index in reversed(range(chain.num_blocks)):
            chain.bind(index + 1, self.flats[index + 1], self.sink)
            for micro in range(len(batches)):
                leaf = inputs[index][micro].detach().requires_grad_()
                self.draw(index + 1, micro)
                result = chain.block(index, leaf, calls[micro][index])
                torch.autograd.backward(
                    [result.hidden, *result.asides], [gradients[micro], *(g[micro] for g in aside_gradients[index])]
                )
                gradients[micro] = leaf.grad
            chain.release(index + 1)
        for micro, batch in enumerate(batches):
            self.draw(0, micro)
            chain.prologue(batch).hidden.backward(gradients[micro])
        return loss + loss_of_asides

    @torch.no_grad()
    def forward(self, batches: list[MicroBatch]) -> tuple[Any, Any, Any, Any]:
        chain, starts = self.chain, []
        for micro, batch in enumerate(batches):
            self.draw(0, micro)
            starts.append(chain.prologue(batch))
        hidden, calls = [s.hidden for s in starts], [s.calls for s in starts]
        inputs, asides = [], []
        for index in range(chain.num_blocks):
            chain.bind(index + 1, self.flats[index + 1], None)
            inputs.append(list(hidden))
            results = []
            for micro in range(len(batches)):
                self.draw(index + 1, micro)
                results.append(chain.block(index, hidden[micro], calls[micro][index]))
            hidden = [result.hidden for result in results]
            asides.append([torch.cat(parts) for parts in zip(*(result.asides for result in results), strict=True)])
            chain.release(index + 1)
        return hidden, calls, inputs, asides

    def aside_gradients(self, asides: Any, batches: list[MicroBatch]) -> tuple[float, Any]:
        flat = [logits.requires_grad_() for block in asides for logits in block]
        if not flat:
            return 0.0, [[] for _ in asides]
        masks = [torch.ones_like(b.input_ids) if b.attention_mask is None else b.attention_mask for b in batches]
        loss = self.chain.aside_loss(flat, torch.cat([mask.flatten() for mask in masks]))
        left = iter(torch.autograd.grad(loss, flat))
        rows = [mask.numel() for mask in masks]
        return float(loss.detach()), [[next(left).split(rows) for _ in block] for block in asides]


def plain_gradients(plain: Any, batches: list[MicroBatch], coefficient: float = 0.0) -> tuple[float, dict[str, torch.Tensor]]:
    """Token-mean loss of all batches and its gradients by plain autograd; the auxiliary loss over all tokens at once."""
    trained = sum(int((shift_labels(b.labels) != -100).sum()) for b in batches)
    loss, routed = torch.zeros(()), []
    for batch in batches:
        wanted = {"output_router_logits": True} if coefficient else {}
        out = plain(input_ids=batch.input_ids, attention_mask=batch.attention_mask, **wanted)
        loss = (
            loss
            + F.cross_entropy(
                out.logits.float().flatten(0, 1), shift_labels(batch.labels).flatten(), reduction="sum", ignore_index=-100
            )
            / trained
        )
        routed.append(getattr(out, "router_logits", ()) or ())
    if coefficient:
        loss = loss + coefficient * switch_loss(
            plain.config, [torch.cat(layer) for layer in zip(*routed, strict=True)], batches
        )
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def switch_loss(config: Any, logits: list[torch.Tensor], batches: list[MicroBatch]) -> torch.Tensor:
    """Load-balancing loss (Switch Transformer, equations 4-6) over all layers and all tokens that are not padding."""
    masks = [torch.ones_like(b.input_ids) if b.attention_mask is None else b.attention_mask for b in batches]
    kept = torch.cat([mask.flatten() for mask in masks]).bool()
    weights = torch.cat([layer[kept] for layer in logits]).softmax(-1)
    chosen = weights.topk(config.num_experts_per_tok, dim=-1).indices
    experts = weights.shape[-1]
    share = F.one_hot(chosen, experts).sum(1).float().mean(0)
    return experts * (share * weights.mean(0)).sum()


def assert_same_gradients(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    assert set(plain) <= set(ours)
    largest = max(float(g.abs().max()) for g in plain.values())
    for name, expected in plain.items():
        difference = float((ours[name] - expected).abs().max())
        assert difference <= tolerance * max(1.0, largest), f"{name}: {difference}"


@pytest.mark.parametrize("padded", [False, True])
def test_gradients_equal_plain_pytorch(case: Any, padded: bool) -> None:
    config = make_config(case)
    plain, batches = make_plain(config), make_batches(padded)
    chain = Chain.from_config(config, "float32", OPTIMIZER)
    stepper = Stepper(chain, flats_of(chain, plain))
    loss = stepper.step(batches)
    coefficient = case[1].get("router_aux_loss_coef", 0.0)
    expected, gradients = plain_gradients(plain, batches, coefficient)
    assert loss == pytest.approx(expected, abs=2e-6)
    assert_same_gradients(stepper.gradients, gradients)
    assert chain.collects_asides == bool(coefficient)
    assert chain.num_parameters == sum(p.numel() for p in plain.parameters())


def test_any_split_gives_the_same_step() -> None:
    config = make_config(CONFIGS["mixtral-routed"])
    plain = make_plain(config)
    rows = make_batches(padded=False)[0]
    split = [MicroBatch(rows.input_ids[i : i + 1], rows.labels[i : i + 1]) for i in range(2)]
    results = []
    for batches in ([rows], split):
        chain = Chain.from_config(config, "float32", OPTIMIZER)
        stepper = Stepper(chain, flats_of(chain, plain), chunk=64 if len(batches) == 1 else 3)
        results.append((stepper.step(batches), stepper.gradients))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    assert_same_gradients(results[0][1], results[1][1])


def test_dropout_is_replayed_from_the_seed() -> None:
    config = make_config(DROPOUT_GPT2)
    plain, batches = make_plain(config), make_batches(padded=True)
    chain = Chain.from_config(config, "float32", OPTIMIZER)
    assert chain.has_dropout
    stepper = Stepper(chain, flats_of(chain, plain), seed=7)
    loss = stepper.step(batches)
    # The reference: the plain model, whose blocks and embedding seed themselves in the same way.
    micro = [0]
    for unit, module in enumerate([plain.transformer.drop, *plain.transformer.h]):
        module.register_forward_pre_hook(lambda m, a, unit=unit: torch.manual_seed(block_seed(7, 0, unit, micro[0])) and None)
    trained = sum(int((shift_labels(b.labels) != -100).sum()) for b in batches)
    total = 0.0
    for micro[0], batch in enumerate(batches):
        logits = plain(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        targets = shift_labels(batch.labels)
        part = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / trained
        part.backward()
        total += float(part.detach())
    assert loss == pytest.approx(total, abs=2e-6)
    assert_same_gradients(stepper.gradients, {n: p.grad for n, p in plain.named_parameters() if p.grad is not None})


def test_bfloat16_blocks_equal_the_stock_model() -> None:
    config = make_config(CONFIGS["qwen3"])
    plain = make_plain(config, torch.bfloat16)
    chain = Chain.from_config(config, "bfloat16", OPTIMIZER)
    for unit, flat in enumerate(flats_of(chain, plain)):
        chain.bind(unit, flat, None)
    batch = make_batches(padded=True)[0]
    with torch.no_grad():
        start = chain.prologue(batch)
        hidden = start.hidden
        for index, call in enumerate(start.calls):
            hidden = chain.block(index, hidden, call).hidden
        loss = chain.loss_sum(batch.input_ids, hidden, shift_labels(batch.labels))
        logits = plain(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    targets = shift_labels(batch.labels).flatten()
    assert torch.equal(loss, F.cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum"))


def test_layouts_place_every_parameter_once(case: Any) -> None:
    config = make_config(case)
    chain = Chain.from_config(
        config, "bfloat16", Optimizer(weight_decay=0.1, groups=(ParameterGroup(pattern="embed", weight_decay=0),))
    )
    shapes = {name: tuple(p.shape) for name, p in make_plain(config).named_parameters()}
    placed = [spec for layout in chain.layouts for spec in layout.parameters]
    assert {spec.name: spec.shape for spec in placed} == shapes
    assert len(placed) == len(shapes)
    names = [layout.name for layout in chain.layouts[: chain.num_blocks + 1]]
    assert names == ["prologue", *(f"block.{i}" for i in range(chain.num_blocks))]
    assert chain.layouts[0].parameters
    assert len({layout.num_elements for layout in chain.layouts[1 : chain.num_blocks + 1]}) <= 2


def test_prologue_and_epilogue_membership() -> None:
    tied = Chain.from_config(make_config(CONFIGS["llama-tied"]), "float32", OPTIMIZER)
    assert [spec.name for spec in tied.layouts[0].parameters] == ["model.embed_tokens.weight"]
    assert [spec.name for spec in tied.layouts[-1].parameters] == ["model.norm.weight"]
    assert tied.tied
    untied = Chain.from_config(make_config(CONFIGS["llama"]), "float32", OPTIMIZER)
    assert {spec.name for spec in untied.layouts[-1].parameters} == {"model.norm.weight", "lm_head.weight"}
    assert not untied.tied
    projected = Chain.from_config(make_config(CONFIGS["opt-projected"]), "float32", OPTIMIZER)
    prologue = {spec.name for spec in projected.layouts[0].parameters}
    assert "model.decoder.project_in.weight" in prologue
    assert "model.decoder.project_out.weight" not in prologue


def test_an_unbound_unit_is_an_error_not_garbage() -> None:
    config = make_config(CONFIGS["llama"])
    chain = Chain.from_config(config, "float32", OPTIMIZER)
    flats, batch = flats_of(chain, make_plain(config)), make_batches(False)[0]
    with pytest.raises(StepFailed, match="unit 0"):
        chain.prologue(batch)
    chain.bind(0, flats[0], None)
    start = chain.prologue(batch)
    with pytest.raises(StepFailed, match=r"unit 1 \(block.0\)"):
        chain.block(0, start.hidden, start.calls[0])
    with pytest.raises(StepFailed, match="epilogue"):
        chain.loss_sum(batch.input_ids, start.hidden, shift_labels(batch.labels))
    chain.bind(1, flats[1], None)
    chain.block(0, start.hidden, start.calls[0])
    chain.release(1)
    assert all(p.device.type == "meta" for p in chain.model.model.layers[0].parameters())
    with pytest.raises(StepFailed):
        chain.block(0, start.hidden, start.calls[0])


def test_bind_refuses_a_wrong_buffer() -> None:
    chain = Chain.from_config(make_config(CONFIGS["llama"]), "float32", OPTIMIZER)
    elements = chain.layouts[1].num_elements
    for wrong in (torch.zeros(elements - 1), torch.zeros(elements, dtype=torch.float64), torch.zeros(1, elements)):
        with pytest.raises(ModelError, match=str(elements)):
            chain.bind(1, wrong, None)


def test_parameters_are_views_of_the_flat_buffer() -> None:
    chain = Chain.from_config(make_config(CONFIGS["llama"]), "float32", OPTIMIZER)
    flat = torch.zeros(chain.layouts[1].num_elements)
    chain.bind(1, flat, None)
    spec = chain.layouts[1].parameters[0]
    flat[spec.offset : spec.offset + spec.num_elements] = 3.0
    assert bool((chain.model.get_parameter(spec.name) == 3.0).all())


def test_calls_share_their_tensors_between_blocks() -> None:
    config = make_config(CONFIGS["llama"])
    chain = Chain.from_config(config, "float32", OPTIMIZER)
    chain.bind(0, flats_of(chain, make_plain(config))[0], None)
    calls = chain.prologue(make_batches(padded=True)[0]).calls
    assert calls[0].kwargs["position_embeddings"][0] is calls[-1].kwargs["position_embeddings"][0]
    assert calls[0].kwargs["attention_mask"] is calls[-1].kwargs["attention_mask"]


@pytest.mark.wide
def test_packing_support_is_found_by_trying() -> None:
    names = ("llama", "qwen3", "opt", "gpt-oss", "bloom", "nemotron-h")
    support = {name: Chain.from_config(make_config(CONFIGS[name]), "float32", OPTIMIZER) for name in names}
    assert support["llama"].packs(10**9)
    assert support["qwen3"].packs(10**9)
    assert support["opt"].packs_by_masks
    assert support["opt"].packs(10**9)
    assert support["gpt-oss"].packs(10**9)
    for name in ("nemotron-h", "bloom"):
        assert support[name].packs(2)
        assert support[name].runs_by_samples(2)
        assert "see each other" in support[name].packing_reason
    assert not any(support[name].runs_by_samples(10**9) for name in ("llama", "qwen3", "opt", "gpt-oss"))


def test_building_does_not_move_the_global_generator() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    Chain.from_config(make_config(CONFIGS["mistral"]), "float32", OPTIMIZER)
    assert torch.equal(before, torch.get_rng_state())


def test_block_seeds_differ_in_every_coordinate() -> None:
    seeds = {block_seed(s, t, u, m) for s in (0, 1) for t in (0, 1, 10) for u in (0, 1, 11) for m in (0, 1)}
    assert len(seeds) == 2 * 3 * 3 * 2
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert block_seed(1, 2, 3, 4) == block_seed(1, 2, 3, 4)


def test_unknown_compute_dtype() -> None:
    with pytest.raises(ConfigError, match="float8"):
        Chain.from_config(make_config(CONFIGS["llama"]), "float8", OPTIMIZER)
