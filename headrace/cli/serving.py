"""`headrace serve`: stderr gets plan, address and notes; answers go to clients."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.cli.generating import tell_plan, with_machine
from headrace.cli.screen import say, tell
from headrace.process import heavy_imports
from headrace.terms.errors import ConfigError
from headrace.terms.options.serve_options import ServeOptions


def serve_model(model: str, given: Mapping[str, Any]) -> None:
    """Serve a model until a signal comes.

    Raises:
        InputError, PlanInfeasible, StorageError: see the functions that it calls.
    """
    options = ServeOptions.of(given)
    try:
        with heavy_imports():
            from headrace.serve import Serving, serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "prometheus_client", "anyio"):
            raise
        raise ConfigError(
            f"serve: needs {error.name}, which is not installed; pip install -e '.[serve]' in the clone"
        ) from error

    def ready(found: Serving) -> None:
        tell(f"{found.name} answers at {found.address}; Ctrl-C ends it after what is under way")

    serve(Path(model), with_machine(options), sink=say, tell_plan=tell_plan, ready=ready)
