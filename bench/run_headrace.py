"""Headrace: full fine-tuning from SSD with exact AdamW, inside the host memory it is given."""

import sys

import torch
import transformers
from worker import Record, Task, measure, parser, refuse, write

import headrace


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--host-memory", default="4GiB", help="the host budget")
    arguments.add_argument("--device-memory", default=None, help="the device budget; none: the CPU computes in host memory")
    options = arguments.parse_args()
    task = Task.of(options)
    if not hasattr(headrace, "Engine"):
        refuse(f"this headrace ({headrace.__version__}, {headrace.__file__}) has no Engine")
    if options.threads:
        torch.set_num_threads(options.threads)
    ssd = options.scratch / "ssd"
    ssd.mkdir()
    engine = headrace.Engine.open(
        options.model,
        headrace.Budget(device=options.device_memory, host=options.host_memory, ssd=[ssd]),
        headrace.AdamW(lr=options.learning_rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
        run_directory=options.scratch / "run",
        tokens_per_step=options.tokens_per_step,
        sequence_length=options.sequence_length,
        compute_dtype="bfloat16",
        max_grad_norm=None,
    )

    def step(batch):
        tokens = torch.from_numpy(batch)
        result = engine.step({"input_ids": tokens, "labels": tokens})
        counted = {
            "engine_seconds": result.seconds,
            "engine_read_bytes": dict(result.bytes_read),
            "engine_written_bytes": dict(result.bytes_written),
            "engine_peak_bytes": dict(result.peak_bytes),
        }
        return float(result.loss), counted

    record = Record(
        contestant="headrace",
        versions={
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "headrace": headrace.__version__,
        },
        settings={
            "host_memory": options.host_memory,
            "device_memory": options.device_memory,
            "threads": torch.get_num_threads(),
        },
    )
    write(measure(task, step, finish=engine.close, record=record), options.result)


if __name__ == "__main__":
    main()
