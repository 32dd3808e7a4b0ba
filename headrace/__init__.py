"""Headrace: fine-tune language models many times larger than the GPU's memory on one machine.

`Engine` and `Generator` are loaded when they are first asked for: torch takes a second, and the command line's help should not.
`set_process_defaults`, called before torch is imported, sets what the command sets: huge pages for tensors, short spinning.
"""

from typing import TYPE_CHECKING, Any

from headrace.terms.budget import Budget
from headrace.terms.generate_options import GenerateOptions
from headrace.terms.optimizer import ParameterGroup
from headrace.terms.options import Options
from headrace.terms.run_options import RunOptions

if TYPE_CHECKING:
    from headrace.cli.environment import set_process_defaults
    from headrace.engine.trainer import Engine
    from headrace.generate.generator import Generator

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
        from headrace.generate.generator import Generator

        return Generator
    if name == "set_process_defaults":
        from headrace.cli.environment import set_process_defaults

        return set_process_defaults
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
