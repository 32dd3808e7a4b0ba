"""The whole path, from a model to its use. `make demo` runs it: on a real model where pip can bring one, else (or with
`--model made`) on one that is made on the spot.
"""

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from made_model import MadeModel
from python_docs import ASKED
from real_model import NoRealModel, real_model
from real_run import RealRun
from stage import ROOT, Places, say, show, title

sys.path.append(str(ROOT))  # so that it also runs without an installation
from headrace.process import cache_directory, machine_profile_path, set_process_defaults


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=ROOT / "demo-run", help="is emptied first")
    parser.add_argument(
        "--model", choices=("real", "made"), default="real", help="default: the real one, where it is to be had"
    )
    arguments = parser.parse_args()
    directory = arguments.directory.resolve()
    started = time.monotonic()
    set_process_defaults()
    if directory.exists():
        shutil.rmtree(directory)
    places = Places(directory)
    places.ssd.mkdir(parents=True)
    if arguments.model == "made" or not on_the_real_model(places):
        stay_inside(directory)
        MadeModel(places).run()
    title(f"done in {time.monotonic() - started:.0f} s; everything lies in {show(directory)}")
    say("Now you, as these stand (`. .venv/bin/activate` first); README.md says what they print:\n")
    for command in next_commands(places):
        say(command)


def next_commands(places: Places) -> tuple[str, ...]:
    """Return commands of README.md that work on what the demo leaves."""
    model, data, ssd, run = map(show, (places.model, places.data, places.ssd, places.run))
    return (
        f"headrace plan {model} --data {data} --ssd {ssd} --host-memory 1GiB --sequence-length 256 --tokens-per-step 256",
        f'headrace generate {run} --prompt "What does {ASKED} do in Python?" --temperature 0',
        f"headrace serve {run}",
    )


def on_the_real_model(places: Places) -> bool:
    """Show the real model; return whether it can be had here, and say in one line why not."""
    try:
        kept = real_model(cache_directory(), lambda text: say(show(text)))
        places.model.symlink_to(kept)
        stay_inside(places.directory)
        RealRun(places).run()
    except NoRealModel as error:
        places.model.unlink(missing_ok=True)
        say(f"A model made on the spot instead of a real one: {error}")
        return False
    return True


def stay_inside(directory: Path) -> None:
    """Let what `headrace` keeps for later runs lie in the demo's directory; a measured machine is taken from where it is."""
    os.environ["XDG_CACHE_HOME"] = str(directory / "cache")
    if not machine_profile_path().exists():
        os.environ["XDG_CONFIG_HOME"] = str(directory / "config")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("\ninterrupted; `make demo` begins again") from None
