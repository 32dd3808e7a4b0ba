"""Blocks under `torch.compile`: one graph for forward, one for recompute, shared by all blocks that are alike.

The compiled function has the block as its argument, so parameters enter the graph as inputs and binding other weights compiles
nothing. The compiler's own guards distinguish blocks whose code reads different values.
Invariants: a block is one whole graph, or the option is refused. The graph is a function of the shapes alone, never of earlier
shapes. So a resumed run computes what an unbroken one does (docs/decisions/0008).
"""

from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
import transformers
from torch import nn

from headrace.model.parts.runner import Runner, run_block
from headrace.model.trials.block_major import compare_gradients
from headrace.model.trials.instance import tiny_samples
from headrace.model.trials.trial import tried
from headrace.terms.errors import ConfigError

# There are two graphs for each kind of block, shape of a micro-batch and kind of mask; torch's own limit of 8 is too small.
_MOST_GRAPHS = 256
# Traces without generating code: it tells in a second instead of a minute whether a block is one graph.
_TRACE_ONLY = "aot_eager"


class CompiledBlocks:
    """Runs blocks compiled, in the place of `run_block`. `backend` is torch's name of what generates code.

    Raises (when called):
        ConfigError: a block could not be compiled for these shapes.
    """

    def __init__(self, backend: str = "inductor") -> None:
        # The compiler keeps graphs by code object, and its guards do not see the hooks that catch router logits. If the code
        # object were shared, one model's blocks would run another's graph and lose those logits without a word.
        own = FunctionType(run_block.__code__.replace(), run_block.__globals__)
        self._run = torch.compile(own, fullgraph=True, dynamic=False, backend=backend, options=_options(backend))

    def __call__(self, block: nn.Module, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `block` on hidden states (b, T, hidden)."""
        errors = _compiler_errors()
        try:
            with _many_graphs():
                return self._run(block, hidden, args, kwargs)
        except errors as error:
            raise ConfigError(
                f"compile_blocks: {type(block).__name__} on {tuple(hidden.shape)} cannot be compiled: {_first_line(error)}; "
                "leave compile_blocks out"
            ) from error


def check_compiler(device: torch.device) -> None:
    """Compile a tiny function for `device` and run it.

    Raises:
        ConfigError: it does not work: no C++ compiler (CPU), no Triton (CUDA), or a broken one; the message says which.
    """
    needed = "Triton (part of torch's CUDA builds)" if device.type == "cuda" else "a C++ compiler (g++ or clang++)"
    try:
        found = torch.compile(_tiny_function, fullgraph=True, dynamic=False)(torch.ones(8, device=device, dtype=torch.float32))
    except Exception as error:  # whatever compilers raise, which are other people's programs
        raise ConfigError(
            f"compile_blocks: torch.compile was asked for, but does not work on {device.type} here: {_first_line(error)}; "
            f"it needs {needed}: install it, or leave compile_blocks out"
        ) from error
    if not torch.equal(found.cpu(), torch.full((8,), 4.0, dtype=torch.float32)):
        raise ConfigError(
            f"compile_blocks: code compiled for {device.type} here gives {found.tolist()} instead of 4.0 each; "
            "mend the compiler that torch finds, or leave compile_blocks out"
        )


def check_compiles(config: Any) -> None:
    """Trace the blocks of a tiny instance, each as one graph, and compare loss and gradients with those of the model's code.

    Raises:
        ConfigError: a block breaks into several graphs, cannot be traced, or computes something else; the message says why.
    """
    reason = _why_not(config)
    if reason:
        raise ConfigError(
            f"compile_blocks: the blocks of {type(config).__name__} cannot be compiled: {reason}; leave compile_blocks out, or "
            f"try newer versions (here are torch {torch.__version__} and transformers {transformers.__version__})"
        )


@tried
def _why_not(runner: Runner) -> str:
    try:
        return compare_gradients(runner, CompiledBlocks(_TRACE_ONLY), tiny_samples(runner.model)[:1])
    except ConfigError as error:
        return _first_line(error.__cause__ or error)


def _tiny_function(values: torch.Tensor) -> torch.Tensor:
    return (values * 3 + 1).relu()


def _options(backend: str) -> dict[str, Any] | None:
    """Return options with which the same shapes always get the same code, if this torch has them: no autotuning."""
    if backend != "inductor":
        return None
    import torch._inductor.config as inductor  # late: it takes a second and 150 MB, and few runs compile

    return {"deterministic": True} if hasattr(inductor, "deterministic") else None


def _many_graphs() -> AbstractContextManager[Any]:
    import torch._dynamo.config as dynamo

    return dynamo.patch(recompile_limit=_MOST_GRAPHS)  # type: ignore[no-any-return]


def _compiler_errors() -> type[BaseException]:
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def _first_line(error: BaseException) -> str:
    """Return what happened, without torch's own call chain."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):  # "backend='inductor' raised:", and then what it raised
        return lines[1].rstrip(".")
    return lines[0].rstrip(".") if lines else type(error).__name__
