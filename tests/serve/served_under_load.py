"""Serves a model in a process of its own; prints its address, and at the end its planned and its measured peak, as JSON."""

import json
import sys
from pathlib import Path

from headrace.machine.meter import MemoryMeter
from headrace.serve import Serving, serve
from headrace.terms.options.serve_options import ServeOptions


def main() -> None:
    model, values = Path(sys.argv[1]), json.loads(sys.argv[2])
    found: list[Serving] = []

    def ready(serving: Serving) -> None:
        found.append(serving)
        print(json.dumps(serving.address), flush=True)

    with MemoryMeter() as meter:
        serve(model, ServeOptions.of(values), sink=lambda event: None, tell_plan=lambda plan: None, ready=ready)
        peak = meter.peak_bytes()
    plan = found[0].plan
    allowed = plan.results.allowed_bytes["host"]
    print(json.dumps({"seats": plan.seats, "planned": plan.peak("host"), "peak": peak, "allowed": allowed}), flush=True)


if __name__ == "__main__":
    main()
