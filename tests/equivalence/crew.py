"""A node and its workers for tests: the node's engine here, workers in threads of this process, all over loopback."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import headrace
from headrace.engine.seams import Seams
from headrace.peers.meet.address import Address
from headrace.peers.meet.listener import Listener
from headrace.peers.node.crowd import Crowd
from headrace.peers.node.node import NodeEngine
from headrace.peers.node.working import work
from headrace.plan.value.plan import Plan
from headrace.terms.events import Sink
from headrace.terms.options.muster import Muster


class Crew:
    """A listener with its crowd, and `num_workers` workers that come to it, each with its own options.

    Workers are threads: what one raises is raised by `join`.
    """

    def __init__(self, num_workers: int = 1, silence_seconds: float = 60.0, muster: Muster | None = None, **own: Any) -> None:
        self.listener = Listener(Address("127.0.0.1", 0), version=headrace.__version__, silence_seconds=silence_seconds)
        self.crowd = Crowd(self.listener, muster or Muster.of(num_workers))
        self._own, self._threads, self.errors = {"host_memory": "4GiB"} | own, list[threading.Thread](), list[BaseException]()
        self.crowd.heed(self._raise)
        for number in range(num_workers):
            self.hire(f"{number + 1}")

    def hire(self, name: str, asked: dict[str, Any] | None = None, **own: Any) -> None:
        """Start one more worker, with more options of its own; what is `asked` must be the node's."""
        thread = threading.Thread(target=self._work, args=(name, self._own | own, asked), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _work(self, name: str, own: dict[str, Any], asked: dict[str, Any] | None) -> None:
        try:
            work(self.listener.address, headrace.Options(**own), name=name, wait_seconds=1.0, asked=asked)
        except BaseException as error:
            self.errors.append(error)

    def _raise(self) -> None:
        """Raise what a worker raised: who waits for it would wait for ever."""
        if self.errors:
            raise self.errors[0]

    def join(self) -> None:
        """Let the workers go, and see that they went well."""
        self.crowd.dismiss()
        for thread in self._threads:
            thread.join(200)
        assert self.errors == []
        self.listener.close()


@contextmanager
def crew(num_workers: int = 1, **own: Any) -> Iterator[Crew]:
    """Give a crew, and let it go at the end."""
    made = Crew(num_workers, **own)
    try:
        yield made
        made.join()
    finally:
        made.listener.close()


def node_options(output: Path, batches: Sequence[dict[str, torch.Tensor]], **options: Any) -> headrace.Options:
    """Return the options of a run over `batches`, as `short_run` has them."""
    rows, length = batches[0]["input_ids"].shape
    given: dict[str, Any] = {"host_memory": "4GiB", "max_grad_norm": None, "learning_rate": 1e-3, "weight_decay": 0.1}
    return headrace.Options(output=output, tokens_per_step=rows * length, sequence_length=length, **(given | options))


def node_run(
    path: Path,
    output: Path,
    batches: Sequence[dict[str, torch.Tensor]],
    made: Crew,
    *,
    plan: Plan | None = None,
    sink: Sink | None = None,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and final weights of a run over `batches` that `made` computes."""
    seams = Seams(workers=made.crowd)
    out = output.parent / f"{output.name}-out"
    with NodeEngine.open(path, node_options(output, batches, **options), plan=plan, seams=seams, sink=sink) as engine:
        losses = [engine.step(batch).loss for batch in batches]
        engine.save_pretrained(out)
    return losses, weights_of(out)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a model directory."""
    weights: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        weights |= load_file(shard)
    return weights
