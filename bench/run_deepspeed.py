"""DeepSpeed ZeRO stage 3 with parameters and optimizer states in RAM or on NVMe (ZeRO-Infinity).

Runs in DeepSpeed's own environment. Its buffer sizes are counted in elements and must hold the largest parameter.
"""

import argparse
import os
import socket
import sys

from shapes import SHAPES, Shape
from worker import Record, Task, measure, parser, refuse, write

try:
    import deepspeed
except ImportError as error:
    refuse(f"{sys.executable} cannot import deepspeed ({error}); see bench/README.md for how to set it up")

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig


def single_process_group() -> None:
    """Set what a launcher would set for one process, with a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in alone.items():
        os.environ.setdefault(name, str(value))


def configuration(options, task: Task, shape: Shape) -> dict:
    """Return the DeepSpeed configuration for `options`."""
    largest = shape.vocabulary * shape.hidden
    elements = int(options.buffer_elements) or -(-largest // 2**20) * 2**20
    if elements < largest:
        refuse(f"--buffer-elements {elements}: the largest parameter has {largest} elements")
    optimizer_offload = {"device": options.states, "pin_memory": options.pin}
    parameter_offload = {"device": options.parameters, "pin_memory": options.pin}
    if options.states == "nvme":
        optimizer_offload |= {"nvme_path": str(options.scratch), "buffer_count": options.state_buffers}
        optimizer_offload |= {"pipeline_read": options.pipeline, "pipeline_write": options.pipeline}
    if options.parameters == "nvme":
        parameter_offload |= {"nvme_path": str(options.scratch), "buffer_count": options.parameter_buffers}
        parameter_offload |= {"buffer_size": elements, "max_in_cpu": 0}
    zero = {
        "stage": 3,
        "overlap_comm": False,  # one process: there is nobody to talk to
        "contiguous_gradients": True,
        "reduce_bucket_size": elements,
        "sub_group_size": int(options.sub_group_elements) or elements,
        "stage3_prefetch_bucket_size": int(options.prefetch_elements),
        "stage3_max_live_parameters": int(options.prefetch_elements),
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": optimizer_offload,
        "offload_param": parameter_offload,
    }
    adamw = {"lr": options.learning_rate, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}
    return {
        "train_micro_batch_size_per_gpu": task.micro_batch,
        "gradient_accumulation_steps": task.sequences // task.micro_batch,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": adamw},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": options.aio_threads,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def options_of() -> tuple:
    """Return the options and the task they describe."""
    arguments = parser(__doc__)
    arguments.add_argument("--states", choices=["cpu", "nvme"], default="nvme", help="where the optimizer states live")
    arguments.add_argument("--parameters", choices=["cpu", "nvme"], default="nvme", help="where the parameters live")
    arguments.add_argument("--buffer-elements", type=float, default=0, help="parameter buffer; 0: the largest parameter")
    arguments.add_argument("--sub-group-elements", type=float, default=0, help="optimizer sub-group; 0: as the buffer")
    arguments.add_argument("--parameter-buffers", type=int, default=6)
    arguments.add_argument("--state-buffers", type=int, default=4, help="--pipeline needs 12")
    arguments.add_argument("--prefetch-elements", type=float, default=0, help="more than 0 fails at some sizes")
    arguments.add_argument("--aio-threads", type=int, default=2)
    arguments.add_argument("--pipeline", action="store_true", help="overlap reading, updating and writing of states")
    # Checkpointing without re-entry gave wrong losses here with parameters on NVMe, in silence: see bench/README.md.
    arguments.add_argument("--reentrant", action=argparse.BooleanOptionalAction, default=True)
    arguments.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True, help="pinned buffers")
    options = arguments.parse_args()
    return options, Task.of(options)


def main() -> None:
    options, task = options_of()
    if options.threads:
        torch.set_num_threads(options.threads)
    single_process_group()
    configured = configuration(options, task, SHAPES[options.size])
    keep_alive = HfDeepSpeedConfig(configured)  # while it lives, from_pretrained loads the model partitioned
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.config.use_cache = False
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": options.reentrant})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=configured)
    engine.train()
    micro_batches = task.sequences // task.micro_batch

    def step(batch):
        total = 0.0
        for micro in torch.from_numpy(batch).split(task.micro_batch):
            loss = engine(input_ids=micro, labels=micro).loss
            engine.backward(loss)
            engine.step()  # updates at the last micro-batch only
            total += loss.item() / micro_batches
        return total, {}

    record = Record(
        contestant=f"deepspeed-{options.states}",
        versions={
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "deepspeed": deepspeed.__version__,
        },
        settings={"checkpointing": options.checkpointing, "micro_batch": task.micro_batch, "configuration": configured},
    )
    write(measure(task, step, finish=lambda: None, record=record), options.result)
    del keep_alive


if __name__ == "__main__":
    main()
