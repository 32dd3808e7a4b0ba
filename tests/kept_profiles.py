"""What models cost, profiled once: in memory for all tests of a process, and on disk for the processes to come.

On disk a profile is found by all that decides it: the code that profiles, the model's configuration and its classes, what was
asked, the libraries and the instruction set. Files come by rename, so that a second process or a kill never leaves half of one.
What a test exchanges in the deciding code changes profiles: it is given none that was made without, and leaves none to others.
"""

import hashlib
import os
import pickle
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
# What `headrace.model` may import decides a profile, and nothing else of the package does (tests/style/test_layers.py).
DECIDING = ("model", "codec", "files", "machine", "terms")
COUNTING = ("model", "codec")  # of these, those that count; what the others say of a machine is in the key
# Whose modules a model may have for its profile to be kept: those of which the key says the version.
KNOWN_PACKAGES = ("torch", "transformers")
MOST_VERSIONS = 4  # of the code, of which profiles are kept on disk


def nothing() -> list[Any]:
    """Return what a test has exchanged that exchanges nothing."""
    return []


def module_of(exchanged: Any) -> str:
    """Return the name of a module, or of the module in which a class or an object's class is."""
    return exchanged.__name__ if isinstance(exchanged, ModuleType) else getattr(exchanged, "__module__", "")


def digest_of(files: Iterable[Path]) -> str:
    """Return a digest of the files' names and contents."""
    digest = hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:20]


def instruction_set(information: Path = Path("/proc/cpuinfo")) -> str:
    """Return the names of the processor's instructions, or of the processor where the system does not say them."""
    lines = information.read_text().splitlines() if information.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def code_and_machine() -> str:
    """Return a digest of this package's code, the libraries and the instruction set."""
    import torch
    import transformers

    code = digest_of(path for name in DECIDING for path in (ROOT / "headrace" / name).rglob("*.py"))
    words = (code, torch.__version__, transformers.__version__, sys.version, instruction_set())
    return hashlib.sha256(repr(words).encode()).hexdigest()[:20]


class KeptProfiles:
    """Stands in for `profile`, which it calls for what is not known. `folder`: where profiles are kept, None for nowhere;
    `kind`: of what, where several are kept in one; `exchanged`: returns the modules and classes of which the test that runs now
    has exchanged something.
    """

    def __init__(self, profile: Callable[..., Any], folder: Path | None, kind: str = "") -> None:
        self._profile, self._kind, self._known = profile, kind, dict[tuple[Any, ...], Any]()
        self._folder, self.exchanged = None, nothing
        if folder is not None:
            self._folder = folder / code_and_machine()
            self._folder.mkdir(parents=True, exist_ok=True)
            os.utime(self._folder)
            forget_oldest(folder)

    def __call__(self, chain: Any, *shape: int, **options: Any) -> Any:
        """Return what `profile` does, which `other` makes quicker and does not change. A `code` for caches is in no key."""
        more = {"other": options.pop("other")} if "other" in options else {}
        if "code" in options:
            return self._profile(chain, *shape, **options)
        exchanged = {module_of(each) for each in self.exchanged()}
        if any(name.split(".")[:2] == ["headrace", room] for name in exchanged for room in COUNTING):
            return self._profile(chain, *shape, **more, **options)
        key = key_of(chain, shape, options)
        if key not in self._known:
            path = None if exchanged else self._path(chain, key)
            costs = read(path) if path else None
            if costs is None:
                costs = self._profile(chain, *shape, **more, **options)
                if path:
                    write(path, costs)
            self._known[key] = costs
        return self._known[key]

    def _path(self, chain: Any, key: tuple[Any, ...]) -> Path | None:
        kinds = {type(module) for module in chain.model.modules()}
        if self._folder is None or not all(kind.__module__.split(".")[0] in KNOWN_PACKAGES for kind in kinds):
            return None
        words = (
            self._kind,
            key,
            sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds),
            os.environ.get("THP_MEM_ALLOC_ENABLE"),
        )
        return self._folder / hashlib.sha256(repr(words).encode()).hexdigest()[:40]


def key_of(chain: Any, shape: tuple[int, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Return all that decides the costs of a chain, as long as code and machine are the same."""
    products = (chain.wide_products, chain.narrow_products)
    ways = (chain.dtype, chain.compute_dtype, chain.device, products, chain.replayable, chain.packs(shape[1]))
    libraries = (chain.config._attn_implementation, chain.config._experts_implementation)
    key = (chain.config.to_json_string(), shape, ways, libraries, chain.notes, tuple(chain.layouts))
    return (*key, *sorted(options.items()), chain.adapters and (chain.adapters.settings, *chain.adapters.layouts.values()))


def read(path: Path) -> Any:
    """Return what was kept at `path`, None if nothing was that can be read."""
    try:
        return pickle.loads(path.read_bytes())
    except (OSError, EOFError, pickle.UnpicklingError):
        return None


def write(path: Path, costs: Any) -> None:
    """Keep `costs` at `path`, at once or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix="partial-", delete=False) as file:
        file.write(pickle.dumps(costs))
    Path(file.name).replace(path)


def forget_oldest(folder: Path) -> None:
    """Leave the versions of the code that were used last."""
    versions = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in versions[MOST_VERSIONS:]:
        shutil.rmtree(path, ignore_errors=True)
