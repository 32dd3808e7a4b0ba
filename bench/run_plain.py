"""The reference: stock transformers and torch AdamW with everything in RAM.

bf16 weights and gradients, fp32 master weights and moments: 16 bytes per parameter. Activation checkpointing
unless told otherwise.
"""

import sys

import torch
import transformers
from transformers import AutoModelForCausalLM
from worker import Record, Task, measure, parser, write


class MasterAdamW:
    """AdamW on fp32 copies of bf16 parameters, one optimizer per parameter so that only one fp32 gradient lives at a time."""

    def __init__(self, parameters: list[torch.nn.Parameter], learning_rate: float) -> None:
        self._pairs = []
        for parameter in parameters:
            master = parameter.detach().float().requires_grad_()
            optimizer = torch.optim.AdamW([master], lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True)
            self._pairs.append((parameter, master, optimizer))

    @torch.no_grad()
    def step(self) -> None:
        """Update the masters from the parameters' gradients, round them into the parameters, and drop the gradients."""
        for parameter, master, optimizer in self._pairs:
            master.grad = parameter.grad.float()
            parameter.grad = None
            optimizer.step()
            master.grad = None
            parameter.copy_(master)


def main() -> None:
    options = parser(__doc__).parse_args()
    task = Task.of(options)
    if options.threads:
        torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.config.use_cache = False
    model.train()
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = MasterAdamW(list(model.parameters()), options.learning_rate)
    share = task.micro_batch / task.sequences  # all sequences have the same number of targets, so the mean of means is the mean

    def step(batch):
        total = 0.0
        for micro in torch.from_numpy(batch).split(task.micro_batch):
            loss = model(input_ids=micro, labels=micro).loss * share
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total, {}

    record = Record(
        contestant="plain",
        versions={"python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__},
        settings={"checkpointing": options.checkpointing, "micro_batch": task.micro_batch, "threads": torch.get_num_threads()},
    )
    write(measure(task, step, finish=lambda: None, record=record), options.result)


if __name__ == "__main__":
    main()
