"""The golden plans: what the planner answers to 32 questions, stored so that a change of any figure is seen and reviewed.

    make golden                                                   # renews all of them: CPU minutes
    python tests/plan/golden_plans.py generate-mixtral cluster    # renews those whose names begin so

Every machine is named, every budget given, and none is this one, so the process and its memory do not count. They hold under
the versions of constraints.txt alone. A stored plan is what the command's `--json` says, shortened (`compact`).
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import torch  # noqa: E402
from promise import COMBINATIONS, SEQUENCE_LENGTH, Combination  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from shapes import SHAPES  # noqa: E402
from transformers import CONFIG_MAPPING, AutoModelForCausalLM  # noqa: E402

from headrace.ask.answer import plan_model  # noqa: E402
from headrace.codec.published import PackQuantized  # noqa: E402
from headrace.compress.planner import plan_compression  # noqa: E402
from headrace.generate.passes.asked import plan_generation  # noqa: E402
from headrace.peers.node.planning import plan_cluster  # noqa: E402
from headrace.plan.clock.machine_profiles import load_profile  # noqa: E402
from headrace.terms.options.generate_options import GenerateOptions  # noqa: E402
from headrace.terms.options.options import Options  # noqa: E402
from headrace.terms.options.plan_options import PlanOptions  # noqa: E402

STORED = Path(__file__).parent / "golden"
# Two cores, one SSD and no GPU: the machine on which the combinations of bench/promise.py are trained.
TWO_CORES = STORED / "machines" / "two-cores.json"
LLAMA = {"max_position_embeddings": 32768, "tie_word_embeddings": False}
LLAMA_8B = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
MIXTRAL = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_local_experts": 8}
SMALL = LLAMA | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
# What is said of a plan in sentences, which may be said better.
WORDS = {"bottleneck", "change", "notes", "wear"}
Make = Callable[[Path], dict[str, Any]]


def written(folder: Path, kind: str, sizes: dict[str, Any]) -> Path:
    """Write the config.json of a model; nothing else of it is needed."""
    (folder / "config.json").write_text(CONFIG_MAPPING[kind](**sizes, dtype="bfloat16").to_json_string(), encoding="utf-8")
    return folder


def training(each: Combination) -> Make:
    shape = SHAPES[each.size]
    sizes = LLAMA | {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "vocab_size": shape.vocabulary,
    }
    options = {
        "tokens_per_step": each.tokens_per_step,
        "sequence_length": min(SEQUENCE_LENGTH, each.tokens_per_step),
        "host_memory": each.host_memory,
        "max_grad_norm": 1.0 if each.clip else None,
        "machine": load_profile(TWO_CORES),
    }
    return lambda folder: plan_model(written(folder, "llama", sizes), Options(**options), here=False).to_json()


def trained_on(machine: str, kind: str, sizes: dict[str, Any], **options: Any) -> Make:
    asked = Options(machine=machine, **options)
    return lambda folder: plan_model(written(folder, kind, sizes), asked, here=False).to_json()


def generation(
    machine: str | Path, kind: str, sizes: dict[str, Any], counts: dict[str, int], compress: str | None = None, **options: Any
) -> Make:
    def made(folder: Path) -> dict[str, Any]:
        model = written(folder, kind, sizes) if kind != "coded" else coded(folder, sizes)
        asked, ceilings = GenerateOptions.of(options), load_profile(machine)
        return plan_generation(str(model), asked, ceilings, here=False, compress=compress, **counts).to_json()

    return made


def coded(folder: Path, sizes: dict[str, Any]) -> Path:
    """Write a model whose matrices are four-bit words, with their weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**sizes), dtype=torch.bfloat16)
    codec, stored = PackQuantized(32), dict[str, torch.Tensor]()
    for key, weight in model.state_dict().items():
        if ".layers." in key and weight.dim() == 2:
            stem = key.removesuffix("weight")
            stored |= {f"{stem}{name}": part for name, part in codec.encode(weight).items()}
            stored[f"{stem}weight_shape"] = torch.tensor(weight.shape)
        else:
            stored[key] = weight
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    described = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}}}
    config = json.loads(model.config.to_json_string())
    config |= {"dtype": "bfloat16", "quantization_config": {"quant_method": "compressed-tensors", **described}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def compression(machine: str, code: str, kind: str, sizes: dict[str, Any], **more: Any) -> Make:
    return lambda folder: plan_compression(written(folder, kind, sizes), code, machine, **more).to_json()


def cluster(machine: str, sizes: dict[str, Any], **options: Any) -> Make:
    asked = PlanOptions(machine=machine, **options)
    return lambda folder: plan_cluster(written(folder, "llama", sizes), asked).to_json()


ONE = {"prompts": 1, "prompt_length": 512, "new_tokens": 128}
MANY = {"prompts": 64, "prompt_length": 512, "new_tokens": 32}
LONG = {"prompts": 16, "prompt_length": 16384, "new_tokens": 64}
PLANS: dict[str, Make] = {
    **{f"train-{each.name}": training(each) for each in COMBINATIONS},
    "train-70B-on-gpu": trained_on("rtx4090-4ssd", "llama", LLAMA_70B, host_memory="100GiB"),
    "train-8B-lora-on-gpu": trained_on("rtx4090-1ssd", "llama", LLAMA_8B, host_memory="24GiB", adapter="lora"),
    "generate-8B-laptop": generation("rtx4060-laptop-1ssd", "llama", LLAMA_8B, ONE, host_memory="12GiB"),
    "generate-70B-4ssd": generation("rtx4090-4ssd", "llama", LLAMA_70B, MANY, host_memory="64GiB"),
    "generate-8B-int4": generation("rtx4060-laptop-1ssd", "llama", LLAMA_8B, ONE, "int4", device_memory="4GiB"),
    "generate-mixtral": generation("t4-1ssd", "mixtral", MIXTRAL, MANY, host_memory="48GiB"),
    "generate-mixtral-ternary": generation("t4-1ssd", "mixtral", MIXTRAL, MANY, "ternary", host_memory="24GiB"),
    "generate-8B-chunks": generation("t4-1ssd", "llama", LLAMA_8B, LONG, device_memory="6GiB"),
    "generate-8B-attention-on-host": generation("t4-1ssd", "llama", LLAMA_8B, MANY, device_memory="4GiB", attention="host"),
    "generate-coded": generation(TWO_CORES, "coded", SMALL, ONE, host_memory="1GiB"),
    "compress-8B-int4": compression("rtx4090-1ssd", "int4", "llama", LLAMA_8B),
    "compress-mixtral-int4": compression("a6000-1ssd", "int4", "mixtral", MIXTRAL, tokens=1 << 20),
    "compress-mixtral-ternary": compression("a6000-1ssd", "ternary", "mixtral", MIXTRAL),
    "cluster-8B": cluster("rtx4090", LLAMA_8B, workers=4, tokens_per_step=65536, host_memory="32GiB"),
    "cluster-70B": cluster("a100-40g", LLAMA_70B, workers=8, nodes=2, link="100Gbit", tokens_per_step=131072),
}
# What `make test` (the first of them) and `make test-wide` compare: some thirty seconds.
QUICK = {
    "train-S-256-clip-tight",
    "train-S-512-clip",
    "generate-coded",
    "generate-8B-int4",
    "cluster-8B",
    "compress-8B-int4",
    "compress-mixtral-int4",
    "compress-mixtral-ternary",
}


def other_versions() -> list[str]:
    """Return which libraries that decide plans have other versions than constraints.txt names."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    named = dict(line.split("==") for line in lines if "==" in line)
    found = {name: version(name).split("+")[0] for name in ("torch", "transformers")}  # behind + stands the build
    return [f"{name} {there}, not {named[name]}" for name, there in found.items() if there != named[name]]


def plan_of(name: str) -> Any:
    """Return the plan of that name as it is stored."""
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(PLANS[name](Path(folder))).replace(folder, "MODEL")
    return compact(json.loads(text))


def compact(value: Any) -> Any:
    """Return `value` in fewer lines, without words: six digits of floats, runs of equal items once, objects by columns."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: compact(each) for key, each in value.items() if key not in WORDS}
    if not isinstance(value, list):
        return value
    if len(value) > 1 and all(isinstance(each, dict) and each.keys() == value[0].keys() for each in value):
        return {"columns of": len(value)} | {key: compact([each[key] for each in value]) for key in value[0]}
    runs: list[list[Any]] = []
    for each in map(compact, value):
        if runs and runs[-1][1] == each:
            runs[-1][0] += 1
        else:
            runs.append([1, each])
    return [item for count, each in runs for item in ([{"times": count, "item": each}] if count > 2 else [each] * count)]


def text_of(value: Any, indent: str = "") -> str:
    """Return JSON with sorted keys, a line for each key, and lists of plain values in one."""
    deeper = indent + " "
    if isinstance(value, dict) and value and not value.keys() <= {"times", "item"}:
        inner = [f"{deeper}{json.dumps(key)}: {text_of(value[key], deeper)}" for key in sorted(value)]
        return "{\n" + ",\n".join(inner) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(each, dict) and "item" not in each for each in value):
        return "[\n" + ",\n".join(deeper + text_of(each, deeper) for each in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


def stored(name: str) -> Path:
    """Return the file of a plan."""
    return STORED / f"{name}.json"


def changes(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """Yield a line for each field that differs: its place, what it was, what it is."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from changes(before.get(key, "(nothing)"), now.get(key, "(nothing)"), f"{where}.{key}" if where else key)
    elif before != now:
        yield f"{where}: was {json.dumps(before, ensure_ascii=False)}, is {json.dumps(now, ensure_ascii=False)}"


def renew(beginnings: list[str]) -> None:
    """Store the plans whose names begin so, and say what changed."""
    if found := other_versions():
        raise SystemExit(f"golden plans hold under constraints.txt alone; here are {', '.join(found)}; nothing was renewed")
    chosen = [name for name in PLANS if not beginnings or name.startswith(tuple(beginnings))]
    if not chosen:
        raise SystemExit(f"no golden plan begins with {', '.join(beginnings)}; there are {', '.join(PLANS)}")
    for name in chosen:
        plan, path = plan_of(name), stored(name)
        lines = list(changes(json.loads(path.read_text(encoding="utf-8")), plan)) if path.exists() else ["is new"]
        path.write_text(text_of(plan) + "\n", encoding="utf-8")
        print("\n  ".join([f"{name}: {'changed' if lines else 'as it was'}", *lines]))
    for path in STORED.glob("*.json"):
        if path.stem not in PLANS:
            path.unlink()
            print(f"{path.stem}: is asked no longer")


if __name__ == "__main__":
    renew(sys.argv[1:])
