"""Headrace: fine-tune, compress and run language models that are larger than memory, on one machine.

`Engine` and `Generator` are imported at their first use, because torch takes a second and `headrace -h` should not. Call
`set_process_defaults` before torch is imported to get the command's settings: huge pages for tensors, short spinning.
"""

from typing import TYPE_CHECKING, Any

from headrace.terms.options.budget import Budget
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.options.optimizer import ParameterGroup
from headrace.terms.options.options import Options
from headrace.terms.options.run_options import RunOptions

if TYPE_CHECKING:
    from headrace.engine.trainer import Engine
    from headrace.generate.passes.generator import Generator
    from headrace.process import set_process_defaults

__all__ = [
    "Budget",
    "Engine",
    "GenerateOptions",
    "Generator",
    "Options",
    "ParameterGroup",
    "RunOptions",
    "set_process_defaults",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from headrace.engine.trainer import Engine

        return Engine
    if name == "Generator":
        from headrace.generate.passes.generator import Generator

        return Generator
    if name == "set_process_defaults":
        from headrace.process import set_process_defaults

        return set_process_defaults
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
